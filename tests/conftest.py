"""Settings of the whole suite: one thread per worker, seeded, and nothing leaks from test to test."""

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)
