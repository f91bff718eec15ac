"""Weights of any file in any model: found inside, without prefixes, in all banks; errors change no tensor."""

import argparse
import os
import pickle
import warnings
from pathlib import Path

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import advnorm
from advnorm._core.errors import ConfigError
from advnorm.models import Normalized
from advnorm.models.weights import LoadedWeights, load_weights, save_weights
from support.problems import raises_problem


def files(folder: Path) -> list[str]:
    """Everything in a folder, hidden files too."""
    return sorted(path.name for path in folder.iterdir())


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        one[name].dtype == other[name].dtype and torch.equal(one[name], other[name]) for name in one
    )


def network(norm: str = "bn", seed: int = 0, **options) -> nn.Module:
    """A network whose tensors all differ from their initial values, in each bank."""
    torch.manual_seed(seed)
    model = advnorm.create_model("small_cnn", norm=norm, in_channels=1, **options)
    with torch.no_grad():
        for value in model.state_dict().values():
            value.copy_(torch.rand(value.shape) + 0.5 if value.is_floating_point() else torch.tensor(7))
    return model.eval()


# -- files of advnorm --------------------------------------------------------------------------------------------------


def test_weights_come_back_with_their_meta(tmp_path):
    model = advnorm.create_model("small_cnn", norm="dual_bn").to(memory_format=torch.channels_last)
    path = save_weights(tmp_path / "deep" / "w.safetensors", model, {"accuracy": 0.5})
    torch.manual_seed(1)
    other = advnorm.create_model("small_cnn", norm="dual_bn").to(memory_format=torch.channels_last)
    addresses = [value.data_ptr() for value in other.state_dict().values()]
    assert load_weights(other, path).meta == {"accuracy": 0.5}
    assert same(other.state_dict(), model.state_dict())
    assert [value.data_ptr() for value in other.state_dict().values()] == addresses
    assert other.conv2.weight.is_contiguous(memory_format=torch.channels_last)
    assert same(safetensors.torch.load_file(path), model.state_dict())  # any tool reads it
    assert files(path.parent) == ["w.safetensors"]


def test_shared_layers_and_foreign_files_load(tmp_path):
    shared = nn.BatchNorm1d(3)
    model = nn.Sequential(nn.Linear(3, 3), shared, nn.Linear(3, 3), shared)
    model(torch.rand(4, 3))
    save_weights(tmp_path / "w.safetensors", model, {})
    other_norm = nn.BatchNorm1d(3)
    other = nn.Sequential(nn.Linear(3, 3), other_norm, nn.Linear(3, 3), other_norm)
    load_weights(other, tmp_path / "w.safetensors")
    assert same(other.state_dict(), model.state_dict()) and other[1] is other[3]
    unshared = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3), nn.BatchNorm1d(3))
    load_weights(unshared, tmp_path / "w.safetensors")
    assert same(unshared.state_dict(), model.state_dict())
    for metadata in (None, {"format": "pt"}):
        safetensors.torch.save_file(unshared.state_dict(), tmp_path / "foreign.safetensors", metadata)
        assert load_weights(other, tmp_path / "foreign.safetensors") == LoadedWeights()


def test_compiled_models_save_and_load_under_the_plain_names(tmp_path):
    model = nn.Linear(2, 2)
    path = save_weights(tmp_path / "w.safetensors", torch.compile(model), {})
    other = torch.compile(nn.Linear(2, 2))
    load_weights(other, path)
    assert torch.equal(other.weight, model.weight)


def test_all_that_does_not_fit_a_model_comes_in_one_error(tmp_path):
    path = save_weights(tmp_path / "w.safetensors", nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2)), {})
    model = nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(2))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(ConfigError) as caught:
        load_weights(model, path)
    for part in (
        "w.safetensors does not fit",
        "1.running_mean is missing in the file",
        "0.weight is (2, 3) in the file",
    ):
        assert part in str(caught.value)
    assert same(model.state_dict(), before)


def test_files_that_are_no_weights_are_rejected_with_the_fix(tmp_path):
    model = nn.Linear(2, 2)
    with raises_problem("missing_file", "weights"):
        load_weights(model, tmp_path / "w.safetensors")
    path = save_weights(tmp_path / "w.safetensors", model, {})
    whole = path.read_bytes()
    header = b'{"__metadata__":{"advnorm":"[]"}}'
    for data in (b"", b"nonsense that is no header", whole[:-1], len(header).to_bytes(8, "little") + header):
        path.write_bytes(data)
        with raises_problem("damaged_file", "weights"):
            load_weights(model, path)


