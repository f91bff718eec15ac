"""``bench recipe``: times from the start of a process, accuracies that survive kills, and paired differences."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from advnorm import train
from advnorm.attacks import AutoAttack, Quick
from advnorm.bench import recipe as recipe_module
from advnorm.bench.recipe import bench_recipe
from advnorm.bench.training_process import TrainingFailed, read_wall_clock, train_in_process, training_command
from advnorm.config import load_config
from advnorm.evaluation.results import BenchmarkResult
from advnorm.training.run_folder import Run
from support.command import invoke
from support.problems import raises_problem
from support.small_runs import ENVIRONMENT

TINY = """\
model: {name: small_cnn, width: 0.25}
data: digits
held_out: 50
objective: classical
eps: 0.15
attack: {steps: 1}
epochs: 2
batch_size: 128
ema: 0.9
validation_attack: pgd1
"""
VARIANT = "ema=null lr=0.05"
LIMIT = 40


@pytest.fixture(scope="module")
def recipe(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("recipe") / "tiny.yaml"
    path.write_text(TINY)
    return path


@pytest.fixture(scope="module")
def trained(recipe, tmp_path_factory) -> Path:
    """Finished runs of the recipe and of a variant, of two seeds, that no benchmark has timed."""
    out = tmp_path_factory.mktemp("trained")
    for changes in ((), VARIANT.split()):
        for seed in (0, 1):
            train(load_config(recipe, changes), seed=seed, out=out, device="cpu")
    return out


@pytest.fixture(autouse=True)
def _a_short_autoattack(monkeypatch):
    """Square alone takes seconds, even on few images."""
    create = recipe_module.create_attack

    def short(name, *place, **settings):
        attack = create(name, *place, **settings)
        return replace(attack, steps=5, queries=20) if isinstance(attack, AutoAttack | Quick) else attack

    monkeypatch.setattr(recipe_module, "create_attack", short)


@pytest.fixture
def nothing_runs(monkeypatch):
    monkeypatch.setattr(recipe_module, "train_in_process", lambda *_: pytest.fail("trained first"))


def measured(recipe, out, **settings):
    return bench_recipe(recipe, out=out, device="cpu", limit=LIMIT, **{"seeds": (0,), **settings})


def test_the_wall_clock_time_starts_with_the_process_of_a_training(recipe, tmp_path, monkeypatch):
    """The process takes two seconds before it reads the recipe, and nobody times a run that was trained before."""
    (tmp_path / "slow.py").write_text("import time\ntime.sleep(2)\n")
    before, lines = time.perf_counter(), list[str]()
    imports = [str(tmp_path / "slow.py")]
    result = measured(recipe, tmp_path / "out", imports=imports, on_row=lines.append)
    whole = time.perf_counter() - before
    (row,) = result.rows
    assert row.seconds is not None and row.first_step is not None
    assert 2 < row.first_step < row.seconds < whole and row.seconds > row.training + row.validation + 2
    assert any("seed 0: epoch   1" in line for line in lines)
    run = Run(tmp_path / "out" / row.run)
    assert read_wall_clock(run) == {"seconds": row.seconds, "first_step": row.first_step}
    assert measured(recipe, tmp_path / "out").rows == [row], "all is read back"
    same = train(load_config(recipe), out=tmp_path / "alone", device="cpu")
    assert same.record["best"] == run.record["best"], "the process trains what a user would train"


def test_a_training_that_was_interrupted_resumes_and_has_no_wall_clock_time(recipe, trained, tmp_path):
    stopped = train(load_config(recipe), out=tmp_path, device="cpu", max_minutes=0)
    assert not stopped.finished
    (row,) = measured(recipe, tmp_path).rows
    (whole,) = measured(recipe, trained).rows
    assert row.run == stopped.folder.name and (row.seconds, row.first_step) == (None, None)
    assert row.accuracies == whole.accuracies and row.training > 0


def test_differences_equal_a_count_by_hand(recipe, trained):
    """Per image, the mean over two seeds; the interval of Agresti and Min."""
    compared = list[tuple[int, int]]()

    def collect(result):
        compared.extend(one.records for one in result.differences.values())

    result = measured(recipe, trained, seeds=(0, 1), variants=[VARIANT], on_result=collect)
    assert compared == [(1, 1), (2, 2)], "the seeds so far"
    assert [(row.variant, row.seed) for row in result.rows] == [
        ("recipe", 0),
        ("recipe", 1),
        (VARIANT, 0),
        (VARIANT, 1),
    ]
    sides: list[list[list[int]]] = []
    for name in ("recipe", VARIANT):
        runs = [trained / row.run for row in result.rows if row.variant == name]
        records = [BenchmarkResult.load(path) for run in runs for path in run.glob("evaluation-best-*.json")]
        assert len(records) == 2
        sides.append([record.robust["default"]["quick"].int().tolist() for record in records])
    gaps = [(a + b) / 2 - (c + d) / 2 for a, b, c, d in zip(*sides[0], *sides[1])]
    assert len(gaps) == LIMIT == result.images and any(gaps)
    total, n = sum(gaps), LIMIT + 2
    half = 1.959964 * ((sum(gap * gap for gap in gaps) + 1 - total**2 / n) ** 0.5) / n
    found = result.differences[VARIANT]
    assert found.difference == pytest.approx(total / LIMIT) and found.records == (2, 2)
    assert (found.low, found.high) == pytest.approx((total / n - half, total / n + half), abs=1e-6)
    summary = result.summary()["recipe"]["quick"]
    assert summary["median"] == pytest.approx(sum(map(sum, sides[0])) / 2 / LIMIT)
    assert summary["interval"][0] < summary["median"] < summary["interval"][1]


def test_the_recipe_is_evaluated_at_both_checkpoints_and_a_variant_at_the_best(recipe, tmp_path):
    frozen = [
        "norm=none",
        "ema=null",
        "lr=1e-9",
        "monitor=20",
        "monitor_attack=pgd1",
    ]  # so that no later epoch is better than the first
    for change in (frozen, ["lr=2e-9", *(setting for setting in frozen if "lr" not in setting)]):
        train(load_config(recipe, change), out=tmp_path, device="cpu")
    result = measured(recipe, tmp_path, overrides=frozen, variants=["lr=2e-9"])
    assert [list(row.accuracies) for row in result.rows] == [["best", "last"], ["best"]]
    attacks = [list(accuracies["default"]) for row in result.rows for accuracies in row.accuracies.values()]
    assert attacks == [["clean", "pgd10", "quick", "autoattack"], *[["clean", "pgd10", "quick"]] * 2]
    assert [list(row.evaluation) for row in result.rows] == [["pgd10", "quick", "autoattack"], ["pgd10", "quick"]]
    assert [row.alarms for row in result.rows] == [0, 0]
    assert [row.epochs for row in result.rows] == [{"best": 1, "last": 2}, {"best": 1}]


def test_every_variant_is_compared_through_its_own_branch(recipe, tmp_path):
    changes, variant = ["norm=dual_bn", "epochs=1"], "norm=bn"
    for change in (changes, [variant, *changes[1:]]):
        train(load_config(recipe, change), out=tmp_path, device="cpu")
    result = measured(recipe, tmp_path, overrides=changes, variants=[variant])
    assert result.branch == {"recipe": "adv", variant: "default"}
    found = result.differences[variant]
    assert (found.first, found.second) == ("adv, quick", "default route, quick")


def table_of_the_pages(folder: Path) -> str:
    """The table that the benchmarks' page would show for the records in a folder."""
    path = Path(__file__).parents[2] / "benchmarks" / "readme_tables.py"
    spec = importlib.util.spec_from_file_location("readme_tables", path)
    tables = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tables)
    tables.RECIPES = folder
    return tables.recipes()


