"""Shared ground of the norm tests: a seed and one thread for every test, and the folder's oracles importable."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))  # for norm_oracles, whatever pytest's import mode


@pytest.fixture(scope="session", autouse=True)
def _one_thread():
    """Tensors of a few values: a second thread costs a hundred times what it computes."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def _seed(_one_thread):
    torch.manual_seed(0)
