"""Heads saved for the Hugging Face hub and read back, without a network."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import torchcpl as cpl
from torchcpl.head import KINDS

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("kind", KINDS)
def test_a_head_comes_back_as_it_was(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("huggingface_hub")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    torch.manual_seed(0)
    head = cpl.CPLHead(6, 8, kind=kind, live_stop=True, activation="relu").eval()
    head.save_pretrained(tmp_path / "head")
    assert {path.name for path in (tmp_path / "head").iterdir()} <= {"config.json", "model.safetensors", "README.md"}
    assert json.loads((tmp_path / "head" / "config.json").read_text())["kind"] == kind
    again = cpl.CPLHead.from_pretrained(tmp_path / "head").eval()
    assert isinstance(again, cpl.CPLHead)
    features = torch.randn(3, 7, 6)
    with torch.no_grad():
        wanted, found = cpl.greedy(head(features), max_len=4), cpl.greedy(again(features), max_len=4)
    assert torch.equal(wanted.indices, found.indices)
    assert torch.equal(wanted.log_prob, found.log_prob)
    again.save_pretrained(tmp_path / "twice")  # as what came back is saved
    assert (tmp_path / "twice" / "model.safetensors").read_bytes() == (
        tmp_path / "head" / "model.safetensors"
    ).read_bytes()


def test_without_the_extra_heads_work_and_say_what_is_missing() -> None:
    script = (
        "import sys; sys.modules['huggingface_hub'] = None\n"
        "import torch, torchcpl as cpl\n"
        "head = cpl.CPLHead(4, 8)\n"
        "head(torch.randn(1, 3, 4))\n"
        "try:\n    head.save_pretrained('x')\nexcept ImportError as error:\n    print(error)"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "pip install 'torchcpl[hub]'" in done.stdout
