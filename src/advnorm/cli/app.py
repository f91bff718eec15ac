"""Verbs of the command line; each imports what it needs, so that help is instant."""

from __future__ import annotations

import errno
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from advnorm._core.errors import AdvnormError, ConfigError, raise_all
from advnorm._core.exit_codes import CRASHED, USAGE

app = typer.Typer(
    name="advnorm",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    help="Adversarial training in which normalization is the subject.",
)
bench = typer.Typer(no_args_is_help=True, help="Measure what things cost, against a plain reference in the same run.")
app.add_typer(bench, name="bench")
console = Console()


# Options that several verbs have.
Source = Annotated[
    str | None,
    typer.Argument(help="A .yaml, .json or .py file, or a study's cell; default: a quick one on digits."),
]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", help="key=value, one or several; parts by a dot: attack.steps=20.")
]
Target = Annotated[
    str, typer.Argument(help="Folder of a run, or module:function that returns the model; looked up from here.")
]
Checkpoint = Annotated[
    str | None, typer.Option(help="Of a run: best (by held-out accuracy, the default), last, or epoch5.")
]
Weights = Annotated[Path | None, typer.Option(help="Its weights, as .safetensors.")]
Data = Annotated[
    str | None,
    typer.Option(help="NAME:FOLDER of a data set, or a .npz or .safetensors file with x and y; a run has its own."),
]
DataDir = Annotated[Path | None, typer.Option(help="Folder that holds the data set.")]
Eps = Annotated[str | None, typer.Option(help="Radius in pixel scale; default: the run's, else 8/255.")]
Norm = Annotated[str | None, typer.Option(help="Linf, L2 or L1; default: the run's, else Linf.")]
Statistics = Annotated[str, typer.Option(help="What batch norms use: running, batch or batch_frozen.")]
Limit = Annotated[int | None, typer.Option(min=1, help="Use so many of the images at most.")]
BatchSize = Annotated[int | None, typer.Option(min=1, help="Images at a time; default: as many as fit.")]
Device = Annotated[str | None, typer.Option(help="cpu or cuda; default: cuda where there is one.")]
Seed = Annotated[int, typer.Option(help="Seed of the noise.")]
Json = Annotated[Path | None, typer.Option(help="Record; a killed run continues from it.")]
AlsoJson = Annotated[Path | None, typer.Option(help="Also write the record here.")]


class Kind(StrEnum):
    """What `advnorm ls` can list."""

    norms = "norms"
    models = "models"
    attacks = "attacks"
    objectives = "objectives"
    datasets = "datasets"
    analyses = "analyses"
    studies = "studies"


@app.callback(invoke_without_command=True)
def first_of_all(
    show: Annotated[bool, typer.Option("--version", help="Print the version and leave.")] = False,
    own: Annotated[
        list[str] | None,
        typer.Option(
            "--import",
            envvar="ADVNORM_IMPORT",
            help="A .py file or a module with models or data sets of your own, before the verb; one or several.",
        ),
    ] = None,
) -> None:
    for source in own or ():
        from advnorm.cli.evaluate import run_code

        run_code(source)
    if show:
        from advnorm import __version__

        console.print(f"advnorm {__version__}")
        raise typer.Exit


@app.command("ls")
def list_things(
    kind: Annotated[Kind, typer.Argument(help="What to list.")],
    pattern: Annotated[str, typer.Argument(help="Shell pattern, for example 'dual_*', or a study's name.")] = "*",
) -> None:
    """List norms, models, attacks, objectives, data sets, analyses or studies by name.

    Examples: `advnorm ls norms`, `advnorm ls models 'resnet*'`, `advnorm ls studies 'A/*'`; its cells: `advnorm ls
    studies A/table3`
    """
    from advnorm.cli import listing

    console.print(getattr(listing, kind.value)(pattern))


@app.command()
def show(source: Source = None, overrides: Overrides = None) -> None:
    """Print the full configuration that a file or a study's cell and overrides give; of studies the paper's numbers.

    Examples: `advnorm show recipes/cifar10_eps16.yaml --set norm=dual_bn epochs=30`, `advnorm show A/table3`,
    `advnorm show A/table3/dual_bn/eps16`
    """
    from advnorm.cli import listing
    from advnorm.cli.train import configured, named

    study, cell = named(source) or (None, None)
    if study is None or cell is not None:
        console.print(listing.configuration(configured(source, overrides or ())))
    if study is not None:
        console.print(listing.study(study, cell=cell and cell.name, width=console.width))


