"""Published layouts, written small: what is read from them, and files that are not what they should be."""

import hashlib
import io
import os
import pickle
import struct
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from advnorm import ConfigError
from advnorm.data import MissingFiles, cifar, cifar10, corruptions, load, svhn

IMAGES = {"train": 50, "test": 10}


def python2_pickle(value) -> bytes:
    """``value`` as Python 2 and its numpy pickled it: strings of bytes, arrays by ``numpy.core.multiarray``."""

    def dump(value):
        if isinstance(value, bytes):
            return b"T" + struct.pack("<i", len(value)) + value
        if isinstance(value, bool):
            return b"\x88" if value else b"\x89"
        if isinstance(value, int):
            return b"J" + struct.pack("<i", value)
        if isinstance(value, tuple):
            return b"(" + b"".join(map(dump, value)) + b"t"
        if isinstance(value, list):
            return b"](" + b"".join(map(dump, value)) + b"e"
        if isinstance(value, dict):
            return b"}(" + b"".join(dump(key) + dump(item) for key, item in value.items()) + b"u"
        kind = value.dtype.str[1:].encode()
        state = dump(1) + dump(value.shape)
        state += (
            b"cnumpy\ndtype\n" + dump((kind, 0, 1)) + b"R(" + dump(3) + dump(b"|") + b"NNN" + dump(-1) * 2 + dump(0)
        )
        state += b"tb" + dump(False) + dump(value.tobytes())
        return (
            b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n"
            + dump((0,))
            + dump(b"b")
            + b"tR("
            + state
            + b"tb"
        )

    return b"\x80\x02" + dump(value) + b"."


@pytest.fixture(params=["cifar10-binary", "cifar10-python", "cifar100-binary", "cifar100-python"])
def published(request, tmp_path, monkeypatch):
    """Name, layout, folder and content of a small CIFAR whose md5 sums stand in place of the published ones."""
    name, form = request.param.split("-")
    layout = getattr(cifar, f"{name.upper()}_LAYOUTS")[form == "python"]
    folder = tmp_path / layout.folder
    folder.mkdir()
    generator = np.random.default_rng(0)
    contents, sums = {}, {}
    for split, files in layout.files.items():
        classes = 10 if name == "cifar10" else 100
        images = generator.integers(0, 256, (IMAGES[split], 3, 32, 32), dtype=np.uint8)
        labels = generator.integers(0, classes, IMAGES[split])
        contents[split] = images, labels
        for file, rows in zip(files, np.split(np.arange(IMAGES[split]), len(files))):
            pixels, fine, coarse = images[rows].reshape(len(rows), -1), labels[rows], labels[rows] // 5
            if form == "binary":
                columns = [fine] if name == "cifar10" else [coarse, fine]
                content = np.column_stack([*columns, pixels]).astype(np.uint8).tobytes()
            elif name == "cifar10":
                content = python2_pickle({b"batch_label": b"some", b"labels": fine.tolist(), b"data": pixels})
            else:
                batch = {b"fine_labels": fine.tolist(), b"coarse_labels": coarse.tolist(), b"data": pixels}
                content = python2_pickle({b"filenames": [b"a.png"], **batch})
            (folder / file).write_bytes(content)
            sums[file] = hashlib.md5(content).hexdigest()
    monkeypatch.setattr(cifar, "IMAGES", IMAGES)
    monkeypatch.setattr(cifar, "MD5", {file: sums[file] for file in sums if file in cifar.MD5})
    return name, layout, folder, contents


def test_both_forms_of_cifar_are_read_from_the_folder_or_the_one_above(published):
    name, _, folder, contents = published
    for split, (images, labels) in contents.items():
        for root in (folder, folder.parent, str(folder)):
            data = load(name, split, root)
            assert np.array_equal(data.images.numpy(), images) and np.array_equal(data.labels.numpy(), labels)
        assert data.images.dtype == torch.uint8 and (data.name, data.split) == (name, split)
        assert data.num_classes == (10 if name == "cifar10" else 100)


def test_the_environment_names_the_folder_where_nobody_else_does(published, tmp_path, monkeypatch):
    name, _, folder, contents = published
    with pytest.raises(ConfigError, match="--data-dir.*ADVNORM_DATA"):
        load(name, "test")
    monkeypatch.setenv("ADVNORM_DATA", "")
    with pytest.raises(ConfigError, match="--data-dir.*ADVNORM_DATA"):
        load(name, "test")
    monkeypatch.setenv("ADVNORM_DATA", str(folder.parent))
    assert np.array_equal(load(name, "test").images.numpy(), contents["test"][0])
    assert len(load("digits", "test"))  # which needs no folder
    with pytest.raises(MissingFiles):
        load(name, "test", tmp_path / "elsewhere")


