"""Adversarial training in which normalization is the subject."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from advnorm import bench, config, evaluation, models, norms, papers, report, sharing, surgery, threat, training  # noqa: F401
    from advnorm._public import *  # noqa: F403

__version__ = "0.1.0"
#: Subpackages that are not among the public names.
_PARTS = (
    "bench",
    "config",
    "evaluation",
    "models",
    "norms",
    "papers",
    "report",
    "sharing",
    "surgery",
    "threat",
    "training",
)


if not TYPE_CHECKING:  # type checkers see the imports above

    def __getattr__(name: str) -> Any:
        """Import public names and subpackages on first use: reports and help need no torch."""
        public = import_module("advnorm._public")
        if name == "__all__" or name in public.__all__:
            return getattr(public, name)
        try:
            return import_module(f"advnorm.{name}")
        except ModuleNotFoundError as error:
            if not f"advnorm.{name}".startswith(str(error.name)):
                raise
            raise AttributeError(f"module 'advnorm' has no attribute {name!r}") from None

    def __dir__() -> list[str]:
        return sorted({*(name for name in globals() if name.startswith("__")), *__getattr__("__all__"), *_PARTS})
