"""The verbs ``study`` and ``show``: what they run, what they print, and their exit status."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

import advnorm
from advnorm import ConfigError
from advnorm._core.exit_codes import PREEMPTED
from advnorm._core.records import write_json
from advnorm.cli.app import app
from advnorm.cli.study_tables import study_table
from advnorm.evaluation.outcomes import CELL_FORMAT
from advnorm.studies import STUDIES
from advnorm.studies.results import values_read_by_check
from advnorm.studies.task import list_tasks
from support.problems import raises_problem

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "studies.md"


def invoke(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments], env={"COLUMNS": "200"})


def invoke_and_raise(*arguments):
    CliRunner().invoke(app, arguments, catch_exceptions=False)


def test_a_smoke_test_runs_every_cell_prints_the_table_and_keeps_nothing(tmp_path):
    out = invoke("study", "A/table6", "--smoke", "--seeds", 0, 1, "--out", tmp_path / "results", "--device", "cpu")
    assert out.exit_code == 0, out.output
    for cell in ("standard/eps8", "standard/eps16"):
        assert all(f"done {cell} seed {seed}" in out.output for seed in (0, 1))
    assert "(n=2)" in out.output and "its numbers mean nothing and are not kept." in out.output
    assert not (tmp_path / "results").exists()


def test_a_dry_run_lists_the_state_of_each_cell_and_runs_nothing(tmp_path):
    study = STUDIES.get("A/table3")
    done, damaged, started, *_ = list_tasks(study, protocol="fast", out=tmp_path)
    names = {"format": CELL_FORMAT, "study": done.study, "cell": done.cell, "protocol": "fast", "seed": 0}
    run = {"config": {**done.planned_cell.config.to_dict(), "lr": 7.0}, "seconds": 1.0, "processes": 1, "device": "one"}
    write_json(done.record_path, {**names, "values": {"shared/clean": 90.0}, "run": run, "measures": []})
    write_json(damaged.record_path, {})
    started.run.folder.mkdir(parents=True)
    before = sorted(tmp_path.rglob("*"))
    out = invoke("study", "A/table3", "--protocol", "fast", "--dry-run", "--out", tmp_path)
    assert out.exit_code == 0
    states = [line.split("│")[1:5] for line in out.output.splitlines() if "│ fast" in line]
    found = {cell.strip(): state.strip() for cell, _, _, state in states}
    states = {done.cell: "done", damaged.cell: "damaged", started.cell: "started"}
    assert found == dict.fromkeys(study.by_name, "pending") | states
    assert "pending: 7 training(s), an estimated 303 PFLOP" in " ".join(out.output.split())
    assert "1 of 8 cells have records in" in " ".join(out.output.split()) and "measured on one;" in out.output
    assert "single/eps8/fast-seed0.json was made with other settings than the study has now: lr 7.0, now" in out.output
    assert "single/eps16/fast-seed0.json is skipped: not a record of a cell: its format must be" in out.output
    assert sorted(tmp_path.rglob("*")) == before
    assert "88.06 | 90.00" in out.output and "claim: " in out.output  # existing records
    empty = invoke("study", "A/table3", "--protocol", "fast", "--dry-run", "--out", tmp_path / "empty")
    assert empty.exit_code == 0 and "claim: " not in empty.output


def test_the_cost_of_several_studies_counts_a_shared_training_once(tmp_path):
    out = invoke("study", "E/*", "--stand-in", "imagenette", "--dry-run", "--out", tmp_path)
    assert out.exit_code == 0
    each = [int(count) for count in re.findall(r"^pending: (\d+) training", out.output, re.MULTILINE)]
    together = re.search(r"^\d+ studies together: pending: (\d+) training.*", out.output, re.MULTILINE)
    assert together and max(each) < int(together[1]) < sum(each)
    assert together[0] in GUIDE.read_text(), "the page shows what the command prints"


def test_a_figure_without_printed_numbers_is_listed_in_lines():
    study = STUDIES.get("C/fig4")
    assert study_table(study).plain.splitlines()[:2] == ["C/fig4", f"claim: {study.printed['claim']}"]
    sums = {(cell.name, f"10/sums/{kind}"): [1.0] for cell in study.cells() for kind in ("clean", "adv")}
    text = study_table(study, sums, "fast").plain
    assert (
        text.startswith("C/fig4 fast\nclaim: ")
        and "Contradicted.\n✗ fails: " in text
        and "`advnorm report` shows ours" in text
    )
    read = sorted(values_read_by_check(study, sums))
    assert read and text.splitlines()[-len(read) :] == [f"{cell} {name}: 1" for cell, name in read]
    out = invoke("study", "A/fig7", "--smoke", "--device", "cpu")
    assert "PFLOP and" not in out.output  # synthetic images have no cost worth a line
    assert (
        out.exit_code == 0
        and "its numbers mean nothing and are not kept.\nThe paper prints no numbers.\n" in out.output
    )


def test_a_pattern_names_studies_and_a_narrow_terminal_cuts_no_name(tmp_path):
    command = ["study", "E/fig[12]", "E/table3", "E/fig1/hybrid/pgd30", "--stand-in", "imagenette", "--dry-run"]
    out = CliRunner().invoke(app, [*command, "--out", str(tmp_path)], env={"COLUMNS": "80"})
    assert out.exit_code == 0, out.output
    assert [line.strip() for line in out.output.splitlines() if line.startswith("E/")] == [
        "E/fig1",
        "E/fig2",
        "E/table3",
    ]
    assert (
        "…" not in out.output and out.output.count("hybrid20/pgd30") == 1 and out.output.count("│ hybrid/pgd30 ") == 2
    )
    with raises_problem("unknown_name", "study"):
        invoke_and_raise("study", "E/plate*", "--dry-run")


#: The command, which gets SIGTERM in its first step of training.
TERMINATED = """
import importlib, os, signal
from advnorm.cli import main
loop = importlib.import_module("advnorm.training.loop").TrainingLoop
step = loop.train_step
loop.train_step = lambda self, batch: (os.kill(os.getpid(), signal.SIGTERM), step(self, batch))
main()
"""


QUEUE = ("A/table6", "A/table8/single/eps16")
QUEUED = ("A/table6/standard/eps8", "A/table6/standard/eps16", "A/table8/single/eps16")
#: The time of --max-minutes counts from `begun`, because a busy computer may need seconds to get there.
TIMER = """
import threading
begun = threading.Event()
class LateTimer(threading.Timer):
    def run(self):
        begun.wait()
        super().run()
