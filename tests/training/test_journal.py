"""The clock, the log, metrics files and TensorBoard events."""

from __future__ import annotations

import os
import re

import pytest
import torch

import advnorm
from advnorm import Run
from advnorm._core import progress
from advnorm.training.journal import Clock, Journal, format_epoch, format_seconds
from support.problems import raises_problem
from support.small_runs import small, train


def test_the_clock_keeps_the_first_steps_apart(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("advnorm.training.journal.time.perf_counter", lambda: now[0])
    clock = Clock(torch.device("cpu"))
    for seconds in (10, 2, 2, 2, 2, 1, 1, 1):
        now[0] += seconds
        clock.step()
    clock.stop()
    now[0] += 100  # validation
    clock.start()
    now[0] += 1
    clock.step()
    clock.stop()
    assert clock.first_step == 10 and clock.total == 22 and clock.steps_per_second() == 1.0


def test_tensorboard_gets_the_numbers_of_every_epoch(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = train(small(epochs=2), tmp_path, tensorboard=True)
    events = EventAccumulator(str(run.folder / "tensorboard")).Reload()
    assert [event.step for event in events.Scalars("loss")] == [1, 2]
    assert "held_out/clean" in events.Tags()["scalars"]


def test_later_events_of_a_resumed_run_are_dropped(tmp_path, monkeypatch):
    class Board:
        def __init__(self, _folder, purge_step):
            purged.append(purge_step)

        def add_scalar(self, name, _value, epoch):
            epochs.extend([epoch] if name == "loss" else [])

        def close(self):
            pass

    purged, epochs, run = [], [], None
    monkeypatch.setattr("advnorm.training.journal._summary_writer", lambda: Board)
    config = small(objective="standard", epochs=2, validate_every=0)
    while run is None or not run.finished:
        run = train(config, tmp_path, tensorboard=True, max_minutes=0)
    assert purged == [1, 1, 1, 1, 2, 2, 2, 2] and epochs == [1, 2]


def test_the_log_line_of_an_epoch_is_readable():
    row = {"epoch": 7, "step": 70, "lr": 0.1, "loss": 1.23456, "adv_ce": 2.0, "adv_accuracy": 0.5}
    assert format_epoch(row, 5.25) == "epoch   7  loss 1.235  adv_ce 2.000  adv 50.0%  | 5.2 s"
    row["held_out"] = {"clean": 0.9, "pgd10": 0.4, "score": 1.3}
    assert format_epoch(row, 5.25).endswith("adv 50.0%  | held out: clean 90.0%  pgd10 40.0%  | 5.2 s")


def test_metrics_that_were_cut_short_are_left_out(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"epoch": 1, "step": 4}\n')
    journal = Journal(tmp_path, active=True)
    mark = journal.mark()
    for name in ("metrics.jsonl", "timing.jsonl"):
        with (tmp_path / name).open("a") as file:
            file.write('{"epoch": 1, "step": 4}\n{"epo')
    assert len(Run(tmp_path).metrics()) == 2 and Run(tmp_path / "none").metrics() == []
    journal.restore(mark)
    assert (tmp_path / "metrics.jsonl").read_text() == '{"epoch": 1, "step": 4}\n'
    assert (tmp_path / "timing.jsonl").read_text() == '{"epoch": 1, "step": 4}\n'


@pytest.mark.parametrize(
    "line", ["{", "[]", "{}", '{"epoch": 1}', '{"epoch": "1", "step": 4}', '{"epoch": 1, "step": 4, "loss": "x"}',
             '{"epoch": 1, "step": 4, "loss": NaN}', '{"epoch": 1, "step": 4, "a": 1e999}',
             '{"epoch": 1, "step": 4, "held_out": 3}', "[" * 100_000],
)  # fmt: skip
def test_damaged_metrics_are_reported_with_their_line(tmp_path, line):
    (tmp_path / "metrics.jsonl").write_text(f'{{"epoch": 1, "step": 4}}\n{line}\n')
    with raises_problem("damaged_file") as caught:
        Run(tmp_path).metrics()
    assert f"{tmp_path / 'metrics.jsonl'}, line 2" in str(caught.value)


def test_a_log_without_a_reader_does_not_block(tmp_path):
    os.mkfifo(tmp_path / "log.txt")
    with pytest.raises(OSError, match="No such device"):
        Journal(tmp_path, active=True).log("text")


def test_a_training_says_what_it_trains_on_and_how_long_an_epoch_takes(tmp_path):
    settings = {"held_out": 0.5, "validate_every": 1, "batch_size": 16, "epochs": 2, "attack": {"steps": 1}}
    config = advnorm.Config(validation_attack="fgsm", **settings)
    run = advnorm.train(config, out=tmp_path, device="cpu")
    log = (run.folder / "log.txt").read_text()
    assert "digits: 674 images of 1×8×8, 10 classes; 674 held out" in log
    assert len(re.findall(r"about [\d.]+ s per epoch, [\d.]+ s in all", log)) == 1


def test_a_log_without_a_terminal_gets_lines_during_validation(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(progress, "LINE_EVERY", 0.0)
    config = advnorm.Config(objective="standard", batch_size=256, epochs=1, validation_attack="pgd2")
    advnorm.train(config, out=tmp_path, device="cpu", progress=True)
    assert "epoch 1/1 validation" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("seconds", "words"), [(0.26, "0.3 s"), (59.6, "60 s"), (119, "119 s"), (150, "2.5 min"), (9000, "2.5 h")]
)
def test_durations_are_readable(seconds, words):
    assert format_seconds(seconds) == words
