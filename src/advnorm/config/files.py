"""Configurations in YAML, JSON and Python files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from advnorm._core.errors import ConfigError
from advnorm._core.records import read_bytes
from advnorm._core.user_modules import import_source
from advnorm.config.config import Config
from advnorm.config.text import parse_yaml, unique_keys


def load_config(source: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Load a configuration from a ``.yaml``, ``.yml``, ``.json`` or ``.py`` file, with ``key=value`` overrides.

    A Python file is run; it defines ``config``, a :class:`Config` or a function that returns one.
    """
    path = Path(source)
    if path.suffix not in READERS:
        words = f"a configuration is a file that ends in {', '.join(READERS)}"
        raise ConfigError("unknown_name", words, field=str(path), heading=str(path))
    try:
        return Config.from_dict(READERS[path.suffix](path), overrides)
    except ConfigError as error:
        headings = [str(path)] if error.code != "missing_file" else []  # its message names the file
        heading = ": ".join([*headings, *([error.heading] if error.heading else [])])
        raise ConfigError.listing(error.problems, heading) from error.__cause__


def _read_text(path: Path) -> str:
    try:
        return read_bytes(path, hint="give its path from the current folder, or the full path").decode()
    except UnicodeDecodeError:
        raise ConfigError("damaged_file", "the file is not valid UTF-8", field=str(path)) from None


def _read_yaml(path: Path) -> Any:
    settings = parse_yaml(_read_text(path))
    return {} if settings is None else settings


def _read_json(path: Path) -> Any:
    try:
        return json.loads(_read_text(path), object_pairs_hook=unique_keys)
    except ConfigError:
        raise
    except (ValueError, RecursionError) as error:
        raise ConfigError("damaged_file", f"the file is not valid JSON: {error}", field=str(path)) from None


def _read_python(path: Path) -> dict[str, Any]:
    _read_text(path)  # a missing file gives the same problem as for the other kinds
    try:
        config = getattr(import_source(str(path)), "config", None)
        config = config() if callable(config) else config
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:
        raise ConfigError("damaged_file", f"the file raised {type(error).__name__}: {error}", str(path)) from error
    if not isinstance(config, Config):
        words = "the file must define config, a Config or a function that returns one"
        raise ConfigError("wrong_type", words, field="config", got=config)
    return config.to_dict()


#: Readers of configuration files by suffix.
READERS = {".yaml": _read_yaml, ".yml": _read_yaml, ".json": _read_json, ".py": _read_python}
