"""Adversarial training in which normalization is the subject."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from advnorm._public import *  # noqa: F403

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """The public names and the parts of the package, read when asked for: reports and help need no torch."""
    public = import_module("advnorm._public")
    if name == "__all__" or name in public.__all__:
        return getattr(public, name)
    try:
        return import_module(f"advnorm.{name}")
    except ModuleNotFoundError as error:
        if error.name != f"advnorm.{name}":
            raise
        raise AttributeError(f"module 'advnorm' has no attribute {name!r}") from None


def __dir__() -> list[str]:
    return sorted({*globals(), *__getattr__("__all__")})
