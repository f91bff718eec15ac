"""The runner: batches, progress, memory, and the bookkeeping of AutoAttack."""

import sys
import time

import torch
from torch import nn

import advnorm
from advnorm.attacks.autoattack import AutoAttack
from advnorm.evaluation import benchmark
from advnorm.evaluation.partial_record import PartialRecord
from advnorm.evaluation.runner import EvaluationRunner
from support.classifiers import CountingLinear, first

THREAT = advnorm.ThreatModel(eps=0.2)


class ClosedStream:
    """A standard error that nobody reads any more."""

    def isatty(self):
        return False

    def write(self, text):
        raise BrokenPipeError


def test_a_slow_attack_is_saved_in_small_parts_with_the_same_result(sound, data, monkeypatch):
    expected = benchmark(sound, first(data), THREAT, ["pgd10", "apgd-ce-steps10"], batch_size=40)
    saved = []
    save = PartialRecord.save
    monkeypatch.setattr(PartialRecord, "save", lambda self, key, *rest: saved.append(key) or save(self, key, *rest))
    monkeypatch.setattr("advnorm.evaluation.runner.UNIT_SECONDS", 0.0)
    result = benchmark(sound, first(data), THREAT, ["pgd10", "apgd-ce-steps10"], batch_size=40)
    assert result.record()["outcomes"] == expected.record()["outcomes"]
    assert 8 <= len(saved) <= 10  # of 10 images each
    saved.clear()
    benchmark(sound, first(data), THREAT, "pgd10", batch_size=40, statistics="batch_frozen")
    assert len(saved) == 1  # batches stay whole if an image depends on the others of its batch


def test_an_adversarial_image_with_nan_logits_is_misclassified():
    """PyTorch's argmax returns the class of a NaN, which may be the label."""

    class NanBesideGrey(nn.Module):
        def forward(self, x):
            logits = torch.tensor([[1.0, 0.0]]).repeat(len(x), 1)
            return logits.masked_fill((x != 0.5).flatten(1).any(1)[:, None], torch.nan)

    grey = torch.full((6, 1, 4, 4), 0.5), torch.zeros(6, dtype=torch.long)
    result = benchmark(NanBesideGrey(), grey, THREAT, "noise-binary")
    assert result.clean["default"].all() and not result.robust["default"]["noise-binary"].any()


def test_the_time_of_the_first_forward_which_loads_kernels_does_not_make_batches_small(sound, data, monkeypatch):
    class SlowAtFirst(nn.Sequential):
        batches = 0

        def forward(self, input):
            self.batches += len(input) > 16  # the reference logits have fewer images
            time.sleep(0.5 if self.batches == 1 else 0.0)
            return super().forward(input)

    sizes = []
    monkeypatch.setattr("advnorm.evaluation.runner.UNIT_SECONDS", 5.0)  # 30 passes of 0.5 s would take longer
    decide = EvaluationRunner._decide
    monkeypatch.setattr(EvaluationRunner, "_decide", lambda *args: sizes.append(len(args[3])) or decide(*args))
    result = benchmark(SlowAtFirst(sound), first(data), THREAT, "pgd10", batch_size=40)
    assert sizes == [round(40 * result.accuracy())]  # one batch of all images that are attacked


def test_a_log_gets_a_line_every_half_minute(sound, data, monkeypatch, capsys):
    benchmark(sound, first(data), THREAT, "pgd10", batch_size=10, progress=True)
    assert capsys.readouterr().err == ""  # finished within half a minute
    monkeypatch.setattr("advnorm._core.progress.LINE_EVERY", 0.0)
    result = benchmark(sound, first(data), THREAT, "pgd10", batch_size=10, progress=True)
    correct = round(40 * result.accuracy())  # other images are not attacked
    lines = capsys.readouterr().err.splitlines()
    for stream in (None, ClosedStream()):
        monkeypatch.setattr(sys, "stderr", stream)
        again = benchmark(sound, first(data), THREAT, "pgd10", batch_size=10, progress=True)
        assert again.accuracies == result.accuracies
    assert f"pgd10: 10 of {correct} images" in lines and not any(f"{correct} of" in line for line in lines)


def test_the_batch_size_is_halved_when_memory_runs_out(data):
    class Large(CountingLinear):
        def forward(self, x):
            if len(x) > 10:
                raise torch.OutOfMemoryError("CUDA out of memory (simulated)")
            return super().forward(x)

    model, weak = Large(), advnorm.ThreatModel(eps=0.01)
    x = data[0][:40]
    y = CountingLinear.forward(model, x).argmax(1)  # all correct
    result = benchmark(model, (x, y), weak, "pgd3", batch_size=40)
    assert [warning.partition(":")[0] for warning in result.warnings] == ["clean", "pgd3"]
    assert all("40, 20 images" in warning and "with 10" in warning for warning in result.warnings)
    model.__class__ = CountingLinear
    assert torch.equal(result.union(), benchmark(model, (x, y), weak, "pgd3").union())


class Rounding(CountingLinear):
    """A classifier without gradients that only an attack without gradients fools."""

    def forward(self, x):
        return super().forward(x + ((8 * x).round() / 8 - x).detach() - (x - x.detach()))


def test_the_points_that_square_takes_are_relative_to_all_images(data):
    torch.manual_seed(0)
    x, _ = first(data, 60)
    model = Rounding()
    y = torch.where(torch.arange(60) < 30, model(x).argmax(1), (model(x).argmax(1) + 1) % 10)
    result = benchmark(model, (x, y), THREAT, AutoAttack(threat=THREAT, steps=3, targets=2, queries=300))
    (stages,) = result.record()["stages"]["default"].values()
    lost = 100 * (stages["fab-t"] - stages["square"])
    assert lost > 0.2
    (warning,) = [text for text in result.warnings if "Square" in text]
    assert f"{lost:.2f} points" in warning


def test_the_stages_of_a_transferred_cascade_are_not_recorded(data):
    """They belong to the attacked branch, not to the evaluated one."""
    torch.manual_seed(0)
    model = advnorm.create_model("small_cnn", norm="dual_bn", in_channels=1).eval()
    own, transferred = (
        benchmark(
            model,
            first(data),
            THREAT,
            {"aa": AutoAttack(threat=THREAT, attacks=("apgd-ce",), steps=2, route=route)},
            "adv",
        ).record()["stages"]
        for route in (None, "clean")
    )
    assert set(own["adv"]) == {"aa"} and transferred == {}
