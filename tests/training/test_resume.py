"""Interrupted trainings resume and end with the same bits."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from advnorm import Run
from advnorm._core.exit_codes import PREEMPTED
from advnorm.training import TrainingError, checkpoint
from advnorm.training import loop as loop_module
from advnorm.training.loop import TrainingLoop
from support import train_worker
from support.problems import raises_problem
from support.small_runs import ENVIRONMENT, ON_DISK, images_on_disk, small, tensors, train
from support.train_worker import PAIRS, patched, state


@pytest.fixture(scope="module")
def deaths(tmp_path_factory) -> tuple[Path, dict[str, dict[str, list[int]]]]:
    """Runs that died in every way and went on, and the exit statuses of their processes."""
    folder = tmp_path_factory.mktemp("deaths")
    command = [sys.executable, train_worker.__file__, str(folder)]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return folder, json.loads((folder / "codes.json").read_text())


@pytest.mark.parametrize(("case", "death"), PAIRS, ids=lambda value: value)
def test_a_run_that_died_ends_with_the_bits_of_one_that_did_not(deaths, case, death):
    folder, codes = deaths
    alone, other = (Run.open(folder / name / f"{case}-seed0") for name in ("alone", death))
    first = codes[case][death][0]
    wanted = {"alone": 0, "at_random_moments": -signal.SIGPROF}.get(
        death, PREEMPTED if death.startswith("by_sigterm") else -signal.SIGKILL
    )
    assert first == wanted and codes[case][death][-1] == 0
    expected, found = state(alone), state(other)
    assert len(alone.metrics()) == 3
    for part in expected:
        assert found[part] == expected[part], part
    assert sum(path.suffix == ".safetensors" for path in other.checkpoints.iterdir()) <= 2, "old checkpoints stay"


def test_a_run_that_died_after_its_last_checkpoint_leaves_no_older_one(tmp_path, monkeypatch):
    config = small(epochs=1, held_out=0, validate_every=0)  # where a best one is marked there is tidied up anyway

    def dies(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(TrainingLoop, "_write_record", dies)
        with pytest.raises(KeyboardInterrupt):
            train(config, tmp_path)
    (folder,) = tmp_path.glob("*/checkpoints")
    older = folder / "last-00000000-00000000.safetensors"
    older.write_bytes(b"of a save that was killed before it could tidy up")
    assert train(config, tmp_path).finished and not older.exists()


def test_the_cases_of_the_deaths_have_state_to_lose(deaths):
    folder, codes = deaths
    assert len(codes["hybrid"]["at_random_moments"]) > 4
    for statuses in codes.values():
        assert set(statuses["at_random_moments"]) == {-signal.SIGPROF, 0}
    hybrid, trades = (Run.open(folder / "alone" / f"{case}-seed0") for case in ("hybrid", "trades"))
    assert any(name.startswith("ema.") for name in tensors(hybrid))
    assert any(name.endswith("exp_avg_sq") for name in tensors(trades))
    scores = [row["held_out"]["score"] for row in hybrid.metrics()]
    assert sum(score > max(scores[:i], default=0) for i, score in enumerate(scores)) >= 2, "the best must move twice"


def test_max_minutes_stops_at_a_checkpoint_and_the_same_call_resumes(tmp_path):
    config = small(norm="dual_bn", ema=0.9)
    codes = []
    for _ in range(50):
        run = train(config, tmp_path, max_minutes=0)
        codes.append(run.finished)
        if run.finished:
            break
        with raises_problem("not_finished", "run"):
            _ = run.record
    assert codes == [False] * 14 + [True], "a step at a time, or the validation of an epoch: 12 steps and 3 epochs"
    alone = train(config, tmp_path / "alone")
    assert state(run) == state(alone)


def test_a_second_pass_that_warms_up_resumes_with_the_same_bits(tmp_path):
    """Killed in every step; until the warm-up ends, the run is that of the objective alone."""
    config = small(second_pass="awp", second_pass_warmup_epochs=2, validate_every=0, held_out=0)
    while not (run := train(config, tmp_path, max_minutes=0)).finished:
        pass
    assert state(run) == state(train(config, tmp_path / "alone"))
    assert ["second_pass" in row for row in run.metrics()] == [False, False, True]
    without = small(validate_every=0, held_out=0)
    assert train(without, tmp_path / "without").metrics()[:2] == run.metrics()[:2]
    never = train(small(second_pass="awp", second_pass_warmup_epochs=3, validate_every=0, held_out=0), tmp_path)
    expected, found = tensors(train(without, tmp_path / "without")), tensors(never)
    assert all(found[name].equal(expected[name]) for name in expected)


def test_the_clock_of_a_resumed_run_continues(tmp_path):
    config, clocks, run = small(objective="standard", epochs=2, validate_every=0), [], None
    while run is None or not run.finished:
        run = train(config, tmp_path, max_minutes=0)
        clocks.append(checkpoint.load(run.checkpoints, "last")[1]["clock"])
    totals = [clock["total"] for clock in clocks]
    assert len(totals) == 8 and all(before < after for before, after in pairwise(totals))
    assert {clock["first_step"] for clock in clocks} == {run.record["first_step_seconds"]}
    assert run.record["seconds"] == totals[-1]


def test_a_stop_interrupts_validation(tmp_path, monkeypatch):
    config = small(norm="dual_bn", ema=0.9, validation_attack="pgd3")
    asked = []

    def interrupts(loop) -> bool:  # during the attack of the second epoch
        asked.append(loop.state.step)
        return asked.count(8) == 3

    with monkeypatch.context() as patch:
        patch.setattr(TrainingLoop, "_interrupts_validation", interrupts)
        run = train(config, tmp_path)
    assert not run.finished and len(run.metrics()) == 1 and asked.count(8) == 3
    assert "stopped in the validation of epoch 2 of 3" in (run.folder / "log.txt").read_text()
    assert checkpoint.load(run.checkpoints, "last")[1]["step"] == 8
    assert state(train(config, tmp_path)) == state(train(config, tmp_path / "alone"))


def stopped_after_two_epochs(tmp_path) -> Run:
    run = Run(str(tmp_path / train(small(), tmp_path, max_minutes=0).folder.name))  # a name does as well as a path
    while len(run.metrics()) < 2:
        train(small(), tmp_path, max_minutes=0)
    return run


def test_metrics_that_were_written_after_the_checkpoint_are_dropped(tmp_path):
    alone, run = train(small(), tmp_path / "alone"), stopped_after_two_epochs(tmp_path)
    metrics, timing = run.folder / "metrics.jsonl", run.folder / "timing.jsonl"
    metrics.write_bytes(metrics.read_bytes() + b'{"epoch": 3, "step": 12}\n{"epo')
    timing.write_bytes(timing.read_bytes() + b'{"epoch": 3, "steps"')
    train(small(), tmp_path)
    assert metrics.read_bytes() == (alone.folder / "metrics.jsonl").read_bytes()
    assert [json.loads(row)["epoch"] for row in timing.read_text().splitlines()] == [1, 2, 3]


@pytest.mark.parametrize("damage", ["a line", "half a line", "zeros", "an edit", "gone"])
def test_metrics_that_the_checkpoint_covers_are_not_replaced_by_others(tmp_path, damage):
    run = stopped_after_two_epochs(tmp_path)
    path = run.folder / "metrics.jsonl"
    whole = path.read_bytes()
    changed = {"a line": whole[: whole[:-1].rfind(b"\n") + 1], "half a line": whole[:-9], "zeros": b"\0" * len(whole)}
    path.write_bytes(changed.get(damage, whole.replace(b'"epoch": 1', b'"epoch": 7')))
    if damage == "gone":
        path.unlink()
    with raises_problem("damaged_file", str(path)) as caught:
        train(small(), tmp_path)
    assert f"delete {run.folder}" in str(caught.value)


def test_metrics_are_on_disk_before_the_checkpoint_that_covers_them(tmp_path, monkeypatch):
    synced, fsync = [], os.fsync

    def note(descriptor):
        synced.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", note)
    monkeypatch.setattr(loop_module, "NEW_ENOUGH", 0.0)
    train(small(held_out=0, validate_every=0), tmp_path)
    order = [name for name in synced if name.startswith((".last-", "metrics"))]
    assert [name.partition("-")[0] for name in order] == ["metrics.jsonl", ".last"] * 3


@pytest.mark.parametrize(("new_enough", "saved"), [(1000.0, [2, 5]), (0.0, [1, 2, 3, 4, 5])])
def test_short_epochs_share_a_checkpoint(tmp_path, monkeypatch, new_enough, saved):
    """A killed run repeats the epochs since then, with the same bits, and drops their metrics first."""
    config, steps = small(epochs=5, held_out=0, snapshots=(2,), validate_every=0), list[int]()
    save, run_epoch = checkpoint.save, TrainingLoop._run_epoch
    monkeypatch.setattr(loop_module, "NEW_ENOUGH", new_enough)

    def note(folder, name, tensors, meta):
        steps.extend([meta["step"]] if name == "last" else [])
        return save(folder, name, tensors, meta)

    monkeypatch.setattr(checkpoint, "save", note)
    alone = state(train(config, tmp_path / "alone"))
    per_epoch = steps[-1] // 5
    assert [step / per_epoch for step in steps] == saved

    def dies(loop, epoch):
        if epoch == 4:
            raise KeyboardInterrupt
        return run_epoch(loop, epoch)

    with monkeypatch.context() as patch:
        patch.setattr(TrainingLoop, "_run_epoch", dies)
        with pytest.raises(KeyboardInterrupt):
            train(config, tmp_path)
    (folder,) = (path.parent for path in tmp_path.glob("*/run.json"))
    assert len(Run.open(folder).metrics()) == 4
    steps.clear()
    assert state(train(config, tmp_path)) == alone
    assert steps[0] / per_epoch == 5 and f"from step {saved[-2] * per_epoch} " in (folder / "log.txt").read_text()


def test_a_checkpoint_does_not_grow_with_the_epochs(tmp_path, monkeypatch):
    sizes, save = [], checkpoint.save
    monkeypatch.setattr(loop_module, "NEW_ENOUGH", 0.0)

    def measure(folder, name, tensors, meta):
        path = save(folder, name, tensors, meta)
        sizes.append((folder / "last.json").stat().st_size)
        return path

    monkeypatch.setattr(checkpoint, "save", measure)
    train(small(epochs=12), tmp_path)
    assert len(sizes) == 12 and max(sizes) - min(sizes) < 200  # numbers have more or fewer digits


def test_a_checkpoint_of_another_version_is_reported_with_its_cure(tmp_path):
    run = train(small(), tmp_path, max_minutes=0)
    tensors, meta = checkpoint.load(run.checkpoints, "last")
    checkpoint.save(run.checkpoints, "last", tensors, {**meta, "metrics": []})
    with raises_problem("damaged_file", f"{run.checkpoints / 'last.json'}: metrics") as caught:
        train(small(), tmp_path)
    assert f"delete {run.folder}" in str(caught.value)


def test_a_run_that_resumes_only_to_write_its_record_writes_the_same_record(tmp_path, monkeypatch):
    config = small(norm="bn", objective="classical", running_epochs=1, eps_warmup_epochs=3)
    alone = train(config, tmp_path / "alone").record

    def full(*_) -> None:
        raise OSError(28, "No space left")

    with monkeypatch.context() as patch:
        patch.setattr(loop_module, "write_json", full)
        with pytest.raises(TrainingError, match="No space left"):
            train(config, tmp_path)
    found = train(config, tmp_path).record
    seconds = ("seconds", "first_step_seconds", "first_step_ended", "images_per_second")
    varying = {*seconds, "digest"}
    assert {k: v for k, v in found.items() if k not in varying} == {k: v for k, v in alone.items() if k not in varying}
    assert all(found[name] > 0 for name in seconds)


def test_a_run_that_another_process_finished_meanwhile_is_not_recorded_again(tmp_path, monkeypatch):
    run = train(small(), tmp_path)
    record = (run.folder / "record.json").read_bytes()
    seen = iter([False, True])
    with monkeypatch.context() as patch:
        patch.setattr(Run, "finished", property(lambda _: next(seen, True)))
        patch.setattr(TrainingLoop, "run", lambda *_, **__: pytest.fail("it was trained again"))
        train(small(), tmp_path)
    assert (run.folder / "record.json").read_bytes() == record


def test_the_record_lists_every_environment_of_a_run(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        real = loop_module.environment
        patch.setattr(loop_module, "environment", lambda device: {**real(device), "torch": "2.11.0"})
        for _ in range(3):
            train(small(), tmp_path, max_minutes=0)
    pieces = train(small(), tmp_path).record["pieces"]
    assert [(piece["from_step"], piece["torch"]) for piece in pieces] == [(0, "2.11.0"), (3, torch.__version__)]
    assert all({"device", "commit", "advnorm", "processes"} <= piece.keys() for piece in pieces)


@pytest.mark.parametrize("scope", [torch.no_grad, torch.inference_mode])
def test_training_works_where_the_caller_takes_no_gradients(tmp_path, scope):
    with scope():
        run = train(small(epochs=1), tmp_path)
    assert run.metrics() == train(small(epochs=1), tmp_path / "plain").metrics()


def test_an_interrupt_leaves_the_last_checkpoint_and_the_lock_is_free(tmp_path, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(TrainingLoop, "train_step", TrainingLoop.train_step)
        patched(TrainingLoop, "train_step", before=interrupt, at=6)
        with pytest.raises(KeyboardInterrupt):
            train(small(), tmp_path)
    run = Run.open(next(tmp_path.iterdir()))
    assert checkpoint.load(run.checkpoints, "last")[1]["step"] == 4
    assert train(small(), tmp_path).metrics() == train(small(), tmp_path / "alone").metrics()


def test_a_first_interrupt_waits_for_a_checkpoint_and_a_second_one_does_not(tmp_path, monkeypatch):
    def interrupts(times):
        return lambda *_: [os.kill(os.getpid(), signal.SIGINT) for _ in range(times)]

    step = TrainingLoop.train_step
    for times, saved in ((1, 6), (2, 4)):
        monkeypatch.setattr(TrainingLoop, "train_step", step)
        patched(TrainingLoop, "train_step", before=interrupts(times), at=6)
        with pytest.raises(KeyboardInterrupt):
            train(small(), tmp_path / str(times))
        run = Run.open(next((tmp_path / str(times)).iterdir()))
        assert checkpoint.load(run.checkpoints, "last")[1]["step"] == saved
        assert ("stopped at step 6" if times == 1 else "failed: Key") in (run.folder / "log.txt").read_text()
        monkeypatch.setattr(TrainingLoop, "train_step", step)
        assert train(small(), tmp_path / str(times)).finished


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_after_the_last_step_lets_the_run_finish_and_reaches_the_caller(tmp_path, monkeypatch, number):
    """A sweep or a queue would otherwise start its next training after the time limit."""
    received: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda signum, _: received.append(signum))
    monkeypatch.setattr(TrainingLoop, "_save", TrainingLoop._save)
    patched(TrainingLoop, "_save", before=lambda *_: os.kill(os.getpid(), number), at=2)
    try:
        train(small(epochs=2), tmp_path)
    except KeyboardInterrupt:
        received.append(signal.SIGINT)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert received == [number]
    assert Run.open(next(tmp_path.iterdir())).finished


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGTERM, PREEMPTED), pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow)]
)
def test_a_signal_to_the_whole_process_group_stops_at_a_checkpoint(tmp_path, number, status):
    folder = images_on_disk(tmp_path / "images")
    (tmp_path / "run.yaml").write_text(small(**ON_DISK, epochs=10_000, name="grouped").to_yaml())
    command = [sys.executable, "-m", "advnorm", "train", "run.yaml", "--data-dir", str(folder), "--workers", "2"]
    process = subprocess.Popen(
        command, cwd=tmp_path, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        lines = [process.stdout.readline()]
        while not lines[-1].startswith("epoch   2  "):
            lines.append(process.stdout.readline())
        os.killpg(process.pid, number)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == status, out + err
    assert "Traceback" not in err and "same command" in out
    assert lines[0].strip() == "run: runs/grouped-seed0", "progress is printed without a terminal too"
    assert "20000 steps of" in lines[3] and [line[:11] for line in lines[-2:]] == ["epoch   1  ", "epoch   2  "]
    assert checkpoint.exists(tmp_path / "runs/grouped-seed0/checkpoints", "last")


def test_images_on_disk_train_and_resume_like_those_in_memory(tmp_path):
    config = small(**ON_DISK, epochs=1)
    settings = {"data_dir": images_on_disk(tmp_path / "images"), "workers": 1}
    alone = train(config, tmp_path / "alone", **settings)
    run = train(config, tmp_path, max_minutes=0, **settings)
    assert not run.finished and checkpoint.load(run.checkpoints, "last")[1]["step"] == 1
    assert state(train(config, tmp_path, **settings)) == state(alone)


def test_a_resumed_run_logs_it(tmp_path, capfd):
    for _ in range(2):
        train(small(), tmp_path, max_minutes=0, progress=True)
    printed = capfd.readouterr().out
    assert "resuming from step 1 of 12" in printed and "threads" not in printed


def test_a_run_records_and_logs_another_number_of_threads(tmp_path, capfd):
    run = train(small(), tmp_path, max_minutes=0)
    torch.set_num_threads(2)
    try:
        train(small(), tmp_path, progress=True)
    finally:
        torch.set_num_threads(1)
    assert "now 2 CPU threads, before another number" in capfd.readouterr().out
    assert [piece["threads"] for piece in run.record["pieces"]] == [1, 2]


def test_a_validation_by_the_quick_estimate_resumes_with_the_same_bits(tmp_path, monkeypatch):
    config = small(validation_attack="quick-steps4-restarts1", epochs=2)
    whole = train(config, tmp_path / "whole")
    save = TrainingLoop._save

    def dies(self):
        save(self)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(TrainingLoop, "_save", dies)
        with pytest.raises(KeyboardInterrupt):
            train(config, tmp_path / "other")
    other = train(config, tmp_path / "other")
    assert "resuming from step 4" in (other.folder / "log.txt").read_text()
    assert state(other) == state(whole)
    assert all("quick-steps4-restarts1" in row["held_out"] for row in whole.metrics())
