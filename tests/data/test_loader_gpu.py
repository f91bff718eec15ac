"""The resident loader on a CUDA device."""

import pytest
import torch

from advnorm.data import load, make_loader
from advnorm.data.loader import AUGMENTS

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("augment", AUGMENTS)
def test_a_step_never_waits_for_the_host_and_equals_the_cpu_bit_for_bit(augment, channels_last):
    data = load("synthetic", "train", size=300)
    loaders = [
        make_loader(data, batch_size=64, augment=augment, channels_last=channels_last, device=device)
        for device in ("cpu", "cuda")
    ]
    on_cpu = list(loaders[0].epoch(1))
    on_gpu = []
    batches = loaders[1].epoch(1)
    on_gpu.append(next(batches))  # the order of the epoch is sent at the first step
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        on_gpu += batches
    finally:
        torch.cuda.set_sync_debug_mode(mode)
    assert len(on_gpu) == len(on_cpu) == 4
    for cpu, gpu in zip(on_cpu, on_gpu):
        assert all(value.is_cuda for value in gpu)
        assert all(torch.equal(one, two.cpu()) for one, two in zip(cpu, gpu))
        assert gpu.x.stride() == cpu.x.stride()


def test_worker_processes_load_batches_for_the_device(tmp_path):
    from PIL import Image

    for number in range(8):
        folder = tmp_path / "train" / f"class{number % 2}"
        folder.mkdir(parents=True, exist_ok=True)
        Image.effect_noise((40, 30), 90).convert("RGB").save(folder / f"{number}.png")
    data = load("imagefolder", "train", tmp_path, image_size=16)
    options = {"batch_size": 4, "workers": 2, "channels_last": True}
    torch.zeros(1, device="cuda")  # workers start after CUDA did
    for cpu, gpu in zip(make_loader(data, **options).epoch(0), make_loader(data, device="cuda", **options).epoch(0)):
        assert all(torch.equal(one, two.cpu()) for one, two in zip(cpu, gpu))
