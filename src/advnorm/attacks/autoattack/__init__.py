"""AutoAttack: a cascade of attacks without parameters to tune."""

from advnorm.attacks.autoattack.attack import AutoAttack, CascadeAttack
from advnorm.attacks.autoattack.record import CascadeResult

__all__ = ["AutoAttack", "CascadeAttack", "CascadeResult"]
