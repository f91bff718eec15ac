"""Model-based adversarial training (paper B, eq. 2): a second pass over a perturbed model.

A step has two backward passes. The first gives the gradient and the direction of the attack on the model; the second
gives the gradient on the attacked model. Both run inside :meth:`compute_loss`. ``loss.backward()`` then only passes the
result to the parameters, and DDP reduces it once. The second pass uses the images of the first, adversarial ones
included, and does not change the running statistics (paper B, sec. 3.2).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Annotated, Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn.modules.batchnorm import _BatchNorm

from advnorm._core.distributed import mean_over_ranks, world_size
from advnorm._core.errors import ConfigError, Problem
from advnorm._core.precision import at_least_float32
from advnorm._core.registry import Registry
from advnorm._core.seeding import ImageNoise
from advnorm._core.settings import Setting
from advnorm.norms import statistics, zero_perturbation
from advnorm.norms.norm_layers import norm_parameters
from advnorm.objectives.base import Objective
from advnorm.objectives.execution import EAGER, CraftedBatch, Execution, ObjectiveOutput
from advnorm.objectives.wrapper import Wrapper, leaving_no_trace


class SecondPass(Wrapper):
    """``g = (1 - r) g_φ + r h_φ``: the objective's gradient, and its gradient on the attacked model.

    The named methods differ in the attack: :meth:`weight_perturbations`, and ``radius`` for statistics.
    """

    def __init__(self, objective: Objective, **options: Any) -> None:
        if isinstance(objective, SecondPass):
            message = f"{type(objective).__name__} is a second pass already"
            raise ConfigError("conflict", message, "objective", hint="for statistics and weights use APARTSAM")
        super().__init__(objective, **options)

    #: Whether the second pass runs; a training turns it on after its warm-up.
    active: bool = True
    #: Whether the statistics are attacked, and the radius of that attack.
    attacks_statistics = False
    radius: float = 0.0
    #: Whether the weights are attacked, so that every rank needs the gradient of the whole batch.
    attacks_weights = False
    #: Groups of the second pass with their own statistics.
    groups: int = 1

    @property
    def loss_variant(self) -> Hashable:
        return self.objective.loss_variant, self.active

    def rows(self, batch_size: int) -> int:
        """Number of a batch's images in the second pass."""
        return batch_size

    def share(self, batch_size: int) -> float:
        """The share r of the second pass in the gradient."""
        return 1.0

    def weight_perturbations(self, parameters: Sequence[Tensor], gradients: Sequence[Tensor]) -> list[Tensor]:
        """The perturbation of each parameter in the second pass, if the weights are attacked."""
        raise NotImplementedError

    def compute_loss(self, batch: CraftedBatch, execution: Execution = EAGER) -> ObjectiveOutput:
        """Compute the loss of both passes and its gradient, without waiting for the device.

        Without ``active`` it is the loss of the objective inside.
        """
        if not self.active:
            return self.objective.compute_loss(batch, execution)
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        if not parameters or not torch.is_grad_enabled():
            why = "no parameter takes a gradient" if not parameters else "torch.no_grad() is on"
            message = f"{type(self).__name__} computes gradients, and {why}"
            raise ConfigError("conflict", message, hint="for the loss alone call the objective inside")
        subset = self._subset(batch)  # before a bank is updated: a batch may be too small
        delta = zero_perturbation(self.model) if self.attacks_statistics else None

        with nullcontext() if delta is None else statistics(self.model, perturbation=delta):
            first = self.objective.compute_loss(batch, execution)
            found = _gradients(first.loss, [*parameters, *(delta.tensors if delta else ())])
        own, of_statistics = found[: len(parameters)], found[len(parameters) :]
        worst = None
        if delta is not None:
            known = [torch.zeros_like(t) if g is None else g for t, g in zip(delta.tensors, of_statistics)]
            worst = delta.sign_step(mean_over_ranks(known), self.radius)

        with ExitStack() as attacked:
            if self.attacks_weights:
                attacked.enter_context(self._perturbed(parameters, own))
            attacked.enter_context(leaving_no_trace(self.model))
            if worst is not None or self.groups > 1:
                attacked.enter_context(statistics(self.model, groups=self.groups, perturbation=worst))
            second = self.objective.compute_loss(subset, execution)
            resisting = _gradients(second.loss, parameters)

        r = self.share(len(batch.x))
        loss = (1 - r) * first.loss.detach() + r * second.loss.detach()
        total = [_mixed(g, h, r) for g, h in zip(own, resisting)]
        terms = {**first.terms, "second_pass": second.loss.detach()}
        # The logits' graph is gone, and DDP would search it for parameters without a gradient.
        return first.detached()._replace(loss=_with_gradients(loss, parameters, total), terms=terms)

    def run_forwards(self, batch: CraftedBatch) -> None:
        """Run the forwards of the second pass, for the errors of a network that cannot take its images."""
        with statistics(self.model, groups=self.groups) if self.groups > 1 else nullcontext():
            self.innermost.compute_loss(self._subset(batch), EAGER)

    def _subset(self, batch: CraftedBatch) -> CraftedBatch:
        """N images in random order, drawn by their identities (algorithm 1, lines 6 and 7)."""
        count = self.rows(len(batch.x))
        if count == len(batch.x) and self.groups == 1:
            return batch
        for domain, of_domain in self.images_per_domain(count).items():
            if of_domain % self.groups:
                message, hint = (
                    f"{of_domain} {domain} images of a second pass cannot be divided into {self.groups} equal groups",
                    "change groups, samples, clean_share or the batch size",
                )
                raise ConfigError("conflict", message, field="groups", hint=hint)
        order = ImageNoise(self.innermost.seed, batch.index).fold("second pass").bits(()).argsort(stable=True)
        return batch.take(order[:count])

    @contextmanager
    def _perturbed(self, parameters: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> Iterator[None]:
        """Scope: the parameters are perturbed in place; afterwards each has its own bits again."""
        known = [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, gradients)]
        steps = self.weight_perturbations(parameters, mean_over_ranks(known))
        before = [p.detach().clone() for p in parameters]
        try:
            with torch.no_grad():
                torch._foreach_add_(list(parameters), steps)  # pyright: ignore[reportPrivateImportUsage]
            torch.clear_autocast_cache()  # it holds the unperturbed weights in half precision
            yield
        finally:
            with torch.no_grad():
                torch._foreach_copy_(list(parameters), before)  # pyright: ignore[reportPrivateImportUsage]
            torch.clear_autocast_cache()


