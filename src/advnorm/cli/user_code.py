"""Import models, data sets and other extensions from the user's own code."""

from __future__ import annotations

import importlib
import runpy
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn

from advnorm._core.errors import ConfigError, Description, did_you_mean
from advnorm._core.records import require_regular
from advnorm.training.checkpoint import load_weights


def import_code(source: str) -> None:
    """Run a ``.py`` file or import a module, for the models, data sets, norms and attacks that it registers."""
    if not source.endswith(".py"):
        with _importing(source):
            importlib.import_module(source)
        return
    with _importing(source):
        runpy.run_path(str(require_regular(source, "--import")))


def load_user_model(target: str, weights: Path | None, device: torch.device) -> nn.Module:
    """Call ``package.module:function``, found from the working directory, and load the weights into its model."""
    name, _, function = target.partition(":")
    if not name or not function:
        raise ConfigError(
            "wrong_type",
            "{field} must be the folder of a run, or module:function such as my_models:build_model",
            field="target",
            got=target,
        )
    with _importing(name):
        module = importlib.import_module(name)
    build = getattr(module, function, None)
    if build is None:
        names = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        message = f"{name} has no {function!r}{did_you_mean(function, names)}"
        raise ConfigError("unknown_name", message, field="target")
    try:
        model = build() if callable(build) and not isinstance(build, nn.Module) else build
    except (Exception, SystemExit) as error:
        raise _own_code_error(target, error) from error
    if not isinstance(model, nn.Module):
        got = Description(type(model).__name__)
        raise ConfigError("wrong_type", f"{target} must return an nn.Module", field="target", got=got)
    if weights is not None:
        load_weights(model, weights)
    return model.to(device)


@contextmanager
def _importing(source: str) -> Iterator[None]:
    """Scope: modules are found from the working directory, and an error of the user's code names its line."""
    sys.path.insert(0, str(Path.cwd()))
    try:
        yield
    except ConfigError:
        raise
    except ModuleNotFoundError as error:
        message = f"no module {error.name!r} for {source!r}"
        hint = "run the command in the folder that contains it, or install it"
        raise ConfigError("missing_file", message, field="module", hint=hint) from error
    except (Exception, SystemExit) as error:
        raise _own_code_error(f"importing {source}", error) from error
    finally:
        sys.path.pop(0)


def _own_code_error(action: str, error: BaseException) -> ConfigError:
    last = traceback.extract_tb(error.__traceback__)[-1]
    place = "" if last.filename == __file__ else f" ({Path(last.filename).name}, line {last.lineno})"
    return ConfigError("own_code", f"{action} raised {type(error).__name__}: {error}{place}", field="module")
