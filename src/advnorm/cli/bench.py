"""The verbs ``bench norms``, ``train``, ``recipe``, ``autoattack``, ``audit``, ``quick`` and ``surgery``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from advnorm.cli.command import INTEGERS, KEY_VALUE, check_copy, command, console, own_code, write_copy
from advnorm.cli.options import DataDir, Device, JsonCopy, Limit, Overrides, Seed

app = typer.Typer(
    no_args_is_help=True, help="Measure speed, memory, the accuracy of attacks, and the errors of the audit."
)


@command(app, "norms", computes=False)
def bench_norms(
    norms: Annotated[list[str] | None, typer.Argument(help="Norms to measure. Default: bn and dual_bn.")] = None,
    model: Annotated[str, typer.Option(help="Network; see `advnorm ls models`.")] = "resnet18",
    batch_size: Annotated[int | None, typer.Option(help="Images per batch. Default: 512 on a GPU, else 32.")] = None,
    device: Device = None,
    precision: Annotated[str, typer.Option(help="float32, tf32 or bf16 (autocast).")] = "float32",
    compiled: Annotated[bool, typer.Option("--compile", help="Compile every network, the plain one too.")] = False,
    rounds: Annotated[int | None, typer.Option(help="Number of repetitions; the median is reported.")] = None,
    threads: Annotated[int, typer.Option(min=1, max=256, help="Number of CPU threads.")] = 1,
    json: JsonCopy = None,
) -> None:
    """Compare routed networks with the plain one: evaluation, and training on a concatenated batch.

    Examples: `advnorm bench norms`, `advnorm bench norms dual_bn cross_bn gmm_bn --precision bf16 --json norms.json`
    """
    from advnorm.bench.norms import bench_norms as measure
    from advnorm.cli.bench_tables import norm_table

    with _measuring(json) as (show, _):
        result = measure(
            norms or ("bn", "dual_bn"),
            model=model,
            batch_size=batch_size,
            device=device,
            precision=precision,  # pyright: ignore[reportArgumentType]  # validated there
            compiled=compiled,
            rounds=rounds,
            threads=threads,
            on_round=lambda: show("norms"),
        )
    console.print(norm_table(result))
    write_copy(json, result)


@command(app, "train")
def bench_train(
    overrides: Overrides = None,
    sweep: Annotated[
        list[str] | None,
        typer.Option(metavar=KEY_VALUE, help="Measure each value: --sweep batch_size=128,512 second_pass=none,sam."),
    ] = None,
    mode: Annotated[
        list[str] | None,
        typer.Option(
            help="Plain PyTorch loops: plain (TF32), careful (bf16, channels-last, frozen weights in the attack), "
            "careful_compiled. Ours: eager, compiled. Default: all; on the CPU: plain, careful, eager."
        ),
    ] = None,
    processes: Annotated[
        list[int] | None,
        typer.Option(
            min=1, metavar=INTEGERS, help="Numbers of processes that divide each batch, one or several. Default: 1."
        ),
    ] = None,
    data_dir: DataDir = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Number of timed steps. Default: 50; on the CPU 3.")] = None,
    parts: Annotated[bool, typer.Option("--parts", help="Also show how the time of a step is spent.")] = False,
    start_up: Annotated[
        bool,
        typer.Option("--start-up", help="Also time the first step in two fresh processes: without and with a cache."),
    ] = False,
    device: Device = None,
    json: JsonCopy = None,
) -> None:
    """Compare the steps of training with plain PyTorch loops, for any settings of a training.

    The default is hybrid PGD-10 training of a ResNet-18 with dual_bn on synthetic images.
    Examples: `advnorm bench train --set data=cifar10 --data-dir data --sweep batch_size=128,512`,
    `advnorm bench train --sweep attack.steps=1,5,10 --mode compiled --processes 1 2 --json train.json`,
    `advnorm bench train --sweep second_pass=none,sam,awp --mode compiled --parts`,
    `advnorm bench train --set model=timm:convnext_atto norm=dual_affine_ln data.image_size=128`.
    On several computers: `torchrun ... -m advnorm bench train`.
    """
    from advnorm._core.distributed import rank
    from advnorm.bench.train import bench_train as measure
    from advnorm.bench.train import default_config
    from advnorm.cli.train_tables import train_tables
    from advnorm.config.sweep import sweep_configs

    with _measuring(json) as (show, _):
        result = measure(
            sweep_configs(default_config(device).with_overrides(overrides or ()), sweep or ()),
            modes=mode or None,  # pyright: ignore[reportArgumentType]  # validated there
            processes=processes or None,
            data_dir=data_dir,
            device=device,
            steps=steps,
            parts=parts,
            start_up=start_up,
            on_row=show,
        )
    if rank() == 0:
        console.print(train_tables(result))
        write_copy(json, result)


@command(app, "recipe")
def bench_recipe(
    file: Annotated[Path, typer.Argument(help="A recipe: a .yaml, .json or .py file, as for `advnorm train`.")],
    seeds: Annotated[list[int] | None, typer.Option(min=0, metavar=INTEGERS, help="Seeds. Default: 0 1 2.")] = None,
    overrides: Overrides = None,
    variant: Annotated[
        list[str] | None,
        typer.Option(
            metavar=KEY_VALUE, help="Also train variants: each is a setting, or 'several settings' in quotes."
        ),
    ] = None,
    out: Annotated[Path, typer.Option(help="Parent folder of the runs' folders.")] = Path("runs"),
    data_dir: DataDir = None,
    limit: Limit = None,
    device: Device = None,
    json: JsonCopy = None,
) -> None:
    """Measure a recipe: wall-clock time of each training, and accuracy under the whole AutoAttack.

    Each seed is trained by `advnorm train` in a process of its own that compiles everything itself. The table of
    variants shows the effect of each changed setting. The same command resumes.
    Examples: `advnorm bench recipe recipes/speedrun.yaml --data-dir data --json speedrun.json`,
    `advnorm bench recipe recipes/trades_awp.yaml --data-dir data --variant second_pass=null
    'schedule=one_cycle milestones=[] gamma=0.1 warmup_epochs=0'`
    """
    from advnorm.bench.recipe import bench_recipe as measure
    from advnorm.cli.bench_tables import recipe_tables

    with _measuring(json) as (show, save):
        result = measure(
            file,
            seeds=(0, 1, 2) if seeds is None else seeds,
            overrides=overrides or (),
            variants=variant or (),
            out=out,
            data_dir=data_dir,
            limit=limit,
            device=device,
            imports=own_code,
            on_row=show,
            on_result=save,
        )
    console.print(recipe_tables(result))
    write_copy(json, result)


@command(app, "autoattack")
def bench_autoattack(
    weights: Annotated[
        Path | None,
        typer.Option(help="Weights of a ResNet-18 (.safetensors, .pt). Default: a small network is trained first."),
    ] = None,
    data_dir: Annotated[Path | None, typer.Option(help="Folder of CIFAR-10; needed with --weights.")] = None,
    images: Annotated[int, typer.Option(min=1, help="Use the first N test images.")] = 1000,
    eps: Annotated[str | None, typer.Option(help="Linf radius. Default: 8/255; for the small network 40/255.")] = None,
    precision: Annotated[
        list[str] | None, typer.Option(help="Precision of the search, one or several: float32, tf32, bf16.")
    ] = None,
    official: Annotated[bool, typer.Option(help="Run pyautoattack too, if it is installed.")] = True,
    seed: Seed = 0,
    json: JsonCopy = None,
) -> None:
    """Compare our AutoAttack (standard) with the official code on the same network and images.

    Examples: `advnorm bench autoattack --images 100`,
    `advnorm bench autoattack --weights resnet18_eps8.safetensors --data-dir data --json autoattack.json`
    """
    from advnorm.bench.autoattack import bench_autoattack as measure
    from advnorm.bench.autoattack import load_network
    from advnorm.cli.bench_tables import autoattack_tables

    with _measuring(json) as (show, save):
        model, x, y, threat, name = load_network(
            weights, data_dir, images=images, eps=eps, seed=seed, precisions=precision or ()
        )
        result = measure(
            model,
            x,
            y,
            threat,
            name=name,
            precisions=precision or (("float32", "tf32", "bf16") if x.is_cuda else ("float32",)),
            official=official,
            seed=seed,
            on_row=show,
            on_result=save,
        )
    console.print(autoattack_tables(result))
    write_copy(json, result)


@command(app, "audit")
def bench_audit(
    specimens: Annotated[list[str] | None, typer.Argument(help="Specimens of the gallery. Default: all.")] = None,
    part: Annotated[
        list[str] | None, typer.Option(help="Only the specimens of one or several parts: fitted, held_out, blind.")
    ] = None,
    data: Annotated[str, typer.Option(help="digits (embedded), or cifar10 for a GPU.")] = "digits",
    data_dir: Annotated[Path | None, typer.Option(help="Folder of CIFAR-10.")] = None,
    budget: Annotated[str, typer.Option(help="Budget of each audit; see `advnorm audit --help`.")] = "quick",
    limit: Annotated[int | None, typer.Option(min=1, help="Number of images. Default: by the budget.")] = None,
    device: Device = None,
    seed: Seed = 0,
    json: JsonCopy = None,
) -> None:
    """Measure how often the audit is wrong, on trained classifiers whose robustness is known.

    Examples: `advnorm bench audit --part blind --json blind.json`, `advnorm bench audit kwta pgd_at --limit 50`
    """
    from advnorm.bench.audit import bench_audit as measure
    from advnorm.cli.bench_tables import audit_tables

    with _measuring(json) as (show, save):
        result = measure(
            specimens or (),
            parts=part or (),  # pyright: ignore[reportArgumentType]  # validated there
            data=data,
            data_dir=data_dir,
            budget=budget,  # pyright: ignore[reportArgumentType]  # validated there
            limit=limit,
            device=device,
            seed=seed,
            on_row=show,
            on_result=save,
        )
    console.print(audit_tables(result))
    write_copy(json, result)


@command(app, "quick")
def bench_quick(
    runs: Annotated[
        list[Path] | None,
        typer.Argument(help="Folders of training runs. Default: small networks are trained on digits first."),
    ] = None,
    data_dir: Annotated[Path | None, typer.Option(help="Folder that contains the data set of the runs.")] = None,
    images: Annotated[int, typer.Option(min=1, help="Use the first N test images.")] = 450,
    training_seed: Annotated[
        list[int] | None,
        typer.Option(min=0, metavar=INTEGERS, help="Seeds of the networks on digits, one or several. Default: 1 2."),
    ] = None,
    precision: Annotated[str, typer.Option(help="Precision of both searches: float32, tf32 or bf16.")] = "float32",
    seed: Seed = 0,
    device: Device = None,
    json: JsonCopy = None,
) -> None:
    """Compare the attack `quick` with AutoAttack: robust accuracy, images that differ, and passes over the network.

    The defaults of `quick` were chosen on networks with seeds 0, 10, 11 and 12, which are not among the default seeds.
    Examples: `advnorm bench quick --training-seed 1 --images 100`,
    `advnorm bench quick runs/a runs/b --data-dir data --images 10000 --precision bf16 --json quick.json`
    """
    from advnorm.bench.quick import bench_quick as measure
    from advnorm.bench.quick import open_networks, train_networks
    from advnorm.cli.bench_tables import quick_tables

    with _measuring(json) as (show, save):
        if runs:
            networks, name = open_networks(runs, images, data_dir=data_dir, device=device), "training runs"
        else:
            networks, name = train_networks(training_seed or (1, 2), images), "small_cnn on digits"
        result = measure(
            networks,
            name=name,
            precision=precision,  # pyright: ignore[reportArgumentType]  # validated there
            seed=seed,
            on_row=show,
            on_result=save,
        )
    console.print(quick_tables(result))
    write_copy(json, result)


@command(app, "surgery", computes=False)
def bench_surgery(
    libraries: Annotated[
        list[str] | None, typer.Argument(help="timm, torchvision, transformers. Default: those three.")
    ] = None,
    check: Annotated[bool, typer.Option(help="Also compare one network of each family before and after.")] = True,
    json: JsonCopy = None,
) -> None:
    """Convert every network of the installed timm, torchvision and transformers to a dual norm; about ten minutes.

    Examples: `advnorm bench surgery`, `advnorm bench surgery torchvision --no-check --json surgery.json`
    """
    from advnorm.bench.surgery import bench_surgery as measure
    from advnorm.cli.bench_tables import surgery_tables

    with _measuring(json) as (show, _):
        result = measure(libraries or None, check=check, on_row=show)
    console.print(surgery_tables(result))
    write_copy(json, result)


@contextmanager
def _measuring(record: Path | None) -> Iterator[tuple[Callable[[str], None], Callable[[Any], None]]]:
    """Scope: the record can be written; yields functions that show the current row and write the results so far."""
    from advnorm._core.progress import show_progress
    from advnorm._core.records import write_json

    def save(result: Any) -> None:  # after every row, because a row can take hours
        if record is not None:
            write_json(record, result.record())

    check_copy(record)
    with show_progress() as display:
        task = display.task("measuring")
        yield lambda row: task.update(description=f"measuring {row}"), save
