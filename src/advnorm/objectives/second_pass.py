"""Model-based adversarial training (paper B, eq. 2): a second pass over a model that is attacked itself.

A step takes two backward passes: the first gives the gradient and, from the same pass, the direction of the attack on
the model; the second gives the gradient that resists it. Both happen where the loss is measured, so that
``loss.backward()`` outside only hands the result to the parameters, and DDP reduces it once. The second pass uses the
images of the first, adversarial ones included, and leaves no trace in the running statistics (paper B, sec. 3.2).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn.modules.batchnorm import _BatchNorm

from advnorm._core.distributed import mean_over_ranks, world_size
from advnorm._core.errors import ConfigError, did_you_mean, raise_all
from advnorm._core.precision import wide
from advnorm._core.registry import Registry
from advnorm._core.seeding import ImageNoise
from advnorm.norms import statistics, zero_perturbation
from advnorm.norms.norm_layers import norm_parameters
from advnorm.objectives.base import Objective, weight_problem
from advnorm.objectives.execution import EAGER, CraftedBatch, Execution, ObjectiveOutput
from advnorm.objectives.wrapper import Wrapper, leaving_no_trace


class SecondPass(Wrapper):
    """``g = (1 - r) g_φ + r h_φ``: the objective's gradient, and its gradient on the attacked model.

    What is attacked is what the named methods differ in: :meth:`weights_moved_by`, and ``radius`` for statistics.
    """

    def __init__(self, objective: Objective) -> None:
        if isinstance(objective, SecondPass):
            raise ConfigError(
                f"{type(objective).__name__} takes a second pass already; for statistics and weights use APARTSAM"
            )
        super().__init__(objective)

    @classmethod
    def setting_problems(cls, **settings: Any) -> list[str]:
        """What is wrong with the settings of the method."""
        return []

    #: Radius of the attack on the statistics; None leaves them alone.
    radius: float | None = None
    #: Groups of the second pass with statistics of their own.
    groups: int = 1

    def rows(self, batch: int) -> int:
        """How many of a batch's images take part in the second pass."""
        return batch

    def share(self, batch: int) -> float:
        """The share r of the second pass in the gradient."""
        return 1.0

    def weights_moved_by(self, parameters: Sequence[Tensor], gradients: Sequence[Tensor]) -> list[Tensor] | None:
        """How far each parameter is moved for the second pass; None leaves them alone."""
        return None

    #: Whether the weights are attacked, so that every rank needs the gradient of the whole batch.
    attacks_weights = False

    def compute_loss(self, batch: CraftedBatch, execution: Execution = EAGER) -> ObjectiveOutput:
        """Compute the loss of both passes and its gradient, without waiting for the device."""
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        if not parameters or not torch.is_grad_enabled():
            why = "no parameter takes a gradient" if not parameters else "torch.no_grad() is on"
            raise ConfigError(
                f"{type(self).__name__} takes gradients, and {why}; for the loss alone call the objective inside of it"
            )
        subset = self._subset(batch)  # before a bank is updated: a batch may be too small
        delta = None if self.radius is None else zero_perturbation(self.model)

        with nullcontext() if delta is None else statistics(self.model, perturbation=delta):
            first = self.objective.compute_loss(batch, execution)
            found = _gradients(first.loss, [*parameters, *(delta.tensors if delta else ())])
        own, of_statistics = found[: len(parameters)], found[len(parameters) :]
        worst = None
        if delta is not None:
            known = [torch.zeros_like(t) if g is None else g for t, g in zip(delta.tensors, of_statistics)]
            worst = delta.sign_step(mean_over_ranks(known), self.radius or 0.0)

        with ExitStack() as attacked:
            if self.attacks_weights:
                attacked.enter_context(self._moved(parameters, own))
            attacked.enter_context(leaving_no_trace(self.model))
            if worst is not None or self.groups > 1:
                attacked.enter_context(statistics(self.model, groups=self.groups, perturbation=worst))
            second = self.objective.compute_loss(subset, execution)
            resisting = _gradients(second.loss, parameters)

        r = self.share(len(batch.x))
        loss = (1 - r) * first.loss.detach() + r * second.loss.detach()
        total = [_mixed(g, h, r) for g, h in zip(own, resisting)]
        terms = {**first.terms, "second_pass": second.loss.detach()}
        # Of a graph that is gone; DDP would look through it for parameters without a gradient.
        logits = {domain: value.detach() for domain, value in first.logits.items()}
        return ObjectiveOutput(_with_gradients(loss, parameters, total), logits, terms, first.labels)

    def run_forwards(self, batch: CraftedBatch) -> None:
        super().run_forwards(batch)
        with statistics(self.model, groups=self.groups) if self.groups > 1 else nullcontext():
            super().run_forwards(self._subset(batch))

    def _subset(self, batch: CraftedBatch) -> CraftedBatch:
        """N images in random order, drawn by their identities (algorithm 1, lines 6 and 7)."""
        count = self.rows(len(batch.x))
        if count == len(batch.x) and self.groups == 1:
            return batch
        for domain, of_domain in self.images_per_domain(count).items():
            if of_domain % self.groups:
                raise ConfigError(
                    f"{of_domain} {domain} images of a second pass cannot be cut into {self.groups} equal groups; "
                    "change groups, samples, clean_share or the batch size"
                )
        order = ImageNoise(self.innermost.seed, batch.index).fold("second pass").bits(()).argsort(stable=True)
        return batch.take(order[:count])

    @contextmanager
    def _moved(self, parameters: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> Iterator[None]:
        """Scope: the parameters are moved, in place; afterwards each has its own bits again."""
        known = [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, gradients)]
        steps = self.weights_moved_by(parameters, mean_over_ranks(known))
        assert steps is not None
        before = [p.detach().clone() for p in parameters]
        try:
            with torch.no_grad():
                torch._foreach_add_(list(parameters), steps)  # pyright: ignore[reportPrivateImportUsage]
            torch.clear_autocast_cache()  # it holds the weights as they were, in half precision
            yield
        finally:
            with torch.no_grad():
                torch._foreach_copy_(list(parameters), before)  # pyright: ignore[reportPrivateImportUsage]
            torch.clear_autocast_cache()


