"""Provenance of a number: device, versions and commit, for every record."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import torch


def environment(device: torch.device) -> dict[str, Any]:
    """Return device, threads, versions and commit for a record."""
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        **own_version(),
    }


def own_version() -> dict[str, Any]:
    """Return version and commit of this package."""
    package = sys.modules["advnorm"]  # without importing upwards
    return {"advnorm": getattr(package, "__version__", None), "commit": _commit()}


@cache  # a process runs the code that it loaded first
def _commit() -> str | None:
    """The commit of this package's own repository, with ``+`` if files differ from it.

    Without the repository (a container, a cluster), the environment variable ADVNORM_COMMIT names the commit.
    """
    here = Path(__file__)

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(["git", *arguments], cwd=here.parent, capture_output=True, text=True, timeout=10)
        except (OSError, subprocess.SubprocessError):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    if git("ls-files", "--error-unmatch", str(here.parent.parent / "__init__.py")) is None:
        return os.environ.get("ADVNORM_COMMIT")
    commit = git("rev-parse", "HEAD")
    return commit if commit is None else commit + ("+" if git("status", "--porcelain", "-uno") else "")