@pytest.mark.parametrize("change", [torch.Tensor.to_sparse, lambda value: value.to("meta")])
def test_weights_without_dense_values_are_rejected(tmp_path, change):
    model = nn.Linear(2, 3)
    torch.save({**model.state_dict(), "weight": change(model.weight.detach())}, tmp_path / "w.pt")
    with raises_problem("wrong_tensors", "weights") as caught:
        load_weights(model, tmp_path / "w.pt")
    assert caught.value.problems[0].hint == ""  # the number of classes is right
    with raises_problem("wrong_tensors", "weights"):
        load_weights(model.to("meta"), save_weights(tmp_path / "w.safetensors", nn.Linear(2, 3), {}))


@pytest.mark.parametrize("name", ["weight", "num_batches_tracked"])
def test_complex_numbers_are_rejected_without_a_cast(tmp_path, name, recwarn):
    model = nn.BatchNorm1d(2)
    state = model.state_dict()
    torch.save({**state, name: state[name] * 1j}, tmp_path / "w.pt")
    with raises_problem("wrong_tensors", "weights"):
        load_weights(model, tmp_path / "w.pt")
    assert not list(recwarn)


@pytest.mark.parametrize("value", [torch.full((4,), torch.nan), torch.ones(4).to(torch.float8_e4m3fn)])
def test_nan_and_eight_bit_floats_equal_themselves(tmp_path, value):
    routed = advnorm.make_norm("dual_bn", 4)
    state = {name: value if part.dim() else part for name, part in routed.state_dict().items()}
    torch.save(state, tmp_path / "w.pt")
    for model in (routed, advnorm.make_norm("bn", 4)):  # the banks are equal, so that none needs to be chosen
        load_weights(model, tmp_path / "w.pt")
        loaded = [part for part in model.state_dict().values() if part.dim()]
        assert all(torch.equal(part.nan_to_num(5), value.float().nan_to_num(5)) for part in loaded)
    name = next(name for name in state if name.startswith("weight"))
    torch.save({"model": state, "ema": {**state, name: value.double()}}, tmp_path / "w.pt")
    with raises_problem("ambiguous", "weights"):
        load_weights(routed, tmp_path / "w.pt")


@pytest.mark.parametrize("dtype", [torch.int8, torch.complex64, torch.bool])
def test_weights_of_another_kind_of_numbers_are_not_cast(tmp_path, dtype):
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)).half()
    state = model.state_dict()
    safetensors.torch.save_file({**state, "0.weight": torch.ones(3, 2).to(dtype)}, tmp_path / "w.safetensors")
    with raises_problem("wrong_tensors"):
        load_weights(model, tmp_path / "w.safetensors")
    safetensors.torch.save_file(
        {name: value.double() if name != "1.num_batches_tracked" else value.int() for name, value in state.items()},
        tmp_path / "w.safetensors",
    )
    load_weights(model, tmp_path / "w.safetensors")


def test_weights_that_cannot_be_written_leave_nothing_behind(tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "folder.safetensors").mkdir()
    for path in (tmp_path / "file" / "w.safetensors", tmp_path / "folder.safetensors"):
        with raises_problem("not_writable"):
            save_weights(path, nn.Linear(2, 2), {})
    assert files(tmp_path) == ["file", "folder.safetensors"]


# -- files of others ---------------------------------------------------------------------------------------------------

PREFIXES = st.lists(st.sampled_from(["module.", "_orig_mod.", "backbone.", "net."]), max_size=3).map("".join)


@given(
    prefix=PREFIXES,
    place=st.lists(st.sampled_from(["state_dict", "model", "net", "ema", "model_state_dict"]), max_size=2),
    suffix=st.sampled_from([".pt", ".pth", ".ckpt", ".bin", ".safetensors"]),
    wrapped=st.booleans(),
)
def test_a_state_dict_is_found_and_its_prefix_removed(prefix, place, suffix, wrapped, tmp_path_factory):
    path = tmp_path_factory.mktemp("weights") / f"w{suffix}"
    original = network()
    state = {f"{prefix}{name}": value for name, value in original.state_dict().items()}
    content = state
    for name in place:
        content = {name: content, "epoch": 3, "loss": torch.tensor(0.5)}
    if suffix == ".safetensors":
        place = []
        safetensors.torch.save_file(state, path)
    else:
        torch.save(content, path)
    model = network(seed=1)
    notes = load_weights(Normalized(model, 0.5, 0.25) if wrapped else model, path).notes
    assert same(model.state_dict(), original.state_dict())
    assert any("took" in note for note in notes) == bool(place)
    assert any("prefix" in note for note in notes) == bool(prefix or wrapped)


def test_wrappers_inside_a_network_are_removed(tmp_path):
    original = network()
    names = {name: name.replace("conv2.", "conv2.module._orig_mod.") for name in original.state_dict()}
    torch.save({names[name]: value for name, value in original.state_dict().items()}, tmp_path / "w.pt")
    model = network(seed=1)
    load_weights(model, tmp_path / "w.pt")
    assert same(model.state_dict(), original.state_dict())


