"""The verbs ``evaluate`` and ``audit``: a model from the user's own code, weights and data from plain files."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console
from torch import Tensor, nn

from advnorm._core.errors import ConfigError, did_you_mean, raise_all
from advnorm.data import cifar10, digits
from advnorm.engine.audit import Budget
from advnorm.engine.audit import audit as run_audit
from advnorm.engine.evaluate import benchmark
from advnorm.norms import Mode
from advnorm.threat import Norm, ThreatModel

_NAMES = ("x", "images"), ("y", "labels")


def evaluate(
    console: Console,
    target: str,
    *,
    weights: Path | None = None,
    data: str = "digits",
    eps: str = "8/255",
    norm: Norm = "Linf",
    attacks: Sequence[str] = ("pgd10", "autoattack"),
    route: Sequence[str] = (),
    limit: int | None = None,
    batch_size: int | None = None,
    device: str | None = None,
    seed: int = 0,
    statistics: Mode = "running",
    json: Path | None = None,
) -> int:
    """Print the table of a benchmark and write its record; the exit status is 0."""
    threat = ThreatModel(norm=norm, eps=eps)
    result = benchmark(
        load_model(target, weights, device),
        load_data(data),
        threat,
        list(attacks),
        list(route) or None,
        batch_size=batch_size,
        record=json,
        progress=console.is_terminal,
        seed=seed,
        limit=limit,
        statistics=statistics,
    )
    console.print(result.table())
    if json is not None:
        console.print(f"record: {json}", highlight=False)
    return 0


def audit(
    console: Console,
    target: str,
    *,
    weights: Path | None = None,
    data: str = "digits",
    eps: str = "8/255",
    norm: Norm = "Linf",
    route: str | None = None,
    budget: Budget = "standard",
    surrogate: str | None = None,
    limit: int | None = None,
    batch_size: int | None = None,
    device: str | None = None,
    seed: int = 0,
    statistics: Mode = "running",
    json: Path | None = None,
    plot: Path | None = None,
) -> int:
    """Print the verdict with its evidence; the exit status is 0 real, 1 false, 3 inconclusive, 4 none."""
    threat = ThreatModel(norm=norm, eps=eps)
    verdict = run_audit(
        load_model(target, weights, device),
        load_data(data),
        threat,
        route=route,
        budget=budget,
        surrogate=None if surrogate is None else load_model(surrogate, weights, device),
        limit=limit,
        batch_size=batch_size,
        record=json,
        progress=console.is_terminal,
        seed=seed,
        statistics=statistics,
    )
    console.print(verdict.table())
    console.print(verdict.evidence_table())
    colour = {"real": "green", "false": "red", "inconclusive": "yellow", "none": "blue"}[verdict.verdict]
    headline, *rest = verdict.summary().splitlines()
    console.print(f"[bold {colour}]{headline}[/]", highlight=False)
    console.print("\n".join(rest), highlight=False, markup=False)
    if plot is not None:
        verdict.plot(plot)
    for label, path in (("record", json), ("plot", plot)):
        if path is not None:
            console.print(f"{label}: {path}", highlight=False)
    return verdict.exit_code


def load_model(target: str, weights: Path | None = None, device: str | None = None) -> nn.Module:
    """The module that ``package.module:function`` returns, looked up from the working directory, with its weights.

    Weights are safetensors: a pickle can run anything when it is opened.
    """
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if where.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError("no CUDA device here; leave --device out or use --device cpu")
    name, _, function = target.partition(":")
    if not name or not function:
        raise ConfigError(f"cannot read {target!r}; write module:function, for example my_models:build_model")
    sys.path.insert(0, str(Path.cwd()))
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"no module {error.name!r} for {target!r}; run from the folder that holds it, or install it"
        ) from error
    finally:
        sys.path.pop(0)
    build = getattr(module, function, None)
    if build is None:
        names = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise ConfigError(f"{name} has no {function!r}{did_you_mean(function, names)}")
    model = build() if callable(build) and not isinstance(build, nn.Module) else build
    if not isinstance(model, nn.Module):
        raise ConfigError(f"{target} must return an nn.Module, got {type(model).__name__}")
    if weights is not None:
        load_weights(model, weights)
    return model.to(where)


def load_weights(model: nn.Module, path: Path) -> None:
    """Fill a model from a safetensors file; all that does not fit in one error."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    if path.suffix != ".safetensors":
        raise ConfigError(
            f"weights must be a .safetensors file, got {path}; a pickle (.pt, .pth) can run any code, so convert it "
            "where you trust it: safetensors.torch.save_file(model.state_dict(), 'w.safetensors')"
        )
    try:
        state = load_file(path)
    except FileNotFoundError:
        raise ConfigError(f"there is no file {path}") from None
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from None
    own = model.state_dict()
    problems = [f"missing: {name}" for name in own if name not in state]
    problems += [f"not in the model: {name}" for name in state if name not in own]
    problems += [
        f"{name} is {tuple(state[name].shape)} in the file and {tuple(own[name].shape)} in the model"
        for name in own
        if name in state and state[name].shape != own[name].shape
    ]
    if len(problems) > 5:
        problems = [*problems[:5], f"and {len(problems) - 5} more"]
    raise_all(problems, f"{path} does not fit the model")
    model.load_state_dict(state)


def load_data(name: str) -> tuple[Tensor, Tensor]:
    """The test images of ``digits`` or ``cifar10:FOLDER``, or a .npz or .safetensors file with images and labels.

    A file names them ``x`` or ``images`` and ``y`` or ``labels``. Images of whole numbers (uint8) are divided by 255.
    """
    path = Path(name)
    if name == "digits":
        return digits("test")
    if name.startswith("cifar10:"):
        images, labels = cifar10(name.removeprefix("cifar10:"), "test")
        return images.float() / 255, labels
    if path.suffix not in (".npz", ".safetensors"):
        raise ConfigError(
            f"unknown data {name!r}; use 'digits', 'cifar10:FOLDER', or a .npz or .safetensors file with x and y"
        )
    if not path.is_file():
        raise ConfigError(f"there is no file {path}")
    try:
        if path.suffix == ".npz":
            import numpy as np

            with np.load(path, allow_pickle=False) as file:
                tensors = {key: torch.from_numpy(file[key]) for key in file.files}
        else:
            from safetensors.torch import load_file

            tensors = load_file(path)
    except Exception as error:
        raise ConfigError(f"cannot read {path}: {error}") from None
    found = [next((tensors[key] for key in keys if key in tensors), None) for keys in _NAMES]
    images, labels = found
    if images is None or labels is None:
        raise ConfigError(f"{path} holds {', '.join(tensors) or 'nothing'}; name the images 'x' and the labels 'y'")
    if images.dtype == torch.uint8:
        images = images.float() / 255
    return images, labels if labels.is_floating_point() else labels.long()
