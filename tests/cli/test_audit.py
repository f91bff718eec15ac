"""``advnorm audit``: verdict, exit status, record, figure, surrogate."""

import json
from pathlib import Path

import pytest
from safetensors.torch import save_file

import advnorm
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
    assert limits["points by which one step beats PGD-10"] == "at most 5"  # two of 40 images


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
    with pytest.raises(advnorm.AdvnormError) as caught:  # the weights of the model do not fit
        invoke("audit", *common, *surrogate)
    assert caught.value.problems[0].field.startswith("surrogate")
    with raises_problem("conflict", "surrogate_weights"):
        invoke("audit", *common, "--surrogate-weights", "w.safetensors")
