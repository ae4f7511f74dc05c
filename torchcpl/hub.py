"""`CPLHead` on the Hugging Face hub: ``config.json`` and ``model.safetensors``. Needs the extra ``hub``."""

from __future__ import annotations

from torchcpl.files import extra
from torchcpl.head import CPLHead

with extra("hub"):
    from huggingface_hub import PyTorchModelHubMixin


class PretrainedHead(PyTorchModelHubMixin, CPLHead, library_name="torchcpl"):  # type: ignore[call-arg, misc, unused-ignore]
    """A `CPLHead` with the hub's own ``save_pretrained``, ``from_pretrained`` and ``push_to_hub``."""


def pretrained(head: CPLHead) -> PretrainedHead:
    """The same head, as the hub stores it."""
    copy = PretrainedHead(**head.arguments)
    copy.load_state_dict(head.state_dict())
    return copy.to(head.stop_token)
