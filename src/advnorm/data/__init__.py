"""Data sets as tensors of images and labels."""

from advnorm.data.cifar import cifar10
from advnorm.data.digits import digits

__all__ = ["cifar10", "digits"]