class APART(SecondPass):
    """Adversarially perturbed batch statistics (paper B, algorithm 1): ``g = M/(M+N) g_φ + N/(M+N) h_φ``.

    ``radius`` ε of the perturbation ``θ = ε sign(g_θ)`` of every norm's mean and deviation (eq. 3). ``samples`` N of
    the second pass: a share of the batch, or a number, which all processes together have. ``groups`` n of them have
    statistics of their own. The paper's line 12 misprints g_θ for g_φ.
    """

    summary, paper = "adversarially perturbed batch statistics", "B (algorithm 1)"

    def __init__(
        self, objective: Objective, *, radius: float = 0.1, samples: int | float = 1.0, groups: int = 1, **unknown: Any
    ) -> None:
        own = {"radius": radius, "samples": samples, "groups": groups}
        check_second_pass(type(self), **own, **unknown)
        super().__init__(objective)
        if any(isinstance(module, _BatchNorm) for module in self.model.modules()):
            raise ConfigError(
                "APART perturbs the statistics of routed norms, and the model has built-in batch norms; convert it "
                "first: advnorm.convert_norm(model, 'bn')"
            )
        zero_perturbation(self.model, requires_grad=False)  # says what is missing
        self.radius, self.samples, self.groups = radius, samples, groups

    @classmethod
    def setting_problems(cls, *, radius: Any = 0.1, samples: Any = 1.0, groups: Any = 1, **_: Any) -> list[str]:
        problems = weight_problem("radius", radius)
        if not problems and radius >= 1:
            problems.append(f"radius is a share of each norm's mean and deviation, below 1; got {radius!r}")
        whole = isinstance(samples, int) and not isinstance(samples, bool)
        if not (whole and samples >= 2) and not (isinstance(samples, float) and 0 < samples <= 1):
            problems.append(
                f"samples is a number of images from 2 on, or a share in (0, 1], 1.0 for all; got {samples!r}"
            )
        if isinstance(groups, bool) or not isinstance(groups, int) or groups < 1:
            problems.append(f"groups must be an integer of at least 1, got {groups!r}")
        elif whole and samples % groups:
            problems.append(f"{samples} samples cannot be cut into {groups} equal groups; change one of them")
        return problems

    def rows(self, batch: int) -> int:
        samples, processes = self.samples, world_size()
        if isinstance(samples, int):
            if samples % processes:
                raise ConfigError(
                    f"samples ({samples}) counts the images of all processes together, and {processes} processes "
                    "cannot have equal parts of it; choose a multiple, or a share such as 0.5"
                )
            samples //= processes
        rows = rows_of_second_pass(batch, samples, self.groups)
        if not rows:
            raise ConfigError(
                f"a batch of {batch} images gives no {self.groups} equal groups of a second pass with "
                f"samples={self.samples}; drop a last batch that is smaller, or change samples or groups"
            )
        return rows

    def share(self, batch: int) -> float:
        return self.rows(batch) / (batch + self.rows(batch))

    def extra_repr(self) -> str:
        return f"radius={self.radius}, samples={self.samples}, groups={self.groups}"


