"""Configurations in YAML, JSON and Python files."""

import json
import os
from dataclasses import replace

import pytest

from advnorm._core.errors import ConfigError
from advnorm.config import AttackConfig, Config, Named, load_config
from support.problems import raises_problem


def written(folder, name, text):
    (folder / name).write_text(text)
    return folder / name


EXPECTED = Config(norm="dual_bn", objective=Named("trades", beta=6.0), lr=1e-3, attack=AttackConfig(steps=5), ema=0.99)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.yaml", "norm: dual_bn\nobjective: {name: trades, beta: 6}\nlr: 1e-3\nema: 0.99\nattack:\n  steps: 5\n"),
        ("a.yml", EXPECTED.to_yaml()),
        ("a.json", json.dumps(EXPECTED.to_dict())),
        ("a.py", f"from advnorm.config import *\nconfig = {EXPECTED!r}\n"),
        ("b.py", f"from advnorm.config import *\ndef config():\n    return {EXPECTED!r}\n"),
    ],
)
def test_a_configuration_is_read_from_any_kind_of_file(tmp_path, name, text):
    path = written(tmp_path, name, text)
    assert load_config(path) == load_config(str(path)) == EXPECTED
    assert load_config(path, ["attack.loss=cw"]) == replace(EXPECTED, attack=AttackConfig(steps=5, loss="cw"))


@pytest.mark.parametrize(
    ("name", "text", "code"),
    [
        ("a.toml", "", "unknown_name"),
        ("a.yaml", "epochs: 1\nepochs: 2\n", "conflict"),
        ("a.yaml", "attack: {steps: 1, steps: 2}", "conflict"),
        ("a.yaml", "a: [1", "damaged_file"),
        ("a.yaml", "- 1\n", "wrong_type"),
        ("a.yaml", "epochs: !!python/object/apply:os.system ['exit 1']", "damaged_file"),
        ("a.yaml", "attack: &a {steps: 1}\nobjective: *a", "damaged_file"),
        ("a.yaml", "model: &a [*a]", "damaged_file"),
        ("a.yaml", "[1, 2]: 3", "unknown_name"),
        ("a.yaml", "a: 1\n---\nb: 2", "damaged_file"),
        ("a.yaml", "epochs: " + "[" * 1000, "damaged_file"),
        ("a.yaml", "epohcs: 3\nattack: {stepz: 3}\nlr: 0\n", "unknown_name"),
        ("a.json", '{"epochs": 1, "epochs": 2}', "conflict"),
        ("a.json", '{"epochs": ', "damaged_file"),
        ("a.json", "[" * 100_000, "damaged_file"),
        ("a.json", '{"lr": NaN}', "wrong_type"),
        ("a.json", '{"seed": ' + "9" * 5000 + "}", "damaged_file"),
        ("a.py", "x = 1", "wrong_type"),
        ("a.py", "config = 3", "wrong_type"),
        ("a.py", "config = lambda: None", "wrong_type"),
        ("a.py", "1 / 0", "damaged_file"),
        ("a.py", "def config(): return {}['x']", "damaged_file"),
        ("a.py", "import sys\nsys.exit(3)", "damaged_file"),
        ("a.py", "def config(:", "damaged_file"),
        ("a.py", "from advnorm.config import Config\nconfig = Config(norm='dualbn')", "unknown_name"),
    ],
)
def test_a_bad_file_is_rejected_by_name(tmp_path, name, text, code):
    path = written(tmp_path, name, text)
    with raises_problem(code) as caught:
        load_config(path)
    assert str(path) in str(caught.value)


def test_all_problems_of_a_file_and_of_its_overrides_come_in_one_error(tmp_path):
    path = written(tmp_path, "a.yaml", "epohcs: 3\nattack: {stepz: 3}\nlr: 0\n")
    with pytest.raises(ConfigError) as caught:
        load_config(path, ["norm=dualbn", "nonsense"])
    assert {problem.field for problem in caught.value.problems} == {"epohcs", "attack.stepz", "lr", "norm", "overrides"}


@pytest.mark.parametrize("name", ["gone.yaml", "gone.json", "gone.py"])
def test_a_missing_file_is_reported_by_name(tmp_path, name):
    with raises_problem("missing_file", str(tmp_path / name)):
        load_config(tmp_path / name)


@pytest.mark.parametrize("name", ["a.yaml", "a.json", "a.py"])
def test_what_is_not_a_regular_file_is_not_read(tmp_path, name):
    os.mkfifo(tmp_path / name)
    with raises_problem("missing_file", str(tmp_path / name)):
        load_config(tmp_path / name)


def test_a_file_that_is_not_text_is_reported_by_name(tmp_path):
    (tmp_path / "a.yaml").write_bytes(b"\xff\xfe\x00")
    with raises_problem("damaged_file", str(tmp_path / "a.yaml")):
        load_config(tmp_path / "a.yaml")