def test_a_part_of_a_larger_network_is_proposed_and_loads_when_it_is_chosen(tmp_path):
    original, model, path = network(), network(seed=1), tmp_path / "w.ckpt"
    state = {f"module.model.{name}": value for name, value in original.state_dict().items()}
    torch.save({"state_dict": {**state, "module.criterion.weight": torch.ones(10)}}, path)
    with pytest.raises(ConfigError, match=f"criterion.weight would be left out.*{path}:model"):
        load_weights(model, path)
    assert load_weights(model, f"{path}:model").notes == ("took 'state_dict.model'",)
    assert same(model.state_dict(), original.state_dict())
    with raises_problem("wrong_tensors", "weights"):  # a part whose names fit and whose shapes do not
        load_weights(nn.Conv2d(1, 1, 1), path)


def test_of_several_sets_that_fit_one_is_chosen(tmp_path):
    live, average = network(seed=1), network(seed=2)
    torch.save({"model": live.state_dict(), "ema": {"module": average.state_dict()}}, tmp_path / "w.pt")
    model = network()
    with raises_problem("ambiguous", "weights"):
        load_weights(model, tmp_path / "w.pt")
    for part, chosen in (("model", live), ("ema", average)):
        load_weights(model, f"{tmp_path}/w.pt:{part}")
        assert same(model.state_dict(), chosen.state_dict())
    with raises_problem("unknown_name", "weights"):
        load_weights(model, f"{tmp_path}/w.pt:emma")
    torch.save({"model": live.state_dict(), "ema": live.state_dict()}, tmp_path / "equal.pt")
    load_weights(model, tmp_path / "equal.pt")
    assert same(model.state_dict(), live.state_dict())


def test_averaged_counts_are_counts_again(tmp_path):
    state = network().state_dict()
    torch.save({name: value * 1.0 for name, value in state.items()}, tmp_path / "w.pt")
    model = network(seed=1)
    load_weights(model, tmp_path / "w.pt")
    assert same(model.state_dict(), state)


# -- other norms -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm", ["dual_bn", "dual_affine_bn", "dual_stats_bn", "cross_bn", "triple_bn", "gmm_bn"])
def test_a_single_bank_fills_all_banks(norm, tmp_path):
    plain, x = network(), torch.rand(4, 1, 8, 8)
    torch.save({"state_dict": plain.state_dict()}, tmp_path / "w.pt")
    model = network(norm, seed=1)
    notes = load_weights(model, tmp_path / "w.pt").notes
    assert len(notes) == 2
    for domain in advnorm.domains(model):
        if norm != "gmm_bn":
            assert torch.equal(advnorm.strip(model, domain)(x), plain(x))
    expected = network("bn", seed=0)
    advnorm.convert_norm(expected, norm, **({"domains": advnorm.domains(model)} if norm == "triple_bn" else {}))
    assert same(model.state_dict(), expected.state_dict())


def test_a_branch_of_a_routed_file_is_chosen(tmp_path):
    routed, x = network("dual_bn"), torch.rand(4, 1, 8, 8)
    path = save_weights(tmp_path / "w.safetensors", routed, {})
    plain = network(seed=1)
    before = {name: value.clone() for name, value in plain.state_dict().items()}
    with raises_problem("ambiguous", "weights"):
        load_weights(plain, path)
    assert same(plain.state_dict(), before)
    for branch in ("clean", "adv"):
        load_weights(plain, f"{path}:{branch}")
        assert torch.equal(plain(x), advnorm.strip(routed, branch)(x))
    with raises_problem("unknown_name", "weights"):
        load_weights(plain, f"{path}:advers")
    three = network("triple_bn", seed=1)
    load_weights(three, f"{path}:adv")
    for branch, origin in (("clean", "clean"), ("adv", "adv"), ("adv2", "adv")):
        assert torch.equal(advnorm.strip(three, branch)(x), advnorm.strip(routed, origin)(x))


def test_equal_branches_need_no_choice_and_a_third_is_left_out(tmp_path):
    converted = network()
    advnorm.convert_norm(converted, "dual_bn")
    path = save_weights(tmp_path / "w.safetensors", converted, {})
    plain = network(seed=1)
    load_weights(plain, path)
    assert same(plain.state_dict(), network().state_dict())
    path = save_weights(tmp_path / "three.safetensors", network("triple_bn"), {})
    dual = network("dual_bn", seed=1)
    assert "adv2" in load_weights(dual, path).notes[0]


def test_a_plain_head_fills_both_heads_and_back(tmp_path):
    plain = network()
    path = save_weights(tmp_path / "w.safetensors", plain, {})
    model = network(seed=1)
    advnorm.convert_head(model)
    load_weights(model, path)
    assert torch.equal(model.fc.weight_clean, plain.fc.weight) and torch.equal(model.fc.bias_adv, plain.fc.bias)
    path = save_weights(tmp_path / "heads.safetensors", model, {})
    again = network(seed=2)
    load_weights(again, path)
    assert same(again.state_dict(), plain.state_dict())