def test_cifar10_gives_images_and_labels(published):
    name, _, folder, contents = published
    if name == "cifar10":
        images, labels = cifar10(folder, "test")
        assert images.shape == (10, 3, 32, 32) and np.array_equal(labels.numpy(), contents["test"][1])
        with pytest.raises(ConfigError, match="did you mean 'train'"):
            cifar10(folder, "training")


def test_a_missing_a_truncated_and_a_changed_file_are_named(published):
    name, layout, folder, _ = published
    path = folder / layout.files["train"][-1]
    whole = path.read_bytes()
    for length in (len(whole) - 1, len(whole) // 2, 0):
        path.write_bytes(whole[:length])
        for check in (True, False):
            with pytest.raises(ConfigError, match=f"{path.name}.*(bytes instead of|md5 differs|truncated|Ran out)"):
                load(name, "train", folder, check=check)
    path.write_bytes(whole[:-9] + bytes([whole[-9] ^ 1]) + whole[-8:])
    if path.name in cifar.MD5:
        with pytest.raises(ConfigError, match=f"{path.name} is not the published file"):
            load(name, "train", folder)
    path.unlink()
    with pytest.raises(ConfigError, match=rf"missing {path.name}; unpack https://www\.cs\.toronto\.edu"):
        load(name, "train", folder)
    assert len(load(name, "test", folder)) == 10, "the other split does not need it"


def test_the_sums_of_all_files_but_two_are_known():
    files = {
        name
        for layout in (*cifar.CIFAR10_LAYOUTS, *cifar.CIFAR100_LAYOUTS)
        for f in layout.files.values()
        for name in f
    }
    assert files - set(cifar.MD5) == {"train.bin", "test.bin"}
    assert all(len(bytes.fromhex(md5)) == 16 for md5 in cifar.MD5.values())


class Evil:
    """Unpickled, it runs a command."""

    def __init__(self, command):
        self.command = command

    def __reduce__(self):
        return os.system, (self.command,)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_pickle_that_runs_a_command_is_refused_by_name_and_does_not_run(tmp_path, monkeypatch, protocol):
    trace = tmp_path / "trace"
    content = pickle.dumps({"data": Evil(f"touch {trace}"), "labels": []}, protocol=protocol)
    (tmp_path / "test_batch").write_bytes(content)
    with pytest.raises(ConfigError, match=r"test_batch is not the published file"):
        cifar10(tmp_path, "test")
    monkeypatch.setitem(cifar.MD5, "test_batch", hashlib.md5(content).hexdigest())
    with pytest.raises(ConfigError, match=r"test_batch: it asks for \w+\.system.*refused"):
        cifar10(tmp_path, "test")
    assert not trace.exists()
    pickle.loads(content)
    assert trace.exists(), "the pickle is as evil as it looks"


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (python2_pickle({b"labels": [1], b"data": np.zeros((1, 3072), np.uint16)}), "only unsigned bytes"),
        (python2_pickle({b"labels": [1], b"data": np.zeros((2, 3072), np.uint8)}), "2 images but 1 labels"),
        (python2_pickle({b"labels": [1], b"data": np.zeros((1, 3071), np.uint8)}), "invalid for input of size 3071"),
        (python2_pickle([1, 2]), "holds a list"),
        (python2_pickle({b"labels": [1]}), "b'data'"),
        (b"", "Ran out of input"),
        (b"(S'true'\nios\nsystem\n.", "asks for os.system"),
        (b"cbuiltins\neval\n(S'1'\ntR.", "asks for builtins.eval"),
        (b"cnumpy\ndtype.__class__\n.", "asks for numpy.dtype.__class__"),
        (pickle.dumps(np.zeros(3), protocol=2), "refused|unsigned bytes"),
    ],
)
def test_a_pickle_of_something_else_is_refused_by_name(tmp_path, content, reason):
    (tmp_path / "test_batch").write_bytes(content)
    with pytest.raises(ConfigError, match=f"cannot read .*test_batch: .*({reason})"):
        cifar10(tmp_path, "test", check=False)


@pytest.fixture
def house_numbers(tmp_path, monkeypatch):
    from scipy.io import savemat

    images = np.random.default_rng(0).integers(0, 256, (32, 32, 3, 12), dtype=np.uint8)
    digits = np.array([10, *range(1, 11), 10], dtype=np.uint8).reshape(-1, 1)
    buffer = io.BytesIO()
    savemat(buffer, {"X": images, "y": digits})
    (tmp_path / "extra_32x32.mat").write_bytes(buffer.getvalue())
    monkeypatch.setitem(svhn.MD5, "extra_32x32.mat", hashlib.md5(buffer.getvalue()).hexdigest())
    return tmp_path, images


def test_svhn_is_read_with_ten_as_zero(house_numbers):
    root, images = house_numbers
    data = load("svhn", "extra", root)
    assert data.labels.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 0]
    assert data.images.shape == (12, 3, 32, 32) and data.images[3, 2, 5, 7] == images[5, 7, 2, 3]


