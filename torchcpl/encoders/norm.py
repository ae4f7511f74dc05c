"""Batch normalisation of images as a prediction needs it: with what comes after it, in one pass where that can be."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad

from torchcpl.checks import tracing
from torchcpl.kernels import dispatch


class BatchNorm(nn.BatchNorm2d):
    """torch's, but in evaluation never by cuDNN, which for channels-last images takes up to ten times as long."""

    def forward(self, x: Tensor, add: Tensor | None = None, relu: bool = False, pool: bool = False) -> Tensor:
        """``normalised`` calls it so: one kernel does all of it where it can, that is without gradients on CUDA."""
        moments = self.weight, self.bias, self.running_mean, self.running_var

        def fast() -> Tensor:
            from torchcpl.encoders import norm_triton

            return norm_triton.batch_norm(x, moments, self.eps, add, relu, pool)  # type: ignore[arg-type]

        def plain() -> Tensor:
            if self.training or self.running_mean is None or self._odd(x):
                return _followed(super(BatchNorm, self).forward(x), add, relu, pool)
            return _followed(torch.native_batch_norm(x, *moments, False, 0.0, self.eps)[0], add, relu, pool)

        if tracing() or not isinstance(x, Tensor):  # of a proxy nothing can be asked
            return plain()
        return dispatch.either(lambda: self._obstacle(x, add, relu, pool), fast, plain, x)

    def _obstacle(self, x: Tensor, add: Tensor | None, relu: bool, pool: bool) -> str | None:
        """Why the kernel cannot run; None when it can."""
        moments = self.weight, self.bias, self.running_mean, self.running_var
        if self.training or forward_ad._current_level >= 0:
            return "training or tangents"
        if x.dim() != 4 or x.numel() == 0 or x.dtype not in dispatch.SINGLES:
            return "no images"
        if pool and (add is not None or not relu):
            return "a maximum of what no ReLU has left"
        if not all(isinstance(t, Tensor) and t.shape == x.shape[1:2] and t.is_contiguous() for t in moments):
            return "no moments of every channel"
        for image in (x,) if add is None else (x, add):
            alike = (image.shape, image.dtype) == (x.shape, x.dtype)
            if not alike or not image.is_contiguous(memory_format=torch.channels_last):
                return "images that are not channels last"
        if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, *moments, add)):
            return "gradients"
        return dispatch.device_obstacle(x)

    def _odd(self, x: Tensor) -> bool:
        """Whether to leave it to torch, and its errors; of what is being traced nothing is known."""
        if not isinstance(x, Tensor) or tracing():
            return False
        return x.dim() != 4 or x.shape[1] != self.num_features or x.numel() == 0


def normalised(
    norm: nn.Module, x: Tensor, add: Tensor | None = None, *, relu: bool = False, pool: bool = False
) -> Tensor:
    """``norm(x)`` and what comes after it: plus ``add``, a ReLU, a 3×3 max-pool of stride 2.

    ``norm`` may be whatever has taken the place of a ``BatchNorm``.
    """
    y: Tensor
    if isinstance(norm, BatchNorm):
        y = norm(x, add, relu, pool)
    else:
        y = _followed(norm(x), add, relu, pool)
    return y


def _followed(y: Tensor, add: Tensor | None, relu: bool, pool: bool) -> Tensor:
    y = y if add is None else y + add
    y = F.relu(y, inplace=True) if relu else y
    return F.max_pool2d(y, 3, stride=2, padding=1) if pool else y
