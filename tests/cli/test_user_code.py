"""Models and data sets of the user's own: ``--import``, ADVNORM_IMPORT, and the follow-up command of ``train``."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import advnorm
from advnorm.data import DATASETS
from advnorm.models import MODELS
from advnorm.models.libraries import import_library
from advnorm.norms import NORMS
from support.command import invoke
from support.problems import raises_problem

OWN = """
import torch
from torch import nn
import advnorm
from advnorm import data
from advnorm.models import register_model

def stripes(split):
    labels = torch.arange(64) % 2
    images = (torch.arange(8) % 2).expand(64, 1, 8, 8).float()
    images = torch.where(labels.view(-1, 1, 1, 1).bool(), images, images.mT)
    return data.ImageData(name="own_stripes", split=split, images=images, labels=labels, num_classes=2)

def net(layers):
    model = nn.Sequential(nn.Conv2d(layers.in_channels, 4, 3), nn.BatchNorm2d(4), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    model.append(nn.Linear(4, layers.num_classes))
    advnorm.convert_norm(model, layers.norm_name, **layers.norm_options)
    return model

data.DATASETS.add("own_stripes", data.DataSource(read=stripes, summary="lines", needs_root=False))
register_model("own_net", mean=None, std=None)(net)
config = advnorm.Config(model="own_net", norm="dual_bn", data="own_stripes", epochs=1, batch_size=16, eps=0.2, name="x")
"""


def test_a_run_with_own_code_is_evaluated_by_the_printed_command(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("own_code.py").write_text(OWN)
    registered = [(registry, dict(registry._entries)) for registry in (DATASETS, MODELS)]

    def run(*words, **environment):
        """Run as in a process of its own: what is registered does not stay."""
        for registry, entries in registered:
            monkeypatch.setattr(registry, "_entries", dict(entries))
        sys.modules.pop("own_code", None)
        return invoke(*words, width=300, **environment)

    trained = run("train", "own_code.py", "--device", "cpu")
    follow_up = "advnorm --import own_code.py evaluate runs/x-seed0"
    assert trained.exit_code == 0 and f"evaluate it: {follow_up}" in trained.output
    words = [*follow_up.split()[1:], "--attacks", "pgd2", "--device", "cpu"]
    evaluated = run(*words)
    assert evaluated.exit_code == 0 and "own_stripes, test" in evaluated.output
    assert run(*words[2:], ADVNORM_IMPORT="own_code").exit_code == 0
    with raises_problem("unknown_name") as caught:
        run(*words[2:])
    assert "own_stripes" in str(caught.value) and "--import" in str(caught.value)
    record = Path("runs/x-seed0/run.json")
    before = record.read_bytes()
    with pytest.raises(advnorm.AdvnormError):
        run(*words, "--json", record)
    assert record.read_bytes() == before


@pytest.mark.parametrize(
    ("source", "code"), [("no.py", "missing_file"), ("no_such", "missing_file"), ("bad.py", "own_code")]
)
def test_code_that_cannot_be_imported_is_an_error(tmp_path, monkeypatch, source, code):
    monkeypatch.chdir(tmp_path)
    Path("bad.py").write_text("1 / 0")
    with raises_problem(code):
        invoke("--import", source, "ls", "norms")


NORM = """
import advnorm
from advnorm.norms import Plan, register_norm

print("imported", __name__)

@register_norm("own_plan_bn", num_domains=2, summary="own statistics, shared affine")
def own_plan(name, domains):
    return Plan(name=name, domains=domains, normalized_by=domains, feeds=domains, affine=("clean", "clean"))

def build():
    return advnorm.create_model("small_cnn", norm="own_plan_bn", in_channels=1, normalize=False)

config = advnorm.Config(norm="own_plan_bn", epochs=1, batch_size=256, attack={"steps": 1}, validate_every=0, name="y")
"""


@pytest.mark.parametrize(
    ("words", "environment"),
    [
        ("train own_norm.py", {}),
        ("--import own_norm.py train own_norm.py", {}),
        ("--import own_norm train ./own_norm.py", {}),
        ("--import ./own_norm.py --import own_norm train --set norm=own_plan_bn epochs=1 batch_size=256 name=y", {}),
        ("train own_norm.py", {"ADVNORM_IMPORT": "own_norm.py"}),
        ("--import own_norm.py evaluate own_norm.py:build --route adv --data digits --attacks fgsm --limit 4", {}),
        ("--import own_norm.py evaluate own_norm:build --route adv --data digits --attacks fgsm --limit 4", {}),
    ],
)
def test_a_file_is_imported_once_whatever_names_it(words, environment, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    Path("own_norm.py").write_text(NORM)
    monkeypatch.setattr(NORMS, "_entries", dict(NORMS._entries))
    try:
        result = invoke(*words.split(), "--device", "cpu", width=300, **environment)
    finally:
        for name in [
            name for name, module in sys.modules.items() if str(module.__dict__.get("__file__")).endswith("own_norm.py")
        ]:
            del sys.modules[name]
    assert result.exit_code == 0 and result.output.count("imported ") == 1
    if "train" in words:
        follow_up = next(line for line in result.output.splitlines() if line.startswith("evaluate it:"))
        assert "--import" in follow_up and "own_norm" in follow_up


def test_a_network_of_timm_is_evaluated_by_its_name_and_a_file_of_weights(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    timm = import_library("timm")
    torch.manual_seed(0)
    network = timm.create_model("test_resnet", num_classes=3).eval()
    images, labels = torch.rand(24, 3, 32, 32), torch.arange(24) % 3
    mean, std = network.pretrained_cfg["mean"], network.pretrained_cfg["std"]
    with torch.no_grad():
        scores = network((images - torch.tensor(mean).view(3, 1, 1)) / torch.tensor(std).view(3, 1, 1))
    labels[:18] = scores.argmax(1)[:18]
    labels[18:] = (scores.argmax(1)[18:] + 1) % 3
    np.savez("images.npz", x=images.numpy(), y=labels.numpy())
    torch.save({"state_dict": {f"module.{k}": v for k, v in network.state_dict().items()}}, "published.pth")
    words = ["evaluate", "timm:test_resnet", "--data", "images.npz", "--attacks", "fgsm", "--device", "cpu"]
    done = invoke(*words, "--weights", "published.pth")
    assert done.exit_code == 0 and "75.0" in done.output
    with raises_problem("missing_option", "weights"):
        invoke(*words)
    with raises_problem("missing_data", "data"):
        invoke("audit", "timm:test_resnet", "--weights", "published.pth")
    with raises_problem("unknown_name"):
        invoke("audit", "timm:tset_resnet", "--weights", "published.pth", "--data", "images.npz")


def test_code_of_the_user_may_import_timm_first(tmp_path):
    import_library("timm")
    (tmp_path / "mine.py").write_text("import timm\n")
    words = [sys.executable, "-m", "advnorm", "--import", "mine.py", "ls", "norms"]  # this process has prepared torch
    subprocess.run(words, cwd=tmp_path, check=True, stdout=subprocess.DEVNULL)