def test_a_damaged_file_of_svhn_is_named(house_numbers):
    root, *_ = house_numbers
    path = root / "extra_32x32.mat"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ConfigError, match=r"extra_32x32\.mat is not the published file"):
        load("svhn", "extra", root)
    with pytest.raises(ConfigError, match=r"cannot read .*extra_32x32\.mat"):
        load("svhn", "extra", root, check=False)
    with pytest.raises(ConfigError, match=r"missing test_32x32\.mat; put http://ufldl"):
        load("svhn", "test", root)


@pytest.fixture
def corrupted(tmp_path, monkeypatch):
    monkeypatch.setattr(corruptions, "PER_LEVEL", 4)
    folder = tmp_path / "CIFAR-10-C"
    folder.mkdir()
    images = np.random.default_rng(0).integers(0, 256, (20, 32, 32, 3), dtype=np.uint8)
    np.save(folder / "fog.npy", images)
    np.save(folder / "labels.npy", (np.arange(20) % 4).astype(np.uint8))
    return folder, images


def test_a_severity_of_cifar10c_is_its_fifth_of_the_array(corrupted):
    folder, images = corrupted
    for severity in range(1, 6):
        data = load("cifar10c", "test", folder.parent, corruption="fog", severity=severity)
        assert np.array_equal(data.images.numpy(), images[4 * severity - 4 : 4 * severity].transpose(0, 3, 1, 2))
        assert data.labels.tolist() == [0, 1, 2, 3]


def test_a_damaged_array_of_cifar10c_is_named_and_never_unpickled(corrupted):
    folder, images = corrupted
    with pytest.raises(ConfigError, match=r"did you mean 'frost'.*severity is 1, 2, 3, 4 or 5, got 6"):
        load("cifar10c", "test", folder, corruption="frosty", severity=6)
    path = folder / "fog.npy"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ConfigError, match=r"cannot read .*fog\.npy"):
        load("cifar10c", "test", folder, corruption="fog", severity=5)
    np.save(path, np.array([Evil(f"touch {folder / 'trace'}")], dtype=object), allow_pickle=True)
    with pytest.raises(ConfigError, match=r"cannot read .*fog\.npy"):
        load("cifar10c", "test", folder, corruption="fog", severity=1)
    assert not (folder / "trace").exists()
    np.save(path, images[:16])
    with pytest.raises(ConfigError, match=r"fog\.npy: it holds uint8 \(16, 32, 32, 3\) instead of"):
        load("cifar10c", "test", folder, corruption="fog", severity=1)


def test_a_set_that_is_known_by_name_is_found_in_its_folder_and_no_other_takes_its_place(tmp_path, picture_folder):
    with pytest.raises(ConfigError, match=r"has \d+ classes and imagenet has 1000; name the folder"):
        load("imagenet", "train", picture_folder)
    for name in range(10):
        folder = tmp_path / "sets" / "imagenette2" / "train" / f"n{name}"
        folder.mkdir(parents=True)
        Image.new("RGB", (16, 16)).save(folder / "0.png")
    for root in (tmp_path / "sets", tmp_path / "sets" / "imagenette2"):
        data = load("imagenette", "train", root, image_size=8)
        assert data.name == "imagenette" and data.num_classes == len(data) == 10


def test_folders_of_classes_have_the_order_of_the_training_classes(picture_folder):
    train, test = load("imagefolder", "train", picture_folder), load("imagefolder", "test", picture_folder)
    assert train.classes == test.classes == ("ant", "bird") and train.num_classes == 2
    assert train.files[:2] == ("train/ant/0.png", "train/ant/1.png") and test.files[-1] == "val/bird/2.png"
    assert train.labels.tolist() == [0] * 6 + [1] * 6 and test.labels.tolist() == [0, 0, 0, 1, 1, 1]
    assert all(path.is_file() for path in train.paths)
    image, label = test[5]
    assert image.shape == (3, 224, 224) and image.dtype == torch.float32 and label == 1
    assert 0 <= image.min() < image.max() <= 1
    for path in (picture_folder / "val" / "ant").iterdir():  # a class that the test images lack keeps its number
        path.unlink()
    (picture_folder / "val" / "ant").rmdir()
    assert load("imagefolder", "test", picture_folder).labels.tolist() == [1, 1, 1]


