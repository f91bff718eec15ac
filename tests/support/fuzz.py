"""A seeded fuzz: bad command lines, tampered files and bad calls. ``python -m support.fuzz`` in ``tests``.

A case is a function of the seed and its number. It passes if it ends in time, without a traceback, with an exit status
that its verb documents; a call raises only errors of advnorm. Device nodes are never used: a bug could replace them.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import torch

#: Seconds that one case may take.
PATIENCE = 60
KINDS = ("command", "file", "call")
#: Cases of one worker process.
PORTION = 50
#: Exit statuses beside 0 and 2 that a verb documents.
STATUSES = {"audit": {1, 3, 4}, "train": {1, 75}, "evaluate": {1}, "demo": {75}, "study": {1, 75}}


@dataclass(frozen=True)
class Failure:
    """A case that did not pass."""

    case: str
    reason: str
    output: str = ""

    def __str__(self) -> str:
        return f"{self.case}\n    {self.reason}\n{self.output[-3000:]}"


class Hang(BaseException):
    """A case took too long."""


# -- the sandbox -------------------------------------------------------------------------------------------------------

OWN = """\
import advnorm
def build():
    return advnorm.create_model("small_cnn", in_channels=1, num_classes=4)
def dual():
    return advnorm.create_model("small_cnn", in_channels=1, num_classes=4, norm="dual_bn")
def broken():
    {}["missing"]
def leaving():
    raise SystemExit(0)
