"""Training runs that are killed, resumed, and shared by several processes."""

from __future__ import annotations

import importlib
import itertools
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from test_train import ROOT, Toy, ToyConfig, assert_same_run, plain_loop, weights_of

from torchcpl.checkpoints import load_checkpoint, read_history
from torchcpl.train import fit


def spawn(code: str, *arguments: str | Path) -> subprocess.Popen[str]:
    """A Python process in which this file can be imported."""
    script = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import test_train_processes; {code}"
    command = [sys.executable, "-c", script, *map(str, arguments)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": ROOT}
    return subprocess.Popen(command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def succeed(process: subprocess.Popen[str]) -> None:
    output = process.communicate()[0]
    assert process.returncode == 0, output


def run_slowly(run: str) -> None:
    torch.set_num_threads(1)
    slow = dict.fromkeys(range(12), lambda: time.sleep(0.05))
    fit(Toy(ToyConfig(), slow), run, progress=False)


def test_kill_in_the_middle_of_training(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    process = spawn("test_train_processes.run_slowly(sys.argv[1])", tmp_path / "run")
    while process.poll() is None and not (tmp_path / "run" / "last").exists():
        time.sleep(0.01)
    process.kill()
    assert process.wait() == -signal.SIGKILL, process.communicate()[0]
    assert not load_checkpoint(tmp_path / "run", "last").state["finished"]
    fit(Toy(ToyConfig()), tmp_path / "run", resume=True, progress=False)
    fit(Toy(ToyConfig()), tmp_path / "whole", progress=False)
    assert_same_run(tmp_path / "run", tmp_path / "whole")


def in_a_fork(work: Callable[[], object]) -> int:
    """How a child process that does the work ends: 0, 1 after an exception, or minus the signal that killed it."""
    child = os.fork()
    if child == 0:
        try:
            work()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    return -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)


def die_at_file_operation(number: int) -> None:
    """Kill this process just before its ``number``-th change of the file system, and tear the file it writes."""
    count = itertools.count()

    def watched(name: str) -> None:
        original = getattr(os, name)

        def operation(*arguments: Any, **options: Any) -> Any:
            if next(count) == number:
                if name == "fsync" and os.path.isfile(f"/proc/self/fd/{arguments[0]}"):
                    os.ftruncate(arguments[0], os.fstat(arguments[0]).st_size // 2)
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*arguments, **options)

        setattr(os, name, operation)
        kept = getattr(pathlib, "_normal_accessor", None)  # Python 3.10's Path asks this, not os
        if hasattr(kept, name):
            setattr(kept, name, operation)

    for name in ("fsync", "replace", "symlink", "mkdir", "unlink", "rmdir"):
        watched(name)


def run_kill_everywhere(folder: str) -> None:
    """Kill a run at every step and at every change of a file, and resume each: all end like the one left alone."""
    for name in ("lightning_fabric", "rich.progress", "torch.utils.tensorboard"):
        importlib.import_module(name)  # once for all the forks

    torch.set_num_threads(1)
    os.chdir(folder)
    config = ToyConfig(epochs=2, ema=0.9)
    whole = Path("whole")
    assert in_a_fork(lambda: fit(Toy(config), whole, progress=False)) == 0

    def dies(name: str, work: Callable[[Path], object]) -> bool:
        run = Path(name)
        end = in_a_fork(lambda: work(run))
        assert end in (0, -signal.SIGKILL), end
        if end:
            # `last` is whole, and no earlier than the validations that were through with it.
            if os.path.lexists(run / "last"):
                reached = load_checkpoint(run, "last").state["step"]
                assert reached >= len(read_history(run)[:-1]) * Toy.steps_per_epoch
            else:
                assert len(read_history(run)) <= 1
            if os.path.lexists(run / "best"):
                load_checkpoint(run, "best")
            assert in_a_fork(lambda: fit(Toy(config), run, resume=True, progress=False)) == 0, name
        assert_same_run(run, whole)
        assert not list(run.glob(".*")), name
        shutil.rmtree(run)
        return bool(end)

    def killed_at_step(step: int) -> Callable[[Path], object]:
        return lambda run: fit(Toy(config, {step: lambda: os.kill(os.getpid(), signal.SIGKILL)}), run, progress=False)

    def killed_at_operation(number: int) -> Callable[[Path], object]:
        def work(run: Path) -> None:
            die_at_file_operation(number)
            fit(Toy(config), run, progress=False)

        return work

    for step in range(config.epochs * Toy.steps_per_epoch):
        assert dies(f"step-{step}", killed_at_step(step))
    operations = 0
    while dies(f"operation-{operations}", killed_at_operation(operations)):
        operations += 1
    assert operations > 40  # two checkpoints of two folders, three or four files each


def test_kill_at_every_step_and_every_file_operation(tmp_path: Path) -> None:
    succeed(spawn("test_train_processes.run_kill_everywhere(sys.argv[1])", tmp_path))


DDP = """
import sys
sys.path.insert(0, {here!r})
import os, pathlib, torch
from test_train import Toy, ToyConfig, fit, interrupt

root = pathlib.Path(sys.argv[1])
fit(Toy(ToyConfig(devices=2, dropout=0.0)), root / "plain", progress=False)
config = ToyConfig(devices=2)
fit(Toy(config), root / "whole", progress=False)
try:
    # Batches 10 and 11 are those of the sixth step; one process alone is interrupted.
    fit(Toy(config, {{11: interrupt}}), root / "parts", progress=False)
except KeyboardInterrupt as stopped:
    assert "after step 6 of 12" in str(stopped), stopped
fit(Toy(config), root / "parts", resume=True, progress=False)
os._exit(0)  # gloo's threads at times abort a process that ends by itself, its work long done
"""


def test_two_processes(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(DDP.format(here=str(Path(__file__).parent)))
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": ROOT}
    command = [sys.executable, str(script), str(tmp_path)]
    done = subprocess.run(command, env=environment, text=True, capture_output=True, timeout=120)
    assert done.returncode == 0, done.stderr
    # Two halves of a batch, one in each process, are one batch twice the size.
    wanted, _ = plain_loop(ToyConfig(devices=2, dropout=0.0), 12, ranks=2)
    for name, tensor in weights_of(tmp_path / "plain", "last").items():
        torch.testing.assert_close(tensor, wanted[name], rtol=1e-5, atol=1e-6)
    assert_same_run(tmp_path / "parts", tmp_path / "whole")


HOSTS = """
import sys
sys.path.insert(0, {here!r})
import os, pathlib
from torchcpl.config import override
from test_train import Toy, ToyConfig, ToyModel, fit

class Plain(Toy):
    def build(self):
        return ToyModel(override(self.config, devices=2))  # without batch statistics, which each process has its own of

fit(Plain(ToyConfig(dropout=0.0)), pathlib.Path(sys.argv[1]) / "run", progress=False)
os._exit(0)
"""


def test_two_hosts_under_torchrun(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(HOSTS.format(here=str(Path(__file__).parent)))
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": ROOT}
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]
    torchrun += ["--master-addr", "localhost", "--master-port", str(port)]
    agents = [
        subprocess.Popen(
            [*torchrun, "--node-rank", rank, str(script), str(tmp_path)],
            env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )
        for rank in "01"
    ]  # fmt: skip
    for agent in agents:
        succeed(agent)
    wanted, _ = plain_loop(ToyConfig(devices=2, dropout=0.0), 12, ranks=2)
    for name, tensor in weights_of(tmp_path / "run", "last").items():
        torch.testing.assert_close(tensor, wanted[name], rtol=1e-5, atol=1e-6)