@app.command()
def study(
    name: Annotated[str, typer.Argument(help="A table or figure, or one cell of it; see `advnorm ls studies`.")],
    seeds: Annotated[list[int] | None, typer.Option(help="One or several.")] = None,
    protocol: Annotated[
        str | None, typer.Option(help="paper: as printed, the default; fast: 30 epochs, batch 512, one cycle.")
    ] = None,
    smoke: Annotated[bool, typer.Option(help="Two steps on synthetic images: does every part work?")] = False,
    dry_run: Annotated[
        bool, typer.Option(help="Only show the cells, what is done, and the estimated cost of the rest.")
    ] = False,
    out: Annotated[Path, typer.Option(help="Folder for runs and records; a killed study goes on.")] = Path("results"),
    data_dir: DataDir = None,
    device: Device = None,
    launcher: Annotated[str, typer.Option(help="local processes, or ray for a cluster.")] = "local",
    address: Annotated[str | None, typer.Option(help="Of the Ray cluster; default: the one at hand.")] = None,
    processes: Annotated[int, typer.Option(min=1, help="Workers per device.")] = 1,
) -> None:
    """Run every cell of a table and print it, the paper's numbers beside ours. Exit status 1 where a cell failed.

    Examples: `advnorm study A/table3 --protocol fast --seeds 0 1 2 --data-dir data`, `advnorm study A/table3 --smoke`,
    `advnorm study A/table3/dual_bn/eps16 --protocol fast --data-dir data`
    """
    from advnorm.cli.study import run

    if smoke and protocol not in (None, "smoke"):
        raise ConfigError(f"--smoke is a protocol of its own; leave it out, or --protocol {protocol}")
    code = run(
        console,
        name,
        seeds=seeds or [0],
        protocol="smoke" if smoke else protocol or "paper",  # pyright: ignore[reportArgumentType]  # checked there
        dry_run=dry_run,
        out=out,
        data_dir=data_dir,
        device=device,
        launcher=launcher,  # pyright: ignore[reportArgumentType]  # checked there
        address=address,
        processes=processes,
    )
    raise typer.Exit(code)


@app.command()
def train(
    source: Source = None,
    overrides: Overrides = None,
    seed: Annotated[int | None, typer.Option(help="Seed of weights, batches and noise; default: the file's.")] = None,
    out: Annotated[Path, typer.Option(help="Folder that gets a folder for the run.")] = Path("runs"),
    data_dir: DataDir = None,
    device: Device = None,
    download: Annotated[bool, typer.Option(help="Fetch a missing data set from its official address.")] = False,
    workers: Annotated[int | None, typer.Option(min=0, help="Processes that decode image files.")] = None,
    max_minutes: Annotated[
        float | None, typer.Option(help="Stop after so many minutes, with a checkpoint (exit status 75).")
    ] = None,
    checkpoint_minutes: Annotated[float, typer.Option(help="Minutes between checkpoints within an epoch.")] = 10,
    tensorboard: Annotated[bool, typer.Option(help="Also write TensorBoard events.")] = False,
) -> None:
    """Train a network; the same command goes on after a kill. Exit status: 0 finished, 75 stopped before its end.

    Examples: `advnorm train --set norm=dual_bn eps=0.2`,
    `advnorm train recipes/cifar10_eps16.yaml --set norm=dual_bn --data-dir data --seed 0`,
    `torchrun --nproc-per-node 8 -m advnorm train recipes/cifar10_eps16.yaml --data-dir data`
    """
    from advnorm.cli.train import configured, run

    code = run(
        console,
        configured(source, overrides or ()),
        source=source,
        seed=seed,
        out=out,
        data_dir=data_dir,
        device=device,
        download=download,
        workers=workers,
        max_minutes=max_minutes,
        checkpoint_minutes=checkpoint_minutes,
        tensorboard=tensorboard,
    )
    raise typer.Exit(code)


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Folder for the runs, the records and report.html.")] = Path("demo"),
    seed: Annotated[int, typer.Option(min=0, help="Seed of weights, batches and noise.")] = 0,
    quick: Annotated[bool, typer.Option("--quick", help="Seconds instead of minutes; no AutoAttack.")] = False,
) -> None:
    """Train on embedded digits with single BN, dual BN and a KL term, and see how much robustness is real.

    Takes a few minutes on two CPU cores; the same command goes on after a kill. Example: `advnorm demo --seed 1`
    """
    from advnorm.cli.demo import run

    raise typer.Exit(run(console, out=out, seed=seed, quick=quick))


