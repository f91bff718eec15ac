"""The attack on a folded bfloat16 copy of its branch, checked against the network before its first use."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from advnorm._core.errors import AdvnormError, first_line
from advnorm._core.precision import choose_kernels
from advnorm._core.seeding import ImageNoise
from advnorm.attacks.folded_copy import FoldedCopy, make_folded_copy
from advnorm.attacks.model_access import predicting
from advnorm.objectives import Execution, Objective
from advnorm.surgery import strip
from advnorm.training.compilation import CompiledFunction, Log
from advnorm.training.tensor_locations import TensorLocations


def make_attack_on_copy(objective: Objective, execution: Execution, log: Log) -> AttackOnCopy | None:
    """Prepare the attack on a bfloat16 copy of its branch, whose norms and activations are folded into convolutions.

    None if a copy gains nothing: other norms, or attacks on batch statistics. If a copy cannot be made, the attack
    uses the network, which is logged when the training starts.
    """
    if objective.attack is None or objective.attack.statistics != "running":
        return None
    problems: list[str] = []
    copy = copy_branch(objective, problems.append)
    if copy is not None:
        execution = dataclasses.replace(
            execution, surrogate=CompiledFunction(copy, "the attack's copy of the network", log)
        )
    elif not problems:
        return None
    return AttackOnCopy(objective, execution, copy, log, problem=problems[0] if problems else None)


def copy_branch(objective: Objective, on_refusal: Callable[[str], object]) -> FoldedCopy | None:
    """Copy the branch that the objective attacks; None if no norm can be folded."""
    try:
        branch = strip(objective.model, objective.attack_route, linked=True).eval()
    except AdvnormError:  # the norms of a mixture or sandwich cannot be linked
        return None
    except (RuntimeError, TypeError) as error:  # a model that cannot be copied
        on_refusal(first_line(error))
        return None
    copy = make_folded_copy(branch, following=True, on_failure=on_refusal)
    return copy if copy is not None and copy.folded else None


class AttackOnCopy:
    """Craft adversarial images on a copy that takes the current weights and statistics before every attack.

    ``execution.surrogate`` runs the copy. The first batch shows whether it agrees with the network.
    """

    #: Largest difference of its logits, relative to the largest logit, and largest loss of the mean cosine between
    #: its gradients and those in float32, compared with the network's own gradients in bfloat16.
    LOGITS, COSINE = 0.05, 0.05
    #: Number of images of the first batch whose gradients are compared.
    IMAGES = 32

    def __init__(
        self,
        objective: Objective,
        execution: Execution,
        copy: FoldedCopy | None,
        log: Log,
        *,
        problem: str | None = None,
    ) -> None:
        self._objective, self.execution, self.copy, self._log = objective, execution, copy, log
        self._problem, self._checked, self._locations = problem, False, TensorLocations(objective.model)

    def __call__(self, x: Tensor, y: Tensor, index: Tensor) -> Tensor:
        if not self._checked:
            self._fall_back(self._problem or self._disagreement(x))
            self._checked = True
        if self.copy is not None and self.execution.surrogate is not None:
            self._fall_back(self._locations.change())
            self.copy.refresh()
        return self._objective.craft(x, y, index, self.execution)

    def _fall_back(self, problem: str | None) -> None:
        """Attack the network itself from now on if there is a problem."""
        if problem is not None:
            self._log(f"the attack uses the network itself, not a fast copy: {problem}")
            self.execution = dataclasses.replace(self.execution, surrogate=None)

    def _disagreement(self, x: Tensor) -> str | None:
        """Describe the difference between the copy and the network in float32; None if they agree.

        Parameters and statistics are perturbed for the comparison. A training starts from zeros and ones, the same in
        all banks, which would hide an error of the copy.
        """
        objective, surrogate, copy, few = self._objective, self.execution.surrogate, self.copy, x[: self.IMAGES]
        assert copy is not None and surrogate is not None
        once = partial(
            choose_kernels, deterministic=torch.backends.cudnn.deterministic, benchmark=len(x) <= self.IMAGES
        )
        with perturbed(objective.model), predicting(objective.model, route=objective.attack_route) as predict:
            copy.refresh()
            try:
                with once(), torch.autocast(x.device.type, enabled=False):
                    logits, gradient = _logits_and_gradient(predict, few)
                with once(), torch.autocast(x.device.type, torch.bfloat16, cache_enabled=False):
                    _, rounded = _logits_and_gradient(predict, few)
                # The function that the attack will use, with as many images.
                found, own = (value[: self.IMAGES] for value in _logits_and_gradient(surrogate, x))
            except Exception as error:  # no kernel for this device or shape, no gradient at all
                return first_line(error)
        gap = (found - logits).abs().max() / logits.abs().max()
        if not gap <= self.LOGITS:
            return f"its logits differ by {gap:.0%} of the largest"
        usual, cosine = (
            torch.nn.functional.cosine_similarity(one.flatten(1), gradient.flatten(1)).mean() for one in (rounded, own)
        )
        return None if cosine >= usual - self.COSINE else f"its gradients point elsewhere, cosine {cosine:.2f}"


def _logits_and_gradient(predict: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
    """Logits, and the direction of the gradient of their squares, which depends on all of them and never saturates."""
    x = x.detach().requires_grad_()
    logits = predict(x)
    known = logits.detach()
    (gradient,) = torch.autograd.grad(logits, x, known / known.abs().max())  # a deep network may start from 1e34
    return known, gradient.double()


@contextmanager
def perturbed(model: nn.Module) -> Iterator[None]:
    """Scope: parameters and statistics change by up to a fifth and are not zero; afterwards each has its own bits.

    Tensors whose elements share memory (empty or expanded ones) do not change.
    """
    tensors = [value for value in (*model.parameters(), *model.buffers()) if _is_perturbable(value)]
    kept = [value.detach().clone() for value in tensors]
    try:
        with torch.no_grad():
            for place, value in enumerate(tensors):
                one = ImageNoise(place, torch.zeros(1, dtype=torch.int64, device=value.device))
                noise = 2 * one.uniform(value.shape)[0] - 1
                size = value[0].numel() ** -0.5 if value.dim() > 1 else 0.1
                value.copy_(torch.where(value.any(), value * (1 + noise / 5), size * noise))
        yield
    finally:
        with torch.no_grad():
            torch._foreach_copy_(tensors, kept)  # pyright: ignore[reportPrivateImportUsage]


def _is_perturbable(value: Tensor) -> bool:
    own_memory = all(step or size == 1 for size, step in zip(value.shape, value.stride()))
    return value.is_floating_point() and value.numel() > 0 and own_memory