threading.Timer = LateTimer
"""
#: The command on settings that take seconds. With ADVNORM_TEST_WAITS, the first step of training lasts until SIGTERM.
SMALL_STUDIES = f"""{TIMER}
import importlib, os, time
from advnorm.cli import main
from advnorm.studies import task
plan = task.plan_cell
task.plan_cell = lambda cell, protocol: plan(cell, "smoke")
loop = importlib.import_module("advnorm.training.loop").TrainingLoop
step = loop.train_step
def wait(self, batch):
    begun.set()
    step(self, batch)
    while os.environ.get("ADVNORM_TEST_WAITS") and not self.signals.received:
        time.sleep(0.01)
loop.train_step = wait
main()
"""
#: The command, whose first measurement does not end.
SLOW_MEASUREMENT = f"""{TIMER}
import time
from advnorm.cli import main
from advnorm.studies import run_tasks
def measure(*_, **__):
    begun.set()
    time.sleep(100)
run_tasks.measure_run = measure
main()
"""


def test_sigterm_stops_a_study_at_a_checkpoint_with_exit_status_75():
    command = [sys.executable, "-c", TERMINATED, "study", "A/table6", "--smoke", "--device", "cpu"]
    found = subprocess.run(command, capture_output=True, text=True)
    assert found.returncode == PREEMPTED, found.stderr
    assert "standard/eps8 was stopped before its end; run the same command to resume" in found.stdout
    assert not any(word in found.stdout for word in ("done", "failed"))


def test_a_queue_of_studies_stops_at_its_time_limit_lists_pending_cells_and_resumes(tmp_path):
    """Cells of two studies on tiny settings; the limit falls into the first training, which waits for it."""
    command = [sys.executable, "-c", SMALL_STUDIES, "study", *QUEUE, "--protocol", "fast", "--device", "cpu"]
    command += ["--out", str(tmp_path)]
    waits = {**os.environ, "ADVNORM_TEST_WAITS": "1", "COLUMNS": "200"}
    stopped = subprocess.run([*command, "--max-minutes", "0.01"], capture_output=True, text=True, env=waits)
    assert stopped.returncode == PREEMPTED, stopped.stderr
    assert "pending: 3 of 3 cells: A/table6/standard/eps8 seed 0, A/table6/standard/eps16 seed 0" in stopped.stdout
    assert list(tmp_path.rglob("last.json")) and not list(tmp_path.rglob("fast-seed0.json"))
    resumed = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "COLUMNS": "200"})
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    (log,) = tmp_path.glob("runs/*-standard-*/log.txt")
    assert "resuming from step 1 of 2" in log.read_text()
    assert all(f"done {cell} seed 0" in resumed.stdout for cell in QUEUED)
    assert len(list(tmp_path.rglob("fast-seed0.json"))) == 3


def test_a_time_limit_during_a_measurement_stops_the_queue_too(tmp_path):
    command = [sys.executable, "-c", SLOW_MEASUREMENT, "study", "A/table6", "A/fig7", "--smoke", "--device", "cpu"]
    found = subprocess.run([*command, "--max-minutes", "0.01"], capture_output=True, text=True, timeout=120)
    assert found.returncode == PREEMPTED, found.stderr
    assert "stopped; run the same command to resume" in found.stdout and "pending: 3 of 3 cells" in found.stdout


def test_a_failing_cell_is_reported_the_others_run_and_the_exit_status_is_1(tmp_path):
    damaged, done = list_tasks(STUDIES.get("A/table6"), protocol="fast", out=tmp_path)
    write_json(damaged.record_path, {})
    names = {"format": CELL_FORMAT, "study": done.study, "cell": done.cell, "protocol": "fast", "seed": 0}
    run = {"config": done.planned_cell.config.to_dict(), "seconds": 1.0, "processes": 1}
    write_json(done.record_path, {**names, "values": {"shared/clean": 90.0}, "run": run, "measures": []})
    out = invoke("study", "A/table6", "--protocol", "fast", "--out", tmp_path)
    assert out.exit_code == 1
    assert "failed standard/eps8 seed 0" in out.output and "done standard/eps16 seed 0" in out.output
    assert "then the same command runs the cell again" in " ".join(out.output.split())
    assert "| not run" in out.output and "Not run." in out.output


@pytest.mark.parametrize(
    ("given", "code"),
    [
        ([], "missing_folder"),
        (["--data-dir", "nothing"], "missing_file"),
        (["--device", "cuda:99"], "no_device"),
        (["--out", __file__], "not_writable"),
        (["--launcher", "slurm"], "unknown_name"),
        (["--address", "auto"], "conflict"),
    ],
)
def test_a_problem_that_blocks_every_cell_is_reported_once_before_any_work(given, code, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ADVNORM_DATA", raising=False)
    out = invoke("study", "A/table3", *given)
    assert isinstance(out.exception, ConfigError) and out.exception.code == code  # exit status 2
    assert [problem.code for problem in out.exception.problems].count(code) == 1
    assert out.output == "" and not list(tmp_path.iterdir())


def test_show_prints_a_study_and_a_cell_with_the_papers_numbers():
    study = invoke("show", "A/table3").output
    assert "Setup1" in study and "claim: " in study and "ours" not in study
    cell = invoke("show", "A/table3/setup1/eps16").output
    assert "dual_affine_bn" in cell and "16/255" in cell
    numbers = cell.partition("A/table3/setup1/eps16: what the paper prints")[2]
    rows = [line.split()[-3:] for line in numbers.splitlines() if line.startswith("Setup1")]
    assert rows == [["60.02", "30.89", "23.43"], ["94.3", "0", "0"]] and "16/255 clean" in numbers
    assert "/255 autoattack" in numbers and " 8/255 autoattack" not in numbers and "BN_adv" not in numbers
    assert "The paper prints no numbers of this cell." in invoke("show", next(cells_of("A/fig7"))).output
    assert "what the paper prints" not in invoke("show", "--set", "norm=dual_bn").output


def cells_of(name):
    return (f"{name}/{cell}" for cell in STUDIES.get(name).by_name)


def test_ls_lists_the_cells_of_a_study_with_their_different_settings():
    whole = invoke("ls", "studies", "A/table3").output
    assert [line.split("│")[1].strip() for line in whole.splitlines() if "│ A/" in line] == [*cells_of("A/table3")]
    assert "norm dual_affine_bn, eps 16/255" in whole
    assert invoke("ls", "studies", "A/table3/*").output == whole
    some = invoke("ls", "studies", "A/table3/*/eps8").output
    assert some.count("eps 8/255") == 4 and "eps 16/255" not in some
    several = invoke("ls", "studies", "A/table3*").output
    assert "claim" in several and "eps 8/255" not in several


@pytest.mark.parametrize("values", [None, {}], ids=["show", "study"])
@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("name", ["A/table3", "C/table1", "E/table3", "E/table4", "E/table7"])
def test_a_table_fits_into_the_terminal_without_breaking_words(name, width, values):
    study, console = STUDIES.get(name), Console(width=400)
    with console.capture() as captured:
        console.print(study_table(study, values, width=width))
    table = captured.get().partition("claim: ")[0].splitlines()
    assert max(len(line.rstrip()) for line in table) <= width
    words = {word for n in study.numbers for word in f"{n.row} {n.column}".split()}
    assert words <= {word for line in table for word in line.split()}
    if name == "A/table3":  # every label has a line of its own
        assert all(any(line.startswith(f"{number.row} ") for line in table) for number in study.numbers)


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        (["study", "A/tabel3"], "study"),
        (["study", "A/table3", "--protocol", "quick"], "protocol"),
        (["study", "A/table6", "--smoke", "--launcher", "rye", "--device", "cpu"], "launcher"),
        (["show", "A/table33/x"], "study"),
        (["show", "a/table3"], "study"),
        (["show", "A/table3/dual_bn/eps61"], "cell"),
        (["train", "A/tabel3/dual_bn/eps16"], "study"),
        (["show", "mine/table3"], "mine/table3"),
        (["ls", "studies", "A/tabel3"], "study"),
    ],
)
def test_a_misspelt_name_in_a_command_raises(arguments, field):
    out = invoke(*arguments)
    assert isinstance(out.exception, ConfigError) and out.output == ""
    assert [(problem.code, problem.field) for problem in out.exception.problems] == [("unknown_name", field)]


@pytest.mark.parametrize(
    "arguments",
    [
        ["study", "A/table3", "--protocol", "fast", "--smoke"],
        ["show", "A/mine.yaml"],
        ["ls", "studies", "A/table3/x*"],
    ],
)
def test_a_wrong_command_raises(arguments):
    out = invoke(*arguments)
    assert isinstance(out.exception, ConfigError) and out.output == ""


def test_a_study_name_instead_of_a_configuration_raises_with_the_right_call():
    with pytest.raises(ConfigError, match=r"advnorm\.studies\.get\('A/table3/dual_bn/eps16'\)"):
        advnorm.train("A/table3/dual_bn/eps16")


def test_the_report_names_files_that_are_not_records(tmp_path):
    for run in ("one", "two", "three", "four"):
        write_json(tmp_path / "runs" / f"{run}-seed0" / "run.json", {})
    out = invoke("report", tmp_path / "runs", "--out", tmp_path / "report.html")
    assert out.exit_code == 0
    [text] = [line for line in out.output.splitlines() if "are skipped" in line]
    assert text.startswith("4 JSON file(s) in four-seed0, one-seed0, ")
    assert "name the --out folder of `advnorm study`" in text
    assert "are skipped" not in invoke("report", tmp_path, "--out", tmp_path / "report.html").output
    write_json(tmp_path / "mine.json", {})
    assert "1 JSON file(s) in " in invoke("report", tmp_path, "--out", tmp_path / "report.html").output