"""
SMALL = "data=synthetic data.size=64 data.image_size=8 data.channels=1 data.classes=4 held_out=16 batch_size=12 "
SMALL += "epochs=2 eps=0.1 attack.steps=1 validation_attack=pgd1 norm=dual_bn snapshots=[1]"


def build_sandbox(folder: Path) -> None:
    """Write every kind of file that advnorm reads, all of them small and sound."""
    import safetensors.torch

    import advnorm
    from advnorm.data import add_split, load
    from support.small_runs import images_on_disk
    from support.study_records import write_table2

    folder.mkdir(parents=True, exist_ok=True)
    config = advnorm.Config().with_overrides([*SMALL.split(), "name=run"])
    run = advnorm.train(config, out=folder / "runs", device="cpu")
    advnorm.train(config.with_overrides(["name=stopped"]), out=folder / "runs", device="cpu", max_minutes=0)
    shutil.copytree(run.folder, folder / "runs" / "ended-seed0")
    (folder / "runs" / "ended-seed0" / "record.json").unlink()
    (folder / "small.yaml").write_text(config.to_yaml())
    (folder / "small.json").write_text(json.dumps(config.to_dict()))
    (folder / "own.py").write_text(OWN)
    images_on_disk(folder / "images")
    sets = {
        split: load("synthetic", split, size=12, image_size=8, channels=1, classes=4) for split in ("train", "test")
    }
    for data in sets.values():
        add_split(folder / "features", data)
    data = sets["test"]
    safetensors.torch.save_file({"x": data.pixels(), "y": data.labels}, folder / "data.safetensors")
    weights = {name.removeprefix("model."): value for name, value in run.weights("last").items()}
    safetensors.torch.save_file(weights, folder / "w.safetensors")
    model, threat = run.model("last"), advnorm.ThreatModel(eps=0.1)
    pair = data.pixels(), data.labels
    advnorm.benchmark(model, pair, threat, ["pgd1"], ["adv"], record=folder / "records" / "evaluation.json")
    advnorm.audit(model, pair, threat, route="adv", budget="quick", limit=6, record=folder / "records" / "audit.json")

    def interrupt(*_: object) -> None:
        if any(folder.glob("records/*.partial.*/batch-*")):
            raise KeyboardInterrupt

    handle = model.register_forward_hook(interrupt)
    with contextlib.suppress(KeyboardInterrupt):
        attacks = ["pgd1", "autoattack"]
        advnorm.benchmark(model, pair, threat, attacks, ["adv"], record=folder / "records" / "stopped.json")
    handle.remove()
    write_table2(folder / "results")
    os.mkfifo(folder / "fifo.yaml")
    (folder / "loop.json").symlink_to("loop.json")
    (folder / "link.json").symlink_to("records/evaluation.json")


#: Sound, cheap command lines in the sandbox.
COMMANDS = tuple(
    line.split()
    for line in (
        "ls norms",
        "ls studies A/*",
        "show",
        f"show --set {SMALL}",
        "show A/table3/dual_bn/eps16 --set epochs=3",
        "show small.yaml --set eps=0.2",
        f"train --set {SMALL} name=new --max-minutes 0 --device cpu",
        "train small.yaml --set name=stopped --max-minutes 0 --device cpu --out runs",
        "train small.json --set name=other epochs=1 --max-minutes 0 --device cpu --seed 1",
        "train small.yaml --set name=f data=features --data-dir features --max-minutes 0 --device cpu",
        "train --set data=imagefolder data.image_size=8 name=i epochs=1 batch_size=4 held_out=0 validate_every=0"
        " attack.steps=1 --data-dir images --max-minutes 0 --device cpu --workers 0",
        "evaluate runs/run-seed0 --attacks pgd1 --limit 8 --device cpu",
        "evaluate runs/run-seed0 --attacks pgd1 fgsm --route adv --limit 8 --json new.json --checkpoint epoch1",
        "evaluate own:build --data data.safetensors --eps 0.1 --attacks pgd1 --limit 4 --seed 1",
        "evaluate own:dual --weights w.safetensors --data data.safetensors --attacks pgd1 --route adv --threat-norm L2",
        "audit runs/run-seed0 --route adv --budget quick --limit 4 --device cpu --json a.json --plot a.png",
        "analyze channel_statistics runs/run-seed0 --limit 16 --batch-size 8 --device cpu --out analysis",
        "analyze ligs runs/run-seed0 --limit 16 --set size=0.1 --device cpu --out analysis",
        "study A/table2 --dry-run --protocol fast --out results",
        "study A/table3/dual_bn/eps16 --dry-run --seeds 0 1",
        "report results --out page.html",
        "report runs --out page.html",
        "report runs --format csv --out rows.csv",
        "train small.yaml --sweep norm=bn,dual_bn --seeds 0 1 --set name=none epochs=1 --max-minutes 0 --device cpu",
        "card runs/run-seed0 --out card",
        "bench norms bn --model small_cnn --batch-size 6 --rounds 1 --device cpu --json b.json",
        "bench train --set model=small_cnn batch_size=2 attack.steps=1 --mode plain --steps 1 --device cpu",
    )
)
#: Words that may replace or follow any other; each is rejected, or costs nothing.
WORDS = (
    "", " ", "-", "--", "=", "nan", "-inf", "-1", "0", "1.5", "1e308", "1e-400", "2147483648", "9" * 5000, "1/0", "8",
    "8/255/3", "None", "null", "yes", "[]", "[[[[[[1]]]]]]", "{}", "{a: 1}", "&a [*a]", "!!python/name:os.system",
    "=b", "a=b", "norm=", "nope=1", "x[/b]y", ":smile:", "[red]", "\x1b[31m", "a\nb", "Ω", "\udcff", "n" * 300, "%s",
    "fifo.yaml", "loop.json", "link.json", "records", "runs", "images", "w.safetensors", "small.yaml", "own.py", "own:",
    ":build", "own:broken", "own:leaving", "own:missing", "os:getcwd", "no_module:f", "A/table3", "A/table3/nope",
    "{0}", "cuda", "mps", "meta", "cuda:99", "pgd0", "pgd-1", "pgd10-restarts0", "autoattack-x", "nope", "epoch9",
    "digits:nope", "x.npz", "x.svg", "--nope", "--set", "-x", "--help",
)  # fmt: skip
#: Options that start servers, download files, or run for minutes.
NEVER = {
    "--smoke", "--download", "--official", "--compile", "--tensorboard", "--processes", "--launcher", "--parts",
    "--start-up",
}  # fmt: skip
SETTING_VALUES = (
    "",
    "nan",
    "inf",
    "-1",
    "1e308",
    "2147483648",
    "no",
    "x[/b]",
    "[]",
    "{}",
    "{name: nope}",
    "null",
    "1.5",
)


def command_case(rng: random.Random) -> tuple[list[str], str]:
    """A sound command line with one to three mutations, and its verb."""
    words = list(rng.choice(COMMANDS))
    verb = words[0]
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        place = rng.randrange(1, len(words) + 1)
        kind = rng.randrange(7)
        if kind == 0 and place < len(words):
            words[place] = rng.choice(WORDS)
        elif kind == 1 and place < len(words):
            del words[place]
        elif kind == 2:
            words.insert(place, rng.choice(WORDS))
        elif kind == 3:
            words[place:place] = [rng.choice(_options(words)), rng.choice(WORDS)]
        elif kind == 4 and verb in ("train", "show"):
            words += ["--set", f"{rng.choice(_settings())}={rng.choice(SETTING_VALUES)}"]
        elif kind == 5 and place < len(words):
            other = rng.randrange(1, len(words))
            words[place], words[other] = words[other], words[place]
        elif place < len(words) and words[place]:
            at = rng.randrange(len(words[place]))
            words[place] = words[place][:at] + rng.choice("=:.-x0[ é") + words[place][at + 1 :]
    return words, verb


def _options(words: list[str]) -> list[str]:
    from typer.main import get_command

    from advnorm.cli.app import app

    command: Any = get_command(app)
    for word in words[:2]:
        command = getattr(command, "commands", {}).get(word, command)
    found = [text for parameter in command.params for text in parameter.opts if text.startswith("--")]
    return [text for text in found if text not in NEVER] or ["--help"]


def _settings() -> list[str]:
    from advnorm.config import AttackConfig, Config

    nested = ("model.width", "model.normalize", "data.size", "objective.clean_weight", "norm_options.momentum")
    attack = [f"attack.{field.name}" for field in fields(AttackConfig)]
    return [field.name for field in fields(Config)] + attack + list(nested)


# -- tampered files ----------------------------------------------------------------------------------------------------

#: Files of the sandbox, each with commands that read it.
READERS: dict[str, tuple[str, ...]] = {
    "runs/run-seed0/run.json": ("evaluate", "train_again", "report_runs", "analyze"),
    "runs/run-seed0/record.json": ("train_again", "report_runs", "evaluate"),
    "runs/run-seed0/metrics.jsonl": ("report_runs", "train_again"),
    "runs/run-seed0/checkpoints/last.json": ("evaluate_last", "analyze"),
    "runs/run-seed0/checkpoints/best.json": ("evaluate",),
    "runs/run-seed0/checkpoints/*.safetensors": ("evaluate", "evaluate_last"),
    "runs/stopped-seed0/run.json": ("resume", "report_runs"),
    "runs/stopped-seed0/checkpoints/last.json": ("resume",),
    "runs/stopped-seed0/checkpoints/*.safetensors": ("resume",),
    "runs/ended-seed0/checkpoints/last.json": ("end",),
    "runs/ended-seed0/metrics.jsonl": ("end", "report_runs"),
    "runs/ended-seed0/timing.jsonl": ("end",),
    "runs/run-seed0/config.yaml": ("from_run",),
    "records/evaluation.json": ("same_evaluation", "report_records"),
    "records/audit.json": ("same_audit", "report_records"),
    "records/stopped.json.partial": ("same_partial",),
    "records/stopped.json.partial.*/record.json": ("same_partial",),
    "records/stopped.json.partial.*/batch-*.safetensors": ("same_partial",),
    "results/records/A/table2/*/*/*.json": ("report_results", "study"),
    "features/train/recipe.json": ("features",),
    "features/train/00000.safetensors": ("features",),
    "images/train/class0/*.png": ("images",),
    "data.safetensors": ("own",),
    "w.safetensors": ("own",),
    "small.yaml": ("small",),
    "small.json": ("small_json",),
    "own.py": ("own",),
}
_OWN = "own:dual --weights w.safetensors --data data.safetensors --attacks pgd1 --route clean --limit 4"
_RUN = "evaluate runs/run-seed0 --attacks pgd1 --limit 4 --device cpu"
_RECORD = "runs/run-seed0 --checkpoint last --data data.safetensors --eps 0.1 --device cpu --json"
READING = {
    "evaluate": _RUN,
    "evaluate_last": f"{_RUN} --checkpoint last",
    "train_again": "train small.yaml --out runs --device cpu",
    "resume": "train small.yaml --set name=stopped --max-minutes 0 --device cpu",
    "end": "train small.yaml --set name=ended --device cpu",
    "report_runs": "report runs --out page.html",
    "report_records": "report records --out page.html",
    "report_results": "report results --out page.html",
    "analyze": "analyze channel_statistics runs/run-seed0 --limit 8 --batch-size 4 --device cpu",
    "from_run": "show runs/run-seed0/config.yaml",
    "same_evaluation": f"evaluate {_RECORD} records/evaluation.json --attacks pgd1 --route adv",
    "same_audit": f"audit {_RECORD} records/audit.json --route adv --budget quick --limit 6",
    "same_partial": f"evaluate {_RECORD} records/stopped.json --attacks pgd1 autoattack --route adv",
    "study": "study A/table2 --dry-run --protocol fast --out results",
    "features": "train small.yaml --set name=f data=features --data-dir features --max-minutes 0 --device cpu",
    "images": "train --set data=imagefolder data.image_size=8 name=i epochs=1 batch_size=4 held_out=0 validate_every=0 "
    "attack.steps=1 --data-dir images --max-minutes 0 --device cpu --workers 0",
    "own": f"evaluate {_OWN} --device cpu",
    "small": "show small.yaml",
    "small_json": "show small.json",
}
_DEEP: Any = []
for _ in range(200):
    _DEEP = [_DEEP]
JUNK: tuple[Any, ...] = (
    None, True, 0, -1, 1e300, 10**400, "", "x[/b]", "\udcff", [], {}, [1], {"a": 1}, _DEEP, "0" * 10000, "real", "../x",
)  # fmt: skip


def tamper(path: Path, rng: random.Random) -> str:
    """Damage a file in one of many ways; return what was done."""
    content = path.read_bytes()
    kind = rng.choice(
        ("json", "json", "json", "json", "cut", "flip", "empty", "text", "gone", "folder", "fifo", "loop")
    )
    if kind == "json" and path.suffix in (".json", ".jsonl", ".partial"):
        lines = content.decode().splitlines() if path.suffix == ".jsonl" else [content.decode()]
        at = rng.randrange(len(lines)) if lines else 0
        data = json.loads(lines[at]) if lines else {}
        what = _change(data, rng)
        lines[at : at + 1] = [json.dumps(data)]
        path.write_text("\n".join(lines) + "\n" * (path.suffix == ".jsonl"), errors="backslashreplace")
        return what
    if kind == "flip" and content:
        changed = bytearray(content)
        for _ in range(rng.choice((1, 5, 50))):
            changed[rng.randrange(len(changed))] = rng.randrange(256)
        path.write_bytes(bytes(changed))
    elif kind in ("empty", "text", "cut", "flip", "json"):
        texts = {
            "empty": b"",
            "text": rng.choice((b"[" * 100_000, b"{}", b"[]", b"null", b'"x"', b"\xff\xfe", b"{" * 99)),
        }
        path.write_bytes(texts.get(kind, content[: rng.randrange(len(content) + 1)]))
    else:
        path.unlink()
        if kind == "folder":
            path.mkdir()
        elif kind == "fifo":
            os.mkfifo(path)
        elif kind == "loop":
            path.symlink_to(path.name)
    return kind


def _change(data: Any, rng: random.Random) -> str:
    """Delete, replace, rename or add one entry somewhere in JSON data."""
    spots: list[tuple[Any, Any, str]] = []

    def walk(value: Any, name: str) -> None:
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            spots.append((value, key, f"{name}.{key}"))
            if isinstance(item, dict | list):
                walk(item, f"{name}.{key}")

    walk(data if isinstance(data, dict | list) else [], "")
    if not spots:
        return "nothing"
    owner, key, name = rng.choice(spots)
    kind = rng.randrange(4)
    if kind == 0:
        del owner[key]
    elif kind == 1 and isinstance(owner, dict):
        owner[str(rng.choice(JUNK[6:8]))] = owner.pop(key)
    elif kind == 2 and isinstance(owner[key], int | float) and not isinstance(owner[key], bool):
        owner[key] = rng.choice((owner[key] + 1, -owner[key], 0, 10**9, 0.5))
    else:
        owner[key] = rng.choice(JUNK)
    return f"{('delete', 'rename', 'number', 'replace')[kind]} {name}"


# -- calls -------------------------------------------------------------------------------------------------------------

#: Plausible mistakes by the kind of an argument: a setting, a path, a tensor, a model, a list of overrides.
VALUES: tuple[Any, ...] = (
    None, True, -1, 0, 1.5, math.nan, math.inf, 1e308, 10**30, "", "x", "nan", "\udcff", "a\0b", b"x", [], {}, (),
    object(), len, [[[[[[1]]]]]], {"a": 1}, {1: 2}, ["x", 1], Path("no/such/file"), Path("fifo.yaml"), type,
    2**63, "9" * 5000,
)  # fmt: skip
PATHS = ("", "no/such/file", "a\0b", "\udcff", "n" * 300, Path("fifo.yaml"), Path("loop.json"), "own.py", "runs")
IMAGES = torch.full((4, 1, 8, 8), 0.5)
TENSORS = (
    torch.zeros(0), torch.tensor(math.nan), torch.zeros(2, 3, dtype=torch.cfloat), IMAGES, IMAGES * 9,
    IMAGES * math.nan, IMAGES.byte(), IMAGES.expand(4, 3, 8, 8), torch.arange(3), torch.arange(4) + 9,
    torch.arange(4).double(), torch.ones(4).bool(),
)  # fmt: skip
MODELS = (torch.nn.Identity(), torch.nn.Flatten(), torch.nn.ReLU(), torch.nn.Linear(3, 4), torch.nn.Sequential())
KINDS_OF_VALUES: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("out", "root", "data_dir", "source", "folder", "record"), PATHS),
    **dict.fromkeys(("x", "y", "index", "images"), TENSORS),
    "model": MODELS,
    "overrides": (["x"], ["lr=0", "lr=1"], "lr", ["=", ""], ["a.b.c=1"], ["attack.steps={}"]),
    "data": (*((x, torch.arange(4)) for x in TENSORS), (IMAGES, torch.arange(3)), "digits", [], 5),
}


@cache
def calls() -> dict[str, tuple[Callable[..., Any], dict[str, Any]]]:
    """Public functions by name, with sound and cheap arguments."""
    import advnorm
    from advnorm import attacks, data
    from advnorm._core.devices import resolve_device, set_threads
    from advnorm.attacks import FGSM, PGD, AutoAttack, Square

    threat = advnorm.ThreatModel(eps=0.1)
    model = advnorm.create_model("small_cnn", in_channels=1, num_classes=4).eval()
    dual = advnorm.create_model("small_cnn", in_channels=1, num_classes=4, norm="dual_bn").eval()
    images, labels = torch.rand(4, 1, 8, 8), torch.arange(4)

    def enter_route(model: Any, route: Any) -> None:
        with advnorm.route(model, route):
            pass

    config = advnorm.Config().with_overrides(SMALL.split())
    found: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
        "ThreatModel": (advnorm.ThreatModel, {"norm": "L2", "eps": "8/255"}),
        "Config": (advnorm.Config, {f.name: getattr(advnorm.Config(), f.name) for f in fields(advnorm.Config)}),
        "from_dict": (advnorm.Config.from_dict, {"settings": {"epochs": 1}, "overrides": ["lr=1"]}),
        "load_config": (advnorm.load_config, {"source": "small.yaml", "overrides": []}),
        "create_model": (
            advnorm.create_model,
            {"name": "small_cnn", "num_classes": 3, "norm": "bn", "in_channels": 1, "width": 0.5, "normalize": True},
        ),
        "make_norm": (advnorm.make_norm, {"name": "dual_bn", "num_features": 4, "dim": 2}),
        "load": (data.load, {"name": "synthetic", "split": "test", "root": None, "size": 4, "image_size": 8}),
        "corrupt": (data.corrupt, {"images": images, "corruption": "fog", "severity": 1, "seed": 0, "index": labels}),
        "get": (attacks.get, {"name": "pgd2", "threat": threat, "seed": 0, "route": None, "statistics": "running"}),
        "benchmark": (
            advnorm.benchmark,
            {"model": model, "data": (images, labels), "threat": threat, "attacks": ["fgsm"], "route": None, "limit": 4,
             "batch_size": 2, "seed": 0, "statistics": "running", "record": None},
        ),
        "audit": (
            lambda **how: advnorm.audit(**how),
            {"model": model, "data": (images, labels), "threat": threat, "route": None, "budget": "nope", "limit": 4},
        ),
        "train": (
            advnorm.train,
            {"config": config, "seed": 0, "out": "runs", "data_dir": None, "device": "cpu", "workers": 0,
             "max_minutes": 0, "checkpoint_minutes": 1},
        ),
        "route": (enter_route, {"model": dual, "route": "adv"}),
        "strip": (advnorm.strip, {"model": dual, "route": "adv"}),
        "convert_norm": (lambda norm: advnorm.convert_norm(torch.nn.BatchNorm2d(3), norm), {"norm": "dual_bn"}),
        "Run.open": (advnorm.Run.open, {"folder": "runs/run-seed0"}),
        "Run.model": (lambda **how: advnorm.Run.open("runs/run-seed0").model(**how), {"which": "last"}),
        "studies.get": (advnorm.studies.get, {"name": "A/table3/dual_bn/eps16"}),
        "resolve_device": (resolve_device, {"device": "cpu"}),
        "set_threads": (set_threads, {"count": 1}),
    }  # fmt: skip
    for kind in (PGD, FGSM, Square, AutoAttack):
        sound = {f.name: getattr(kind(threat=threat), f.name) for f in fields(kind) if f.init}
        found[kind.__name__] = kind, sound
    attack = PGD(threat=threat, steps=1)
    found["attack"] = attack, {"model": model, "x": images, "y": labels, "index": labels}
    return found


# -- running -----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def limited(seconds: float = PATIENCE) -> Iterator[None]:
    """Scope: raise :class:`Hang` after a time."""

    def stop(*_: object) -> None:
        raise Hang

    before = signal.signal(signal.SIGALRM, stop), signal.getsignal(signal.SIGTERM)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before[0])
        signal.signal(signal.SIGTERM, before[1])  # a command leaves SIGTERM ignored


def run_words(words: list[str]) -> tuple[Any, str]:
    """Run a command line in this process; return the exit status and the output."""
    from advnorm.cli import main

    output = io.TextIOWrapper(io.BytesIO(), "utf-8", "replace", write_through=True)
    status: Any = None
    for name in [name for name in sys.modules if name == "own"]:
        del sys.modules[name]
    with (
        contextlib.redirect_stdout(output),
        contextlib.redirect_stderr(output),
        mock.patch("sys.argv", ["advnorm", *words]),
    ):
        try:
            with limited():
                main()
        except SystemExit as left:
            status = left.code
        except Hang:
            status = f"no end after {PATIENCE} s"
        except BaseException as error:
            traceback.print_exc()
            status = f"{type(error).__name__} left main"
    torch.set_num_threads(1)
    return status, output.buffer.getvalue().decode()  # pyright: ignore[reportAttributeAccessIssue]


def check_words(words: list[str], verb: str, case: str) -> Failure | None:
    """Run a command line and return why it did not pass."""
    status, output = run_words(words)
    shown = f"{case}: advnorm {' '.join(repr(word)[:200] for word in words)}"
    if status not in {0, 2} | STATUSES.get(verb, set()):
        return Failure(shown, f"exit status {status}", output)
    if "Traceback" in output:
        return Failure(shown, "a traceback", output)
    if status == 2 and "error" not in output.lower():
        return Failure(shown, "exit status 2 without a message", output)
    return None


def run_case(kind: str, number: int, seed: int, sandbox: Path) -> Failure | None:
    """Run one case in a copy of the sandbox."""
    rng = random.Random(f"{kind} {number} {seed}")
    case, before = f"{kind} {number} (seed {seed})", Path.cwd()
    with tempfile.TemporaryDirectory(prefix="fuzz-") as scratch:
        place = Path(scratch) / "sandbox"
        shutil.copytree(sandbox, place, symlinks=True, copy_function=_copy, ignore=_fifos)
        os.mkfifo(place / "fifo.yaml")
        os.chdir(place)
        try:
            if kind == "command":
                words, verb = command_case(rng)
                return check_words(words, verb, case)
            if kind == "file":
                pattern = rng.choice(list(READERS))
                path = rng.choice(sorted(Path().glob(pattern)))
                words = READING[rng.choice(READERS[pattern])].split()
                done = tamper(path, rng)
                return check_words(words, words[0], f"{case}: {path}: {done}")
            return _run_call(rng, case)
        finally:
            os.chdir(before)


def _copy(source: str, target: str) -> None:
    shutil.copyfile(source, target, follow_symlinks=False)


def _fifos(folder: str, names: list[str]) -> list[str]:
    return [name for name in names if Path(folder, name).is_fifo()]


def _run_call(rng: random.Random, case: str) -> Failure | None:
    from advnorm import AdvnormError

    name, (function, sound) = rng.choice(list(calls().items()))
    argument = rng.choice(list(sound))
    value = rng.choice(KINDS_OF_VALUES.get(argument, VALUES))
    shown = f"{case}: {name}({argument}={value!r:.80})"
    try:
        with limited(), contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            function(**{**sound, argument: value})
    except AdvnormError:
        return None
    except Hang:
        return Failure(shown, f"no end after {PATIENCE} s")
    except Exception:
        return Failure(shown, "another error than ours", traceback.format_exc())
    finally:
        torch.set_num_threads(1)
    return None


def main() -> None:
    """Run cases in worker processes, so that a crash of the interpreter is one failure; print counts and failures."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--cases", type=int, default=600, help="number of cases of each kind")
    parser.add_argument("--seconds", type=float, default=900, help="stop after this time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kind", choices=KINDS, action="append")
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker is not None:
        _work(options.worker, options.kind[0], range(options.first, options.first + options.cases), options.seed)
        return
    began, counts, failures = time.monotonic(), Counter[str](), []
    with tempfile.TemporaryDirectory(prefix="fuzz-") as scratch:
        build_sandbox(Path(scratch) / "sandbox")
        kinds, last = options.kind or KINDS, options.first + options.cases
        pending = dict.fromkeys(kinds, options.first)
        while pending and time.monotonic() - began < options.seconds:
            for kind, first in list(pending.items()):  # in turn, so that the time limit cuts all kinds alike
                end = min(last, first + PORTION)
                found, pending[kind] = _supervise(Path(scratch), kind, first, end, options.seed, counts)
                failures += found
            pending = {kind: first for kind, first in pending.items() if first < last}
    for failure in failures:
        print(failure)
    print(", ".join(f"{count} {kind} cases" for kind, count in counts.items()), end=": ")
    print(f"{len(failures)} failures in {time.monotonic() - began:.0f} s")
    sys.exit(bool(failures))


