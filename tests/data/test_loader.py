"""Batches depend on seed and epoch only, not on ranks, batch size, device or worker processes."""

import math
import multiprocessing
import os
import signal

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from advnorm._core.seeding import ImageNoise
from advnorm.data import load, make_loader
from advnorm.data.loader import AUGMENTS, ResidentLoader, WorkerLoader, random_crop_box
from support.problems import raises_problem

fast = settings(
    deadline=None, max_examples=25, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def same(left, right):
    return len(left) == len(right) and all(torch.equal(a, b) for one, two in zip(left, right) for a, b in zip(one, two))


def by_index(loader, epoch):
    """Every image of an epoch under its identity."""
    return {int(i): x for batch in loader.epoch(epoch) for i, x in zip(batch.index, batch.x)}


def test_a_batch_without_augmentation_is_the_images_and_their_identities(make_data):
    data = make_data(10, (3, 5, 7))
    loader = ResidentLoader(data, batch_size=4, augment="none")
    assert loader.steps == 2
    for batch in loader.epoch(3):
        position = batch.index - 30
        assert batch.x.dtype == torch.float32 and batch.index.dtype == batch.y.dtype == torch.int64
        assert torch.equal(batch.x, data.pixels(position)) and torch.equal(batch.y, data.labels[position])
        assert ((position >= 0) & (position < 10)).all()


@pytest.mark.parametrize("augment", AUGMENTS)
def test_batches_on_a_device_need_no_value_from_it(make_data, augment):
    """Reading a value of the meta device raises, and so does an operation that mixes in a tensor of the CPU."""
    batches = list(ResidentLoader(make_data(10, (3, 8, 8)), batch_size=4, augment=augment, device="meta").epoch(1))
    assert [value.device.type for batch in batches for value in batch] == ["meta"] * 6


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
@pytest.mark.parametrize("shape", [(3, 32, 32), (1, 8, 8), (2, 16, 9), (3, 5, 24)])
def test_crops_and_flips_equal_those_of_numpy(make_data, dtype, shape):
    data = make_data(40, shape, dtype=dtype)
    _, height, width = shape
    pad = height // 8, width // 8
    seen = set()
    for batch in ResidentLoader(data, batch_size=20, seed=5, augment="crop_flip").epoch(2):
        noise = ImageNoise(5, batch.index).fold("augment")
        down, right, flip = (
            noise.integers(high, (1,), draw=draw).flatten().tolist()
            for high, draw in ((2 * pad[0] + 1, "down"), (2 * pad[1] + 1, "right"), (2, "flip"))
        )
        seen |= set(zip(down, right, flip))
        for row, index in enumerate(batch.index.tolist()):
            image = np.pad(data.pixels([index - 80])[0].numpy(), ((0, 0), (pad[0],) * 2, (pad[1],) * 2))
            image = image[:, down[row] : down[row] + height, right[row] : right[row] + width]
            assert np.array_equal(batch.x[row].numpy(), image[:, :, ::-1] if flip[row] else image)
    assert len(seen) > 1 + (pad[0] > 0) + (pad[1] > 0), "the draws vary"


def test_flip_mirrors_half_of_the_images_and_moves_none(make_data):
    data = make_data(400, (1, 2, 8))
    images = by_index(ResidentLoader(data, batch_size=400, augment="flip"), 0)
    plain = [torch.equal(images[i], data.pixels([i])[0]) for i in range(400)]
    mirrored = [torch.equal(images[i], data.pixels([i])[0].flip(2)) for i in range(400)]
    assert all(a != b for a, b in zip(plain, mirrored)) and 160 < sum(mirrored) < 240


def test_augmentation_differs_between_epochs_and_seeds(make_data):
    data = make_data(16, (3, 32, 32))
    views = [
        by_index(ResidentLoader(data, batch_size=16, seed=seed, augment="crop_flip"), epoch)
        for seed in (0, 1)
        for epoch in (0, 1)
    ]
    assert [sorted(view) for view in views[:2]] == [list(range(16)), list(range(16, 32))]
    pictures = [torch.stack([view[i] for i in sorted(view)]) for view in views]
    for one in range(4):
        for two in range(one):
            assert (pictures[one] != pictures[two]).flatten(1).any(1).sum() > 12


def test_the_order_depends_on_seed_and_epoch_only(make_data):
    data = make_data(30)
    orders = {
        (seed, epoch): ResidentLoader(data, batch_size=7, seed=seed).order(epoch) for seed in (0, 1) for epoch in (0, 1)
    }
    assert all(sorted(order.tolist()) == list(range(30)) for order in orders.values())
    assert len({tuple(order.tolist()) for order in orders.values()}) == 4
    assert torch.equal(orders[0, 1], ResidentLoader(data, batch_size=3, world=3, rank=1, augment="none").order(1))
    assert ResidentLoader(data, batch_size=3, shuffle=False).order(1).tolist() == list(range(30))
    first = torch.stack([ResidentLoader(data, batch_size=30).order(epoch) for epoch in range(150)])[:, 0]
    assert first.bincount(minlength=30).max() < 20, "no image is preferred"  # 5 expected


@given(
    size=st.integers(4, 41),
    world=st.sampled_from([1, 2, 4]),
    per_rank=st.integers(1, 5),
    epoch=st.integers(0, 3),
    augment=st.sampled_from(AUGMENTS),
    drop_last=st.booleans(),
    shuffle=st.booleans(),
    channels_last=st.booleans(),
    data=st.data(),
)
@fast
def test_ranks_together_equal_one_process_and_a_late_start_equals_the_rest(
    make_data, size, world, per_rank, epoch, augment, drop_last, shuffle, channels_last, data
):
    batch_size = world * per_rank
    drop_last = drop_last and batch_size <= size
    images = make_data(size, (3, 8, 10))
    options = {
        "batch_size": batch_size,
        "augment": augment,
        "drop_last": drop_last,
        "shuffle": shuffle,
        "channels_last": channels_last,
        "seed": 3,
    }
    whole = ResidentLoader(images, **options)
    batches = list(whole.epoch(epoch))
    assert len(batches) == whole.steps == (size // batch_size if drop_last else math.ceil(size / batch_size))
    seen = torch.cat([batch.index for batch in batches]) - epoch * size
    assert len(seen) == len(seen.unique()) == (whole.steps * batch_size if drop_last else size)
    layout = torch.channels_last if channels_last else torch.contiguous_format
    assert all(batch.x.is_contiguous(memory_format=layout) for batch in batches)

    ranks = [list(ResidentLoader(images, **options, rank=rank, world=world).epoch(epoch)) for rank in range(world)]
    assert all(len(part) == whole.steps for part in ranks)
    joined = [tuple(map(torch.cat, zip(*parts))) for parts in zip(*ranks)]
    assert same(joined, batches)
    assert all(len(part[0].y) == per_rank for part in ranks if len(batches[0].y) == batch_size)

    start = data.draw(st.integers(0, whole.steps))
    assert same(list(whole.epoch(epoch, start=start)), batches[start:])


@given(sizes=st.lists(st.integers(1, 23), min_size=2, max_size=3, unique=True), augment=st.sampled_from(AUGMENTS))
@fast
def test_an_augmented_image_does_not_depend_on_the_batch_size(make_data, sizes, augment):
    data = make_data(23, (1, 16, 16))
    views = [by_index(ResidentLoader(data, batch_size=size, augment=augment, drop_last=False), 1) for size in sizes]
    for view in views[1:]:
        assert view.keys() == views[0].keys() and all(torch.equal(view[i], views[0][i]) for i in view)


def test_all_problems_are_reported_at_once(make_data):
    data = make_data(10)
    with raises_problem("unknown_name", "augment") as caught:
        ResidentLoader(data, batch_size=5, world=2, augment="cropflip")
    assert [(problem.code, problem.field) for problem in caught.value.problems[1:]] == [("out_of_range", "batch_size")]
    with raises_problem("out_of_range", "rank"):
        ResidentLoader(data, batch_size=4, rank=2, world=2)
    with raises_problem("conflict", "batch_size"):
        ResidentLoader(data, batch_size=11)
    assert ResidentLoader(data, batch_size=11, drop_last=False).steps == 1
    loader = ResidentLoader(data, batch_size=5)
    with raises_problem("out_of_range", "start"):
        loader.epoch(0, start=3)


def test_loaders_do_not_touch_the_global_random_state(make_data, picture_folder):
    pictures = load("imagefolder", "train", picture_folder, image_size=8)
    before = torch.get_rng_state()
    options = {"batch_size": 4, "augment": "crop_flip"}
    for loader in (make_loader(make_data(8), **options), make_loader(pictures, workers=0, **options)):
        assert len(list(loader.epoch(0))) == loader.steps
    assert torch.equal(torch.get_rng_state(), before)


def test_images_are_not_augmented_by_default_as_in_a_configuration(make_data):
    data = make_data(8)
    batch = next(make_loader(data, batch_size=8).epoch(0))
    assert torch.equal(batch.x, data.pixels(batch.index))


def test_make_loader_chooses_by_the_kind_of_data(make_data, picture_folder):
    assert isinstance(make_loader(make_data(8), batch_size=4, workers=2), ResidentLoader)
    pictures = make_loader(load("imagefolder", "train", picture_folder, image_size=224), batch_size=4, workers=2)
    assert isinstance(pictures, WorkerLoader) and pictures.workers == 2


@pytest.mark.parametrize("augment", AUGMENTS)
def test_images_on_disk_do_not_depend_on_workers_ranks_or_the_start(picture_folder, augment):
    data = load("imagefolder", "train", picture_folder, image_size=8)
    options = {"batch_size": 4, "augment": augment, "drop_last": False, "seed": 2}
    batches = list(WorkerLoader(data, workers=0, **options).epoch(1))
    assert [batch.x.shape for batch in batches] == [(4, 3, 8, 8)] * 3
    assert same(list(WorkerLoader(data, workers=2, channels_last=True, **options).epoch(1)), batches)
    assert same(list(WorkerLoader(data, workers=0, **options).epoch(1, start=2)), batches[2:])
    ranks = [WorkerLoader(data, workers=0, rank=rank, world=2, **options).epoch(1) for rank in range(2)]
    assert same([tuple(map(torch.cat, zip(*parts))) for parts in zip(*ranks)], batches)
    assert torch.equal(
        torch.cat([batch.y for batch in batches]), data.labels[torch.cat([b.index for b in batches]) - 12]
    )


def test_images_on_disk_are_cropped_resized_and_flipped_as_by_hand(picture_folder):
    data = load("imagefolder", "train", picture_folder, image_size=8)
    changed = 0
    for batch in WorkerLoader(data, batch_size=6, workers=0, seed=7, augment="crop_flip").epoch(0):
        noise = ImageNoise(7, batch.index).fold("augment")
        flips, draws = noise.integers(2, draw="flip"), noise.uniform((10, 4), draw="crop").tolist()
        for row, index in enumerate(batch.index.tolist()):
            image = Image.open(data.root / data.files[index]).convert("RGB")
            box = random_crop_box(image.width, image.height, draws[row])
            pixels = np.array(image.crop(box).resize((8, 8), Image.Resampling.BILINEAR)).transpose(2, 0, 1)
            pixels = pixels[:, :, ::-1] if flips[row] else pixels
            assert np.array_equal(batch.x[row].numpy(), pixels.astype(np.float32) / np.float32(255))
            changed += not torch.equal(batch.x[row], data[index][0])
    assert changed == 12
    flipped = next(WorkerLoader(data, batch_size=12, workers=0, augment="flip").epoch(0))
    both = [(torch.equal(x, data[i][0]), torch.equal(x.flip(2), data[i][0])) for x, i in zip(flipped.x, flipped.index)]
    assert sorted(set(both)) == [(False, True), (True, False)]


@pytest.mark.parametrize("augment", ["flip", "crop_flip"])
def test_augmentation_of_images_on_disk_differs_between_epochs_and_seeds(picture_folder, augment):
    data = load("imagefolder", "train", picture_folder, image_size=8)
    views = []
    for seed, epoch in ((0, 0), (0, 1), (1, 0)):
        images = by_index(WorkerLoader(data, batch_size=12, workers=0, seed=seed, augment=augment), epoch)
        views.append(torch.stack([images[i] for i in sorted(images)]))
    for one, two in ((0, 1), (0, 2), (1, 2)):
        assert (views[one] != views[two]).flatten(1).any(1).sum() > (8 if augment == "crop_flip" else 0)


@given(
    width=st.integers(1, 400),
    height=st.integers(1, 400),
    draws=st.lists(st.lists(st.floats(0, 1, exclude_max=True), min_size=4, max_size=4), min_size=0, max_size=3),
)
@fast
def test_a_random_crop_box_lies_in_the_image_and_is_not_too_narrow(width, height, draws):
    left, top, right, bottom = random_crop_box(width, height, draws)
    assert 0 <= left < right <= width and 0 <= top < bottom <= height
    ratio = (right - left) / (bottom - top)
    rounding = 1 + 2 / min(right - left, bottom - top)
    assert 3 / 4 / rounding <= ratio <= 4 / 3 * rounding


def test_random_crop_boxes_cover_eight_to_a_hundred_percent_evenly():
    draws = ImageNoise(0, torch.arange(4000)).uniform((10, 4)).tolist()
    boxes = np.array([random_crop_box(300, 300, draw) for draw in draws])
    area = (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1]) / 300**2
    assert 0.075 < area.min() < 0.1 and area.max() > 0.95 and (boxes == boxes.round()).all()
    below = np.mean(area < 0.5)  # all ratios fit below 3/4 of the area, where it is uniform
    assert 0.45 < below < 0.55


def test_random_crop_boxes_have_every_ratio_and_lie_anywhere():
    draws = ImageNoise(0, torch.arange(4000)).uniform((10, 4)).tolist()
    left, top, right, bottom = np.array([random_crop_box(300, 300, draw) for draw in draws]).T
    width, height = right - left, bottom - top
    small = width * height < 300**2 / 2  # there all ratios fit
    ratio = np.log(width / height)[small] / np.log(4 / 3)
    assert np.allclose(np.quantile(ratio, [0.05, 0.25, 0.5, 0.75, 0.95]), [-0.9, -0.5, 0, 0.5, 0.9], atol=0.07)
    places = [start[small] / (300 - length[small]) for start, length in ((left, width), (top, height))]
    for place in places:
        assert np.allclose(np.quantile(place, [0.05, 0.25, 0.5, 0.75, 0.95]), [0.05, 0.25, 0.5, 0.75, 0.95], atol=0.04)
    assert abs(np.corrcoef(*places)[0, 1]) < 0.08


def test_a_worker_names_a_damaged_image(picture_folder):
    data = load("imagefolder", "train", picture_folder, image_size=8)
    (data.root / data.files[4]).write_bytes(b"no picture")
    with raises_problem("damaged_file", "files") as caught:
        list(WorkerLoader(data, batch_size=12, workers=1).epoch(0))
    assert "ant/4.png" in str(caught.value)


def test_an_error_in_a_worker_is_one_line_without_its_traceback(picture_folder):
    data = load("imagefolder", "train", picture_folder, image_size=8)
    path = data.root / data.files[0]
    path.write_bytes(path.read_bytes()[:60])
    messages, others = [], set(multiprocessing.active_children())
    for workers in (0, 1):
        with raises_problem("damaged_file", "files") as raised:
            list(make_loader(data, batch_size=2, workers=workers).epoch(0))
        messages.append(str(raised.value))
        assert not set(multiprocessing.active_children()) - others, "the traceback keeps no worker alive"
    assert messages[0] == messages[1] and "\n" not in messages[0]


def test_workers_ignore_signals_to_the_process_group_and_end_with_their_loader(picture_folder):
    data = load("imagefolder", "train", picture_folder, image_size=8)
    before, others = signal.pthread_sigmask(signal.SIG_BLOCK, []), set(multiprocessing.active_children())
    batches = make_loader(data, batch_size=1, augment="none", workers=2).epoch(0)
    next(batches), next(batches)  # one from each worker, so that both have started
    workers = set(multiprocessing.active_children()) - others
    assert len(workers) == 2 and os.getpgid(0) not in {os.getpgid(worker.pid) for worker in workers}
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == before
    batches.close()
    assert not any(worker.is_alive() for worker in workers)