def test_the_centre_of_a_resized_image_is_cut_out(picture_folder):
    data = load("imagefolder", "val", picture_folder, image_size=8, resize=16)
    assert data.image_shape == (3, 8, 8)
    for position, path in enumerate(data.paths):
        pixels = np.array(Image.open(path))
        if min(pixels.shape[:2]) == 16:  # the shorter side is 16 already: the centre as it stands
            top, left = (pixels.shape[0] - 8) // 2, (pixels.shape[1] - 8) // 2
            assert np.array_equal(data.bytes_of(position).permute(1, 2, 0), pixels[top : top + 8, left : left + 8])
    whole = data.in_memory()
    assert len(whole) == 6 and torch.equal(whole.pixels([4])[0], data[4][0]) and whole.labels is data.labels
    part = data.take([4, 1])
    assert part.files == (data.files[4], data.files[1]) and torch.equal(part[0][0], data[4][0])
    assert len({data.fingerprint, part.fingerprint, load("imagefolder", "val", picture_folder).fingerprint}) == 3


def test_the_shorter_side_is_eight_sevenths_of_the_image_unless_told(picture_folder):
    assert load("imagefolder", "val", picture_folder).resize == 256
    data = load("imagefolder", "val", picture_folder, image_size=14)
    assert data.resize == 16 and load("imagefolder", "val", picture_folder, image_size=14, resize=14).resize == 14


def test_the_fingerprint_of_images_on_disk_knows_files_labels_classes_and_sizes(picture_folder):
    data = load("imagefolder", "val", picture_folder, image_size=8)
    others = (
        {"files": data.files[::-1]}, {"labels": 1 - data.labels}, {"classes": ("ant", "bee")}, {"image_size": 7},
        {"resize": 11},
    )  # fmt: skip
    assert len({data.fingerprint, *(replace(data, **change).fingerprint for change in others)}) == 6


def test_unlabelled_test_images_leave_the_validation_images_in_charge(picture_folder):
    (picture_folder / "test").mkdir()
    (picture_folder / "test" / "0.png").write_bytes(b"")
    assert load("imagefolder", "test", picture_folder).files[0] == "val/ant/0.png"
    (picture_folder / "val").rename(picture_folder / "elsewhere")
    with pytest.raises(ConfigError, match=r"no images at .*val: it needs a folder per class"):
        load("imagefolder", "test", picture_folder)


@pytest.mark.parametrize("suffix", ["png", "tif"])
def test_grey_pictures_of_16_bits_are_read_in_256_levels(picture_folder, suffix):
    grey = np.random.default_rng(0).integers(0, 65536, (8, 8)).astype(np.uint16)
    grey[0, :3] = 0, 128, 65535
    Image.fromarray(grey).save(picture_folder / "val" / "ant" / f"0.{suffix}")
    data = load("imagefolder", "val", picture_folder, image_size=8, resize=8)
    place = data.files.index(f"val/ant/0.{suffix}")
    expected = np.floor(grey / 65535 * 255 + 0.5)
    assert np.array_equal(data.bytes_of(place).numpy(), np.stack([expected] * 3))


@pytest.mark.parametrize(("kind", "words"), [(np.float32, "floating-point"), (np.int32, "32-bit")])
def test_pictures_without_a_known_white_are_refused_by_name(picture_folder, kind, words):
    Image.fromarray(np.ones((8, 8), kind)).save(picture_folder / "val" / "ant" / "0.tif")
    with pytest.raises(ConfigError, match=rf"ant/0\.tif holds {words} values .*save it with 8 or 16 bits"):
        load("imagefolder", "val", picture_folder).in_memory()


def test_damaged_pictures_and_folders_are_named(picture_folder):
    path = picture_folder / "val" / "ant" / "1.png"
    path.write_bytes(path.read_bytes()[:-60])
    with pytest.raises(ConfigError, match=r"cannot decode .*ant/1\.png"):
        load("imagefolder", "val", picture_folder)[1]
    with pytest.raises(ConfigError, match="1 <= image_size <= resize"):
        load("imagefolder", "val", picture_folder, image_size=8, resize=4)
    (picture_folder / "val" / "wasp").mkdir()
    with pytest.raises(ConfigError, match=r"has classes that .*train has not: wasp"):
        load("imagefolder", "val", picture_folder)
    (picture_folder / "train" / "wasp").mkdir()
    with pytest.raises(ConfigError, match=r"no images in .*train/wasp"):
        load("imagefolder", "train", picture_folder)


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
    with pytest.raises(ConfigError, match=r"val_annotations\.txt, line 2: there is no image"):
        load("tiny_imagenet", "test", tiny)
    path.write_text("".join(whole.splitlines(keepends=True)[:2]))
    with pytest.raises(ConfigError, match=r"val_annotations\.txt lists 2 of 3 images"):
        load("tiny_imagenet", "test", tiny)
    path.write_text(whole.replace("n01", "n03"))
    with pytest.raises(ConfigError, match=r"line 1: unknown class 'n03'"):
        load("tiny_imagenet", "test", tiny)
    path.unlink()
    with pytest.raises(ConfigError, match=r"missing val/val_annotations\.txt; unpack http://cs231n"):
        load("tiny_imagenet", "test", tiny)
