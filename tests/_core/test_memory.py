"""Batch sizes that halve when memory runs out."""

import pytest
import torch

from advnorm._core.memory import AdaptiveBatchSize
from support.problems import raises_problem


def test_a_batch_size_halves_until_it_fits_and_only_the_failed_batch_is_repeated():
    memory, calls = AdaptiveBatchSize(64), []

    def work(part: slice) -> int:
        calls.append(part.stop - part.start)
        if calls[-1] > 10:
            raise torch.OutOfMemoryError("out of memory")
        return calls[-1]

    assert sum(memory.map(30, work)) == 30
    assert calls == [30, 15, 7, 7, 7, 7, 2]
    assert memory.halved == [30, 15] and memory.size == 7


@pytest.mark.parametrize("minimum", [1, 2])
def test_the_smallest_batch_that_does_not_fit_is_an_error(minimum):
    def work(part: slice) -> None:
        raise torch.OutOfMemoryError("out of memory")

    with raises_problem("out_of_memory", "batch_size"):
        AdaptiveBatchSize(4, minimum=minimum).map(4, work)


@pytest.mark.parametrize("count", range(1, 30))
def test_no_batch_is_smaller_than_the_minimum_even_if_memory_runs_out(count):
    def work(part: slice) -> range:
        if part.stop - part.start > 5:
            raise torch.OutOfMemoryError("out of memory")
        return range(part.start, part.stop)

    parts = AdaptiveBatchSize(8, minimum=2).map(count, work)
    assert [place for part in parts for place in part] == list(range(count))
    assert all(len(part) >= 2 for part in parts) or count == 1
