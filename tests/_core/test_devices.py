"""The device to compute on."""

import pytest
import torch

from advnorm._core.devices import resolve_device
from support.problems import raises_problem


@pytest.fixture
def gpus(monkeypatch):
    """Pretend that the machine has a number of GPUs."""

    def pretend(count: int) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)

    return pretend


def test_the_default_is_cuda_if_available_else_the_cpu(gpus):
    gpus(0)
    assert resolve_device() == torch.device("cpu") == resolve_device("cpu")
    gpus(2)
    assert resolve_device() == torch.device("cuda", 0) == resolve_device("cuda")
    assert resolve_device(torch.device("cuda:1")) == torch.device("cuda", 1)


@pytest.mark.parametrize("device", ["cuda", "cuda:0", "mps", "meta", "nonsense", "cuda:-2"])
def test_a_device_that_is_not_available_is_rejected(gpus, device):
    gpus(0)
    with raises_problem("no_device", "device"):
        resolve_device(device)


def test_an_index_beyond_the_last_gpu_is_rejected(gpus):
    gpus(2)
    with raises_problem("no_device", "device"):
        resolve_device("cuda:7")


def test_under_torchrun_each_process_has_its_own_gpu(gpus, monkeypatch):
    gpus(2)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert resolve_device() == resolve_device("cuda:0") == torch.device("cuda", 1)
    monkeypatch.setenv("LOCAL_RANK", "2")
    with raises_problem("no_device", "device"):
        resolve_device()
