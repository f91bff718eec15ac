"""Records on disk: which files are valid, and which record serves a cell."""

import json

import pytest

from advnorm._core.records import write_json
from advnorm.studies import STUDIES, Study
from advnorm.studies.registry import equivalent_cells
from advnorm.studies.report_data import summarize_studies
from advnorm.studies.results import evaluate_study
from advnorm.studies.store import RecordStore
from support.study_records import (
    collect_values,
    entry_in,
    make_task,
    record_of,
    state_of,
    study_in,
    write_record,
    write_table2,
)


def spoil_value(record, value):
    return json.dumps({**record, "values": {**record["values"], "shared/pgd10": value}})


BAD = {
    "cut short": (lambda record: json.dumps(record)[:-20], "damaged"),
    "no JSON": (lambda record: "hello", "damaged"),
    "no UTF-8": (lambda record: b"\xff\xfe{}", "damaged"),
    "a list": (lambda record: "[1, 2]", "damaged"),
    "too deep": (lambda record: "[" * 200_000, ""),
    "another format": (lambda record: json.dumps({**record, "format": "advnorm.run/1"}), "advnorm.run/1"),
    "no format": (lambda record: "{}", "None"),
    "another cell's": (lambda record: json.dumps({**record, "cell": "dual_bn/eps16"}), "it claims to be"),
    "a study that is a list": (lambda record: json.dumps({**record, "study": ["A"]}), "it claims to be"),
    "a seed that is text": (lambda record: json.dumps({**record, "seed": "0"}), "it claims to be"),
    "no values": (lambda record: json.dumps({**record, "values": None}), "values must be"),
    "NaN": (lambda record: json.dumps({**record, "values": {"shared/clean": float("nan")}}), "it is damaged"),
    "a huge number": (lambda record: json.dumps({**record, "values": {"shared/clean": 10**400}}), "values must be"),
    "an accuracy above 100 %": (lambda record: spoil_value(record, 131.0), "outside 0 to 100 %: shared/pgd10"),
    "a negative accuracy": (lambda record: spoil_value(record, -0.5), "outside 0 to 100 %: shared/pgd10"),
    "no run": (lambda record: json.dumps({**record, "run": 3}), "run must contain"),
    "no seconds": (lambda record: json.dumps({**record, "run": {"config": {}}}), "run must contain"),
    "no measurements": (lambda record: json.dumps({**record, "measures": None}), "measures must be"),
    "a measurement that is a number": (lambda record: json.dumps({**record, "measures": [3]}), "measures must be"),
}


@pytest.mark.parametrize("kind", BAD)
def test_an_invalid_record_is_skipped_with_its_problem(tmp_path, kind):
    write_table2(tmp_path)
    one = make_task(tmp_path, "single/eps16")
    spoil, reason = BAD[kind]
    text = spoil(json.loads(one.record_path.read_text()))
    one.record_path.write_bytes(text if isinstance(text, bytes) else text.encode())
    found = summarize_studies(tmp_path)
    (problem,) = found["problems"]
    assert problem.startswith("records/A/table2/single/eps16/fast-seed0.json is skipped") and reason in problem
    assert str(tmp_path) not in problem
    (result,) = study_in(found, "A/table2")["results"]
    assert entry_in(result, "single/eps16", "shared/clean")["ours"] is None
    assert entry_in(result, "dual_bn/eps16", "adv/clean")["ours"] == 22.0


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"study": "A/tabel2"}, "did you mean 'A/table2'"),
        ({"cell": "singel/eps16"}, "did you mean 'single/eps16'"),
        ({"protocol": "quick"}, "unknown protocol"),
    ],
)
def test_the_record_of_a_cell_that_no_longer_exists_is_skipped_with_its_problem(tmp_path, change, reason):
    one = make_task(tmp_path, "single/eps16")
    record = {**write_record(one, {"shared/clean": 90.0}), **change}
    one.record_path.unlink()
    name = f"{record['study']}/{record['cell']}/{record['protocol']}-seed0.json"
    write_json(tmp_path / "records" / name, record)
    (problem,) = summarize_studies(tmp_path)["problems"]
    assert problem.startswith(f"records/{name} is skipped") and reason in problem