def test_the_command_prints_tables_and_writes_a_record(recipe, trained, tmp_path):
    options = ("--seeds", 0, "--limit", LIMIT, "--out", trained, "--device", "cpu", "--json", tmp_path / "r.json")
    printed = invoke("bench", "recipe", recipe, "--variant", VARIANT, *options, width=80).output
    assert VARIANT in printed and "medians over seeds" in printed and "without a wall-clock time" in printed
    record = json.loads((tmp_path / "r.json").read_text())
    config = load_config(recipe)
    assert (record["text"], record["digest"]) == (TINY, config.digest)
    assert {"device", "torch", "commit", "advnorm", "threat", "attacks", "images", "summary"} <= set(record)
    (row,) = (row for row in record["rows"] if row["variant"] == "recipe")
    assert record["summary"]["recipe"]["autoattack"]["seconds"] == row["evaluation"]["autoattack"] > 0
    assert "autoattack" not in record["summary"][VARIANT]
    assert record["passes"]["recipe"] == {"epoch": 5, "all": 10} and list(record["differences"]) == [VARIANT]
    assert record["summary"]["recipe"]["seconds"] is None
    assert f"| `{VARIANT}` | 1 |" in table_of_the_pages(tmp_path) and "No recipe" in table_of_the_pages(trained)


@pytest.mark.parametrize(
    ("settings", "code"),
    [
        ({"overrides": ["emma=0.9"]}, "unknown_name"),
        ({"variants": ["emma=null"]}, "unknown_name"),
        ({"variants": ["ema=null", "attack.stepz=3"]}, "unknown_name"),
        ({"variants": ["ema=0.9"]}, "conflict"),
        ({"variants": ["ema=null", "ema=null"]}, "conflict"),
        ({"variants": ["ema=null ema=0.5"]}, "conflict"),
        ({"variants": ["without ema"]}, "wrong_type"),
        ({"variants": ["ema=null"], "overrides": ["name=one"]}, "conflict"),
        ({"seeds": (0, 0)}, "conflict"),
        ({"seeds": ()}, "conflict"),
        ({"seeds": (-1,)}, "out_of_range"),
        ({"overrides": ["data=cifar10"]}, "missing_file"),
        ({"variants": ["data=cifar10"]}, "missing_file"),
        ({"out": "/dev/null/out"}, "not_writable"),
    ],
)
@pytest.mark.usefixtures("nothing_runs")
def test_mistakes_are_errors_before_any_training(recipe, tmp_path, settings, code):
    with raises_problem(code):
        bench_recipe(recipe, **{"out": tmp_path, "device": "cpu", "data_dir": tmp_path, **settings})


