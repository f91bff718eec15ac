"""Attacks with a contract: the result lies inside ball and box exactly, and the model is unchanged bit for bit."""

from advnorm.attacks.apgd import APGD
from advnorm.attacks.autoattack import AutoAttack, CascadeResult
from advnorm.attacks.base import Attack, AttackResult
from advnorm.attacks.fab import FAB
from advnorm.attacks.model_access import input_gradient, predicting
from advnorm.attacks.names import ATTACKS, NameOption, count_options, get, list_attacks, register_attack
from advnorm.attacks.pgd import FGSM, PGD
from advnorm.attacks.quick import Quick
from advnorm.attacks.random_noise import RandomNoise
from advnorm.attacks.square import Square

__all__ = [
    "APGD",
    "ATTACKS",
    "FAB",
    "FGSM",
    "PGD",
    "Attack",
    "AttackResult",
    "AutoAttack",
    "CascadeResult",
    "NameOption",
    "Quick",
    "RandomNoise",
    "Square",
    "count_options",
    "get",
    "input_gradient",
    "list_attacks",
    "predicting",
    "register_attack",
]