@app.command()
def evaluate(
    target: Target,
    attacks: Annotated[list[str] | None, typer.Option(help="One or several; see `advnorm ls attacks`.")] = None,
    route: Annotated[list[str] | None, typer.Option(help="One or several branches.")] = None,
    weights: Weights = None,
    checkpoint: Checkpoint = None,
    data: Data = None,
    data_dir: DataDir = None,
    eps: Eps = None,
    norm: Norm = None,
    statistics: Statistics = "running",
    limit: Limit = None,
    batch_size: BatchSize = None,
    device: Device = None,
    seed: Seed = 0,
    json: Json = None,
) -> None:
    """Clean and robust accuracy of a run or of anybody's classifier, per attack and over all of them.

    Examples: `advnorm evaluate runs/NAME --attacks pgd10 autoattack --route clean adv`,
    `advnorm evaluate my_models:build --weights w.safetensors --data cifar10:data --attacks pgd10 autoattack
    --route adv --json result.json`
    """
    from advnorm.cli import evaluate as verbs

    asked = verbs.Asked(
        target=target,
        weights=weights,
        checkpoint=checkpoint,
        data=data,
        data_dir=data_dir,
        eps=eps,
        norm=norm,  # pyright: ignore[reportArgumentType]
        statistics=statistics,  # pyright: ignore[reportArgumentType]
        limit=limit,
        batch_size=batch_size,
        device=device,
        seed=seed,
        json=json,
    )
    code = verbs.evaluate(console, asked, attacks=attacks or ("pgd10", "autoattack"), route=route or ())
    raise typer.Exit(code)


@app.command()
def audit(
    target: Target,
    route: Annotated[
        str | None, typer.Option(help="Branch to judge; default: the one that withstands PGD-10 best.")
    ] = None,
    budget: Annotated[str, typer.Option(help="quick, standard or full.")] = "standard",
    surrogate: Annotated[str | None, typer.Option(help="module:function of a model to transfer attacks from.")] = None,
    surrogate_weights: Annotated[
        Path | None, typer.Option(help="Its weights, as .safetensors; default: those of the model.")
    ] = None,
    weights: Weights = None,
    checkpoint: Checkpoint = None,
    data: Data = None,
    data_dir: DataDir = None,
    eps: Eps = None,
    norm: Norm = None,
    statistics: Statistics = "running",
    limit: Limit = None,
    batch_size: BatchSize = None,
    device: Device = None,
    seed: Seed = 0,
    json: Json = None,
    plot: Annotated[Path | None, typer.Option(help="Write the figure here (.png, .svg, .pdf).")] = None,
) -> None:
    """Is the robustness of a classifier real? Exit status: 0 real, 1 false, 3 inconclusive, 4 none there; 70 a crash.

    Examples: `advnorm audit my_models:build --weights w.safetensors --data cifar10:data --eps 8/255 --plot audit.png`,
    `advnorm audit my_models:quantized --weights q.safetensors --surrogate my_models:build
    --surrogate-weights w.safetensors`
    """
    from advnorm.cli import evaluate as verbs

    asked = verbs.Asked(
        target=target,
        weights=weights,
        checkpoint=checkpoint,
        data=data,
        data_dir=data_dir,
        eps=eps,
        norm=norm,  # pyright: ignore[reportArgumentType]
        statistics=statistics,  # pyright: ignore[reportArgumentType]
        limit=limit,
        batch_size=batch_size,
        device=device,
        seed=seed,
        json=json,
    )
    code = verbs.audit(
        console,
        asked,
        route=route,
        budget=budget,  # pyright: ignore[reportArgumentType]  # checked there, with a hint
        surrogate=surrogate,
        surrogate_weights=surrogate_weights,
        plot=plot,
    )
    raise typer.Exit(code)


@app.command()
def analyze(
    name: Annotated[str, typer.Argument(help="See `advnorm ls analyses`.")],
    runs: Annotated[list[Path], typer.Argument(help="Folder of a training run, for some analyses several.")],
    out: Annotated[Path, typer.Option(help="Folder for the figure (SVG, PNG) and its data (JSON).")] = Path("analysis"),
    options: Annotated[list[str] | None, typer.Option("--set", help="key=value options of the analysis.")] = None,
    checkpoint: Checkpoint = None,
    data_dir: DataDir = None,
    attack: Annotated[str | None, typer.Option(help="By name; default: the attack of training.")] = None,
    eps: Eps = None,
    limit: Limit = 1000,
    batch_size: Annotated[int, typer.Option(min=1, help="Images at a time.")] = 256,
    device: Device = None,
    seed: Seed = 0,
) -> None:
    """Measure and draw what goes on inside a trained network.

    Example: `advnorm analyze domain_gap runs/NAME --data-dir data --out figures`
    """
    from advnorm.cli.analyze import analyze as run

    code = run(
        console,
        name,
        runs,
        out=out,
        options=options or (),
        checkpoint=checkpoint,
        data_dir=data_dir,
        attack=attack,
        eps=eps,
        limit=limit,
        batch_size=batch_size,
        device=device,
        seed=seed,
    )
    raise typer.Exit(code)


