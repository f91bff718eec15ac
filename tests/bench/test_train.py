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
from advnorm.bench.plain_loops import HYBRID
from advnorm.bench.profile import kind_of
from advnorm.bench.train import TrainBenchmark, bench_train
from advnorm.bench.train_group import TrainRow
from advnorm.cli.app import app
from advnorm.cli.train_tables import train_tables
from advnorm.config import Config, Named
from advnorm.config.sweep import sweep_configs
from advnorm.training.ranks import Ranks
from support.problems import raises_problem

SMALL = replace(
    HYBRID,
    model=Named("small_cnn"),
    batch_size=8,
    attack=replace(HYBRID.attack, steps=1),
    data=Named("synthetic", size=64),
)
ONE_STEP = {"device": "cpu", "steps": 1}


def cases(*sweep: str, config: Config = SMALL) -> list[Config]:
    """Every combination of a small configuration."""
    return sweep_configs(config, sweep)


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
            "bench", "train", "--set", "batch_size=8", "--sweep", "model=small_cnn,resnet20", "attack.steps=1,3",
            "--mode", "plain", "eager", "--device", "cpu", "--steps", "1", "--json", str(record),
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
        mode, steps, rate, epoch, share, memory, _, speedup = cells
        assert (mode, int(steps)) == (row.mode, row.attack_steps)
        assert float(rate.replace(",", "")) == pytest.approx(row.images_per_second, abs=0.5)
        assert float(epoch.replace(",", "")) == pytest.approx(row.epoch_seconds, abs=0.5)
        assert float(share.rstrip("%")) == pytest.approx(100 * row.share_of_peak, abs=0.5)
        assert float(speedup) == pytest.approx(row.speedups["plain"], abs=0.005) and memory == "–"
    assert {"config", "device", "torch", "steps", "laws", "notes", "advnorm", "commit"} <= set(data)
    assert "batch size 8, image size 32, processes 1, dual_bn, hybrid" in " ".join(out.output.split())


def test_rates_epochs_and_operations_are_consistent():
    result = bench_train(cases("batch_size=8,12", "attack.steps=1,4"), modes=("plain", "eager"), **ONE_STEP)
    assert [(row.batch_size, row.attack_steps) for row in result.rows[::2]] == [(8, 1), (8, 4), (12, 1), (12, 4)]
    for row in result.rows:
        passes = 2 * row.attack_steps + 2 * 3  # attack: forward and back; then both kinds of images, three passes each
        assert row.tflops * 1e12 == pytest.approx(row.images_per_second * passes * forward_flops("small_cnn"))
        assert row.share_of_peak == pytest.approx(row.tflops / row.peak_tflops)
        assert row.epoch_seconds == pytest.approx(50_000 / row.images_per_second)
        assert row.start_up_seconds > 0
    plain, eager = result.rows[:2]
    assert (plain.mode, plain.speedups, eager.mode) == ("plain", {"plain": 1.0}, "eager")


def check_rows_of_one_and_two_processes(result: TrainBenchmark) -> None:
    one, two = result.rows
    assert (one.processes, two.processes) == (1, 2) and one.batch_size == two.batch_size == 8
    assert one.speedups == two.speedups == {}  # there is no plain loop to compare with
    assert two.epoch_seconds == pytest.approx(50_000 / two.images_per_second)
    assert one.peak_tflops != two.peak_tflops
    assert all(row.share_of_peak == pytest.approx(row.tflops / row.peak_tflops / row.processes) for row in (one, two))
    text = " ".join(" ".join(lines(result)).split())
    assert f"{one.peak_tflops:.3g} TFLOP/s, {two.peak_tflops:.3g} TFLOP/s in each of 2 processes" in text


def test_each_number_of_processes_has_rows_with_its_own_peak(monkeypatch):
    def measure(count, plan, device):
        rows, notes = train._measure(plan, plan.load(), Ranks(device=torch.device(device)))
        return [replace(row, processes=count, share_of_peak=row.share_of_peak / count) for row in rows], notes

    monkeypatch.setattr(train, "_measure_spawned", measure)
    check_rows_of_one_and_two_processes(bench_train(cases(), processes=(1, 2), modes=("eager",), **ONE_STEP))


