"""Principal components of the input of a layer, for clean, adversarial and other images (paper C, fig. 1).

Our own because scikit-learn needs all activations in memory; here two batches suffice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, combinations_with_replacement
from typing import Annotated, NamedTuple

import torch
from torch import Tensor, nn

from advnorm._core.errors import ConfigError, raise_problems
from advnorm._core.settings import Setting
from advnorm.analysis.banks import norm_layers
from advnorm.analysis.base import Finding, register_analysis
from advnorm.analysis.images import iterate_batches, track
from advnorm.analysis.moments import affine_bank_settings, observe_norm_inputs
from advnorm.analysis.plots import Figure, legend_below, line_style, new_figure
from advnorm.analysis.settings import BatchSize, StatisticsMode, setting_problems

Layers = Annotated[Sequence[str] | None, Setting("Layers by name. Default: the first, middle and last norm.")]
Samples = Annotated[int, Setting("Number of images of each kind.", "[2, inf)")]


def principal_components(gram: Tensor) -> tuple[Tensor, Tensor]:
    """Return scores ``(N, 2)`` of the first two components and their shares of the variance, from inner products.

    The eigenvectors of the doubly centered Gram matrix, each times the root of its eigenvalue, are the scores of the
    components of the covariance, for any number of features. The largest entry of each by absolute value is positive.
    """
    gram = gram.double()
    row = gram.mean(0, keepdim=True)
    centered = gram - row - row.T + row.mean()
    values, vectors = torch.linalg.eigh(centered)
    values, vectors = values.flip(0)[:2].clamp_min(0), vectors.flip(1)[:, :2]
    signs = vectors.gather(0, vectors.abs().argmax(0, keepdim=True)).sign()
    total = centered.trace().clamp_min(torch.finfo(torch.float64).tiny)
    return vectors * signs * values.sqrt(), values / total


class LayerProjection(NamedTuple):
    """Images in the plane of the first two components of a layer's inputs: ``points[name]``, one row for each image."""

    explained_variance_ratio: tuple[float, float]
    points: Mapping[str, Tensor]


@dataclass(frozen=True, kw_only=True, eq=False)
class Projection(Finding):
    """The projection of the inputs of several layers."""

    RECORD = ("analysis", "layers", "conditions")
    analysis = "projection"

    layers: Mapping[str, LayerProjection]

    def draw(self) -> Figure:
        figure, panels = new_figure(len(self.layers), min(3, len(self.layers)))
        handles = {}
        for axes, (layer, found) in zip(panels, self.layers.items()):
            for index, (name, points) in enumerate(found.points.items()):
                style = {key: line_style(index, name)[key] for key in ("color", "marker")}
                handles[name] = axes.scatter(*points.T, s=6, alpha=0.5, linewidths=0, **style)
            one, two = (f"component {n} ({share:.0%})" for n, share in enumerate(found.explained_variance_ratio, 1))
            axes.set(title=f"Input of {layer}", xlabel=one, ylabel=two, xticks=[], yticks=[])
        legend_below(figure, handles)
        for handle in figure.legends[0].legend_handles:
            if handle is not None:
                handle.set(alpha=1, sizes=[24])
        return figure


@register_analysis(
    "projection",
    summary="images in the plane of a layer's inputs",
    paper="C fig. 1",
    takes="images",
    inputs=("clean", "adv", "autoattack"),
)
def projection(
    model: nn.Module,
    inputs: Mapping[str, Tensor],
    *,
    layers: Layers = None,
    samples: Samples = 500,
    route: str | None = None,
    statistics: StatisticsMode = "running",
    batch_size: BatchSize = 256,
) -> Projection:
    """Return the first two principal components of layers' inputs, all kinds of images together (paper C, fig. 1).

    The default ``layers`` are the first, the middle and the last norm; ``samples`` is the number of images of each
    kind. The components come from the inner products of the images, block by block: activations of two batches are in
    memory at a time, at the cost of a forward for every pair of batches.
    """
    raise_problems(setting_problems(projection, locals(), any_bank=True), "bad projection")
    if layers is None:
        names = list(norm_layers(model))
        layers = list(dict.fromkeys([names[0], names[len(names) // 2], names[-1]]))
    sizes = {name: len(images[:samples]) for name, images in inputs.items()}
    if sum(sizes.values()) < 2:
        raise ConfigError("empty", "{field} must hold at least two images", field="inputs", got=sum(sizes.values()))
    chosen = list(norm_layers(model, layers))
    blocks = [block for images in inputs.values() for block in iterate_batches(images[:samples], batch_size)]
    starts = list(accumulate(map(len, blocks), initial=0))
    grams = {layer: torch.zeros(starts[-1], starts[-1], dtype=torch.float64) for layer in chosen}

    def activations(block: Tensor) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        how = {**affine_bank_settings(route, statistics), "layers": chosen, "batch_size": batch_size}
        observe_norm_inputs(model, block, lambda name, value: found.__setitem__(name, value.flatten(1).double()), **how)
        return found

    first: dict[str, Tensor] = {}
    for i, j in track(combinations_with_replacement(range(len(blocks)), 2)):
        second = activations(blocks[j])
        first = second if i == j else first
        for layer in chosen:
            if layer not in first:
                message = f"{layer} is not used in the forward pass"
                raise ConfigError("not_supported", message, field="layers", hint="choose another layer")
            products = (first[layer] @ second[layer].T).cpu()
            grams[layer][starts[i] : starts[i + 1], starts[j] : starts[j + 1]] = products
            grams[layer][starts[j] : starts[j + 1], starts[i] : starts[i + 1]] = products.T
    found = {}
    for layer, gram in grams.items():
        scores, shares = principal_components(gram)
        points = dict(zip(inputs, scores.split(list(sizes.values()))))
        found[layer] = LayerProjection((shares[0].item(), shares[1].item()), points)
    conditions = {"route": route, "statistics": statistics, "samples": sizes, "fitted_on": "all together"}
    return Projection(layers=found, conditions=conditions)
