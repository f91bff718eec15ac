"""``advnorm audit``: verdict, exit status, record, figure, surrogate."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import advnorm
from advnorm.evaluation.outcomes import decode_rows
from support.command import invoke
from support.problems import raises_problem

QUICK = ("--data", "digits", "--budget", "quick", "--device", "cpu")


def test_the_verdict_is_printed_and_is_the_exit_status(own_model, undefended):
    save_file(undefended.state_dict(), "u.safetensors")
    options = ("--weights", "u.safetensors", "--eps", "51/255", "--limit", "40", "--json", "v.json", "--plot", "v.png")
    result = invoke("audit", "own_model:build", *QUICK, *options)
    record = json.loads(Path("v.json").read_text())
    assert result.exit_code == record["exit_code"] == 4 and Path("v.png").exists()
    assert "NONE" in result.output and "record: v.json" in result.output
    assert "own_model:build" in result.output and "u.safetensors" in result.output
    limits = {item["text"]: item["expected"] for item in record["evidence"]}
    assert limits["points by which one step beats PGD-10"] == "at most 5 (2 of 40 images)"


def test_a_limit_selects_the_same_images_as_in_evaluate(own_model):
    common = ("own_model:build", "--weights", "w.safetensors", "--data", "digits", "--device", "cpu", "--limit", "30")
    invoke("audit", *common, "--budget", "quick", "--json", "a.json")
    invoke("evaluate", *common, "--attacks", "fgsm", "--json", "e.json")
    audited, evaluated = (json.loads(Path(name).read_text()) for name in ("a.json", "e.json"))
    count = len(advnorm.data.load("digits", "test"))
    assert decode_rows(audited["rows"]).tolist() == [row * count // 30 for row in range(30)]
    assert audited["rows"] == evaluated["rows"] and audited["clean"] == evaluated["accuracy"]["default"]["clean"]


def test_too_few_images_for_a_verdict_are_reported_before_the_attacks(own_model):
    result = invoke("audit", "own_model:build", "--weights", "w.safetensors", *QUICK, "--limit", "20")
    assert "20 images are too few" in result.output.partition("clean")[0] and result.exit_code == 3
    x, y = advnorm.data.digits("test")
    save_file({"x": x[:40].clone(), "y": y[:40].clone()}, "test.safetensors")
    file = ("--data", "test.safetensors", "--device", "cpu", "--eps", "0.2", "--budget", "quick")
    assert "too few" not in invoke("audit", "own_model:build", "--weights", "w.safetensors", *file).output


def test_one_error_lists_everything_that_is_wrong(own_model):
    options = ("--threat-norm", "L3", "--budget", "quik", "--plot", "v.xyz", "--surrogate", "own_model:number")
    with pytest.raises(advnorm.AdvnormError) as caught:
        invoke("audit", "own_model:build", "--device", "cpu", *options)
    fields = {problem.field for problem in caught.value.problems}
    assert {"norm", "budget", "plot", "surrogate.target", "data"} <= fields


def test_a_surrogate_has_its_own_weights(own_model, sound):
    (own_model / "quantized.py").write_text(
        "import torch, own_model\n"
        "class Quantized(torch.nn.Module):\n"
        "    def __init__(self):\n        super().__init__()\n        self.model = own_model.build()\n"
        "    def forward(self, x):\n        return self.model((x * 16).round() / 16)\n"
    )
    save_file({f"model.{name}": value for name, value in sound.state_dict().items()}, "q.safetensors")
    common = ("quantized:Quantized", "--weights", "q.safetensors", "--eps", "0.2", "--limit", "30", *QUICK)
    surrogate = ("--surrogate", "own_model:build")
    result = invoke("audit", *common, *surrogate, "--surrogate-weights", "w.safetensors")
    assert "from surrogate" in result.output
    save_file({"a": torch.zeros(1)}, "other.safetensors")
    with pytest.raises(advnorm.AdvnormError) as caught:
        invoke("audit", *common, *surrogate, "--surrogate-weights", "other.safetensors")
    assert caught.value.problems[0].field.startswith("surrogate")
    with raises_problem("conflict", "surrogate_weights"):
        invoke("audit", *common, "--surrogate-weights", "w.safetensors")


THIRD_PARTY = """\
import torch

class Net(torch.nn.Module):  # expects normalized images, as most published networks do
    def __init__(self):
        super().__init__()
        self.features = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 32), torch.nn.ReLU())
        self.fc = torch.nn.Linear(32, 10)

    def forward(self, x):
        return self.fc(self.features(x))
"""


def test_a_published_network_is_audited_by_one_command(tmp_path):
    """A ``.pt`` file with a state dict inside, saved from DataParallel, for normalized images."""
    (tmp_path / "third_party.py").write_text(THIRD_PARTY)
    scope: dict = {}
    exec(THIRD_PARTY, scope)
    torch.manual_seed(0)
    net = scope["Net"]()
    saved = torch.nn.DataParallel(net)
    torch.save({"state_dict": saved.state_dict(), "epoch": 3, "best_acc": 0.9}, tmp_path / "published.pt")
    command = "audit third_party.py:Net --weights published.pt --mean 0.3 --std 0.4 --data digits --eps 0.1"
    options = "--budget quick --limit 30 --device cpu --json verdict.json"
    words = [sys.executable, "-m", "advnorm", *command.split(), *options.split()]
    done = subprocess.run(words, cwd=tmp_path, env=os.environ, capture_output=True, text=True, check=False)
    record = json.loads((tmp_path / "verdict.json").read_text())
    assert done.returncode == record["exit_code"], done.stderr
    assert "took 'state_dict'" in done.stdout and "removed the prefix 'module.'" in done.stdout
    threat = advnorm.ThreatModel(eps=0.1)
    model = advnorm.models.Normalized(net, 0.3, 0.4)
    expected = advnorm.audit(model, advnorm.data.load("digits", "test"), threat, budget="quick", limit=30)
    assert [record[key] for key in ("clean", "pgd10", "worst_case")] == [
        expected.clean,
        expected.claimed,
        expected.worst_case,
    ]
    assert record["about"]["mean"] == [0.3] and "module." in record["about"]["weights"]


@pytest.mark.parametrize(
    ("options", "code", "field"),
    [
        ("--mean 0.5", "conflict", "std"),
        ("--std 0.5", "conflict", "mean"),
        ("--mean 0.5 --std 0", "out_of_range", "std"),
        ("--mean 0.5 0.5 0.5 --std 0.5 0.5", "wrong_shape", "std"),
    ],
)
def test_a_wrong_normalization_is_an_error_before_any_work(own_model, options, code, field):
    with raises_problem(code, field):
        invoke("audit", "own_model.py:build", *QUICK, *options.split())
