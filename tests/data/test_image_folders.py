"""Images on disk: class folders, known data sets, Tiny ImageNet, decoding, and damaged files."""

import os
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from advnorm.data import load
from support.problems import raises_problem


def test_a_known_data_set_is_found_in_its_folder_and_no_other_takes_its_place(tmp_path, picture_folder):
    with raises_problem("conflict", "root"):
        load("imagenet", "train", picture_folder)
    for name in range(10):
        folder = tmp_path / "sets" / "imagenette2" / "train" / f"n{name}"
        folder.mkdir(parents=True)
        Image.new("RGB", (16, 16)).save(folder / "0.png")
    for root in (tmp_path / "sets", tmp_path / "sets" / "imagenette2"):
        data = load("imagenette", "train", root, image_size=8)
        assert data.name == "imagenette" and data.num_classes == len(data) == 10


def test_folders_of_classes_have_the_order_of_the_training_classes(picture_folder):
    train, test = (load("imagefolder", split, picture_folder, image_size=224) for split in ("train", "test"))
    assert train.classes == test.classes == ("ant", "bird") and train.num_classes == 2
    assert train.files[:2] == ("train/ant/0.png", "train/ant/1.png") and test.files[-1] == "val/bird/2.png"
    assert train.labels.tolist() == [0] * 6 + [1] * 6 and test.labels.tolist() == [0, 0, 0, 1, 1, 1]
    assert all((train.root / file).is_file() for file in train.files)
    image, label = test[5]
    assert image.shape == (3, 224, 224) and image.dtype == torch.float32 and label == 1
    assert 0 <= image.min() < image.max() <= 1
    for path in (picture_folder / "val" / "ant").iterdir():  # a class that the test images lack keeps its number
        path.unlink()
    (picture_folder / "val" / "ant").rmdir()
    assert load("imagefolder", "test", picture_folder, image_size=224).labels.tolist() == [1, 1, 1]


def test_the_center_of_a_resized_image_is_cropped(picture_folder):
    data = load("imagefolder", "val", picture_folder, image_size=8, resize=16)
    assert data.image_shape == (3, 8, 8)
    for position, path in enumerate(data.root / file for file in data.files):
        pixels = np.array(Image.open(path))
        if min(pixels.shape[:2]) == 16:  # the shorter side is 16 already, so that nothing is resized
            top, left = (pixels.shape[0] - 8) // 2, (pixels.shape[1] - 8) // 2
            assert np.array_equal(data.center_crop(position).permute(1, 2, 0), pixels[top : top + 8, left : left + 8])
    whole = data.in_memory()
    assert len(whole) == 6 and torch.equal(whole.pixels([4])[0], data[4][0]) and whole.labels is data.labels
    part = data.take([4, 1])
    assert part.files == (data.files[4], data.files[1]) and torch.equal(part[0][0], data[4][0])
    assert (
        len(
            {data.fingerprint, part.fingerprint, load("imagefolder", "val", picture_folder, image_size=224).fingerprint}
        )
        == 3
    )


def test_the_shorter_side_is_eight_sevenths_of_the_image_by_default(picture_folder):
    assert load("imagefolder", "val", picture_folder, image_size=224).resize == 256
    data = load("imagefolder", "val", picture_folder, image_size=14)
    assert data.resize == 16 and load("imagefolder", "val", picture_folder, image_size=14, resize=14).resize == 14


def test_the_fingerprint_of_images_on_disk_covers_files_labels_classes_and_sizes(picture_folder):
    data = load("imagefolder", "val", picture_folder, image_size=8)
    others = (
        {"files": data.files[::-1]}, {"labels": 1 - data.labels}, {"classes": ("ant", "bee")}, {"image_size": 7},
        {"resize": 11},
    )  # fmt: skip
    assert len({data.fingerprint, *(replace(data, **change).fingerprint for change in others)}) == 6


def test_validation_images_replace_test_images_without_labels(picture_folder):
    (picture_folder / "test").mkdir()
    (picture_folder / "test" / "0.png").write_bytes(b"")
    assert load("imagefolder", "test", picture_folder, image_size=224).files[0] == "val/ant/0.png"
    (picture_folder / "val").rename(picture_folder / "elsewhere")
    with raises_problem("missing_file", "root"):
        load("imagefolder", "test", picture_folder, image_size=224)


@pytest.mark.parametrize("suffix", ["png", "tif"])
def test_gray_images_of_16_bits_are_read_in_256_levels(picture_folder, suffix):
    grey = np.random.default_rng(0).integers(0, 65536, (8, 8)).astype(np.uint16)
    grey[0, :3] = 0, 128, 65535
    Image.fromarray(grey).save(picture_folder / "val" / "ant" / f"0.{suffix}")
    data = load("imagefolder", "val", picture_folder, image_size=8, resize=8)
    place = data.files.index(f"val/ant/0.{suffix}")
    expected = np.floor(grey / 65535 * 255 + 0.5)
    assert np.array_equal(data.center_crop(place).numpy(), np.stack([expected] * 3))


