"""Convert the norms and the head of any model in place, and take one branch out as a plain module."""

from advnorm.surgery.adapters import NormAdapter, register_adapter
from advnorm.surgery.convert import convert_norm
from advnorm.surgery.heads import convert_head
from advnorm.surgery.replace import SurgeryReport
from advnorm.surgery.strip import strip

__all__ = ["NormAdapter", "SurgeryReport", "convert_head", "convert_norm", "register_adapter", "strip"]