def test_every_unreadable_file_among_the_records_is_reported(tmp_path):
    write_table2(tmp_path)
    records = tmp_path / "records"
    (records / "notes.txt").write_text("hello")
    (records / "Z").mkdir()
    (records / "Z" / "link.json").symlink_to(tmp_path / "nowhere")
    (records / "A" / "table2" / "single" / "eps16" / "copy of fast-seed0.json").write_bytes(
        make_task(tmp_path, "single/eps16").record_path.read_bytes()
    )
    (records / ".fast-seed1.json.7.part").write_text("{")  # of a writer that was killed
    problems = summarize_studies(tmp_path)["problems"]
    assert len(problems) == 3
    for name in ("notes.txt", "Z/link.json", "copy of fast-seed0.json"):
        assert any(name in problem for problem in problems)


def test_a_record_with_outdated_settings_is_shown_and_reported(tmp_path):
    one = make_task(tmp_path, "single/eps16")
    record = write_record(one, {"shared/clean": 90.0})
    record["run"]["config"]["epochs"] += 7
    write_json(one.record_path, record)
    found = summarize_studies(tmp_path)
    (problem,) = found["problems"]
    epochs = one.planned_cell.config.epochs
    assert f"epochs {epochs + 7}, now {epochs}" in problem and "skipped" not in problem
    assert study_in(found, "A/table2")["results"][0]["outdated"] == ["single/eps16 seed 0"]
    assert entry_in(study_in(found, "A/table2")["results"][0], "single/eps16", "shared/clean")["ours"] == 90.0


def test_an_outdated_record_never_decides_a_verdict(tmp_path):
    write_table2(tmp_path, seeds=(0, 1))
    one = make_task(tmp_path, "cross_bn/eps16", seed=1)
    record = json.loads(one.record_path.read_text())
    record["run"]["config"]["epochs"] = 1
    record["values"] = dict.fromkeys(record["values"], 0.0)
    write_json(one.record_path, record)
    (result,) = study_in(summarize_studies(tmp_path), "A/table2")["results"]  # the other seed's stands
    assert result["verdict"] == "supported" and entry_in(result, "cross_bn/eps16", "adv/autoattack")["ours"] == 22.0
    make_task(tmp_path, "cross_bn/eps16").record_path.unlink()
    (result,) = study_in(summarize_studies(tmp_path), "A/table2")["results"]
    assert result["verdict"] == "not run" and entry_in(result, "cross_bn/eps16", "adv/autoattack")["ours"] == 0.0
    study = STUDIES.get("A/table2")
    assert ("cross_bn/eps16", "adv/autoattack") in collect_values(study, protocol="fast", out=tmp_path)[0]
    assert evaluate_study(study, RecordStore(tmp_path), protocol="fast")[1].verdict == "not run"


def test_a_record_without_values_or_configuration_is_damaged(tmp_path):
    one, other = make_task(tmp_path, "single/eps16"), make_task(tmp_path, "dual_bn/eps16")
    write_record(one, {})
    write_record(other, {"adv/clean": 1.0}, run={"seconds": 1.0, "processes": 1})
    problems = summarize_studies(tmp_path)["problems"]
    assert [problem.rpartition(": ")[2] for problem in problems] == [
        "run must contain a configuration, seconds and processes",
        "values must be finite numbers by name",
    ]
    assert state_of(one) == state_of(other) == "damaged"


