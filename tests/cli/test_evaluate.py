"""``advnorm evaluate``: a run or the user's own model, its table, its record, and errors before any work."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

import advnorm
from advnorm.cli.evaluate import faster_search_hint
from support.command import invoke
from support.problems import raises_problem

CPU = ("--device", "cpu")


def test_files_of_both_kinds_give_the_same_table(own_model, data):
    x, y = (part[:100] for part in data)
    np.savez("d.npz", x=(x * 255).round().byte().numpy(), y=y.int().numpy())
    save_file({"images": (x * 255).round() / 255, "labels": y}, "d.safetensors")
    accuracies = []
    for name in ("d.npz", "d.safetensors"):
        options = ("--weights", "w.safetensors", "--data", name, "--eps", "51/255", "--json", f"{name}.json", *CPU)
        result = invoke("evaluate", "own_model:build", "--attacks", "pgd10", *options)
        assert result.exit_code == 0 and "pgd10" in result.output
        (accuracy,) = json.loads(Path(f"{name}.json").read_text())["accuracy"].values()
        accuracies.append(accuracy)
    assert accuracies[0] == accuracies[1] and accuracies[0]["clean"] > 0.9


@pytest.mark.parametrize(
    ("target", "weights", "data", "code", "field"),
    [
        ("own_model", None, "digits", "wrong_type", "target"),
        ("runs/typo", None, "digits", "missing_file", "target"),
        ("own_model:broken", None, "digits", "own_code", "module"),
        ("own_model:leaving", None, "digits", "own_code", "module"),
        ("own_model:dual", None, "digits", "missing_route", "route"),
        ("own_modell:build", None, "digits", "missing_file", "module"),
        ("own_model:bild", None, "digits", "unknown_name", "target"),
        ("own_model:number", None, "digits", "wrong_type", "target"),
        ("own_model:build", "w.pth", "digits", None, None),
        ("own_model:build", "x.safetensors", "digits", None, None),
        ("own_model:build", "other.safetensors", "digits", None, None),
        ("own_model:build", None, "digitz", "unknown_name", "data"),
        ("own_model:build", None, "d.npz", "missing_file", "data"),
        ("own_model:build", None, "other.safetensors", "missing_entry", "data"),
        ("own_model:build", None, None, "missing_data", "data"),
    ],
)
def test_what_cannot_be_evaluated_is_an_error(own_model, target, weights, data, code, field):
    save_file({"a": torch.zeros(1)}, "other.safetensors")
    options = [*(("--weights", weights) if weights else ()), *(("--data", data) if data else ())]
    with pytest.raises(advnorm.AdvnormError) as caught:
        invoke("evaluate", target, "--attacks", "fgsm", *options, *CPU)
    problem = caught.value.problems[0]
    assert code is None or (problem.code, problem.field) == (code, field)


def test_several_networks_of_own_code_are_named_in_one_table(own_model):
    few = ("--data", "digits", "--limit", "4", "--attacks", "fgsm", *CPU)
    result = invoke("evaluate", "own_model:build", "own_model.py:build", *few)
    assert result.exit_code == 0, result.output
    table = result.output[result.output.index("seeds") :]
    assert "own_model:build" in table and "own_model.py:build" in table


def test_a_target_that_cannot_be_opened_needs_no_images(own_model):
    with pytest.raises(advnorm.AdvnormError) as caught:
        invoke("evaluate", "runs/typo", *CPU)
    assert [(problem.code, problem.field) for problem in caught.value.problems] == [("missing_file", "target")]


def test_an_error_of_own_code_names_its_line_and_its_cause(own_model):
    with raises_problem("own_code") as caught:
        invoke("evaluate", "own_model:broken", "--data", "digits", *CPU)
    assert "own_model.py, line 7" in str(caught.value)


def test_a_network_without_values_is_an_error(own_model, recwarn):
    for weights in ((), ("--weights", "w.safetensors")):
        with raises_problem("wrong_device", "target"):
            invoke("evaluate", "own_model:empty", "--data", "digits", *weights, *CPU)
    assert not [warning for warning in recwarn if "meta" in str(warning.message)]


def test_one_error_lists_everything_that_is_wrong_with_a_command(own_model):
    options = ("--data", "digitz", "--eps", "8", "--statistics", "frozen", "--json", own_model, *CPU)
    with pytest.raises(advnorm.AdvnormError) as caught:
        invoke("evaluate", "own_model:bild", "--attacks", "pdg10", "pgd10-cv", *options)
    for part in ("'pgd10'", "'cw'", "'build'", "'digitz'", "'8/255'", "'frozen'", "is a folder"):
        assert part in str(caught.value)


def test_a_seed_has_one_range(own_model):
    options = ("own_model:build", "--data", "digits", "--limit", "4", "--attacks", "clean", *CPU)
    for seed in (-5, 2**31):
        with raises_problem("out_of_range", "seed"):
            invoke("evaluate", *options, "--seed", seed)
        with raises_problem("out_of_range", "seed"):
            advnorm.attacks.PGD(threat=advnorm.ThreatModel(norm="Linf", eps=0.1), seed=seed)
        with raises_problem("out_of_range", "seed"):
            advnorm.Config(seed=seed)


def test_the_threat_norm_is_accepted_in_any_case(own_model):
    words = ("evaluate", "own_model:build", "--data", "digits", "--limit", "4", "--attacks", "fgsm", *CPU)
    assert invoke(*words, "--threat-norm", "l2").exit_code == 0
    with raises_problem("unknown_name", "norm"):
        invoke(*words, "--threat-norm", "L3")


@pytest.mark.parametrize("name", ["r.json", "r.json.partial"])
def test_a_result_whose_record_cannot_be_written_is_shown(own_model, name):
    (own_model / "own_model.py").write_text(
        "import pathlib, torch\n"
        "class Net(torch.nn.Linear):\n"
        "    def forward(self, x):\n"
        f"        len(x) > 4 and x.requires_grad and pathlib.Path({name!r}).mkdir(exist_ok=True)\n"  # during an attack
        "        return super().forward(x.flatten(1))\n"
        "def build():\n    torch.manual_seed(0)\n    return Net(64, 10)\n"
    )
    command = [
        sys.executable, "-m", "advnorm", "evaluate", "own_model:build", "--data", "digits", "--limit", "200",
        "--json", "r.json", "--eps", "0.01", "--attacks", "fgsm", *CPU,
    ]  # fmt: skip
    out = subprocess.run(command, capture_output=True, text=True, check=False)
    assert out.returncode == 2 and f"cannot write {name}" in out.stderr
    assert ("200 images" in out.stdout) == (name == "r.json")  # the partial record fails before the end


def test_an_existing_record_is_read_back_and_edited_code_is_noticed(own_model):
    def evaluate(levels: int) -> str:
        (own_model / "own_model.py").write_text(
            "import torch\nclass Net(torch.nn.Linear):\n"
            f"    def forward(self, x):\n        return super().forward((x * {levels}).round().flatten(1) / {levels})\n"
            "def build():\n    torch.manual_seed(0)\n    return Net(64, 10)\n"
        )
        shutil.rmtree("__pycache__", ignore_errors=True)
        sys.modules.pop("own_model", None)
        options = ("--data", "digits", "--eps", "0.01", "--limit", "20", "--json", "r.json", *CPU)
        return invoke("evaluate", "own_model:build", "--attacks", "noise-uniform", *options).output

    assert "record: r.json" in evaluate(16)
    assert "read back from r.json" in evaluate(16)
    with pytest.raises(advnorm.AdvnormError):
        evaluate(2)


def test_no_more_images_of_a_folder_are_decoded_than_evaluated(own_model, tmp_path):
    folder = tmp_path / "pictures"
    for split in ("train", "val"):
        for name in ("cat", "dog"):
            (folder / split / name).mkdir(parents=True)
            Image.new("RGB", (224, 224)).save(folder / split / name / "00.png")
            (folder / split / name / "01.png").write_bytes(b"damaged")
    (own_model / "own_model.py").write_text(
        "from torch import nn\ndef build():\n    return nn.Sequential(nn.Flatten(), nn.Linear(3 * 224 * 224, 2))\n"
    )
    words = ("evaluate", "own_model:build", "--data", f"imagefolder:{folder}", "--attacks", "fgsm", *CPU)
    assert invoke(*words, "--limit", "2").exit_code == 0  # the first image of each class
    with pytest.raises(advnorm.AdvnormError):
        invoke(*words, "--limit", "3")


def test_the_faster_search_is_suggested_on_a_gpu():
    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    assert "autoattack-steps10-bf16" in faster_search_hint(["pgd10", "autoattack-steps10"], cuda)
    assert faster_search_hint(["autoattack"], cpu) is None
    for names in (["pgd10", "square"], ["autoattack-bf16"], ["autoattack-float32"]):
        assert faster_search_hint(names, cuda) is None


SMALL = {"model": "small_cnn", "eps": 0.1, "epochs": 1, "batch_size": 256, "attack": {"steps": 1}, "seed": 7}


def test_the_record_of_a_run_contains_how_it_was_trained(tmp_path):
    run = advnorm.train(advnorm.Config.from_dict({**SMALL, "held_out": 0.1}), out=tmp_path, device="cpu")
    for which in ("best", "last"):
        path = tmp_path / f"{which}.json"
        options = ("--attacks", "fgsm", "--limit", "8", "--json", path, *CPU)
        result = invoke("evaluate", run.folder, *options, *(("--checkpoint", "last") if which == "last" else ()))
        assert result.exit_code == 0, result.output
        about = json.loads(path.read_text())["about"]
        assert about["training"] == json.loads(json.dumps(run.config.to_dict())) and run.config.seed == 7
        assert (about["run"], about["checkpoint"], about["data"]) == (run.folder.name, which, "digits, test")
        assert f"checkpoint {which}" in " ".join(result.output.split())


def test_an_unfinished_training_is_reported(tmp_path):
    config = advnorm.Config.from_dict({**SMALL, "epochs": 3})
    run = advnorm.train(config, out=tmp_path, device="cpu", max_minutes=0)
    result = invoke("evaluate", run.folder, "--attacks", "fgsm", "--limit", "8", *CPU)
    assert result.exit_code == 0 and "0 of 3 epochs" in " ".join(result.output.split())


def test_options_that_belong_to_another_kind_of_target_are_rejected(own_model, tmp_path):
    with raises_problem("conflict", "checkpoint"):
        invoke("evaluate", "own_model:build", "--data", "digits", "--checkpoint", "last", *CPU)
    with raises_problem("conflict", "weights"):
        invoke("evaluate", tmp_path, "--weights", "w.safetensors", *CPU)
