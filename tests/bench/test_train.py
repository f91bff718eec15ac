"""The benchmark of training: its rows, its table, and its errors."""

from __future__ import annotations

import io
import json
from dataclasses import replace

import pytest
import torch
from rich.console import Console
from torch import nn
from typer.testing import CliRunner

from advnorm import create_model, strip
from advnorm._core.errors import ConfigError
from advnorm.bench import train
from advnorm.bench.profile import kind_of
from advnorm.bench.train import TrainBenchmark, TrainRow, bench_train
from advnorm.cli.app import app
from advnorm.cli.bench_tables import train_tables
from advnorm.config import AttackConfig, Config, Named
from advnorm.data import load
from advnorm.training.ranks import Ranks
from support.problems import raises_problem

SMALL = {"models": ("small_cnn",), "batch_sizes": (8,), "attack_steps": (1,), "device": "cpu", "steps": 1}


def lines(result: TrainBenchmark, width: int = 80) -> list[str]:
    """The lines on a terminal of this width."""
    console = Console(width=width, file=io.StringIO())
    console.print(train_tables(result))
    return console.file.getvalue().splitlines()


def forward_flops(name: str) -> int:
    """Operations of one image: twice the products of every convolution and linear layer."""
    network, found = strip(create_model(name, norm="bn")).eval(), []

    def count(module: nn.Module, args: object, out: torch.Tensor) -> None:
        found.append(2 * out[0].numel() * module.weight[0].numel())

    for module in network.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            module.register_forward_hook(count)
    network(torch.zeros(1, 3, 32, 32))
    return sum(found)


def test_every_case_is_measured_and_table_and_record_agree(tmp_path):
    record = tmp_path / "deep" / "train.json"
    out = CliRunner().invoke(
        app,
        [
            "bench", "train", "--model", "small_cnn", "--model", "resnet20", "--batch-size", "8",
            "--attack-steps", "1", "--attack-steps", "3", "--device", "cpu", "--steps", "1", "--json", str(record),
        ],
    )  # fmt: skip
    assert out.exit_code == 0, out.output
    data = json.loads(record.read_text())
    rows = [TrainRow(**row) for row in data["rows"]]
    cases = {(row.model, row.batch_size, row.attack_steps, row.mode) for row in rows}
    assert len(rows) == len(cases) == 8 and {row.processes for row in rows} == {1}
    shown = [line.split() for line in out.output.splitlines() if line.split()[:1] in (["plain"], ["eager"])]
    assert len(shown) == 8
    for row, cells in zip(rows, shown, strict=True):
        mode, batch, steps, processes, rate, epoch, share, memory, _, speedup = cells
        assert (mode, int(batch), int(steps), int(processes)) == (row.mode, row.batch_size, row.attack_steps, 1)
        assert float(rate.replace(",", "")) == pytest.approx(row.images_per_second, abs=0.5)
        assert float(epoch.replace(",", "")) == pytest.approx(row.epoch_seconds, abs=0.5)
        assert float(share.rstrip("%")) == pytest.approx(100 * row.share_of_peak, abs=0.5)
        assert float(speedup) == pytest.approx(row.speedup, abs=0.005) and memory == "–"
    assert {"norm", "eps", "data", "device", "torch", "steps", "notes", "advnorm", "commit"} <= set(data)


def test_rates_epochs_and_operations_are_consistent():
    result = bench_train(**{**SMALL, "attack_steps": (1, 4), "batch_sizes": (8, 12)})
    assert [(row.batch_size, row.attack_steps) for row in result.rows[::2]] == [(8, 1), (8, 4), (12, 1), (12, 4)]
    for row in result.rows:
        passes = 2 * row.attack_steps + 2 * 3  # attack: forward and back; then both kinds of images, three passes each
        assert row.tflops * 1e12 == pytest.approx(row.images_per_second * passes * forward_flops("small_cnn"))
        assert row.share_of_peak == pytest.approx(row.tflops / row.peak_tflops)
        assert row.epoch_seconds == pytest.approx(50_000 / row.images_per_second)
        assert row.start_up_seconds > 0
    plain, eager = result.rows[:2]
    assert (plain.mode, plain.speedup, eager.mode) == ("plain", 1.0, "eager")


