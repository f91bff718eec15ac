"""The statistics banks and affine banks that the norm layers of a model store, and distances between them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from advnorm._core.errors import ConfigError, raise_problems, unknown_name
from advnorm._core.wrappers import unwrap_model
from advnorm.norms import RoutedNorm
from advnorm.norms.norm_layers import NORM_LAYERS
from advnorm.norms.plan import SHARED
from advnorm.surgery import convert_norm


class Gaussian(NamedTuple):
    """The channels of one layer as independent Gaussians, float64."""

    mean: Tensor
    std: Tensor


class AffineBank(NamedTuple):
    """Bias and weight of the channels of one layer: mean and deviation of its output for standardized input."""

    bias: Tensor
    weight: Tensor


Bank = TypeVar("Bank", Gaussian, AffineBank)


def norm_layers(model: nn.Module, layers: str | Sequence[str] | None = None) -> dict[str, nn.Module]:
    """Return the norm layers of a model by name, or the named ones; a model with ``norm="none"`` has them, too."""
    found = {name: module for name, module in unwrap_model(model).named_modules() if isinstance(module, NORM_LAYERS)}
    if not found:
        message = f"{type(model).__name__} has no norm layers"
        raise ConfigError("not_supported", message, field="model", hint="build it with norm='none' to measure there")
    wanted = found if layers is None else [layers] if isinstance(layers, str) else list(layers)
    raise_problems([unknown_name("layer", name, found) for name in wanted if name not in found])
    return {name: found[name] for name in wanted}


def default_layer(model: nn.Module) -> str:
    """Return the second norm of the first residual block (paper A, fig. 4), else the second norm of the model."""
    names = list(norm_layers(model))
    block = [name for name in names if name.endswith("layer1.0.bn2")]
    return (block or names[1:2] or names)[0]


def statistics_banks(norm: nn.Module) -> dict[str, Gaussian]:
    """Return running mean and deviation (of the unbiased variance) by bank; empty unless it is a batch norm."""
    if isinstance(norm, RoutedNorm):
        banks = norm.plan.statistics_banks if norm.track_running_stats else ()
        stored = {bank: norm.statistics_bank(bank)[:2] for bank in banks}
    else:
        stored = {SHARED: (getattr(norm, "running_mean", None), getattr(norm, "running_var", None))}
    return {
        bank: Gaussian(_to_float64(mean), _to_float64(var).sqrt())
        for bank, (mean, var) in stored.items()
        if mean is not None and var is not None
    }


def affine_banks(norm: nn.Module) -> dict[str, AffineBank]:
    """Return bias and weight of a norm by bank."""
    if isinstance(norm, RoutedNorm):
        stored = {bank: norm.affine_bank(bank) for bank in norm.plan.affine_banks}
    else:
        stored = {SHARED: (getattr(norm, "weight", None), getattr(norm, "bias", None))}
    return {
        bank: AffineBank(_to_float64(torch.zeros_like(weight) if bias is None else bias), _to_float64(weight))
        for bank, (weight, bias) in stored.items()
        if weight is not None
    }


def stored_statistics(model: nn.Module, domain: str | None = None) -> dict[str, Gaussian]:
    """Return the running statistics of every batch norm for a domain: those of the bank that its samples update."""
    found = _banks_of_domain(model, domain, statistics_banks, "feeds")
    if not found:
        raise ConfigError("not_supported", "no norm of this model stores statistics", field="model")
    return found


def affine_parameters(model: nn.Module, domain: str | None = None) -> dict[str, AffineBank]:
    """Return the affine parameters of every norm for a domain."""
    return _banks_of_domain(model, domain, affine_banks, "affine")


def _banks_of_domain(
    model: nn.Module, domain: str | None, banks_of: Callable[[nn.Module], dict[str, Bank]], assigned: str
) -> dict[str, Bank]:
    found: dict[str, Bank] = {}
    for name, norm in norm_layers(model).items():
        banks = banks_of(norm)
        bank = SHARED
        if banks and isinstance(norm, RoutedNorm):
            if domain is None and len(banks) > 1:
                hint = f"name a domain: {', '.join(norm.plan.domains)}"
                raise ConfigError("missing_route", "the model has several banks", field="domain", hint=hint)
            bank = getattr(norm.plan, assigned)[0 if domain is None else norm.plan.index(domain)]
        if banks:
            found[name] = banks[bank]
    return found


def has_batch_statistics(model: nn.Module) -> bool:
    """Whether a model has running statistics that can be re-estimated."""
    return any(
        module.plan.statistics == "batch" and not module.plan.mixture
        if isinstance(module, RoutedNorm)
        else isinstance(module, _BatchNorm) and module.track_running_stats
        for module in model.modules()
    )


def routed_copy(model: nn.Module) -> nn.Module:
    """Return a copy of a model with routed norms instead of built-in batch norms, and with the same output."""
    twin = copy.deepcopy(unwrap_model(model))
    if any(isinstance(module, _BatchNorm) for module in twin.modules()):
        convert_norm(twin, "bn")
    return twin


def _to_float64(value: Tensor) -> Tensor:
    return value.detach().double().cpu().flatten()


# -- distances (paper C, eq. 7) ----------------------------------------------------------------------------------------

#: What a norm adds to a variance by default; a relative distance divides by at least its square root.
EPS = 1e-5


class Distance(NamedTuple):
    """The two parts of a squared 2-Wasserstein distance: of the means and of the deviations, summed over channels."""

    mean: float
    std: float

    RECORD = ("mean", "std", "total")

    @property
    def total(self) -> float:
        return self.mean + self.std


#: Distances by layer.
Distances = dict[str, Distance]


def wasserstein(first: Gaussian | AffineBank, second: Gaussian | AffineBank, *, relative: bool = False) -> Distance:
    """Return ``Σ_c (μ₁ - μ₂)² + (σ₁ - σ₂)²`` of two diagonal Gaussians (paper C, eq. 7).

    ``relative``: each channel in units of its own deviation, the root mean square of both. A batch norm does not depend
    on the scale of the weights before it, but the absolute distance does.
    """
    unit = ((first[1].square() + second[1].square()) / 2 + EPS).sqrt() if relative else torch.ones(())
    parts = ((one - other) / unit for one, other in zip(first, second))
    return Distance(*(part.square().sum().item() for part in parts))


def layer_distances(first: Mapping[str, Bank], second: Mapping[str, Bank], *, relative: bool = False) -> Distances:
    """Return the distance at every layer that both have."""
    return {name: wasserstein(first[name], second[name], relative=relative) for name in first if name in second}