class SAM(SecondPass):
    """Sharpness-aware minimization: the gradient at ``w + ρ g / ||g||_2`` (Foret et al. 2021; paper B, eq. 6, 7)."""

    summary, paper = "sharpness-aware minimization", "B (eq. 6)"

    attacks_weights = True

    def __init__(self, objective: Objective, *, rho: float = 0.05, **unknown: Any) -> None:
        check_second_pass(type(self), rho=rho, **unknown)
        super().__init__(objective)
        self.rho = rho

    @classmethod
    def setting_problems(cls, *, rho: Any = 0.05, **_: Any) -> list[str]:
        return weight_problem("rho", rho)

    def weights_moved_by(self, parameters: Sequence[Tensor], gradients: Sequence[Tensor]) -> list[Tensor]:
        return _sam_step(gradients, self.rho)

    def extra_repr(self) -> str:
        return f"rho={self.rho}"


class APARTSAM(APART):
    """APART with the weights moved too, by ``δ = ρ g_φ / ||g_φ||_2`` (paper B, eq. 7 with p = 2), at no extra pass."""

    summary, paper = "statistics and weights perturbed together", "B (eq. 7)"

    attacks_weights = True

    def __init__(self, objective: Objective, *, rho: float = 0.05, **options: Any) -> None:
        check_second_pass(type(self), rho=rho, **options)
        super().__init__(objective, **options)
        self.rho = rho

    @classmethod
    def setting_problems(cls, *, rho: Any = 0.05, **options: Any) -> list[str]:
        return super().setting_problems(**options) + weight_problem("rho", rho)

    def weights_moved_by(self, parameters: Sequence[Tensor], gradients: Sequence[Tensor]) -> list[Tensor]:
        return _sam_step(gradients, self.rho)

    def extra_repr(self) -> str:
        return f"rho={self.rho}, {super().extra_repr()}"


class AWP(SecondPass):
    """Adversarial weight perturbation: the gradient at ``w_l + γ ||w_l|| g_l / ||g_l||`` (Wu et al. 2020), by layer.

    Weights of convolutions and linear layers are moved; with ``norms`` those of norm layers too. Biases never are.
    """

    summary, paper = "adversarial weight perturbation, by layer", ""

    attacks_weights = True

    def __init__(self, objective: Objective, *, gamma: float = 0.005, norms: bool = False, **unknown: Any) -> None:
        check_second_pass(type(self), gamma=gamma, norms=norms, **unknown)
        super().__init__(objective)
        self.gamma, self.norms = gamma, norms
        if not any(p.requires_grad for p in self._attacked()):
            raise ConfigError(
                "AWP moves the weights of convolutions and linear layers, and none that is trained is there; use SAM, "
                "or norms=True for those of norms"
            )

    @classmethod
    def setting_problems(cls, *, gamma: Any = 0.005, norms: Any = False, **_: Any) -> list[str]:
        problems = weight_problem("gamma", gamma)
        return problems if isinstance(norms, bool) else [*problems, f"norms must be True or False, got {norms!r}"]

    def weights_moved_by(self, parameters: Sequence[Tensor], gradients: Sequence[Tensor]) -> list[Tensor]:
        moved = {id(p) for p in self._attacked()}
        steps = []
        for parameter, gradient in zip(parameters, gradients):
            length, own = wide(gradient).norm(), wide(parameter.detach()).norm()
            scale = torch.where(length > 0, self.gamma * own / length.clamp_min(_tiny(length)), 0)
            step = scale * wide(gradient) if id(parameter) in moved else torch.zeros_like(gradient)
            steps.append(step.to(gradient.dtype))
        return steps

    def _attacked(self) -> list[Tensor]:
        """Weights by their names, also where they are parametrized, as by ``weight_norm``."""
        of_norms = {id(p) for p in norm_parameters(self.model)}
        return [
            p
            for name, p in self.model.named_parameters()
            if "weight" in _own_name(name) and (self.norms if id(p) in of_norms else p.dim() > 1)
        ]

    def extra_repr(self) -> str:
        return f"gamma={self.gamma}, norms={self.norms}"