@pytest.mark.slow
@pytest.mark.world_size(2)
def test_several_processes_divide_the_batch():
    check_rows_of_one_and_two_processes(bench_train(cases(), processes=(1, 2), modes=("eager",), **ONE_STEP))


def test_fallbacks_of_the_training_are_noted_below_the_table(monkeypatch):
    def fails(x):
        raise torch._dynamo.exc.TorchDynamoException("no compiler")

    monkeypatch.setattr(torch, "compile", lambda *_, **__: fails)  # a compiler that is missing would stay so
    result = bench_train(cases("batch_size=6"), modes=("compiled",), **ONE_STEP)
    assert len(result.notes) == 1 and result.notes[0].startswith("the network cannot be compiled and runs eagerly: ")
    assert any(line.startswith("note: the network cannot be compiled") for line in lines(result))


def test_the_table_fits_on_80_columns_with_large_numbers():
    fast = TrainRow(
        model="imagenet_resnet638",
        batch_size=16384,
        attack_steps=1,
        image_size=224,
        processes=1024,
        mode="compiled",
        images_per_second=123_456.7,
        epoch_seconds=0.41,
        tflops=12345.6,
        peak_tflops=789.0,
        share_of_peak=1.0,
        memory=140 * 2**30,
        start_up_seconds=1234.5,
        speedups={"plain": 12.34, "careful": 3.21, "careful_compiled": 1.5},
        spread=0.01,
    )
    slow = replace(fast, attack_steps=100, images_per_second=0.4, epoch_seconds=123_456.7, share_of_peak=0.001)
    conditions = {"config": SMALL.to_dict(), "device": "NVIDIA H200", "steps": 50, "laws": (), "notes": ()}
    shown = lines(TrainBenchmark(rows=(fast, slow), **conditions))
    assert all(len(line.rstrip()) <= 80 for line in shown) and not any("…" in line for line in shown)
    assert [line.split() for line in shown if line.startswith(" compiled ")] == [
        ["compiled", "1", "123,457", "0.41", "100%", "140.0", "1234"],
        ["compiled", "100", "0", "123,457", "0%", "140.0", "1234"],
        ["compiled", "1", "12.34", "3.21", "1.50"],
        ["compiled", "100", "12.34", "3.21", "1.50"],
    ]
    shown = lines(TrainBenchmark(rows=(fast, replace(fast, mode="eager")), **conditions))
    assert ["compiled", "123,457", "0.41", "100%", "140.0", "1234", "12.34", "3.21", "1.50"] in map(str.split, shown)
    assert all(len(line.rstrip()) <= 80 for line in shown)


def test_second_passes_and_norms_take_turns_and_their_cost_is_relative_to_the_first():
    result = bench_train(
        cases("second_pass=none,sam", "norm=dual_bn,dual_affine_ln"), modes=("plain", "eager"), **ONE_STEP
    )
    assert [(row.mode, *row.settings.values()) for row in result.rows] == [
        ("plain", "own", None),
        ("eager", "dual_bn", None),
        ("eager", "dual_affine_ln", None),
        ("eager", "dual_bn", "sam"),
        ("eager", "dual_affine_ln", "sam"),
    ]
    plain, first, *others = result.rows
    assert plain.cost is None and first.cost == 1.0
    assert [row.cost for row in others] == pytest.approx(
        [first.images_per_second / row.images_per_second for row in others]  # one turn: the ratio of the medians
    )
    assert [set(row.speedups) for row in result.rows] == [{"plain"}, {"plain"}, {"plain"}, set(), set()]
    assert all(row.tflops > 0 for row in result.rows) and "cost" in " ".join(lines(result)).split()


