"""Settings of PGD, which the attack of a training configuration shares."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from advnorm._core.settings import Setting

Start = Literal["uniform", "clean", "gaussian"]
Keep = Literal["last", "worst"]
Target = Literal["random", "least_likely"]


@dataclass(frozen=True, kw_only=True)
class PGDSettings:
    """Steps, step size, restarts, start, loss, target, momentum and the iterate to keep."""

    steps: Annotated[int, Setting("Number of gradient steps.", "[1, inf)")] = 10
    step_size: Annotated[
        float | str | None, Setting("Step size in pixel scale; none: 2.5 · eps / steps (paper D, B.2).")
    ] = None
    restarts: Annotated[int, Setting("Number of restarts; the worst case per image counts.", "[1, inf)")] = 1
    start: Annotated[
        Start | float,
        Setting("Start; a number is the probability of a clean start, otherwise uniform (paper E).", "[0, 1]"),
    ] = "uniform"
    loss: Annotated[str, Setting("`ce`, `cw` margin, `dlr`, or `kl` to the clean output.")] = "ce"
    target: Annotated[Target | None, Setting("Class to attack towards; none: any wrong class.")] = None
    momentum: Annotated[float, Setting("Decay of the accumulated gradient (Dong et al. 2018).", "[0, inf)")] = 0.0
    keep: Annotated[Keep, Setting("Iterate that a restart contributes.")] = "last"