#: Second passes by name, for configurations and listings.
SECOND_PASSES: Registry[type[SecondPass]] = Registry("second pass")
register_second_pass = SECOND_PASSES.register


@register_second_pass("apart")
class APART(SecondPass):
    """Adversarially perturbed batch statistics (paper B, algorithm 1): ``g = M/(M+N) g_φ + N/(M+N) h_φ``.

    The perturbation of every norm's mean and deviation is ``θ = ε sign(g_θ)`` (eq. 3) with ε = ``radius``. ``samples``
    is N, a share of the batch or a number for all processes together. Each of n = ``groups`` parts of them has its own
    statistics. The paper's line 12 misprints g_θ for g_φ.
    """

    summary, paper = "adversarially perturbed batch statistics", "B (algorithm 1)"
    attacks_statistics = True
    radius: Annotated[float, Setting("Perturbation, as a share of mean and deviation.", "[0, 1)")] = 0.1
    samples: Annotated[int | float, Setting("Images of the second pass: a number, or a share (float).")] = 1.0
    groups: Annotated[int, Setting("Groups of the second pass with their own statistics.", "[1, inf)")] = 1

    def __init__(self, objective: Objective, **options: Any) -> None:
        super().__init__(objective, **options)
        if any(isinstance(module, _BatchNorm) for module in self.model.modules()):
            message = "APART perturbs the statistics of routed norms, and the model has built-in batch norms"
            hint = "convert it first: advnorm.convert_norm(model, 'bn')"
            raise ConfigError("not_supported", message, field="model", hint=hint)
        zero_perturbation(self.model, requires_grad=False)  # raises if no norm has batch statistics

    @classmethod
    def setting_problems(cls, **settings: Any) -> list[Problem]:
        samples, groups = settings["samples"], settings["groups"]
        whole = isinstance(samples, int)
        if not (samples >= 2 if whole else 0 < samples <= 1):
            message = "{field} must be a number of at least 2 images, or a share in (0, 1] such as 1.0 for all"
            return [Problem(code="out_of_range", message=message, field="samples", got=samples)]
        if whole and samples % groups:
            message = f"{samples} samples cannot be divided into {groups} equal groups"
            return [Problem(code="conflict", message=message, field="groups", hint="change one of them")]
        return []

    def rows(self, batch_size: int) -> int:
        samples, processes = self.samples, world_size()
        if isinstance(samples, int):
            if samples % processes:
                raise ConfigError(
                    "conflict",
                    f"{{field}} ({samples}) counts the images of all processes together, and {processes} processes "
                    "cannot have equal parts",
                    field="samples",
                    hint="choose a multiple, or a share such as 0.5",
                )
            samples //= processes
        rows = rows_of_second_pass(batch_size, samples, self.groups)
        if not rows:
            message = f"{{field}}={self.samples} of a batch of {batch_size} images gives no {self.groups} equal groups"
            hint = "drop a smaller last batch, or change samples or groups"
            raise ConfigError("conflict", message, field="samples", hint=hint)
        return rows

    def share(self, batch_size: int) -> float:
        return self.rows(batch_size) / (batch_size + self.rows(batch_size))


