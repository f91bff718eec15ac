"""The device to compute on."""

import subprocess
import sys

import pytest
import torch

from advnorm._core.devices import resolve_device, set_threads
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


@pytest.mark.parametrize(
    "device", ["cuda", "cuda:0", "mps", "meta", "nonsense", "cuda:-2", "", f"cuda:{'9' * 30}", 2.5, -1]
)
def test_a_device_that_is_not_available_is_rejected(gpus, device):
    gpus(0)
    with raises_problem("no_device", "device"):
        resolve_device(device)


@pytest.mark.parametrize(("count", "code"), [(0, "out_of_range"), (99999, "out_of_range"), (1.0, "wrong_type")])
def test_a_number_of_threads_that_torch_cannot_run_is_rejected(count, code):
    with raises_problem(code, "threads"):
        set_threads(count)


def test_processes_that_are_started_have_the_same_number_of_threads(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("MKL_NUM_THREADS", "1")
    try:
        set_threads(2)
        script = "import torch; print(torch.get_num_threads())"
        assert torch.get_num_threads() == 2 == int(subprocess.check_output([sys.executable, "-c", script]))
    finally:
        torch.set_num_threads(1)


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
