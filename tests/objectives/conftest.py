"""Makes the oracles of the objectives, and those of the norms that they stand on, importable by the tests."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "norms")]  # whatever pytest's import mode
