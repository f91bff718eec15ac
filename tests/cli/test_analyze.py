"""``advnorm analyze``: files that do not replace each other, tables, and errors before any work."""

import json
from pathlib import Path

import pytest

import advnorm
from support.command import invoke
from support.problems import raises_problem


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
        "branch_gap": ((), "NS under adv", "sums"),
        "ligs": (("shifts=[gaussian]",), "Gaussian noise", "networks"),
        "corruptions": (("corruptions=[fog]", "severities=[1]"), "corrupted, statistics adapted", "networks"),
        "perturbed_statistics": (("radii=[0.0, 0.1]",), "radius 0.1", "accuracy"),
        "landscape": (("count=1",), "effective β-smoothness", "networks"),
        "statistics_shift": ((), "distance, summed over the layers", "sums"),
        "features": (("steps=1", "route=adv"), "predicted as their label", "feature_distance"),
    }
    for name, (options, words, key) in tables.items():
        out, given = tmp_path / name, ["--set", *options] if options else []
        result = invoke("analyze", name, str(run.folder), *more[:2], "--out", str(out), *more[4:], *given)
        assert result.exit_code == 0, result.output
        assert words in " ".join(result.output.split())
        record = json.loads(next(out.glob("*.json")).read_text())
        assert key in record
        if name == "domain_gap":
            assert f"{record['sums']['clean-adv']:.4g}" in result.output
        if name == "ligs":
            assert f"{next(iter(record['networks'].values()))['shifts']['gaussian']['mean']:.4f}" in result.output


@pytest.mark.parametrize(
    ("analysis", "option", "code", "field"),
    [
        ("domain_gap", "inputs=5", "wrong_type", "inputs"),
        ("domain_gap", "inputs=[clean, 5]", "wrong_type", "inputs"),
        ("channels", "channels=many", "wrong_type", "channels"),
        ("ligs", "size=[1]", "wrong_type", "size"),
        ("moments", "statistics=batched", "unknown_name", "statistics"),
    ],
)
def test_an_option_of_another_type_is_an_error_before_any_work(tmp_path, monkeypatch, analysis, option, code, field):
    monkeypatch.setattr("advnorm.evaluation.target.open_run", lambda *_, **__: pytest.fail("it began"))
    with raises_problem(code, field):
        invoke("analyze", analysis, tmp_path, "--out", tmp_path / "out", "--set", option)


@pytest.mark.parametrize(("options", "code"), [(["size=1", "size=2"], "conflict"), (["size"], "wrong_type")])
def test_an_option_is_given_once_and_with_a_value(tmp_path, options, code):
    with raises_problem(code):
        invoke("analyze", "ligs", tmp_path, "--out", tmp_path / "out", "--set", *options)


def test_a_place_that_cannot_be_written_is_an_error_before_any_work(tmp_path, monkeypatch):
    (tmp_path / "afile").write_text("")
    monkeypatch.setattr("advnorm.evaluation.target.open_run", lambda *_, **__: pytest.fail("it began"))
    for out in (tmp_path / "afile", tmp_path / "afile" / "sub"):
        with raises_problem("not_writable"):
            invoke("analyze", "ligs", tmp_path, "--out", out)


def test_an_analysis_of_one_run_rejects_two(tmp_path):
    with raises_problem("wrong_number", "runs"):
        invoke("analyze", "moments", tmp_path, tmp_path, "--out", tmp_path / "out")
