"""Images and labels from every kind of data."""

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, SequentialSampler, TensorDataset, default_collate

from advnorm.data import ImageData, load, make_loader
from advnorm.data.gather import gather, gather_spread
from support.problems import raises_problem


class MapStyle(Dataset):
    """A data set that never raises IndexError and lists the rows that are read."""

    def __init__(self, x, y):
        self.x, self.y, self.read = x, y, []

    def __len__(self):
        return len(self.x)

    def __getitem__(self, row):
        self.read.append(row)
        return self.x[row], int(self.y[row])


class Pictures(MapStyle):
    def __getitem__(self, row):
        from PIL import Image

        return Image.new("RGB", (8, 8)), 0


class Batches(MapStyle):
    """Ten batches of four images."""

    def __len__(self):
        return 10

    def __getitem__(self, row):
        return self.x[4 * row : 4 * row + 4], self.y[4 * row : 4 * row + 4]


@pytest.fixture
def few(data):
    return data[0][:40], data[1][:40]


@pytest.mark.parametrize(
    "wrap",
    [
        lambda x, y: (x, y),
        lambda x, y: [x.numpy(), y.numpy()],
        TensorDataset,
        MapStyle,
        lambda x, y: DataLoader(TensorDataset(x, y), batch_size=7),
        lambda x, y: ((x[i : i + 9], y[i : i + 9]) for i in range(0, len(x), 9)),
        lambda x, y: ImageData(name="some", split="test", images=x, labels=y, num_classes=10),
    ],
    ids=["tensors", "arrays", "TensorDataset", "map style", "loader", "generator", "ours"],
)
def test_data_comes_in_many_forms(wrap, few):
    x, y = few
    for limit in (None, 11):
        images, labels = gather(wrap(x, y), limit)
        assert torch.equal(images, x[:limit]) and torch.equal(labels, y[:limit])


@pytest.mark.parametrize("wrap", [lambda listed: listed, lambda listed: DataLoader(listed, batch_size=7)])
def test_spread_images_are_the_only_ones_that_are_read(few, wrap):
    rows = list(range(0, 40, 4))
    listed = MapStyle(*few)
    images, labels, index = gather_spread(wrap(listed), 10)
    assert listed.read == index.tolist() == rows
    assert torch.equal(images, few[0][rows]) and torch.equal(labels, few[1][rows])


@pytest.mark.parametrize(
    "wrap",
    [
        lambda x, y: (x, y),
        Batches,
        lambda x, y: [*zip(x.split(1), y.split(1))],
        lambda x, y: DataLoader([*zip(x, y)], batch_size=7, collate_fn=default_collate),
        lambda x, y: DataLoader(Batches(x, y), batch_size=None),
    ],
)
def test_spread_images_are_the_same_from_tensors_and_batches(wrap, few):
    images, _, index = gather_spread(wrap(*few), 10)
    assert index.tolist() == list(range(0, 40, 4)) and torch.equal(images, few[0][::4])


def inverted(batch):
    x, y = default_collate(batch)
    return 1 - x, y


@pytest.mark.parametrize(
    ("options", "change"),
    [
        ({"batch_size": 7, "collate_fn": inverted}, lambda x: 1 - x),
        ({"batch_size": 7, "drop_last": True}, lambda x: x[:35]),
        ({"batch_sampler": [[5, 3], [1, 0, 2]]}, lambda x: x[[5, 3, 1, 0, 2]]),
        ({"batch_sampler": BatchSampler(range(20, 40), 6, False)}, lambda x: x[20:]),
        ({"batch_size": 7, "sampler": SequentialSampler(range(9))}, lambda x: x[:9]),
    ],
)
def test_a_loader_that_changes_its_data_set_gives_spread_images_of_its_batches(few, options, change):
    x, y = few
    images, _, rows = gather_spread(DataLoader(TensorDataset(x, y), **options), 5)
    whole = change(x)
    assert rows.tolist() == [number * len(whole) // 5 for number in range(5)]
    assert torch.equal(images, whole[rows])


def test_spread_images_of_a_folder_are_the_only_ones_that_are_decoded(mostly_damaged_folder):
    root, rows = mostly_damaged_folder
    images, labels, index = gather_spread(load("imagefolder", "test", root, image_size=8, resize=8), 10)
    assert index.tolist() == rows and labels.tolist() == [0] * 5 + [1] * 5
    assert torch.equal((images[:, 0, 0, 0] * 255).round().long(), torch.tensor(rows) % 20)


@pytest.mark.parametrize(
    ("wrap", "code"),
    [
        (lambda x, y: [], "empty"),
        (lambda x, y: x, "wrong_type"),
        (lambda x, y: [x, x, x], "wrong_type"),
        (lambda x, y: "digits", "wrong_type"),
        (lambda x, y: make_loader(load("digits", "test"), batch_size=8), "wrong_type"),
        (Pictures, "wrong_type"),
        (lambda x, y: [(x[0], 0), (x[0, :, :4], 0)], "wrong_shape"),
    ],
)
def test_data_without_images_and_labels_is_rejected(wrap, code, few):
    with raises_problem(code, "data"):
        gather(wrap(*few))


def test_images_and_labels_of_different_number_are_an_error(few):
    for limit in (None, 3):
        with raises_problem("wrong_shape", "data"):
            gather_spread((few[0], few[1][1:]), limit)