@pytest.mark.parametrize("kind", [np.float32, np.int32])
def test_images_without_a_known_white_raise_with_their_name(picture_folder, kind):
    Image.fromarray(np.ones((8, 8), kind)).save(picture_folder / "val" / "ant" / "0.tif")
    with raises_problem("not_supported", "files") as caught:
        load("imagefolder", "val", picture_folder, image_size=224).in_memory()
    assert "ant/0.tif" in str(caught.value)


def test_postscript_is_not_run_whatever_the_file_is_called(picture_folder, monkeypatch):
    from PIL import EpsImagePlugin

    ran = []
    monkeypatch.setattr(EpsImagePlugin, "Ghostscript", lambda *_: ran.append(1) or Image.new("RGB", (8, 8)).im)
    (picture_folder / "val" / "ant" / "0.png").write_text(
        "%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\nshowpage\n%%EOF\n"
    )
    with raises_problem("damaged_file", "files"):
        load("imagefolder", "val", picture_folder, image_size=224)[0]
    assert not ran


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_the_dimensions_of_an_image_are_bounded_before_it_is_decoded(picture_folder):
    Image.new("1", (10_000, 10_000)).save(picture_folder / "val" / "ant" / "0.png")
    with raises_problem("damaged_file", "files") as caught:
        load("imagefolder", "val", picture_folder, image_size=224)[0]
    assert "10000 x 10000" in str(caught.value)


def test_a_fifo_among_the_images_is_not_read(picture_folder):
    path = picture_folder / "val" / "ant" / "0.png"
    path.unlink()
    os.mkfifo(path)
    with raises_problem("missing_file", "files"):
        load("imagefolder", "val", picture_folder, image_size=224)[0]


def test_damaged_images_and_folders_are_named(picture_folder):
    path = picture_folder / "val" / "ant" / "1.png"
    path.write_bytes(path.read_bytes()[:-60])
    with raises_problem("damaged_file", "files") as caught:
        load("imagefolder", "val", picture_folder, image_size=224)[1]
    assert "ant/1.png" in str(caught.value)
    with raises_problem("out_of_range", "image_size"):
        load("imagefolder", "val", picture_folder, image_size=8, resize=4)
    (picture_folder / "val" / "wasp").mkdir()
    with raises_problem("conflict", "root"):
        load("imagefolder", "val", picture_folder, image_size=224)
    (picture_folder / "train" / "wasp").mkdir()
    with raises_problem("empty", "root"):
        load("imagefolder", "train", picture_folder, image_size=224)


@pytest.fixture
def tiny(tmp_path):
    root = tmp_path / "tiny-imagenet-200"
    (root / "val" / "images").mkdir(parents=True)
    (root / "wnids.txt").write_text("n02\nn01\n")
    lines = []
    for number, name in enumerate(["n01", "n02", "n02"]):
        Image.new("L", (64, 64), 10 * number).save(root / "val" / "images" / f"val_{number}.JPEG")
        lines.append(f"val_{number}.JPEG\t{name}\t0\t0\t9\t9\n")
        (root / "train" / name / "images").mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (64, 64), (number, 0, 0)).save(root / "train" / name / "images" / f"{name}_{number}.JPEG")
    (root / "val" / "val_annotations.txt").write_text("".join(lines))
    return root


def test_tiny_imagenet_has_the_order_of_its_list_and_its_annotations(tiny):
    train, test = load("tiny_imagenet", "train", tiny.parent), load("tiny_imagenet", "test", tiny)
    assert train.classes == test.classes == ("n02", "n01")
    assert train.labels.tolist() == [0, 0, 1] and test.labels.tolist() == [1, 0, 0]
    assert train.image_shape == (3, 64, 64) and torch.equal(test[2][0], torch.full((3, 64, 64), 20 / 255))


def test_damaged_annotations_of_tiny_imagenet_are_named(tiny):
    path = tiny / "val" / "val_annotations.txt"
    whole = path.read_text()
    path.write_text(whole[:30])
    with raises_problem("damaged_file", "root") as caught:
        load("tiny_imagenet", "test", tiny)
    assert "val_annotations.txt, line 2" in str(caught.value)
    path.write_text("".join(whole.splitlines(keepends=True)[:2]))
    with raises_problem("damaged_file", "root"):
        load("tiny_imagenet", "test", tiny)
    path.write_text(whole.replace("n01", "n03"))
    with raises_problem("damaged_file", "root") as caught:
        load("tiny_imagenet", "test", tiny)
    assert "line 1: unknown class 'n03'" in str(caught.value)
    path.unlink()
    with raises_problem("missing_file", "root") as caught:
        load("tiny_imagenet", "test", tiny)
    assert "val/val_annotations.txt" in str(caught.value)