@app.command()
def report(
    results: Annotated[Path, typer.Argument(help="Folder of `advnorm study`, or of training runs.")] = Path("results"),
    out: Annotated[Path, typer.Option(help="The page, one HTML file.")] = Path("report.html"),
) -> None:
    """One page of all studies: verdicts, the papers' numbers beside ours; or of the training runs in a folder.

    Examples: `advnorm report results/ --out report.html`, `advnorm report runs/ --out report.html`
    """
    from advnorm.cli.report import report as run

    raise typer.Exit(run(console, results, out))


@bench.command("norms")
def bench_norms(
    norms: Annotated[list[str] | None, typer.Argument(help="Norms to measure.")] = None,
    model: Annotated[str, typer.Option(help="Network; see `advnorm ls models`.")] = "resnet18",
    batch_size: Annotated[int | None, typer.Option(help="Default: 32 on the CPU, 512 on a GPU.")] = None,
    device: Device = None,
    precision: Annotated[str, typer.Option(help="float32, tf32 or bf16 (autocast).")] = "float32",
    compiled: Annotated[bool, typer.Option("--compile", help="Compile every network, the plain one too.")] = False,
    rounds: Annotated[int | None, typer.Option(help="Repetitions; the median counts.")] = None,
    threads: Annotated[int, typer.Option(help="Threads on the CPU.")] = 1,
    json: AlsoJson = None,
) -> None:
    """Routed networks against the plain one: evaluation, and training on a concatenated batch.

    Examples: `advnorm bench norms`, `advnorm bench norms dual_bn cross_bn gmm_bn --precision bf16 --json norms.json`
    """
    from advnorm.bench.norms import bench_norms as measure
    from advnorm.cli import listing

    _check_writable(json)
    with _measuring() as shown:
        result = measure(
            norms or ("bn", "dual_bn"),
            model=model,
            batch_size=batch_size,
            device=device,
            precision=precision,  # pyright: ignore[reportArgumentType]  # checked there, with a hint
            compiled=compiled,
            rounds=rounds,
            threads=threads,
            on_round=lambda: shown(model),
        )
    console.print(listing.norm_benchmark(result))
    _write(json, result.record())


@bench.command("train")
def bench_train(
    model: Annotated[list[str] | None, typer.Option(help="Network, one or several; default resnet18.")] = None,
    norm: Annotated[str, typer.Option(help="Norm of the engine's networks.")] = "dual_bn",
    batch_size: Annotated[
        list[int] | None, typer.Option(min=2, help="One or several; default 128 and 512, on the CPU 16.")
    ] = None,
    attack_steps: Annotated[list[int] | None, typer.Option(min=1, help="One or several; default 10.")] = None,
    mode: Annotated[
        list[str] | None,
        typer.Option(help="plain (a usual PyTorch loop), eager, compiled; default all, on the CPU the first two."),
    ] = None,
    processes: Annotated[
        list[int] | None,
        typer.Option(min=1, help="One or several numbers of them, which divide each batch; default 1."),
    ] = None,
    eps: Annotated[str, typer.Option(help="Linf radius.")] = "16/255",
    data_dir: Annotated[Path | None, typer.Option(help="Folder of CIFAR-10; without: synthetic images.")] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Timed steps; default 50, on the CPU 3.")] = None,
    parts: Annotated[bool, typer.Option("--parts", help="Also show where the time of a step goes.")] = False,
    device: Device = None,
    json: AlsoJson = None,
) -> None:
    """Hybrid PGD training: the engine against a plain PyTorch loop, by network, batch size, attack steps and processes.

    Examples: `advnorm bench train`, `advnorm bench train --batch-size 512 --mode compiled --data-dir data`,
    `advnorm bench train --model resnet18 --model wrn_34_10 --processes 1 --processes 2 --json train.json`,
    `advnorm bench train --mode compiled --parts`. Over several
    machines: `torchrun ... -m advnorm bench train`.
    """
    from advnorm._core.distributed import rank
    from advnorm.bench.train import bench_train as measure
    from advnorm.cli import listing

    _check_writable(json)
    with _measuring() as told:
        result = measure(
            models=model or ("resnet18",),
            norm=norm,
            batch_sizes=batch_size or None,
            attack_steps=attack_steps or (10,),
            modes=mode or None,  # pyright: ignore[reportArgumentType]  # checked there, with a hint
            processes=processes or None,
            eps=eps,
            data_dir=data_dir,
            device=device,
            steps=steps,
            parts=parts,
            on_row=told,
        )
    if rank() == 0:
        console.print(listing.train_benchmark(result))
        _write(json, result.record())


