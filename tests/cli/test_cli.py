"""The command line: what it prints, what it refuses, and its exit status."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import advnorm
from advnorm import __version__, list_models, list_norms
from advnorm._core.errors import AdvnormError
from advnorm.cli import app as commands
from advnorm.cli.app import app, spelled_out
from advnorm.data import DATASETS
from advnorm.models import MODELS


def invoke(*arguments):
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": "200"})


def test_ls_norms_lists_every_norm():
    out = invoke("ls", "norms")
    assert out.exit_code == 0
    assert [name for name in list_norms() if name not in out.output] == []


def test_ls_models_lists_parameters_and_takes_a_pattern():
    out = invoke("ls", "models", "*resnet18")
    assert "11,173,962" in out.output and "11,171,146" in out.output and "11,689,512" in out.output
    assert [name for name in list_models("*resnet18") if name not in out.output] == []
    assert "vgg11" not in out.output


def test_ls_attacks_names_options_as_they_are_typed():
    out = invoke("ls", "attacks").output
    assert all(word in out for word in ("pgd10", "restartsN", "float32, tf32, bf16"))
    threat = advnorm.ThreatModel(eps="8/255")
    for precision in ("float32", "tf32", "bf16"):
        assert advnorm.attacks.get(f"autoattack-{precision}", threat=threat).precision == precision


@pytest.mark.parametrize("kind", ["norms", "models", "attacks", "objectives", "datasets", "analyses", "studies"])
def test_a_pattern_that_matches_nothing_is_told_with_one_that_does(kind):
    told = str(invoke("ls", kind, "zzz*").exception)
    example = re.search("use one such as '(.*)'", told)[1]
    assert "leave it out to see all" in told and invoke("ls", kind, example).exit_code == 0


def test_ls_objectives_says_what_is_no_option_of_theirs():
    out = invoke("ls", "objectives").output
    assert "label_smoothing, running_epochs and mix (mixup, cutmix) are settings" in out and "beta=6.0" in out
    assert all(name in out for name in ("second_pass=apart_sam", "regularizer=ligs", "rho=0.05"))


def test_demo_says_what_it_costs_before_it_starts():
    out = invoke("demo", "--help")
    assert out.exit_code == 0
    assert "a few minutes on two CPU cores" in out.output and "--quick" in out.output


def test_bench_norms_prints_ratios_and_writes_a_record(tmp_path):
    record = tmp_path / "deep" / "norms.json"
    out = invoke(
        "bench", "norms", "dual_bn", "none", "--model", "small_cnn", "--batch-size", "8", "--rounds", "2",
        "--device", "cpu", "--json", str(record),
    )  # fmt: skip
    assert out.exit_code == 0, out.output
    data = json.loads(record.read_text())
    assert set(data["rows"]) == {"plain nn.BatchNorm2d", "dual_bn", "none"}
    assert data["rows"]["plain nn.BatchNorm2d"]["eval"]["ratio"] == 1.0
    assert data["rows"]["dual_bn"]["train"]["seconds"] > 0
    assert {"device", "torch", "rounds", "batch_size", "precision", "threads", "commit"} <= set(data)
    assert data["advnorm"] == __version__


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("bench", "norms", "dualbn"), "did you mean 'dual_bn'"),
        (("bench", "norms", "--model", "resnet81"), "did you mean 'resnet18'"),
        (("bench", "norms", "--precision", "fp8"), "unknown precision 'fp8'"),
        (("bench", "norms", "--rounds", "-1"), "rounds at least 1"),
        (("bench", "norms", "--device", "gpu"), "unknown device 'gpu'; use 'cpu', 'cuda'"),
        (("ls", "norms", "x*"), "no norm matches 'x*'"),
    ],
)
def test_a_wrong_argument_is_explained(arguments, message):
    out = invoke(*arguments)
    assert isinstance(out.exception, AdvnormError)
    assert message in str(out.exception)


@pytest.mark.parametrize("kind", ["norms", "train", "autoattack"])
def test_a_bench_refuses_a_place_that_cannot_be_written_before_it_measures(kind, tmp_path, monkeypatch):
    for name in ("norms.bench_norms", "train.bench_train", "autoattack.subject"):
        monkeypatch.setattr(f"advnorm.bench.{name}", lambda *_, **__: pytest.fail("measured first"))
    (tmp_path / "file").touch()
    for place in (tmp_path, tmp_path / "file" / "r"):
        out = invoke("bench", kind, "--json", str(place))
        assert isinstance(out.exception, AdvnormError) and out.exception.code == "not_writable"


def test_a_wrong_precision_is_refused_before_a_network_is_trained(monkeypatch):
    monkeypatch.setattr("advnorm.bench.autoattack._small", lambda *_: pytest.fail("trained first"))
    out = invoke("bench", "autoattack", "--precision", "fp16")
    assert isinstance(out.exception, AdvnormError)
    assert "unknown precision 'fp16', did you mean 'bf16'?" in str(out.exception)


def test_an_error_is_one_line_and_exit_status_2():
    out = subprocess.run(
        [sys.executable, "-m", "advnorm", "bench", "norms", "dualbn"], capture_output=True, text=True, check=False
    )
    assert out.returncode == 2
    assert out.stderr.strip() == "error: bad benchmark: unknown norm 'dualbn', did you mean 'dual_bn'?"
    assert out.stdout == ""


def test_a_crash_is_no_verdict(monkeypatch, capsys):
    def crash(_arguments):
        raise RuntimeError("a bug")

    monkeypatch.setattr(commands, "app", crash)
    with pytest.raises(SystemExit) as left:
        commands.main()
    assert left.value.code == 70 and "RuntimeError: a bug" in capsys.readouterr().err


@pytest.mark.parametrize(
    "error", [OSError(28, "No space left on device", "a.json"), PermissionError(13, "Denied", "b")]
)
def test_what_a_machine_refuses_is_one_line_and_no_crash(monkeypatch, capsys, error):
    def fail(*_):
        raise error

    monkeypatch.setattr(commands, "app", fail)
    with pytest.raises(SystemExit) as out:
        commands.main()
    assert out.value.code == 2
    assert capsys.readouterr().err.strip() == f"error: {error.filename}: {error.strerror}"


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


def test_a_run_with_a_model_and_a_data_set_of_ones_own_is_judged_by_the_command_that_is_told(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("own_code.py").write_text(OWN)
    Path("bad.py").write_text("1 / 0")
    registered = [(registry, dict(registry._entries)) for registry in (DATASETS, MODELS)]

    def run(*arguments, **environ):
        """As in a process of its own: what is registered does not stay."""
        for registry, entries in registered:
            monkeypatch.setattr(registry, "_entries", dict(entries))
        sys.modules.pop("own_code", None)
        return CliRunner().invoke(app, list(arguments), env={"COLUMNS": "300", **environ})

    trained = run("train", "own_code.py", "--device", "cpu")
    told = "advnorm --import own_code.py evaluate runs/x-seed0"
    assert trained.exit_code == 0 and f"judge it: {told}" in trained.output
    judge = [*told.split()[1:], "--attacks", "pgd2", "--device", "cpu"]
    judged = run(*judge)
    assert judged.exit_code == 0 and "data own_stripes, test" in judged.output
    named = run(*judge[2:], ADVNORM_IMPORT="own_code")
    assert named.exit_code == 0
    unknown = str(run(*judge[2:]).exception)
    assert "unknown data set 'own_stripes'" in unknown and "advnorm --import FILE.py" in unknown
    assert "on which images" not in unknown
    for wrong, message in (
        ("no.py", "there is no such file"),
        ("no_such", "no module 'no_such'"),
        ("bad.py", "importing bad.py raised ZeroDivisionError"),
    ):
        assert message in str(run("--import", wrong, "ls", "norms").exception)
    record = Path("runs/x-seed0/run.json")
    before = record.read_bytes()
    assert "is no record of an evaluation; choose another file" in str(run(*judge, "--json", str(record)).exception)
    assert record.read_bytes() == before


def test_a_builder_that_fails_and_a_figure_of_no_kind_are_usage_errors(tmp_path):
    (tmp_path / "mine.py").write_text("def build():\n    raise ValueError('cannot find [my] weights')\n")
    command = [sys.executable, "-m", "advnorm", "audit", "mine:build", "--plot", "x.xyz"]
    out = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert out.returncode == 2 and "Traceback" not in out.stderr
    assert "mine:build raised ValueError: cannot find [my] weights (mine.py, line 2)" in out.stderr
    assert "x.xyz names no known kind of figure" in out.stderr


def test_version():
    assert invoke("--version").output.strip() == f"advnorm {__version__}"


def test_an_option_may_take_several_values_at_once():
    typed = ["evaluate", "m:f", "--attacks", "pgd10", "autoattack", "--route", "clean", "adv", "--limit", "5"]
    meant = [*typed[:4], "--attacks", "autoattack", "--route", "clean", "--route", "adv", "--limit", "5"]
    assert spelled_out(typed) == spelled_out(meant) == meant


def test_evaluate_and_audit_judge_ones_own_model(tmp_path):
    (tmp_path / "mine.py").write_text(
        "import advnorm, torch\ndef build():\n    torch.manual_seed(0)\n"
        "    return advnorm.create_model('small_cnn', in_channels=1, norm='dual_bn')\n"
    )
    common = [sys.executable, "-m", "advnorm"]
    run = {"cwd": tmp_path, "capture_output": True, "text": True, "check": False}
    out = subprocess.run(
        [
            *common,
            "evaluate",
            "mine:build",
            "--attacks",
            "fgsm",
            "pgd2",
            "--route",
            "clean",
            "adv",
            "--limit",
            "16",
            "--data",
            "digits",
        ],
        **run,
    )
    assert out.returncode == 0, out.stderr
    assert all(word in out.stdout for word in ("fgsm", "pgd2", "union", "clean", "adv"))
    quick = ["--data", "digits", "--limit", "30", "--budget", "quick", "--eps", "0.2"]
    out = subprocess.run([*common, "audit", "mine:build", *quick], **run)
    assert out.returncode == 4, out.stdout + out.stderr  # an untrained network claims nothing
    assert "NONE" in out.stdout
    out = subprocess.run([*common, "evaluate", "mine:bild"], **run)
    assert out.returncode == 2 and "did you mean 'build'" in out.stderr and "on which images? --data" in out.stderr


def test_the_record_of_a_judged_run_says_how_it_was_trained(tmp_path):
    small = {"model": "small_cnn", "eps": 0.1, "epochs": 1, "batch_size": 256, "attack": {"steps": 1}, "seed": 7}
    run = advnorm.train(advnorm.Config.from_dict({**small, "held_out": 0.1}), out=tmp_path, device="cpu")
    for which in ("best", "last"):
        path = tmp_path / f"{which}.json"
        given = ("--attacks", "fgsm", "--limit", "8", "--device", "cpu", "--json", str(path))
        result = invoke("evaluate", str(run.folder), *given, *(("--checkpoint", "last") if which == "last" else ()))
        assert result.exit_code == 0, result.output
        about = json.loads(path.read_text())["about"]
        assert about.pop("training") == json.loads(json.dumps(run.config.to_dict())) and run.config.seed == 7
        assert about == {"run": run.folder.name, "checkpoint": which, "trained_on": "digits", "data": "digits, test"}
        assert f"checkpoint {which}, data digits, test" in " ".join(result.output.split())


def test_a_training_that_is_not_finished_is_told_where_it_is_judged(tmp_path):
    small = {"model": "small_cnn", "eps": 0.1, "epochs": 3, "batch_size": 256, "attack": {"steps": 1}}
    run = advnorm.train(advnorm.Config.from_dict(small), out=tmp_path, device="cpu", max_minutes=0)
    result = invoke("evaluate", str(run.folder), "--attacks", "fgsm", "--limit", "8", "--device", "cpu")
    assert result.exit_code == 0, result.output
    assert "a training that is not finished (0 of 3 epochs)" in " ".join(result.output.split())


def test_the_seed_reaches_an_analysis_and_comparisons_do_not_replace_each_other(tmp_path):
    small = {"model": "small_cnn", "eps": 0.1, "epochs": 1, "batch_size": 256, "attack": {"steps": 1}}
    runs = [
        str(advnorm.train(advnorm.Config.from_dict({**small, "name": name}), out=tmp_path, device="cpu").folder)
        for name in ("one", "two", "three")
    ]
    found = []
    for seed in ("0", "5"):
        more = ("--limit", "16", "--seed", seed, "--out", str(tmp_path / seed), "--device", "cpu")
        result = invoke("analyze", "ligs", runs[0], *more, "--set", "size=1e-2")
        assert result.exit_code == 0, result.output
        found.append(next((tmp_path / seed).glob("*.json")).read_text())
    assert found[0] != found[1]
    for other in runs[1:]:
        more = ("--limit", "16", "--out", str(tmp_path / "both"), "--device", "cpu")
        result = invoke("analyze", "ligs", runs[0], other, *more)
        assert result.exit_code == 0, result.output
    assert len(list((tmp_path / "both").glob("*.json"))) == 2
    for more in ((), ("--checkpoint", "last"), ("--set", "size=1e-2"), ("--batch-size", "40")):
        assert invoke("analyze", "ligs", runs[0], "--out", str(tmp_path / "own"), *more).exit_code == 0
    other = {**small, "name": "one", "lr": 0.2}  # another network in a folder of the same name
    namesake = advnorm.train(advnorm.Config.from_dict(other), out=tmp_path / "elsewhere", device="cpu").folder
    assert namesake.name == Path(runs[0]).name
    assert invoke("analyze", "ligs", str(namesake), "--out", str(tmp_path / "own")).exit_code == 0
    records = [json.loads(path.read_text()) for path in (tmp_path / "own").glob("*.json")]
    conditions = [network["conditions"] for record in records for network in record["networks"].values()]
    assert len(records) == 5 and all({"checkpoint", "device", "torch", "commit"} <= one.keys() for one in conditions)


def test_an_analysis_that_is_a_table_prints_it(tmp_path):
    small = {
        "model": "small_cnn",
        "norm": "dual_bn",
        "eps": 0.1,
        "epochs": 1,
        "batch_size": 256,
        "attack": {"steps": 1},
    }
    run = advnorm.train(advnorm.Config.from_dict(small), out=tmp_path, device="cpu")
    more = ("--limit", "16", "--out", str(tmp_path / "out"), "--device", "cpu")
    tables = {
        "domain_gap": (("inputs=[adv, noise]",), "clean – adv", "sums"),
        "domain_gap_table": (("inputs=[adv, noise]",), "clean – noise", "runs"),
        "swap_table": (("attacks=[pgd1]",), "AP_clean", "rows"),
        "transfer": (("source=adversarial",), "adversarial examples from", "accuracy"),
    }
    for name, (options, words, key) in tables.items():
        out = tmp_path / name
        result = invoke("analyze", name, str(run.folder), *more[:2], "--out", str(out), *more[4:], "--set", *options)
        assert result.exit_code == 0, result.output
        assert words in " ".join(result.output.split())
        record = json.loads(next(out.glob("*.json")).read_text())
        assert key in record
        if name == "domain_gap":
            assert f"{record['sums']['clean-adv']:.4g}" in result.output


@pytest.mark.parametrize(
    ("analysis", "option", "told"),
    [
        ("domain_gap", "inputs=5", "inputs must be a list whose items are each a printable string, got 5"),
        ("domain_gap", "inputs=[clean, 5]", "inputs must be a printable string, got 5"),
        ("channels", "channels=many", "channels must be an integer or a list whose items are each an integer"),
        ("ligs", "size=[1]", "size must be a finite number or a printable string, got [1]"),
        ("moments", "statistics=batched", "unknown statistics 'batched', did you mean 'batch_frozen'"),
    ],
)
def test_an_option_of_another_type_is_told_before_an_analysis_begins(tmp_path, monkeypatch, analysis, option, told):
    monkeypatch.setattr("advnorm.cli.analyze.open_run", lambda *_, **__: pytest.fail("it began"))
    result = invoke("analyze", analysis, str(tmp_path), "--out", str(tmp_path / "out"), "--set", option)
    assert isinstance(result.exception, AdvnormError) and told in str(result.exception)


def test_a_place_that_cannot_be_written_to_is_told_before_an_analysis_begins(tmp_path, monkeypatch):
    (tmp_path / "afile").write_text("")
    monkeypatch.setattr("advnorm.cli.analyze.open_run", lambda *_, **__: pytest.fail("it began"))
    for out in (tmp_path / "afile", tmp_path / "afile" / "sub"):
        result = invoke("analyze", "ligs", str(tmp_path), "--out", str(out))
        assert isinstance(result.exception, AdvnormError) and "afile" in str(result.exception)
