"""Our own files are read back by their shape; damage and edits are reported with the file, the entry and the cure."""

from __future__ import annotations  # as in the modules that declare shapes

import json
from typing import Any, Literal, NotRequired, TypedDict

import pytest

from advnorm._core.errors import ConfigError
from advnorm._core.records import write_json
from advnorm._core.shapes import Fraction, check_record, read_record, with_digest
from support.problems import raises_problem


class Row(TypedDict):
    epoch: int
    loss: float
    held_out: NotRequired[dict[str, float]]


class Record(TypedDict):
    format: str
    verdict: Literal["real", "false"]
    rows: list[Row]
    best: Row | None
    robust: Fraction | None
    about: dict[str, Any]


SOUND = {
    "format": "a/1",
    "verdict": "real",
    "rows": [{"epoch": 1, "loss": 2, "held_out": {"clean": 0.5}}, {"epoch": 2, "loss": 1.5, "more": "x"}],
    "best": None,
    "robust": 1.0,
    "about": {"name": [1, None]},
}


def test_a_sound_record_comes_back(tmp_path):
    write_json(tmp_path / "r.json", with_digest(SOUND))
    found = read_record(tmp_path / "r.json", Record, "a/1", "delete it")
    assert len(found.pop("digest")) == 32 and found == SOUND
    write_json(tmp_path / "old.json", SOUND)
    assert read_record(tmp_path / "old.json", Record, "a/1", "delete it") == SOUND, "an old record has no digest"


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"verdict": "maybe"}, "verdict"),
        ({"rows": None}, "rows"),
        ({"rows": [{"epoch": 1}]}, "rows.0.loss"),
        ({"rows": [{"epoch": True, "loss": 1}]}, "rows.0.epoch"),
        ({"rows": [{"epoch": 1, "loss": 1, "held_out": {"clean": "x"}}]}, "rows.0.held_out.clean"),
        ({"rows": [{"epoch": 10**400, "loss": 1}]}, "rows.0.epoch"),
        ({"rows": [{"epoch": 1, "loss": 10**400}]}, "rows.0.loss"),
        ({"best": {"epoch": "1", "loss": 1}}, "best.epoch"),
        ({"robust": 1.01}, "robust"),
        ({"robust": -0.5}, "robust"),
        ({"robust": "1"}, "robust"),
        ({"about": []}, "about"),
        ({"format": "a/2"}, "format"),
    ],
)
def test_an_entry_of_another_type_is_reported_with_file_entry_and_cure(tmp_path, change, field):
    path = tmp_path / "r.json"
    write_json(path, {**SOUND, **change})
    code = "not_supported" if field == "format" else "damaged_file"
    with raises_problem(code, f"{path}: {field}", ConfigError) as caught:
        read_record(path, Record, "a/1", "delete it")
    assert all(problem.hint == "delete it" for problem in caught.value.problems)


def test_missing_entries_are_reported_together(tmp_path):
    with pytest.raises(ConfigError) as caught:
        check_record({"format": "a/1"}, Record, "r.json", "delete it")
    assert {problem.field for problem in caught.value.problems} == {
        f"r.json: {name}" for name in ("about", "best", "robust", "rows", "verdict")
    }


def test_an_edit_is_noticed(tmp_path):
    path = tmp_path / "r.json"
    edited = {**with_digest({**SOUND, "verdict": "false"}), "verdict": "real"}
    path.write_text(json.dumps(edited))
    with raises_problem("damaged_file", f"{path}: digest"):
        read_record(path, Record, "a/1", "delete it")


@pytest.mark.parametrize("text", ['{"a": NaN}', '{"a": -Infinity}', '{"a": 1e999}', '{"a": [-1e400]}'])
def test_numbers_that_we_never_write_are_damage(tmp_path, text):
    (tmp_path / "r.json").write_text(text)
    with raises_problem("damaged_file", str(tmp_path / "r.json"), ConfigError) as caught:
        read_record(tmp_path / "r.json", dict[str, Any], "a/1", "delete it")
    assert caught.value.problems[0].hint == "delete it"


class Signed(Record):
    digest: str


def test_a_shape_can_require_the_digest(tmp_path):
    check_record(with_digest(SOUND), Signed, "r.json", "")
    with raises_problem("damaged_file", "r.json: digest"):
        check_record(SOUND, Signed, "r.json", "")
