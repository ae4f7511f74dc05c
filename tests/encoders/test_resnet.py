"""ResNet-18: torchvision's names and shapes, the files it reads, and features against stored ones."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from torchcpl.encoders.norm import BatchNorm
from torchcpl.encoders.resnet import IMAGENET_MEAN, IMAGENET_STD, ResNet18, load_resnet18, prepare

CONVOLUTIONS = {
    "conv1": (64, 3, 7, 7),
    "layer1.0.conv1": (64, 64, 3, 3),
    "layer1.0.conv2": (64, 64, 3, 3),
    "layer1.1.conv1": (64, 64, 3, 3),
    "layer1.1.conv2": (64, 64, 3, 3),
    "layer2.0.conv1": (128, 64, 3, 3),
    "layer2.0.conv2": (128, 128, 3, 3),
    "layer2.0.downsample.0": (128, 64, 1, 1),
    "layer2.1.conv1": (128, 128, 3, 3),
    "layer2.1.conv2": (128, 128, 3, 3),
    "layer3.0.conv1": (256, 128, 3, 3),
    "layer3.0.conv2": (256, 256, 3, 3),
    "layer3.0.downsample.0": (256, 128, 1, 1),
    "layer3.1.conv1": (256, 256, 3, 3),
    "layer3.1.conv2": (256, 256, 3, 3),
    "layer4.0.conv1": (512, 256, 3, 3),
    "layer4.0.conv2": (512, 512, 3, 3),
    "layer4.0.downsample.0": (512, 256, 1, 1),
    "layer4.1.conv1": (512, 512, 3, 3),
    "layer4.1.conv2": (512, 512, 3, 3),
}


def expected_shapes(cut: int) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    for name, shape in CONVOLUTIONS.items():
        if name.startswith("layer") and int(name[5]) > cut:
            continue
        shapes[f"{name}.weight"] = shape
        norm = name.replace("conv", "bn") if "conv" in name else name.replace("downsample.0", "downsample.1")
        for part in ("weight", "bias", "running_mean", "running_var"):
            shapes[f"{norm}.{part}"] = shape[:1]
        shapes[f"{norm}.num_batches_tracked"] = ()
    return shapes


@pytest.mark.parametrize("cut", [1, 2, 3, 4])
def test_names_and_shapes_are_torchvisions(cut: int) -> None:
    state = ResNet18(cut).state_dict()
    assert {name: tuple(value.shape) for name, value in state.items()} == expected_shapes(cut)


def test_parameter_count() -> None:
    """11,689,512 is the published count; the classifier has 512,000 + 1,000 of them."""
    assert sum(p.numel() for p in ResNet18().parameters()) == 11_689_512 - 513_000


@pytest.mark.parametrize(("cut", "channels", "stride"), [(1, 64, 4), (2, 128, 8), (3, 256, 16), (4, 512, 32)])
def test_output_shapes(cut: int, channels: int, stride: int) -> None:
    net = ResNet18(cut).eval()
    assert (net.channels, net.stride) == (channels, stride)
    images = torch.randn(2, 3, 64, 96)
    out = net(images)
    assert out.shape == (2, channels, 64 // stride, 96 // stride)
    torch.testing.assert_close(net.features(images), out.flatten(2).mean(2))


def test_channels_last_gives_the_same() -> None:
    net = ResNet18().eval()
    images = torch.randn(2, 3, 64, 64)
    torch.testing.assert_close(net(images), net(images.to(memory_format=torch.channels_last)), rtol=1e-4, atol=1e-4)
    assert net.conv1.weight.is_contiguous(memory_format=torch.channels_last)


def test_bad_cut() -> None:
    with pytest.raises(ValueError, match="cut: expected a stage from 1 to 4, got 5"):
        ResNet18(5)


def test_prepare() -> None:
    images = torch.randint(0, 256, (2, 224, 224, 3), dtype=torch.uint8)
    plain = prepare(images)
    for channel in range(3):
        value = (images[1, 4, 6, channel].item() / 255 - IMAGENET_MEAN[channel]) / IMAGENET_STD[channel]
        assert plain[1, channel, 4, 6].item() == pytest.approx(value, abs=1e-5)
    assert plain.is_contiguous(memory_format=torch.channels_last)
    assert prepare(images[:, :5, :7]).shape == (2, 3, 224, 224)
    with pytest.raises(ValueError, match="images: expected a uint8"):
        prepare(images.float())


def state_of(cut: int = 4) -> dict[str, Tensor]:
    net = ResNet18(cut)
    for name, buffer in net.named_buffers():
        if name.endswith(("running_mean", "running_var")):
            buffer.uniform_(0.5, 1.5)
    return {name: value.contiguous() for name, value in net.state_dict().items()}


@pytest.mark.parametrize("suffix", [".safetensors", ".pth", ".pt"])
@pytest.mark.parametrize("classifier", [False, True])
def test_load(tmp_path: Path, suffix: str, classifier: bool) -> None:
    state = state_of()
    half = {k: v.half() for k, v in state.items() if not k.endswith("num_batches_tracked")}
    if classifier:
        half |= {"fc.weight": torch.zeros(1000, 512), "fc.bias": torch.zeros(1000)}
    path = tmp_path / f"weights{suffix}"
    if suffix == ".safetensors":
        save_file(half, path)
    else:
        torch.save(half, path)
    net = load_resnet18(path, cut=2)
    assert not net.training
    for name, value in net.state_dict().items():
        if not name.endswith("num_batches_tracked"):
            assert value.dtype == torch.float32
            assert torch.equal(value, half[name].float()), name


def test_load_a_cut_file(tmp_path: Path) -> None:
    path = tmp_path / "cut.pth"
    torch.save(state_of(cut=2), path)
    assert load_resnet18(path, cut=2).cut == 2
    with pytest.raises(ValueError, match=r"up to stage 4: .*Missing key.*layer3\.0\.conv1\.weight"):
        load_resnet18(path)


def test_load_refuses(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no such weights file"):
        load_resnet18(tmp_path / "none.pth")
    with pytest.raises(ValueError, match=r"expected a \.safetensors, \.pth or \.pt"):
        load_resnet18(tmp_path / "weights.bin")
    for suffix in (".pth", ".safetensors"):
        path = tmp_path / f"foreign{suffix}"
        path.write_bytes(b"no weights at all")
        with pytest.raises(ValueError, match="not a readable weights file"):
            load_resnet18(path)
    path = tmp_path / "truncated.safetensors"
    save_file({"conv1.weight": torch.zeros(64, 3, 7, 7)}, path)
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(ValueError, match="not a readable weights file"):
        load_resnet18(path)

    path = tmp_path / "weights.pth"
    for content, message in [
        ([1, 2], "expected a state dict"),
        ({"epoch": 3}, "expected a state dict"),
        ({}, "Missing key.*conv1.weight"),
        (
            state_of() | {"layer1.0.conv3.weight": torch.zeros(1)},
            r"Unexpected key.*layer1\.0\.conv3\.weight",
        ),
        (state_of() | {"conv1.weight": torch.zeros(64, 1, 7, 7)}, r"size mismatch for conv1\.weight"),
    ]:
        torch.save(content, path)
        with pytest.raises(ValueError, match=message):
            load_resnet18(path)


def test_load_runs_no_code(tmp_path: Path) -> None:
    witness = tmp_path / "witness"

    class Evil:
        def __reduce__(self) -> tuple[object, ...]:
            return Path.touch, (witness,)

    path = tmp_path / "evil.pth"
    torch.save({"conv1.weight": Evil()}, path)
    with pytest.raises(ValueError, match="not a readable weights file"):
        load_resnet18(path)
    assert not witness.exists()


def test_features_match_the_stored_ones(shared_data: Path) -> None:
    """The stored features are 8 bit and saturate at 255 · scale: there, ours may only lie above."""
    folder = shared_data / "cifar100-resnet18"
    with np.load(folder / "features.npz") as stored, np.load(folder / "test_images.npz") as pictures:
        codes = torch.from_numpy(stored["test"][pictures["rows"]]).float()  # (2000, 512)
        scale = torch.from_numpy(stored["scale"])
        images = torch.from_numpy(pictures["images"])
    saturated = (codes == 255).any(1).nonzero()[:, 0]
    sample = torch.cat([torch.arange(7, 2000, 45), saturated[::15]])
    codes, images = codes[sample], images[sample]
    net = load_resnet18(shared_data / "resnet18-imagenet" / "resnet18.safetensors")
    with torch.inference_mode():
        ours = torch.cat([net.features(prepare(part)) for part in torch.split(images, 16)])
    full = codes == 255
    within = torch.where(full, ours.minimum(255 * scale), ours)
    assert F.cosine_similarity(within, codes * scale).min() >= 0.999
    assert F.cosine_similarity(ours, codes * scale)[~full.any(1)].min() >= 0.999
    assert (ours / scale)[full].min() > 250


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_batch_normalisation_is_torchs(training: bool, dtype: torch.dtype) -> None:
    ours, theirs = BatchNorm(8).train(training), torch.nn.BatchNorm2d(8).train(training)
    torch.manual_seed(0)
    for value in ours.state_dict().values():
        if value.is_floating_point():
            torch.nn.init.uniform_(value, 0.5, 1.5)
    theirs.load_state_dict(ours.state_dict())
    x = torch.randn(2, 8, 5, 7).to(dtype, memory_format=torch.channels_last).requires_grad_()
    weight = torch.randn(2, 8, 5, 7)
    results = []
    for norm in (ours, theirs):
        y = norm(x)
        results.append([y, *torch.autograd.grad((y * weight).sum(), [x, *norm.parameters()]), *norm.buffers()])
    for have, want in zip(*results, strict=True):
        torch.testing.assert_close(have, want)


def others(channels: int) -> dict[str, torch.nn.Module]:
    return {
        "sync": torch.nn.SyncBatchNorm(channels),
        "group": torch.nn.GroupNorm(4, channels),
        "none": torch.nn.Identity(),
    }


@pytest.mark.parametrize("name", others(8))
def test_another_normalisation_can_take_its_place(name: str) -> None:
    x = torch.randn(2, 3, 32, 32)
    net = ResNet18(cut=2).eval()
    for path, module in list(net.named_modules()):
        if isinstance(module, BatchNorm):
            net.set_submodule(path, others(module.num_features)[name].eval())
    block = net.layer2[0]  # type: ignore[index]
    y = F.max_pool2d(net.bn1(net.conv1(x)).relu(), 3, 2, 1)
    for inner in net.layer1:  # type: ignore[union-attr]
        y = (y + inner.bn2(inner.conv2(inner.bn1(inner.conv1(y)).relu()))).relu()
    expected = (block.downsample(y) + block.bn2(block.conv2(block.bn1(block.conv1(y)).relu()))).relu()
    found = []
    block.register_forward_hook(lambda module, given, out: found.append(out))
    net(x)
    torch.testing.assert_close(found[0], expected)


def test_what_batch_normalisation_refuses_is_what_torch_refuses() -> None:
    x = torch.randn(2, 3, 4, 4)
    with pytest.raises(RuntimeError, match="running_mean should contain 3 elements not 8"):
        BatchNorm(8).eval()(x)
    with pytest.raises(ValueError, match="expected 4D input"):
        BatchNorm(4).eval()(x[0])
    assert BatchNorm(3).eval()(x[:0]).shape == (0, 3, 4, 4)
    bare = {"affine": False, "track_running_stats": False}
    torch.testing.assert_close(BatchNorm(3, **bare).eval()(x), torch.nn.BatchNorm2d(3, **bare)(x))  # type: ignore[arg-type]


def test_networks_can_be_exported_whatever_the_batch() -> None:
    class Some(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = ResNet18(cut=1).eval()

        def forward(self, x: Tensor, some: Tensor) -> Tensor:
            out: Tensor = self.net(x[some])
            return out

    x, some = torch.randn(3, 3, 16, 16), torch.tensor([True, False, True])
    model = Some()
    with torch.no_grad():
        program = torch.export.export(model, (x, some))
        torch.testing.assert_close(program.module()(x, some), model(x, some))
        torch.testing.assert_close(torch.fx.symbolic_trace(model.net)(x), model.net(x))
