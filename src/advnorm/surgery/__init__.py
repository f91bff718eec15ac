"""Convert the norms and the head of any model in place, and take one branch out as a plain module."""

from advnorm.surgery import torch_norms  # noqa: F401  # imported for its registrations
from advnorm.surgery.adapter import NormAdapter, NormSettings, register_adapter
from advnorm.surgery.convert import convert_norm
from advnorm.surgery.heads import convert_head
from advnorm.surgery.report import SurgeryReport
from advnorm.surgery.strip import strip

__all__ = [
    "NormAdapter",
    "NormSettings",
    "SurgeryReport",
    "convert_head",
    "convert_norm",
    "register_adapter",
    "strip",
]