def test_sizes_of_images_and_widths_of_networks_are_settings():
    result = bench_train(cases("data.image_size=8,16", "model.width=0.5,1"), modes=("plain", "eager"), **ONE_STEP)
    assert [(row.image_size, row.settings) for row in result.rows[::2]] == [
        (size, {"model.width": width}) for size in (8, 16) for width in (0.5, 1.0)
    ]
    small, wide, large = (result.rows[place].tflops / result.rows[place].images_per_second for place in (0, 2, 4))
    assert large == pytest.approx(4 * small, rel=0.01) and 3 < wide / small < 4  # the first layer has 3 channels


def test_ratios_are_taken_to_every_reference_that_was_measured():
    result = bench_train(cases(), modes=("plain", "careful", "eager"), **ONE_STEP)
    assert [row.mode for row in result.rows] == ["plain", "careful", "eager"]
    rates = [row.images_per_second for row in result.rows]
    for row in result.rows:
        expected = {"plain": row.images_per_second / rates[0], "careful": row.images_per_second / rates[1]}
        assert row.speedups == pytest.approx(expected)


def test_the_record_has_the_configuration_that_was_measured():
    result = bench_train(cases("eps=8/255", "data.size=64"), modes=("eager",), **ONE_STEP)
    config = Config.from_dict(result.config)
    assert (config.eps, config.data, config.model.name) == ("8/255", Named("synthetic", size=64), "small_cnn")
    assert result.rows[0].settings == {}


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
            "bench", "train", "--set", "model=small_cnn", "batch_size=8", "attack.steps=1", "--device", "cpu",
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
    assert [row.parts for row in bench_train(cases(), modes=("eager",), **ONE_STEP).rows] == [None]


@pytest.mark.parametrize(
    ("overrides", "settings", "code", "field"),
    [
        ([], {"modes": ("compield",)}, "unknown_name", "mode"),
        (["model=timm:resnet81"], {}, "unknown_name", "model"),
        (["norm=dualbn"], {}, "unknown_name", "norm"),
        (["attack.steps=0"], {}, "out_of_range", "attack.steps"),
        (["eps=8"], {}, "out_of_range", "eps"),
        (["model=imagenet_resnet18", "norm=dual_gn"], {}, "unknown_name", "norm"),
        (["data.size=4"], {}, "conflict", "batch_size"),
        (["data=cifar10"], {}, "missing_folder", "root"),
        ([], {"data_dir": "data"}, "conflict", "data_dir"),
        (["compile=true"], {}, "conflict", "compile"),
        (["objective=trades"], {}, "conflict", "mode"),
        (["attack.momentum=1"], {"modes": ("plain",)}, "conflict", "mode"),
        ([], {"steps": 0}, "out_of_range", "steps"),
        ([], {"processes": (0,)}, "out_of_range", "processes"),
        ([], {"processes": (1, 3)}, "conflict", "processes"),
        ([], {"device": "tpu"}, "no_device", "device"),
    ],
)
def test_a_wrong_setting_is_reported_before_any_measurement(overrides, settings, code, field):
    started = []
    with raises_problem(code, field):
        bench_train([SMALL.with_overrides(overrides)], **{**ONE_STEP, **settings}, on_row=started.append)
    assert not started


@pytest.mark.parametrize(
    ("overrides", "code"),
    [
        (["model=timm:test_vit", "norm=dual_bn"], "no_norm_of_kind"),
        (["model=timm:test_vit", "norm=dual_affine_ln", "data.image_size=40"], "wrong_shape"),
    ],
)
def test_a_network_that_cannot_take_the_norm_or_the_images_is_reported_before_any_measurement(overrides, code):
    pytest.importorskip("timm", reason="timm is not installed")
    started = []
    with raises_problem(code):  # the first configuration is fine
        bench_train([SMALL, SMALL.with_overrides(overrides)], **ONE_STEP, on_row=started.append)
    assert not started


def test_one_error_lists_all_problems():
    with pytest.raises(ConfigError) as error:
        bench_train(cases(), modes=("compield",), device="cpu", steps=0)
    assert [problem.field for problem in error.value.problems] == ["mode", "steps"]
