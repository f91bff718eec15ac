"""Opening a run as an evaluation target: its test images and its attack."""

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from advnorm import AdvnormError, Config, train
from advnorm.config import Named
from advnorm.evaluation import open_run
from advnorm.evaluation.target import load_test_data
from support.problems import raises_problem

CLASSES, EACH = ("ant", "bee", "cat"), 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Images in folders, one class after another; every pixel of test image ``i`` is ``10 i``."""
    folder = tmp_path_factory.mktemp("pictures")
    for split in ("train", "test"):
        for label, name in enumerate(CLASSES):
            (folder / split / name).mkdir(parents=True)
            for number in range(EACH):
                pixels = np.full((8, 8, 3), 10 * (EACH * label + number), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / split / name / f"{number}.png")
    return folder


@pytest.fixture(scope="module")
def run(folder, tmp_path_factory):
    config = Config(
        data=Named("imagefolder", image_size=8, resize=8),
        objective="standard",
        epochs=1,
        batch_size=4,
        held_out=0,
        validate_every=0,
    )
    return train(config, out=tmp_path_factory.mktemp("runs"), data_dir=folder, device="cpu", workers=0)


@pytest.mark.parametrize(("limit", "chosen"), [(3, [0, 4, 8]), (5, [0, 2, 4, 7, 9]), (12, range(12)), (99, range(12))])
def test_a_sample_takes_images_of_every_class_of_a_folder(run, folder, limit, chosen):
    target = open_run(run, data_dir=folder, device="cpu").sample(limit)
    rows = target.rows.tolist()
    assert sorted(rows) == list(chosen) and target.labels.tolist() == [i // EACH for i in rows]
    expected = torch.tensor([10 * i / 255 for i in rows]).view(-1, 1, 1, 1).expand(-1, 3, 8, 8)
    assert torch.allclose(target.images, expected)
    assert target.conditions["images"] == len(chosen) and target.conditions["checkpoint"] == "last"
    assert target.conditions["trained_on"] == run.description["data"]["name"] == "imagefolder"


def test_a_sample_of_a_folder_is_shuffled_always_in_the_same_way(run, folder):
    first, second = (open_run(run, data_dir=folder, device="cpu").sample(None) for _ in range(2))
    assert len(first.labels) == 12 and torch.equal(first.labels, second.labels)
    assert all(len(part.unique()) > 1 for part in first.labels.split(EACH))


def test_images_outside_the_sample_are_not_decoded(run, folder):
    spoiled = folder / "test" / "ant" / "1.png"
    whole = spoiled.read_bytes()
    spoiled.write_bytes(b"no picture")
    try:
        assert len(open_run(run, data_dir=folder, device="cpu").sample(3).labels) == 3
    finally:
        spoiled.write_bytes(whole)


def test_the_attack_of_the_training_uses_running_statistics(tmp_path):
    config = Config(epochs=1, batch_size=512, attack={"steps": 1, "statistics": "batch"}, norm="dual_bn")
    found = open_run(train(config, out=tmp_path, device="cpu", workers=0), device="cpu").sample(16)
    assert found.attack.statistics == "running" and "statistics='running'" in found.conditions["attack"]
    assert found.attack.steps == 1


# -- data for a model without a run ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "other", [{"names": ["zero", "one"]}, {"names": np.array(["zero", None])}, {"made": np.datetime64("2026-01-01")}]
)
def test_other_entries_of_a_file_are_not_read(other, data, tmp_path):
    x, y = data[0][:5], data[1][:5]
    np.savez(tmp_path / "d.npz", **other, x=x.numpy(), y=y.numpy())
    images, labels = load_test_data(str(tmp_path / "d.npz"))
    assert torch.equal(images, x) and torch.equal(labels, y)


def test_a_file_of_bytes_is_divided_by_255_and_one_of_floats_is_not(data, tmp_path):
    x, y = (data[0][:5] * 255).round(), data[1][:5]
    np.savez(tmp_path / "d.npz", images=x.byte().numpy(), labels=y.int().numpy())
    save_file({"x": x / 255, "y": y}, tmp_path / "d.safetensors")
    (one, labels), (other, _) = (load_test_data(str(tmp_path / name)) for name in ("d.npz", "d.safetensors"))
    assert torch.equal(one, other) and labels.dtype == torch.int64


def test_data_that_cannot_be_loaded_is_reported(data, tmp_path):
    np.savez(tmp_path / "pickled.npz", x=np.array([None]), y=data[1].numpy())
    np.savez(tmp_path / "other.npz", a=data[1].numpy())
    for name, code in (
        ("digitz", "unknown_name"),
        ("missing.npz", "missing_file"),
        ("pickled.npz", "damaged_file"),
        ("other.npz", "missing_entry"),
    ):
        with raises_problem(code, "data"):
            load_test_data(str(tmp_path / name) if name.endswith("npz") else name)


def test_an_empty_text_and_zero_do_not_stand_for_the_default(run, folder):
    assert open_run(run, data_dir=folder, eps=0, device="cpu").threat.eps == 0
    for name, problem in (("eps", "eps"), ("threat_norm", "norm"), ("attack", "attack")):
        with raises_problem("wrong_type" if name == "eps" else "unknown_name", problem):
            open_run(run, data_dir=folder, **{name: ""}, device="cpu")


def test_all_problems_of_a_run_come_in_one_error(run):
    with pytest.raises(AdvnormError) as error:
        open_run(run, checkpoint="epoch7", eps="8", data="digitz", device="cpu")
    assert len(error.value.problems) == 3