#: Second passes by name, for configurations and listings.
SECOND_PASSES: Registry[type[SecondPass]] = Registry("second pass")
for _name, _kind in (("apart", APART), ("sam", SAM), ("apart_sam", APARTSAM), ("awp", AWP)):
    SECOND_PASSES.add(_name, _kind)


def rows_of_second_pass(batch: int, samples: int | float, groups: int) -> int:
    """So many of a batch's images as are wanted, in equal groups; 0 where they are fewer than groups."""
    wanted = samples if isinstance(samples, int) else round(samples * batch)
    return min(batch, wanted) // groups * groups


def check_second_pass(kind: type[Any], **settings: Any) -> None:
    """Refuse, all at once, what is wrong with the settings of a second pass."""
    known = kind.options()
    problems = [f"unknown option {name!r}{did_you_mean(name, known)}" for name in settings if name not in known]
    raise_all(problems + kind.setting_problems(**settings), f"bad {kind.__name__}")


def _sam_step(gradients: Sequence[Tensor], rho: float) -> list[Tensor]:
    """``ρ g / ||g||_2`` over all parameters together; 0 where there is no gradient."""
    length = torch.stack([wide(gradient).norm() for gradient in gradients]).norm()
    scale = torch.where(length > 0, rho / length.clamp_min(_tiny(length)), 0)
    return [(scale.to(wide(gradient).dtype) * gradient).to(gradient.dtype) for gradient in gradients]


def _tiny(value: Tensor) -> float:
    return torch.finfo(value.dtype).tiny


def _own_name(name: str) -> str:
    """A parameter's name in its module; ``weight`` of ``parametrizations.weight.original0``."""
    *rest, own = name.split(".")
    return rest[-1] if "parametrizations" in rest[-2:-1] else own


def _gradients(loss: Tensor, tensors: Sequence[Tensor]) -> list[Tensor | None]:
    """Of the loss, as they are before the parameters' own hooks: those run once, on the gradient of the step."""
    hooks = [(kept, dict(kept)) for tensor in tensors if (kept := tensor._backward_hooks)]
    try:
        for kept, _ in hooks:
            kept.clear()
        with torch.autocast(loss.device.type, enabled=False):
            return list(torch.autograd.grad(loss, tensors, allow_unused=True))
    finally:
        for kept, own in hooks:
            kept.update(own)


def _mixed(first: Tensor | None, second: Tensor | None, share: float) -> Tensor | None:
    if first is None or second is None:  # a parameter that one of the passes does not use, or none
        found, weight = (second, share) if first is None else (first, 1 - share)
        return None if found is None else weight * found
    return second if share == 1 else (1 - share) * first + share * second


class _WithGradients(Function):
    """A number whose gradient with respect to each parameter is given."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, *given: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(*given[: len(given) // 2])
        return value.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        gradients = ctx.saved_tensors
        return (None, *(None for _ in gradients), *(grad * gradient for gradient in gradients))


def _with_gradients(value: Tensor, parameters: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> Tensor:
    pairs = [(p, g) for p, g in zip(parameters, gradients) if g is not None]
    return _WithGradients.apply(value, *(g for _, g in pairs), *(p for p, _ in pairs))  # pyright: ignore
