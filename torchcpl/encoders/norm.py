"""Batch normalisation fused with the residual sum, ReLU and max-pool after it, for inference on CUDA."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad

from torchcpl.checks import tracing
from torchcpl.kernels import dispatch


class BatchNorm(nn.BatchNorm2d):
    """``nn.BatchNorm2d``, in evaluation without cuDNN, which is up to ten times slower on channels-last images."""

    def forward(self, x: Tensor, add: Tensor | None = None, relu: bool = False, pool: bool = False) -> Tensor:
        """See ``normalised``: one kernel where it applies, that is on CUDA without gradients."""
        moments = self.weight, self.bias, self.running_mean, self.running_var
        traced = tracing() or not isinstance(x, Tensor)  # an FX proxy has no shape

        def fast() -> Tensor:
            from torchcpl.encoders import norm_triton

            return norm_triton.batch_norm(x, moments, self.eps, add, relu, pool)  # type: ignore[arg-type]

        def plain() -> Tensor:
            odd = not traced and (x.dim() != 4 or x.shape[1] != self.num_features or x.numel() == 0)
            if self.training or self.running_mean is None or odd:  # torch raises where x does not fit
                return _followed(super(BatchNorm, self).forward(x), add, relu, pool)
            return _followed(torch.native_batch_norm(x, *moments, False, 0.0, self.eps)[0], add, relu, pool)

        return plain() if traced else dispatch.either(lambda: self._obstacle(x, add, relu, pool), fast, plain, x)

    def _obstacle(self, x: Tensor, add: Tensor | None, relu: bool, pool: bool) -> str | None:
        """Why the kernel cannot run; None when it can."""
        moments = self.weight, self.bias, self.running_mean, self.running_var
        if self.training or forward_ad._current_level >= 0:
            return "training or forward-mode gradients"
        if x.dim() != 4 or x.numel() == 0 or x.dtype not in dispatch.SINGLES:
            return "an input that is not (B, C, H, W) float32, bfloat16 or float16"
        if pool and (add is not None or not relu):
            return "a max-pool without a ReLU before it, or after a residual sum"
        if not all(isinstance(t, Tensor) and t.shape == x.shape[1:2] and t.is_contiguous() for t in moments):
            return "weight, bias, mean or variance not of shape (C,)"
        for image in (x,) if add is None else (x, add):
            alike = (image.shape, image.dtype) == (x.shape, x.dtype)
            if not alike or not image.is_contiguous(memory_format=torch.channels_last):
                return "images not in channels-last memory format"
        if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, *moments, add)):
            return "gradients"
        return dispatch.device_obstacle(x)


def normalised(
    norm: nn.Module, x: Tensor, add: Tensor | None = None, *, relu: bool = False, pool: bool = False
) -> Tensor:
    """``norm(x)``, plus ``add``, then a ReLU, then a 3×3 max-pool of stride 2.

    ``norm`` may be a module that has replaced a ``BatchNorm``.
    """
    return norm(x, add, relu, pool) if isinstance(norm, BatchNorm) else _followed(norm(x), add, relu, pool)


def _followed(y: Tensor, add: Tensor | None, relu: bool, pool: bool) -> Tensor:
    y = y if add is None else y + add
    y = F.relu(y, inplace=True) if relu else y
    return F.max_pool2d(y, 3, stride=2, padding=1) if pool else y