def _work(folder: Path, kind: str, numbers: range, seed: int) -> None:
    with (folder / "progress").open("a") as progress:
        for number in numbers:
            failure = run_case(kind, number, seed, folder / "sandbox")
            entry = {"number": number, "failure": failure and [failure.case, failure.reason, failure.output]}
            print(json.dumps(entry), file=progress, flush=True)


def _supervise(
    folder: Path, kind: str, first: int, last: int, seed: int, counts: Counter[str]
) -> tuple[list[Failure], int]:
    (folder / "progress").write_text("")
    words = ["-m", "support.fuzz", "--worker", folder, "--kind", kind, "--first", first, "--cases", last - first]
    arguments = [sys.executable, *map(str, words), "--seed", str(seed)]
    try:
        done = subprocess.run(arguments, stderr=subprocess.PIPE, timeout=PATIENCE * 20, check=False)
        ended, error = f"the interpreter ended with status {done.returncode}", done.stderr.decode(errors="replace")
    except subprocess.TimeoutExpired:
        ended, error = "no end, and no signal was handled", ""
    entries = [json.loads(line) for line in (folder / "progress").read_text().splitlines()]
    failures = [Failure(*entry["failure"]) for entry in entries if entry["failure"]]
    counts[kind] += len(entries)
    if len(entries) == last - first:
        return failures, last
    counts[kind] += 1
    return [*failures, Failure(f"{kind} {first + len(entries)} (seed {seed})", ended, error)], first + len(entries) + 1


if __name__ == "__main__":
    main()
