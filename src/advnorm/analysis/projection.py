"""Principal components of what enters a layer, for clean, adversarial and other images (paper C, fig. 1)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from advnorm._core.errors import ConfigError, raise_all
from advnorm.analysis.base import Finding, register
from advnorm.analysis.moments import (
    attack_branch,
    conditions_of,
    in_batches,
    input_images,
    legend_below,
    look,
    norm_layers,
    under,
    watch,
)
from advnorm.analysis.views import setting_problems
from advnorm.attacks.base import Progress
from advnorm.evaluation.target import EvaluationTarget
from advnorm.norms import Mode

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def principal_components(gram: Tensor, count: int = 2) -> tuple[Tensor, Tensor]:
    """Scores ``(N, count)`` of the first components, and their shares of the variance, from inner products.

    The eigenvectors of the doubly centred Gram matrix, each times the root of its eigenvalue, are the scores of the
    covariance's components, however many features there are. The entry of largest size in each is positive.
    """
    gram = gram.double()
    row = gram.mean(0, keepdim=True)
    centred = gram - row - row.T + row.mean()
    values, vectors = torch.linalg.eigh(centred)
    values, vectors = values.flip(0)[:count].clamp_min(0), vectors.flip(1)[:, :count]
    signs = vectors.gather(0, vectors.abs().argmax(0, keepdim=True)).sign()
    total = centred.trace().clamp_min(torch.finfo(torch.float64).tiny)
    return vectors * signs * values.sqrt(), values / total


@dataclass(frozen=True, kw_only=True, eq=False)
class Projection(Finding):
    """Images in the plane of the first two components of a layer's inputs: ``points[layer][name]``, one row each."""

    points: Mapping[str, Mapping[str, Tensor]]
    explained: Mapping[str, tuple[float, float]]  # shares of the variance
    conditions: Mapping[str, Any] = field(default_factory=dict)

    def record(self) -> dict[str, Any]:
        layers = {
            layer: {
                "explained_variance_ratio": list(self.explained[layer]),
                "points": {name: points.tolist() for name, points in row.items()},
            }
            for layer, row in self.points.items()
        }
        return {"analysis": "projection", "layers": layers, "conditions": dict(self.conditions)}

    def draw(self) -> Figure:
        from matplotlib.figure import Figure

        columns = min(3, len(self.points))
        rows = -(-len(self.points) // columns)
        figure = Figure(figsize=(7.0, 0.6 + 2.5 * rows))
        panels = figure.subplots(rows, columns, squeeze=False)
        for axes in panels.flat[len(self.points) :]:
            axes.set_axis_off()
        for axes, (layer, row) in zip(panels.flat, self.points.items()):
            for index, (name, points) in enumerate(row.items()):
                same = {key: look(index, name)[key] for key in ("color", "marker")}
                axes.scatter(*points.T, s=6, alpha=0.5, linewidths=0, label=name, **same)
            one, two = (f"component {n} ({share:.0%})" for n, share in enumerate(self.explained[layer], 1))
            axes.set(title=f"Input of {layer}", xlabel=one, ylabel=two, xticks=[], yticks=[])
        legend_below(figure, panels[0, 0])
        for handle in figure.legends[0].legend_handles:
            if handle is not None:
                handle.set(alpha=1, sizes=[24])
        return figure


def projection(
    model: nn.Module,
    inputs: Mapping[str, Tensor],
    *,
    layers: str | Sequence[str] | None = None,
    samples: int = 500,
    route: str | None = None,
    statistics: Mode = "running",
    batch_size: int = 256,
    progress: Progress | None = None,
) -> Projection:
    """PCA to two dimensions of the flattened inputs of norms, all kinds of images together (paper C, fig. 1).

    ``layers``: by default the first, the middle and the last norm; ``samples``: the first so many images of each kind.
    Components come from the inner products of the images, block by block: two batches' activations of the chosen
    layers are in memory at a time, at the price of a forward for every pair of batches.
    """
    if layers is None:
        names = list(norm_layers(model))
        layers = list(dict.fromkeys([names[0], names[len(names) // 2], names[-1]]))
    problems = _sample_problems(samples)
    raise_all(
        problems + setting_problems(model, route=route, statistics=statistics, batch_size=batch_size), "bad projection"
    )
    if sum(len(images[:samples]) for images in inputs.values()) < 2:
        raise ConfigError("a plane needs at least two images; give more, or more kinds of them")
    chosen = list(norm_layers(model, layers))
    blocks = [block for images in inputs.values() for block in in_batches(images[:samples], batch_size)]
    starts = [0]
    for block in blocks:
        starts.append(starts[-1] + len(block))
    grams = {layer: torch.zeros(starts[-1], starts[-1], dtype=torch.float64) for layer in chosen}

    def activations(block: Tensor) -> dict[str, Tensor]:
        seen: dict[str, Tensor] = {}
        how = {**under(route, statistics), "layers": chosen, "batch_size": batch_size}
        watch(model, block, lambda name, value: seen.__setitem__(name, value.flatten(1).double()), **how)
        return seen

    done, total = 0, len(blocks) * (len(blocks) + 1) // 2
    for i, first in enumerate(blocks):
        mine = activations(first)
        for j in range(i, len(blocks)):
            theirs = mine if i == j else activations(blocks[j])
            for layer in chosen:
                if layer not in mine:
                    raise ConfigError(f"{layer} takes no part in the forward; choose another layer")
                products = (mine[layer] @ theirs[layer].T).cpu()
                grams[layer][starts[i] : starts[i + 1], starts[j] : starts[j + 1]] = products
                grams[layer][starts[j] : starts[j + 1], starts[i] : starts[i + 1]] = products.T
            done += 1
            if progress is not None:
                progress(done, total)
    sizes = [len(images[:samples]) for images in inputs.values()]
    points: dict[str, dict[str, Tensor]] = {}
    explained: dict[str, tuple[float, float]] = {}
    for layer, gram in grams.items():
        scores, shares = principal_components(gram)
        points[layer] = dict(zip(inputs, scores.split(sizes)))
        explained[layer] = (shares[0].item(), shares[1].item())
    counts = dict(zip(inputs, sizes))
    conditions = {"route": route, "statistics": statistics, "samples": counts, "fitted_on": "all together"}
    return Projection(points=points, explained=explained, conditions=conditions)


def _sample_problems(samples: Any) -> list[str]:
    good = isinstance(samples, int) and not isinstance(samples, bool) and samples >= 2
    return [] if good else [f"samples must be an integer of at least 2, got {samples!r}"]


@register("projection", summary="clean, PGD and AutoAttack images in the plane of a layer's inputs", paper="C fig. 1")
def projection_of_run(
    subject: EvaluationTarget,
    *,
    inputs: Sequence[str] = ("clean", "adv", "autoattack"),
    layers: Sequence[str] | None = None,
    samples: int = 500,
    route: str | None = None,
    progress: Progress | None = None,
) -> Projection:
    """``inputs``: images by name; ``route``: the branch that is attacked and looked at (``adv``)."""
    raise_all(_sample_problems(samples), "bad projection")
    branch = attack_branch(subject.model, route)
    few = dataclasses.replace(subject, data=(subject.images[:samples], subject.labels[:samples]))
    images = input_images(few, inputs, route=branch, progress=progress)
    found = projection(
        subject.model, images, layers=layers, samples=samples, route=branch, batch_size=subject.batch_size
    )
    told = conditions_of(subject, inputs, through=branch, **found.conditions)
    return dataclasses.replace(found, conditions=told)
