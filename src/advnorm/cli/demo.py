"""The demonstration: a plain network becomes a routed one, learns both domains, and each branch is judged."""

from __future__ import annotations

import time

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor, nn

from advnorm._core.modes import evaluating
from advnorm.attacks import PGD
from advnorm.data import digits
from advnorm.models import create_model
from advnorm.norms import domains, make_plan, route, routed_modules
from advnorm.norms.routed import RoutedNorm
from advnorm.surgery import convert_norm, strip
from advnorm.threat import ThreatModel

BATCH = 128


def run(console: Console, *, norm: str, epochs: int, seed: int, eps: float = 40 / 255) -> dict[str, dict[str, float]]:
    """Train plainly, convert in one line, train hybrid, judge every branch; returns accuracies by branch."""
    make_plan(norm)  # a wrong name is an error before any work
    torch.manual_seed(seed)
    started = time.perf_counter()
    (x, y), (x_test, y_test) = digits("train"), digits("test")
    threat = ThreatModel(norm="Linf", eps=eps)
    attack = PGD(threat=threat, steps=10, step_size=eps / 4, seed=seed)

    console.print("[bold]1. A plain network learns digits[/]")
    model = strip(create_model("small_cnn", in_channels=1))  # an ordinary module with built-in norms
    _fit(model, x, y, epochs, attack=None, console=console)
    attacked = _accuracy(model, attack(model, x_test, y_test), y_test)
    console.print(f"{_accuracy(model, x_test, y_test):.1%} of the test images right; under PGD-10, {attacked:.1%}\n")

    console.print(f"[bold]2. report = advnorm.convert_norm(model, {norm!r})[/]")
    console.print(str(convert_norm(model, norm)) + "\n", highlight=False)

    console.print("[bold]3. It learns clean and adversarial images, concatenated in one batch[/]")
    _fit(model, x, y, epochs, attack=attack, console=console)
    console.print()

    branches = [domain for domain in domains(model) if domain in ("clean", "adv")]  # what it was trained with
    result = {}
    table = Table("branch", title="4. What each branch does", title_justify="left", title_style="bold")
    for column in ("clean", "PGD-10"):
        table.add_column(column, justify="right")
    for branch in branches:
        with route(model, branch):
            adversarial = attack(model, x_test, y_test)
            result[branch] = {
                "clean": _accuracy(model, x_test, y_test),
                "pgd10": _accuracy(model, adversarial, y_test),
            }
        table.add_row(branch, *(f"{value:.1%}" for value in result[branch].values()))
    console.print(table)
    banks = _banks(model)
    if banks.row_count:
        console.print(banks)

    plain = strip(model, route=branches[-1])
    with torch.no_grad(), evaluating(model), evaluating(plain), route(model, branches[-1]):
        same = torch.equal(plain(x_test), model(x_test))
    console.print(f"\n[bold]5. plain = advnorm.strip(model, route={branches[-1]!r})[/]")
    console.print(f"an ordinary module again, {'bit for bit the same' if same else 'not the same'} logits\n")
    console.print(
        f"digits of scikit-learn, {len(x_test)} test images, {threat}, {epochs} + {epochs} epochs, seed {seed}, "
        f"{time.perf_counter() - started:.0f} s",
        style="dim",
    )
    return result


def _fit(model: nn.Module, x: Tensor, y: Tensor, epochs: int, *, attack: PGD | None, console: Console) -> None:
    """SGD, one cycle; with an attack hybrid training with weight 0.5 (paper A, eq. 2) on concatenated batches."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4, nesterov=True)
    steps = len(x) // BATCH
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.2, total_steps=epochs * steps)
    model.train()
    for _ in track(range(epochs), "training", console=console, transient=True, disable=not console.is_terminal):
        for chosen in torch.randperm(len(x)).split(BATCH)[:steps]:
            images, labels = x[chosen], y[chosen]
            if attack is None:
                loss = F.cross_entropy(model(images), labels)
            else:
                with route(model, "adv"):
                    adversarial = attack(model, images, labels, index=chosen)
                with route(model, {"clean": BATCH, "adv": BATCH}):
                    loss = F.cross_entropy(model(torch.cat([images, adversarial])), labels.repeat(2))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()


@torch.no_grad()
def _accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    with evaluating(model):
        return (model(x).argmax(1) == y).float().mean().item()


def _banks(model: nn.Module) -> Table:
    """How far the banks of each norm moved apart: root mean square difference between the first two."""
    table = Table("norm", title="How far apart the banks are (RMS)", title_justify="left", title_style="bold")
    for column in ("mean", "std", "weight", "bias"):
        table.add_column(column, justify="right")
    for name, norm in routed_modules(model).items():
        if not isinstance(norm, RoutedNorm) or not norm.plan.routed:
            continue
        cells = []
        statistics = norm.plan.statistics_banks
        pairs = list(zip(*(norm.statistics_bank(bank)[:2] for bank in statistics[:2]))) if len(statistics) > 1 else []
        cells += (
            [_rms(pairs[0][0], pairs[0][1]), _rms(pairs[1][0].sqrt(), pairs[1][1].sqrt())] if pairs else ["shared"] * 2
        )
        affine = norm.plan.affine_banks
        values = list(zip(*(norm.affine_bank(bank) for bank in affine[:2]))) if len(affine) > 1 else []
        cells += [_rms(first, second) for first, second in values] if values else ["shared"] * 2
        table.add_row(name, *cells)
    return table


def _rms(first: Tensor | None, second: Tensor | None) -> str:
    return "none" if first is None or second is None else f"{(first - second).square().mean().sqrt().item():.3f}"
