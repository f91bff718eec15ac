"""Data by name, NAME:FOLDER, folder, file or data set of torch: the same everywhere; subsets with equal classes."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from safetensors.torch import save_file
from torch.utils.data import TensorDataset

import advnorm
from advnorm.data import ImageData, as_image_data, balanced_subset, load, resolve_source
from advnorm.evaluation import open_run
from support.problems import raises_problem


@pytest.fixture
def same_size(tmp_path):
    """Images of 6 × 10 pixels in ``train`` and ``test``."""
    generator = np.random.default_rng(0)
    for split, count in (("train", 12), ("test", 4)):
        for name in ("ant", "bird"):
            (tmp_path / "pictures" / split / name).mkdir(parents=True)
            for number in range(count):
                pixels = generator.integers(0, 256, (6, 10, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(tmp_path / "pictures" / split / name / f"{number:02}.png")
    return tmp_path / "pictures"


def config(**settings):
    common = {"objective": "standard", "epochs": 1, "batch_size": 8, "held_out": 0, "validate_every": 0}
    return advnorm.Config(**common | settings)


def test_a_text_names_a_set_a_folder_or_a_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "photos").mkdir()
    for text, found in (
        ("digits", ("digits", None)),
        ("cifar10:here/there", ("cifar10", "here/there")),
        ("photos", ("imagefolder", "photos")),
        ("./missing", ("imagefolder", "./missing")),
        ("x.npz", ("arrays", "x.npz")),
        ("a/b.safetensors", ("arrays", "a/b.safetensors")),
    ):
        assert resolve_source(text) == found
    assert resolve_source(Path("photos")) == ("imagefolder", "photos")
    for text in ("digitz", "photoz", Path("photoz")):
        with raises_problem("unknown_name", "data"):
            resolve_source(text)
        with raises_problem("unknown_name", "data"):
            advnorm.Config(data=str(text))
    for value in ("", None, 5, b"digits", ["digits"]):
        with raises_problem("wrong_type", "data"):
            load(value, "test")


def test_images_of_one_size_keep_it(same_size):
    data = load(str(same_size), "train")
    assert data.image_shape == (3, 6, 10) and data.preparation == "native size"
    pixels = np.array(Image.open(same_size / data.files[3]))
    assert np.array_equal(data.center_crop(3).permute(1, 2, 0), pixels)
    assert load(f"imagefolder:{same_size}", "train").fingerprint == data.fingerprint
    cropped = advnorm.data.make_loader(data, batch_size=8, augment="crop_flip", workers=0)
    assert next(iter(cropped.epoch(0))).x.shape == (8, 3, 6, 10)
    with raises_problem("missing_option", "image_size"):
        load("imagefolder", "train", same_size, resize=8)


def test_images_of_several_sizes_need_the_option(picture_folder, tmp_path):
    for source in (str(picture_folder), f"imagefolder:{picture_folder}"):
        with raises_problem("conflict", "image_size"):
            load(source, "train")
        with raises_problem("conflict", "image_size"):
            advnorm.train(config(data=source), out=tmp_path / "runs", device="cpu")
    assert not (tmp_path / "runs").exists()
    assert load(str(picture_folder), "train", image_size=8).image_shape == (3, 8, 8)


def test_a_file_that_changed_its_size_is_named(same_size):
    data = load(str(same_size), "train")
    Image.new("RGB", (7, 7)).save(same_size / data.files[0])
    with raises_problem("conflict", "image_size"):
        data.in_memory()


def test_a_folder_of_classes_alone_holds_test_images(same_size):
    assert load(str(same_size / "test"), "test").labels.tolist() == [0] * 4 + [1] * 4
    with raises_problem("missing_file", "root"):
        load(str(same_size / "test"), "train")


# -- training ----------------------------------------------------------------------------------------------------------


def test_a_run_trains_on_a_folder_and_is_evaluated_on_its_test_images(same_size, tmp_path):
    run = advnorm.train(config(data=str(same_size)), out=tmp_path / "runs", device="cpu", workers=0)
    log = (run.folder / "log.txt").read_text()
    assert "imagefolder: 24 images of 3×6×10 (native size), 2 classes" in log
    assert run.folder.name.startswith(f"{same_size.name}-small_cnn-bn-")
    target = open_run(run, device="cpu")
    assert len(target.images) == 8 and target.images.shape[1:] == (3, 6, 10)
    for path in (same_size / "test").rglob("*.png"):
        Image.new("RGB", (5, 5)).save(path)
    with raises_problem("wrong_shape", "data"):
        open_run(run, device="cpu")


def write_arrays(path, entries):
    if path.suffix == ".npz":
        np.savez(path, **{name: value.numpy() for name, value in entries.items()})
    else:
        save_file(entries, path)
    return path


@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
def test_a_run_trains_on_a_file_and_never_tests_on_its_training_images(suffix, tmp_path):
    x, y = torch.rand(32, 1, 8, 8), torch.arange(32) % 4
    both = {"x_train": x, "y_train": y, "x_test": 1 - x[:8], "y_test": y[:8].clone()}
    path = write_arrays(tmp_path / f"both{suffix}", both)
    run = advnorm.train(config(data=str(path)), out=tmp_path, device="cpu")
    assert run.description["data"]["num_classes"] == 4 and run.description["data"]["name"] == path.name
    assert torch.equal(open_run(run, device="cpu").images, 1 - x[:8])
    path = write_arrays(tmp_path / f"one{suffix}", {"x": x, "y": y})
    run = advnorm.train(config(data=str(path)), out=tmp_path, device="cpu")
    with raises_problem("conflict", "data"):
        open_run(run, device="cpu")
    other = write_arrays(tmp_path / f"other{suffix}", {"x": 1 - x, "y": y})
    assert torch.equal(open_run(run, data=str(other), device="cpu").images, 1 - x)
    normalized = write_arrays(tmp_path / f"normalized{suffix}", {"x": 4 * x - 2, "y": y})
    with raises_problem("out_of_range", "images"):
        advnorm.train(config(data=str(normalized)), out=tmp_path, device="cpu")


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
def test_a_file_may_have_the_channels_last_or_no_channels(channels, suffix, tmp_path):
    x, y = torch.randint(256, (6, channels, 8, 9), dtype=torch.uint8), torch.arange(6) % 3
    layouts = [x, x.movedim(1, -1).contiguous(), *([x[:, 0].contiguous()] if channels == 1 else [])]
    for number, images in enumerate(layouts):
        data = load(write_arrays(tmp_path / f"{number}{suffix}", {"x": images, "y": y}), "test")
        assert torch.equal(data.pixels(), x.float() / 255)
    with raises_problem("wrong_shape", "images"):  # in Python the caller moves the channels
        ImageData(name="mine", split="train", images=layouts[1], labels=y, num_classes=3)


def test_a_file_may_hold_the_float64_images_of_numpy(tmp_path):
    x, y = torch.rand(6, 1, 8, 9, dtype=torch.float64), torch.arange(6) % 3
    data = load(write_arrays(tmp_path / "double.npz", {"x": x, "y": y}), "test")
    assert torch.equal(data.images, x.float())


def test_data_given_in_python_train_and_need_test_data_of_their_own(tmp_path):
    x, y = torch.rand(32, 1, 8, 8), torch.arange(32) % 4
    given_data = [TensorDataset(x, y), (x, y), ImageData(name="mine", split="train", images=x, labels=y, num_classes=4)]
    runs = [
        advnorm.train(config(), data=data, out=tmp_path / str(i), device="cpu") for i, data in enumerate(given_data)
    ]
    names = [run.description["data"]["name"] for run in runs]
    assert names == ["TensorDataset", "tensors", "mine"] and {run.config.data.name for run in runs} == {"given"}
    assert runs[0].metrics() == runs[1].metrics() == runs[2].metrics()
    with raises_problem("missing_data", "data"):
        open_run(runs[0], device="cpu")
    with raises_problem("missing_data", "data"):
        advnorm.train(config(data="given"), out=tmp_path, device="cpu")
    with raises_problem("wrong_type", "data"):
        advnorm.train(config(), data=3, out=tmp_path, device="cpu")


# -- subsets -----------------------------------------------------------------------------------------------------------


@given(sizes=st.lists(st.integers(0, 9), min_size=1, max_size=5).filter(any), share=st.floats(0, 1))
def test_a_subset_has_the_same_number_of_each_class(sizes, share):
    labels = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    labels = labels[torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))]
    images = torch.arange(len(labels), dtype=torch.uint8).view(-1, 1, 1, 1)
    data = ImageData(name="n", split="train", images=images, labels=labels, num_classes=len(sizes))
    limit = max(1, round(share * len(labels)))
    part = balanced_subset(data, limit)
    counts = torch.bincount(part.labels, minlength=len(sizes)).tolist()
    assert sum(counts) == limit and part.images.flatten().tolist() == sorted(part.images.flatten().tolist())
    most = max(counts)
    assert all(count >= min(most - 1, size) for count, size in zip(counts, sizes))
    assert all(label == labels[row] for row, label in zip(part.images.flatten().tolist(), part.labels))


def test_data_limit_limits_training_images_of_every_set(tmp_path):
    assert len(load("digits", "train", limit=50)) == 50 and len(load("digits", "test", limit=50)) == 449
    run = advnorm.train(config(data={"name": "digits", "limit": 40}), seed=3, out=tmp_path, device="cpu")
    assert run.description["data"]["images"] == 40
    assert run.description["data"]["fingerprint"] == load("digits", "train", limit=40).fingerprint
    with raises_problem("out_of_range", "data.limit"):
        advnorm.Config(data={"name": "digits", "limit": 0})
    with raises_problem("unknown_name"):
        load("cifar10c", "test", tmp_path, corruption="fog", severity=1, limit=3)


def test_as_image_data_rejects_images_outside_the_box_and_labels_that_are_no_classes():
    with raises_problem("out_of_range", "images"):
        as_image_data((torch.rand(4, 1, 8, 8) * 3, torch.arange(4)))
    for labels in (torch.rand(4), torch.tensor([0.0, 1.0, 2.0, torch.nan])):
        with raises_problem("wrong_shape", "labels"):
            as_image_data((torch.rand(4, 1, 8, 8), labels))
