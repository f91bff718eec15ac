"""The start-up of a training in fresh processes."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch

from advnorm.bench import start_up
from advnorm.bench.plain_loops import HYBRID
from advnorm.bench.start_up import first_step_seconds
from advnorm.bench.train import bench_train
from advnorm.config import Named

SMALL = replace(HYBRID, model=Named("small_cnn"), batch_size=8, data=Named("synthetic", size=64))
SMALL = replace(SMALL, attack=replace(SMALL.attack, steps=1))


def test_both_processes_share_a_cache_that_was_empty_and_the_environment_is_restored(monkeypatch):
    folders, before = [], dict(os.environ)

    def spawn(function, arguments):
        folders.append(tuple(os.environ[name] for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")))
        assert not any(map(os.path.exists, folders[-1]))
        function(0, *arguments)

    monkeypatch.setattr(torch.multiprocessing, "spawn", spawn)
    seconds = first_step_seconds("eager", SMALL, torch.device("cpu"), None)
    assert set(seconds) == {"cold", "warm"} and all(value > 0 for value in seconds.values())
    assert folders[0] == folders[1] and dict(os.environ) == before


def test_the_rows_have_the_first_step_on_request(monkeypatch):
    monkeypatch.setattr("advnorm.bench.train_group.first_step_seconds", lambda *_: {"cold": 9.0, "warm": 3.0})
    [row] = bench_train([SMALL], modes=("eager",), device="cpu", steps=1, start_up=True).rows
    assert row.first_step == {"cold": 9.0, "warm": 3.0}
    assert tuple(row.first_step) == start_up.CACHES


@pytest.mark.slow
def test_a_fresh_process_starts_faster_with_cached_compilations():
    seconds = first_step_seconds("careful_compiled", SMALL, torch.device("cpu"), None)
    assert seconds["warm"] < 0.8 * seconds["cold"]
