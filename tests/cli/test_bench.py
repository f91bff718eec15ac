"""``advnorm bench``: ratios, records, and errors before any measurement."""

import json

import pytest

from advnorm import __version__
from support.command import invoke
from support.problems import raises_problem


def test_norms_prints_ratios_and_writes_a_record(tmp_path):
    record = tmp_path / "deep" / "norms.json"
    options = ("--model", "small_cnn", "--batch-size", 8, "--rounds", 2, "--device", "cpu", "--json", record)
    out = invoke("bench", "norms", *options, "--precision", "float32", "dual_bn", "none")
    assert out.exit_code == 0, out.output
    data = json.loads(record.read_text())
    assert set(data["rows"]) == {"plain nn.BatchNorm2d", "dual_bn", "none"}
    assert data["rows"]["plain nn.BatchNorm2d"]["eval"]["ratio"] == 1.0
    assert data["rows"]["dual_bn"]["train"]["seconds"] > 0
    assert {"device", "torch", "rounds", "batch_size", "precision", "threads", "commit"} <= set(data)
    assert data["advnorm"] == __version__


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("dualbn",), "unknown_name"),
        (("--model", "resnet81"), "unknown_name"),
        (("--precision", "fp8"), "unknown_name"),
        (("--rounds", "-1"), "out_of_range"),
        (("--device", "gpu"), "no_device"),
    ],
)
def test_a_wrong_argument_of_norms_is_an_error(arguments, code):
    with raises_problem(code):
        invoke("bench", "norms", *arguments)


@pytest.mark.parametrize("kind", ["norms", "train", "autoattack", "quick", "surgery"])
def test_a_record_that_cannot_be_written_is_an_error_before_any_measurement(kind, tmp_path, monkeypatch):
    for name in ("norms", "train", "autoattack", "quick", "surgery"):
        monkeypatch.setattr(f"advnorm.bench.{name}.bench_{name}", lambda *_, **__: pytest.fail("measured first"))
    (tmp_path / "file").touch()
    for place in (tmp_path, tmp_path / "file" / "r"):
        with raises_problem("not_writable"):
            invoke("bench", kind, "--json", place)


@pytest.mark.parametrize("content", ['{"model": "small_cnn"}', '{"format": "advnorm.run/1", "torch": "2.9"}', "code"])
def test_a_file_that_is_no_measurement_is_not_replaced(tmp_path, content):
    (path := tmp_path / "own.json").write_text(content)
    with raises_problem("already_exists", str(path)):
        invoke("bench", "norms", "--json", path)
    assert path.read_text() == content


def test_a_wrong_precision_is_an_error_before_a_network_is_trained():
    with raises_problem("unknown_name", "precision"):
        invoke("bench", "autoattack", "--precision", "fp16")


def test_surgery_prints_outcomes_and_writes_a_record(tmp_path, monkeypatch):
    pytest.importorskip("timm", reason="timm is not installed")
    names = ["timm:test_resnet", "timm:test_vit", "timm:nothing"]
    monkeypatch.setattr("advnorm.bench.surgery.list_architectures", lambda libraries: iter(names))
    out = invoke("bench", "surgery", "timm", "--json", tmp_path / "surgery.json")
    assert out.exit_code == 0 and "2 of 2 families" in out.output and "timm:nothing" in out.output
    data = json.loads((tmp_path / "surgery.json").read_text())
    assert data["counts"] == {"timm": {"converted": 2, "not built": 1}}
    assert {"commit", "versions", "seconds"} <= set(data) and len(data["families"]) == 2
    with raises_problem("unknown_name", "library"):
        invoke("bench", "surgery", "tim")
