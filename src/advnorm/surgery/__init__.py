"""Convert the norms and heads of any model, and take one branch out as a plain module."""

from advnorm.surgery.convert import SurgeryReport, convert_head, convert_norm, strip

__all__ = ["SurgeryReport", "convert_head", "convert_norm", "strip"]