def test_a_record_with_outdated_measurements_is_reported(tmp_path):
    one = make_task(tmp_path, "single/eps16")
    record = write_record(one, {"shared/clean": 90.0})
    record["measures"][0]["options"]["attacks"]["pgd10"] = "pgd10-step4"
    write_json(one.record_path, record)
    (problem,) = summarize_studies(tmp_path)["problems"]
    assert "was made with other settings" in problem and "skipped" not in problem
    assert problem.endswith(": measures.0.options.attacks.pgd10 pgd10-step4, now pgd10-step2")


@pytest.mark.parametrize(
    ("protocol", "search", "matches"),
    [
        ("fast", "autoattack", True),
        ("fast", "autoattack-float32", True),
        ("fast", "autoattack-tf32", False),
        ("paper", "autoattack-bf16", True),
        ("paper", "pgd50", False),
    ],
)
def test_a_search_in_bf16_or_float32_serves_a_cell_and_nothing_else_does(tmp_path, protocol, search, matches):
    one = make_task(tmp_path, "single/eps16", protocol=protocol)
    record = write_record(one, {f"shared/{name}": 90.0 for name in ("clean", "pgd10", "autoattack")})
    record["measures"][0]["options"]["attacks"]["autoattack"] = search
    write_json(one.record_path, record)
    setting = f"measures.0.options.attacks.autoattack {search}, now autoattack"
    found = summarize_studies(tmp_path)
    assert [problem.endswith(f": {setting}") for problem in found["problems"]] == ([] if matches else [True])
    results = study_in(found, "A/table8")["results"]  # it has the same cell
    assert any(result["protocol"] == protocol for result in results) == matches


BOTH = ("A/table1", "A/table8")  # have Dual BN at 16/255
VALUES = {f"{branch}/{name}": 1.0 for branch in ("clean", "adv") for name in ("clean", "pgd10", "autoattack")}


def dual(out, study, value, *, seed=0, **changes):
    values = dict.fromkeys(VALUES, value)
    return write_record(make_task(out, "dual_bn/eps16", study=study, seed=seed), values, **changes)


def found_in(out, study):
    values, problems = collect_values(STUDIES.get(study), protocol="fast", out=out)
    return values.get(("dual_bn/eps16", "adv/clean")), problems


def test_seeds_measured_for_several_studies_are_combined_in_order(tmp_path):
    for study, seed in (("A/table8", 2), ("A/table1", 0), ("A/table3", 1)):
        dual(tmp_path, study, 10.0 + seed, seed=seed)
    for study in (*BOTH, "A/table2", "A/table3", "A/table7"):
        assert found_in(tmp_path, study) == ([10.0, 11.0, 12.0], [])
    [cell] = [
        cell
        for cell in study_in(summarize_studies(tmp_path), "A/table1")["results"][0]["cells"]
        if "16" in cell["name"]
    ]
    assert cell["seeds"] == [0, 1, 2] and cell["measured_for"] == ["A/table3", "A/table8"]
    assert summarize_studies(tmp_path)["minutes"] == {"NVIDIA H200": pytest.approx(6.0)}


def test_a_study_prefers_its_own_record_unless_it_is_outdated(tmp_path):
    for study, value in zip(BOTH, (1.0, 2.0)):
        dual(tmp_path, study, value)
    assert [found_in(tmp_path, study)[0] for study in BOTH] == [[1.0], [2.0]]
    outdated = make_task(tmp_path, "dual_bn/eps16", study=BOTH[1]).planned_cell.config.to_dict() | {"lr": 7.0}
    dual(tmp_path, BOTH[1], 2.0, run={"config": outdated, "seconds": 1.0, "processes": 1})
    values, problems = found_in(tmp_path, BOTH[1])
    assert values == [1.0] and "lr 7.0, now" in str(problems[0]) and problems[0].code == "outdated"
    assert record_of(make_task(tmp_path, "dual_bn/eps16", study=BOTH[1]))["values"] == dict.fromkeys(VALUES, 1.0)
    make_task(tmp_path, "dual_bn/eps16", study=BOTH[0]).record_path.unlink()
    assert found_in(tmp_path, BOTH[1])[0] == [2.0]  # better than none, and reported