@register_second_pass("sam")
class SAM(SecondPass):
    """Sharpness-aware minimization: the gradient at ``w + ρ g / ||g||_2`` (Foret et al. 2021; paper B, eq. 6, 7)."""

    summary, paper = "sharpness-aware minimization", "B (eq. 6)"
    attacks_weights = True
    rho: Annotated[float, Setting("Length ρ of the perturbation of all weights.", "[0, inf)")] = 0.05

    def weight_perturbations(self, parameters: Sequence[Tensor], gradients: Sequence[Tensor]) -> list[Tensor]:
        """``ρ g / ||g||_2`` over all parameters together; 0 if the gradient is 0."""
        length = torch.stack([at_least_float32(gradient).norm() for gradient in gradients]).norm()
        scale = torch.where(length > 0, self.rho / length.clamp_min(_tiny(length)), 0)
        return [(scale.to(at_least_float32(gradient).dtype) * gradient).to(gradient.dtype) for gradient in gradients]


@register_second_pass("apart_sam")
class APARTSAM(SAM, APART):
    """APART that also perturbs the weights, by ``δ = ρ g_φ / ||g_φ||_2`` (paper B, eq. 7, p = 2), in the same pass."""

    summary, paper = "statistics and weights perturbed together", "B (eq. 7)"


@register_second_pass("awp")
class AWP(SecondPass):
    """Adversarial weight perturbation: the gradient at ``w_l + γ ||w_l|| g_l / ||g_l||`` (Wu et al. 2020), by layer.

    It perturbs the weights of convolutions and linear layers, and with ``norms`` those of norm layers, but no biases.
    """

    summary, paper = "adversarial weight perturbation, by layer", ""
    attacks_weights = True
    gamma: Annotated[float, Setting("Perturbation, as a share of each weight's length.", "[0, inf)")] = 0.005
    norms: Annotated[bool, Setting("Perturb the weights of norm layers too.")] = False

    def __init__(self, objective: Objective, **options: Any) -> None:
        super().__init__(objective, **options)
        if not any(p.requires_grad for p in self._perturbed_weights()):
            message = "AWP perturbs the weights of convolutions and linear layers, and none of them is trained"
            raise ConfigError("empty", message, field="model", hint="use SAM, or norms=True for the weights of norms")

    def weight_perturbations(self, parameters: Sequence[Tensor], gradients: Sequence[Tensor]) -> list[Tensor]:
        moved = {id(p) for p in self._perturbed_weights()}
        steps = []
        for parameter, gradient in zip(parameters, gradients):
            length, own = at_least_float32(gradient).norm(), at_least_float32(parameter.detach()).norm()
            scale = torch.where(length > 0, self.gamma * own / length.clamp_min(_tiny(length)), 0)
            step = scale * at_least_float32(gradient) if id(parameter) in moved else torch.zeros_like(gradient)
            steps.append(step.to(gradient.dtype))
        return steps

    def _perturbed_weights(self) -> list[Tensor]:
        """Weights by their names, also if they are parametrized, as by ``weight_norm``."""
        of_norms = {id(p) for p in norm_parameters(self.model)}
        return [
            p
            for name, p in self.model.named_parameters()
            if "weight" in _own_name(name) and (self.norms if id(p) in of_norms else p.dim() > 1)
        ]


def rows_of_second_pass(batch_size: int, samples: int | float, groups: int) -> int:
    """Number of images of a second pass, in equal groups; 0 if there are fewer images than groups."""
    wanted = samples if isinstance(samples, int) else round(samples * batch_size)
    return min(batch_size, wanted) // groups * groups


def _tiny(value: Tensor) -> float:
    return torch.finfo(value.dtype).tiny


def _own_name(name: str) -> str:
    """A parameter's name in its module; ``weight`` of ``parametrizations.weight.original0``."""
    *rest, own = name.split(".")
    return rest[-1] if "parametrizations" in rest[-2:-1] else own


def _gradients(loss: Tensor, tensors: Sequence[Tensor]) -> list[Tensor | None]:
    """Gradients of the loss without the parameters' hooks, which run once, on the gradient of the step."""
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
    if first is None or second is None:  # a parameter that one or both of the passes do not use
        found, weight = (second, share) if first is None else (first, 1 - share)
        return None if found is None else weight * found
    return second if share == 1 else (1 - share) * first + share * second


class _WithGradients(Function):
    """A value with given gradients with respect to the parameters."""

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