@pytest.mark.usefixtures("nothing_runs")
def test_a_bad_file_and_a_record_that_cannot_be_written_are_errors_before_any_training(recipe, tmp_path):
    (tmp_path / "bad.yaml").write_text("epochs: [")
    for file, code in ((tmp_path / "none.yaml", "missing_file"), (tmp_path / "bad.yaml", "damaged_file")):
        with raises_problem(code):
            invoke("bench", "recipe", file, "--out", tmp_path)
    with raises_problem("not_writable"):
        invoke("bench", "recipe", recipe, "--out", tmp_path, "--json", tmp_path)


def test_a_variant_replaces_a_setting_of_the_whole_benchmark(recipe):
    planned = recipe_module.plan_variants(recipe, ["attack.steps=3", "lr=0.2"], ["attack.steps=4"])
    assert [(v.config.attack.steps, v.config.lr) for v in planned] == [(3, 0.2), (4, 0.2)]
    assert load_config(recipe, planned[1].overrides) == planned[1].config


def test_the_command_of_a_training_is_that_of_a_user():
    command = training_command("r.yaml", ["ema=null"], 3, out="runs", data_dir="data", imports=["own.py"])
    assert command[:3] == [sys.executable, "-m", "advnorm"]
    assert " ".join(command[3:]) == ("--import own.py train r.yaml --set ema=null --seed 3 --out runs --data-dir data")


def script(text: str) -> list[str]:
    return [sys.executable, "-c", text]


def test_a_training_finds_no_compiled_code_of_earlier_ones(tmp_path, monkeypatch):
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        monkeypatch.setenv(name, str(tmp_path))
    seen: list[str] = []
    text = (
        "import os; print(os.environ['TORCHINDUCTOR_CACHE_DIR'], os.environ['TRITON_CACHE_DIR'], sep='\\n'); exit(75)"
    )
    for _ in range(2):
        with pytest.raises(TrainingFailed, match="stopped before its end"):
            train_in_process(script(text), Run(tmp_path / "run"), seen.append)
    assert len(set(seen)) == 4 and str(tmp_path) not in seen and not any(Path(path).exists() for path in seen)


def test_a_failed_training_is_reported_with_its_last_line(tmp_path):
    with pytest.raises(TrainingFailed, match="ended with status 3: error: too warm"):
        train_in_process(script("print('error: too warm'); exit(3)"), Run(tmp_path / "run"), lambda _: None)


def test_a_benchmark_that_stops_stops_its_training(tmp_path):
    text = "import signal, sys, time\nsignal.signal(signal.SIGTERM, lambda *_: (open(sys.argv[1], 'w'), exit(75)))\n"
    text += "print('ready', flush=True)\ntime.sleep(60)"

    def interrupt(line: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train_in_process([*script(text), str(tmp_path / "stopped")], Run(tmp_path / "run"), interrupt)
    assert (tmp_path / "stopped").exists()


@pytest.mark.slow
def test_a_killed_benchmark_resumes_with_the_same_accuracies(tmp_path):
    file = tmp_path / "tiny.yaml"
    file.write_text(TINY.replace("epochs: 2", "epochs: 12"))

    def start(out: str) -> subprocess.Popen[bytes]:
        words = [file, "--seeds", "0", "1", "--limit", "40", "--device", "cpu", "--out", tmp_path / out]
        command = [sys.executable, "-m", "advnorm", "bench", "recipe", *words, "--json", tmp_path / f"{out}.json"]
        return subprocess.Popen(list(map(str, command)), env=ENVIRONMENT, start_new_session=True)

    def rows(out: str) -> list[dict]:
        return json.loads((tmp_path / f"{out}.json").read_text())["rows"]

    assert start("alone").wait(timeout=300) == 0
    killed, deadline = start("killed"), time.monotonic() + 300
    while not any(b"epoch   2" in log.read_bytes() for log in (tmp_path / "killed").glob("*/log.txt")):
        assert killed.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    os.killpg(killed.pid, signal.SIGKILL)
    killed.wait()
    assert start("killed").wait(timeout=300) == 0
    assert [row["accuracies"] for row in rows("killed")] == [row["accuracies"] for row in rows("alone")]
    assert [row["seconds"] is None for row in rows("killed")] == [True, False]
    assert [row["seconds"] is None for row in rows("alone")] == [False, False]
