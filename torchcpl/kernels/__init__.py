"""Fast implementations of decoding and losses, used where they apply, with the results of plain torch."""

from torchcpl.kernels.dispatch import set_kernels, use

__all__ = ["set_kernels", "use"]
