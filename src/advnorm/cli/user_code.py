"""Import models, data sets and other extensions from the user's own code, and networks of libraries."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import torch
from torch import nn

from advnorm._core.errors import ConfigError, Description, did_you_mean, raise_problems
from advnorm._core.tensors import meta_problems
from advnorm._core.user_modules import import_source
from advnorm.cli.command import say
from advnorm.models import create_model
from advnorm.models.normalized import Normalized
from advnorm.models.weights import load_weights

PACKAGE = Path(__file__).parents[1]


def import_code(source: str) -> ModuleType:
    """Import a ``.py`` file or a module, for the parts that it registers; an error in it names its line."""
    try:
        return import_source(source)
    except ConfigError:
        raise
    except ModuleNotFoundError as error:
        message = f"no module {error.name!r}" + (f" for {source!r}" if error.name != source else "")
        hint = "run the command in the folder that contains it, or install it"
        raise ConfigError("missing_file", message, field="module", hint=hint) from error
    except (Exception, SystemExit) as error:
        raise _own_code_error(f"importing {source}", error) from error


def load_user_model(
    target: str,
    weights: str | None,
    device: torch.device,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
) -> tuple[nn.Module, tuple[str, ...]]:
    """Call ``package.module:function`` or ``FILE.py:function``, found from the working directory; fill its model.

    ``mean``, ``std``: the model expects images that are normalized with them. Return the model, and notes on what was
    done to make the weights fit, which are also printed.
    """
    name, _, function = target.rpartition(":")
    if not name or not function:
        if "/" in target and not Path(target).exists():
            hint = "name the folder of a run or of a saved model"
            raise ConfigError("missing_file", f"the folder {target} does not exist", field="target", hint=hint)
        hint = ""
        if target.endswith(".py"):
            hint = f"name the function that returns the model: {target}:FUNCTION"
        elif Path(target).is_file():
            hint = f"name the network, and its weights after it: module:function --weights {target}"
        message = "{field} must be the folder of a run, or module:function such as my_models:build_model"
        raise ConfigError("wrong_type", message, field="target", got=target, hint=hint)
    if (mean is None) != (std is None):
        raise ConfigError("conflict", "--mean and --std belong together", field="std" if std is None else "mean")
    module = import_code(name)
    build = getattr(module, function, None)
    if build is None:
        names = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise ConfigError("unknown_name", f"{name} has no {function!r}{did_you_mean(function, names)}", "target")
    try:
        model = build() if callable(build) and not isinstance(build, nn.Module) else build
    except (Exception, SystemExit) as error:
        raise _own_code_error(target, error) from error
    if not isinstance(model, nn.Module):
        got = Description(type(model).__name__)
        raise ConfigError("wrong_type", f"{target} must return an nn.Module", field="target", got=got)
    raise_problems(meta_problems(model, "target"))
    notes = _load_weights(model, weights) if weights is not None else ()
    if mean is not None and std is not None:
        model = Normalized(model, mean, std)
    return model.to(device), notes


def load_library_model(
    name: str,
    weights: str | None,
    images: tuple[int, int],
    device: torch.device,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
) -> tuple[nn.Module, tuple[str, ...]]:
    """Build a network of a library and fill it. ``images``: their classes and channels. As in `load_user_model`."""
    if weights is None:
        message, hint = f"{name} needs trained weights", "give --weights FILE; advnorm downloads none"
        raise ConfigError("missing_option", message, field="weights", hint=hint)
    model = create_model(name, images[0], in_channels=images[1], mean=mean, std=std)
    notes = _load_weights(model.network, weights)
    return model.to(device), notes


def _load_weights(model: nn.Module, weights: str) -> tuple[str, ...]:
    notes = load_weights(model, weights).notes
    for note in notes:
        say(f"{weights}: {note}")
    return notes


def _own_code_error(action: str, error: BaseException) -> ConfigError:
    last = traceback.extract_tb(error.__traceback__)[-1]
    place = "" if last.filename.startswith(str(PACKAGE)) else f" ({Path(last.filename).name}, line {last.lineno})"
    return ConfigError("own_code", f"{action} raised {type(error).__name__}: {error}{place}", field="module")