@bench.command("autoattack")
def bench_autoattack(
    weights: Annotated[
        Path | None, typer.Option(help="Weights of a ResNet-18 as safetensors; without: a small network, trained now.")
    ] = None,
    data_dir: Annotated[Path | None, typer.Option(help="Folder of CIFAR-10; needed with --weights.")] = None,
    images: Annotated[int, typer.Option(min=1, help="The first so many test images.")] = 1000,
    eps: Annotated[str | None, typer.Option(help="Linf radius; default 8/255, for the small network 40/255.")] = None,
    precision: Annotated[
        list[str] | None, typer.Option(help="Of the search, one or several: float32, tf32, bf16.")
    ] = None,
    official: Annotated[bool, typer.Option(help="Run pyautoattack too, where it is installed.")] = True,
    seed: Seed = 0,
    json: AlsoJson = None,
) -> None:
    """AutoAttack standard: this package against the official code, on the same network and images.

    Examples: `advnorm bench autoattack --images 100`,
    `advnorm bench autoattack --weights resnet18_eps8.safetensors --data-dir data --json autoattack.json`
    """
    from advnorm._core.records import write_json
    from advnorm.bench.autoattack import bench_autoattack as measure
    from advnorm.bench.autoattack import subject
    from advnorm.cli import listing

    _check_writable(json)
    model, x, y, threat, name = subject(
        weights, data_dir, images=images, eps=eps, seed=seed, precisions=precision or ()
    )
    with _measuring() as told:
        result = measure(
            model,
            x,
            y,
            threat,
            name=name,
            precisions=precision or (("float32", "tf32", "bf16") if x.is_cuda else ("float32",)),
            official=official,
            seed=seed,
            on_row=told,
            on_result=lambda so_far: json and write_json(json, so_far.record()),  # a row can take many minutes
        )
    console.print(listing.autoattack_benchmark(result))
    if json is not None:
        console.print(f"record: {json}")


@contextmanager
def _measuring() -> Iterator[Callable[[str], None]]:
    """Show the row that a benchmark measures."""
    from advnorm._core.progress import show_progress

    with show_progress() as display:
        task = display.task("measuring")
        yield lambda row: task.update(description=f"measuring {row}")


def _check_writable(path: Path | None) -> None:
    """Refuse a place for a record before the work that it is for."""
    if path is not None:
        from advnorm._core.records import writable_problems

        raise_all(writable_problems(path), "bad command")


def _write(path: Path | None, record: dict[str, object]) -> None:
    if path is not None:
        from advnorm._core.records import write_json

        write_json(path, record)
        console.print(f"record: {path}")


#: Options that take several values: `--attacks pgd10 autoattack` as well as `--attacks pgd10 --attacks autoattack`.
SEVERAL = ("--attacks", "--route", "--precision", "--set", "--seeds")


def spelled_out(arguments: Sequence[str]) -> list[str]:
    """Repeat an option that takes several values before each of them, as the parser wants it."""
    spelled: list[str] = []
    option = None
    for argument in arguments:
        if argument.startswith("-"):
            option = argument if argument in SEVERAL else None
        elif option is not None and spelled[-1] != option:
            spelled.append(option)
        spelled.append(argument)
    return spelled


#: What a machine does to a command, which is no defect of it: no room, no rights, a file too large, a broken disk.
OUTSIDE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO, errno.ENOENT)


def main() -> None:
    """Run the command; an error meant for the user is one red line, not a traceback."""
    try:
        app(spelled_out(sys.argv[1:]))
    except AdvnormError as error:
        Console(stderr=True).print(f"[bold red]error:[/] {escape(str(error))}", highlight=False, soft_wrap=True)
        sys.exit(USAGE)
    except Exception as error:
        if isinstance(error, OSError) and error.errno in OUTSIDE:
            where = f"{error.filename}: " if error.filename else ""
            Console(stderr=True).print(f"[bold red]error:[/] {escape(f'{where}{error.strerror}')}", soft_wrap=True)
            sys.exit(USAGE)
        traceback.print_exc()
        sys.exit(CRASHED)