def check_rows_of_one_and_two_processes(result: TrainBenchmark) -> None:
    one, two = result.rows
    assert (one.processes, two.processes) == (1, 2) and one.batch_size == two.batch_size == 8
    assert one.speedup is None and two.speedup is None  # there is no plain loop to compare with
    assert two.epoch_seconds == pytest.approx(50_000 / two.images_per_second)
    assert one.peak_tflops != two.peak_tflops
    assert all(row.share_of_peak == pytest.approx(row.tflops / row.peak_tflops / row.processes) for row in (one, two))
    text = " ".join(" ".join(lines(result)).split())
    assert f"{one.peak_tflops:.3g} in each of 1 process(es), {two.peak_tflops:.3g} in each of 2 process(es)" in text


def test_each_number_of_processes_has_rows_with_its_own_peak(monkeypatch):
    def measure(count, case, device):
        rows, notes = train._measure(case, case.load_data(), Ranks(device=torch.device(device)))
        return [replace(row, processes=count, share_of_peak=row.share_of_peak / count) for row in rows], notes

    monkeypatch.setattr(train, "_measure_spawned", measure)
    check_rows_of_one_and_two_processes(bench_train(**SMALL, processes=(1, 2), modes=("eager",)))


@pytest.mark.slow
@pytest.mark.world_size(2)
def test_several_processes_divide_the_batch():
    check_rows_of_one_and_two_processes(bench_train(**SMALL, processes=(1, 2), modes=("eager",)))


def test_the_plain_loop_trains_and_updates_its_statistics_once_per_step(monkeypatch):
    models = []
    monkeypatch.setattr(train, "strip", lambda model: models.append(strip(model)) or models[-1])
    config = Config(model=Named("small_cnn"), attack=AttackConfig(steps=2), batch_size=8, held_out=0, validate_every=0)
    run = train._plain_steps(config, load("synthetic", "train", size=64), Ranks(device=torch.device("cpu")))
    before = [value.clone() for value in models[0].parameters()]
    run(3)
    assert all(not torch.equal(a, b) for a, b in zip(before, models[0].parameters(), strict=True))
    norms = [module for module in models[0].modules() if isinstance(module, nn.BatchNorm2d)]
    assert norms and all(norm.num_batches_tracked == 3 for norm in norms)


def test_fallbacks_of_the_training_are_noted_below_the_table(monkeypatch):
    def fails(x):
        raise torch._dynamo.exc.TorchDynamoException("no compiler")

    monkeypatch.setattr(torch, "compile", lambda *_, **__: fails)  # a compiler that is missing would stay so
    result = bench_train(**{**SMALL, "batch_sizes": (6,)}, modes=("compiled",))
    assert len(result.notes) == 1 and result.notes[0].startswith("the network cannot be compiled and runs eagerly: ")
    assert any(line.startswith("note: the network cannot be compiled") for line in lines(result))