def test_runner_and_report_choose_the_same_record(tmp_path):
    for study, value in (("A/table3", 3.0), ("A/fig4", 4.0), ("A/table7", 7.0), ("A/table2", 2.0)):
        dual(tmp_path, study, value)
    for study in BOTH:
        assert record_of(make_task(tmp_path, "dual_bn/eps16", study=study))["values"]["adv/clean"] == 2.0
        assert found_in(tmp_path, study)[0] == [2.0]


@pytest.mark.parametrize(
    "wrong", ["no settings", "a setting less", "a setting more", "no measurements", "no values", "another limit"]
)
def test_an_incomplete_record_serves_no_other_study(tmp_path, wrong):
    record = dual(tmp_path, BOTH[0], 1.0)
    config = record["run"]["config"]
    changes = {
        "no settings": {"run": {**record["run"], "config": {}}},
        "a setting less": {"run": {**record["run"], "config": {k: v for k, v in config.items() if k != "eps"}}},
        "a setting more": {"run": {**record["run"], "config": {**config, "colour": "red"}}},
        "no measurements": {"measures": None},
        "no values": {"values": {}},
        "another limit": {"measures": [{**record["measures"][0], "options": {"limit": 7}}]},
    }
    write_json(make_task(tmp_path, "dual_bn/eps16", study=BOTH[0]).record_path, {**record, **changes[wrong]})
    assert found_in(tmp_path, BOTH[1])[0] is None
    assert state_of(make_task(tmp_path, "dual_bn/eps16", study=BOTH[1])) == "pending"


def test_eps_as_a_fraction_or_a_number_is_the_same_setting(tmp_path):
    record = dual(tmp_path, BOTH[0], 1.0)
    config = {**record["run"]["config"], "eps": 16 / 255}
    write_json(
        make_task(tmp_path, "dual_bn/eps16", study=BOTH[0]).record_path,
        {**record, "run": {**record["run"], "config": config}},
    )
    assert found_in(tmp_path, BOTH[1])[0] == [1.0]
    assert state_of(make_task(tmp_path, "dual_bn/eps16", study=BOTH[1])) == "done"


def test_a_damaged_record_is_reported_while_another_serves_its_cell(tmp_path):
    dual(tmp_path, BOTH[0], 1.0)
    path = make_task(tmp_path, "dual_bn/eps16", study=BOTH[1]).record_path
    path.parent.mkdir(parents=True)
    path.write_text("{")
    values, problems = found_in(tmp_path, BOTH[1])
    assert values == [1.0] and problems[0].code == "damaged_file"
    assert state_of(make_task(tmp_path, "dual_bn/eps16", study=BOTH[1])) == "done" and path.read_text() == "{"


def test_a_study_registered_later_shares_records(tmp_path, monkeypatch):
    dual(tmp_path, BOTH[0], 1.0)
    assert found_in(tmp_path, BOTH[1])[0] == [1.0]
    monkeypatch.setattr(STUDIES, "_entries", dict(STUDIES._entries))
    cell = STUDIES.get("A/table1").cell("dual_bn/eps16")
    STUDIES.add(
        "A/later", Study(name="A/later", cells=lambda: [cell], locate=lambda *_: None, check=lambda _: [("", True)])
    )
    assert equivalent_cells("A/later", "dual_bn/eps16")[:1] == [("A/table1", "dual_bn/eps16")]
    assert found_in(tmp_path, "A/later")[0] == [1.0]


def test_problems_of_another_study_are_not_reported(tmp_path):
    for name in ("D/fig1", "D/fig10"):
        (tmp_path / "records" / name).mkdir(parents=True)
        (tmp_path / "records" / name / "notes.txt").write_text("notes")
    _, problems = collect_values(STUDIES.get("D/fig1"), protocol="fast", out=tmp_path)
    assert [problem.field for problem in problems] == ["records/D/fig1/notes.txt"]
