"""Attacks that keep their promises: inside ball and box exactly, and the model bit for bit as before."""

from advnorm.attacks.apgd import APGD
from advnorm.attacks.autoattack import AutoAttack
from advnorm.attacks.autoattack_record import AutoAttackResult
from advnorm.attacks.base import ATTACKS, Attack, attacked, get, input_gradient, list_attacks, register
from advnorm.attacks.fab import FAB
from advnorm.attacks.noise import RandomNoise
from advnorm.attacks.pgd import FGSM, PGD
from advnorm.attacks.square import Square
from advnorm.attacks.statistics import StatisticsAttack, StatisticsResult

__all__ = [
    "APGD",
    "ATTACKS",
    "FAB",
    "FGSM",
    "PGD",
    "Attack",
    "AutoAttack",
    "AutoAttackResult",
    "RandomNoise",
    "Square",
    "StatisticsAttack",
    "StatisticsResult",
    "attacked",
    "get",
    "input_gradient",
    "list_attacks",
    "register",
]