def test_the_table_fits_on_80_columns_with_large_numbers():
    fast = TrainRow(
        model="imagenet_resnet638",
        batch_size=16384,
        attack_steps=1,
        processes=1024,
        mode="compiled",
        images_per_second=123_456.7,
        epoch_seconds=0.41,
        tflops=12345.6,
        peak_tflops=789.0,
        share_of_peak=1.0,
        memory=140 * 2**30,
        start_up_seconds=1234.5,
        speedup=12.34,
        spread=0.01,
    )
    slow = replace(fast, attack_steps=100, images_per_second=0.4, epoch_seconds=123_456.7, share_of_peak=0.001)
    conditions = {
        "norm": "dual_affine_bn", "objective": "hybrid", "eps": "16/255", "data": "cifar10", "device": "NVIDIA H200",
        "torch": "2", "steps": 50, "notes": (),
    }  # fmt: skip
    shown = lines(TrainBenchmark(rows=(fast, slow), **conditions))
    assert all(len(line.rstrip()) <= 80 for line in shown) and not any("…" in line for line in shown)
    assert [line.split() for line in shown if "compiled " in line] == [
        ["compiled", "16384", "1", "1024", "123,457", "0.41", "100%", "140.0", "1234.5", "12.34"],
        ["compiled", "16384", "100", "1024", "0", "123,457", "0%", "140.0", "1234.5", "12.34"],
    ]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("sm90_xmma_fprop_implicit_gemm_bf16bf16_bf16f32_f32_nhwckrsc_nhwc_tilesize128x64x64", "convolutions, forward"),
        ("void implicit_convolve_sgemm<float, float, 128>", "convolutions, forward"),
        ("sm90_xmma_dgrad_implicit_gemm_bf16bf16_bf16f32_f32_nhwckrsc_nhwc", "convolutions, gradient of images"),
        ("sm80_xmma_wgrad_implicit_gemm_indexed_bf16bf16", "convolutions, gradient of weights"),
        ("aten::convolution_backward", "convolutions, backward"),
        ("aten::mkldnn_convolution", "convolutions, forward"),
        ("nvjet_hsh_128x256_64x4_1x2_h_bz_coopA_NTN", "matrix products"),
        ("aten::addmm", "matrix products"),
        ("triton_red_fused_native_batch_norm_backward_threshold_backward_12", "compiled sums"),
        ("triton_per_fused__to_copy_mean_3", "compiled sums"),
        ("triton_poi_fused_add_relu_4", "compiled elementwise"),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::sign>", "elementwise"),
        ("aten::nll_loss_forward", "sums"),
        ("void at::native::multi_tensor_apply_kernel<FusedSgdMathFunctor>", "optimizer"),
        ("Memcpy DtoD (Device -> Device)", "copies"),
        ("_draw", "others"),
    ],
)
def test_the_kind_of_a_kernel_follows_from_its_name(name, kind):
    assert kind_of(name) == kind


def test_the_parts_of_a_step_add_up_to_its_time_and_are_shown(tmp_path):
    record = tmp_path / "train.json"
    out = CliRunner().invoke(
        app,
        [
            "bench", "train", "--model", "small_cnn", "--batch-size", "8", "--attack-steps", "1", "--device", "cpu",
            "--steps", "1", "--mode", "eager", "--parts", "--json", str(record),
        ],
    )  # fmt: skip
    assert out.exit_code == 0, out.output
    [row] = json.loads(record.read_text())["rows"]
    parts = row["parts"]
    assert {"convolutions, forward", "convolutions, backward", "elementwise"} < parts.keys()
    assert all(value >= 0 for value in parts.values()) and list(parts.values()) == sorted(parts.values(), reverse=True)
    assert sum(parts.values()) >= 1e3 * 8 / row["images_per_second"] * 0.999
    assert "a step of small_cnn, eager, batch 8, 1 attack steps, 1 process(es)" in " ".join(out.output.split())
    shown = [line for line in out.output.splitlines() if line.strip().startswith("convolutions, forward")]
    assert shown[0].split()[-2] == f"{parts['convolutions, forward']:,.2f}"


def test_parts_are_measured_only_on_request():
    assert [row.parts for row in bench_train(**SMALL, modes=("eager",)).rows] == [None]


@pytest.mark.parametrize(
    ("settings", "code", "field"),
    [
        ({"modes": ("compield",)}, "unknown_name", "mode"),
        ({"models": ("resnet81",)}, None, None),  # the rest is validated by the configuration
        ({"norm": "dualbn"}, None, None),
        ({"batch_sizes": (0,)}, None, None),
        ({"attack_steps": (0,)}, None, None),
        ({"eps": "8"}, None, None),
        ({"steps": 0}, "out_of_range", "steps"),
        ({"processes": (0,)}, "out_of_range", "processes"),
        ({"processes": (1, 3), "batch_sizes": (8, 9)}, "conflict", "processes"),
        ({"device": "tpu"}, "no_device", "device"),
    ],
)
def test_a_wrong_setting_is_reported_before_any_measurement(settings, code, field):
    started = []
    with pytest.raises(ConfigError) if code is None else raises_problem(code, field):
        bench_train(**{**SMALL, **settings}, on_row=started.append)
    assert not started


def test_one_error_lists_all_problems():
    with pytest.raises(ConfigError) as error:
        bench_train(**{**SMALL, "modes": ("compield",), "steps": 0})
    assert [problem.field for problem in error.value.problems] == ["mode", "steps"]
