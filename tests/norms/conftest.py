"""Shared ground of the norm tests: a seed for every test, and the folder's oracles importable in any import mode."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))  # for norm_oracles, whatever pytest's import mode


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)
