"""Data sets as tensors of images in [0, 1] and labels."""

from advnorm.data.digits import digits

__all__ = ["digits"]