def test_the_parts_of_a_weight_norm_are_no_banks(tmp_path):
    conv = nn.Conv2d(1, 2, 3)
    state = {"weight_g": torch.ones(2, 1, 1, 1), "weight_v": torch.ones(2, 1, 3, 3), "bias": torch.zeros(2)}
    torch.save(state, tmp_path / "w.pt")
    with raises_problem("wrong_tensors", "weights"):
        load_weights(conv, tmp_path / "w.pt")


# -- bad input ---------------------------------------------------------------------------------------------------------


class Code:
    """A pickle that creates a file when it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def write_bad_files(folder: Path) -> dict[str, str]:
    """Files that must not load, with the code of their error."""
    state = network().state_dict()
    torch.save({"state_dict": state, "code": Code(folder / "ran")}, folder / "code.pt")
    torch.save({"state_dict": state, "args": argparse.Namespace(lr=0.1)}, folder / "arguments.pt")
    torch.save(network(), folder / "module.pt")
    (folder / "raw.pt").write_bytes(pickle.dumps(Code(folder / "ran")))
    torch.save(state, folder / "whole.pt")
    (folder / "truncated.pt").write_bytes((folder / "whole.pt").read_bytes()[:-100])
    torch.save(state, folder / "old.pt", _use_new_zipfile_serialization=False)
    (folder / "old_truncated.pt").write_bytes((folder / "old.pt").read_bytes()[:-100])
    (folder / "empty.pt").write_bytes(b"")
    (folder / "folder.pt").mkdir()
    torch.save({"epoch": 3}, folder / "nothing.pt")
    torch.save(nn.Linear(2, 2).state_dict(), folder / "other.pt")
    torch.save(network(num_classes=100).state_dict(), folder / "classes.pt")
    (folder / "w.h5").write_bytes(b"x")
    with warnings.catch_warnings(action="ignore"):  # TorchScript is deprecated
        torch.jit.script(nn.Linear(2, 2)).save(folder / "program.pt")
    return {
        "code.pt": "unsafe_file",
        "arguments.pt": "unsafe_file",
        "module.pt": "unsafe_file",
        "raw.pt": "unsafe_file",
        "program.pt": "unsafe_file",
        "truncated.pt": "damaged_file",
        "old_truncated.pt": "damaged_file",
        "empty.pt": "damaged_file",
        "folder.pt": "missing_file",
        "missing.pt": "missing_file",
        "nothing.pt": "empty",
        "other.pt": "wrong_tensors",
        "classes.pt": "wrong_tensors",
        "w.h5": "not_supported",
    }


def test_bad_files_are_errors_and_change_nothing(tmp_path):
    model = network()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    for name, code in write_bad_files(tmp_path).items():
        with raises_problem(code, "weights"):
            load_weights(model, tmp_path / name)
    assert not (tmp_path / "ran").exists() and same(model.state_dict(), before)
    load_weights(model, tmp_path / "old.pt")
    fixes = {
        "classes.pt": "build the model with 100 classes",
        "other.pt": "no name fits",
        "module.pt": r"save\(model.state_dict",
    }
    for name, words in fixes.items():
        with pytest.raises(ConfigError, match=words):
            load_weights(model, tmp_path / name)
    torch.save({**model.state_dict(), "fc.bias": torch.tensor(1.0)}, tmp_path / "scalar.pt")
    with raises_problem("wrong_tensors", "weights"):
        load_weights(model, tmp_path / "scalar.pt")


# -- normalized inputs -------------------------------------------------------------------------------------------------


def test_a_normalized_model_takes_pixels():
    model, x = network(), torch.rand(4, 1, 8, 8)
    assert torch.equal(Normalized(model, [0.3], 0.2)(x), model((x - 0.3) / 0.2))
    colours = nn.Flatten()
    x = torch.rand(2, 3, 4, 4)
    mean, std = torch.tensor([0.1, 0.2, 0.3]), torch.tensor([0.4, 0.5, 0.6])
    expected = ((x - mean.view(3, 1, 1)) / std.view(3, 1, 1)).flatten(1)
    assert torch.equal(Normalized(colours, mean.tolist(), std.tolist())(x), expected)
    with raises_problem("wrong_shape", "mean"):  # broadcasting would make three channels of one
        Normalized(colours, mean.tolist(), std.tolist())(x[:, :1])
    for mean, std, field in ((float("nan"), 1, "mean"), (0.5, 0, "std"), ((0, 0), (1, 1, 1), "std"), ((), 1, "mean")):
        with pytest.raises(ConfigError) as caught:
            Normalized(colours, mean, std)
        assert caught.value.problems[0].field == field
