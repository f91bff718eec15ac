"""The user's own Python code: files and modules, each imported once under any name."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

from advnorm._core.errors import ConfigError
from advnorm._core.records import digest, read_bytes
from advnorm._core.registry import Registry
from advnorm._core.torchvision_operators import prepare_torchvision


def import_source(source: str) -> ModuleType:
    """Import a ``.py`` file, or a module by its name; both are found from the working directory.

    A file that is imported already, under any name and with the same content, is not run again: what it registers
    would be registered twice.
    """
    prepare_torchvision()  # the code may import timm
    with _finding_from(Path.cwd()):
        if source.endswith(".py"):
            return _import_file(Path(source))
        spec = importlib.util.find_spec(source)
        if spec is None:
            raise ModuleNotFoundError(f"No module named {source!r}", name=source)
        return (spec.origin and _loaded(Path(spec.origin))) or importlib.import_module(source)


def _import_file(path: Path) -> ModuleType:
    content = digest(read_bytes(path, "module"))
    module = _loaded(path)
    if module is not None and getattr(module, "_advnorm_content", content) == content:
        return module
    path = path.resolve()
    # Under its own name, if an import statement would find this file by it.
    own = path.stem.isidentifier() and (found := importlib.util.find_spec(path.stem)) and found.origin == str(path)
    name = path.stem if own else f"advnorm_user_{digest(str(path))[:8]}_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ConfigError("not_supported", f"{path} is not a Python file", field="module")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    before = Registry.additions
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    module.__dict__.update(_advnorm_content=content, _advnorm_registers=Registry.additions > before)
    return module


def registers_parts(path: str) -> bool:
    """Whether a file that was imported has registered a norm, a model or another part."""
    return getattr(_loaded(Path(path)), "_advnorm_registers", False)


def _loaded(path: Path) -> ModuleType | None:
    """The module that was imported from a file."""
    path = path.resolve()
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None)
        if isinstance(file, str) and os.path.basename(file) == path.name and Path(file).resolve() == path:
            return module
    return None


@contextmanager
def _finding_from(folder: Path) -> Iterator[None]:
    """Scope: modules are found from this folder."""
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))
