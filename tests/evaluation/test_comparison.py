"""Results per image in records, and the paired difference of two evaluations."""

import json
from pathlib import Path

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

import advnorm
from advnorm._core.shapes import with_digest
from advnorm.evaluation import BenchmarkResult, benchmark
from advnorm.evaluation.outcomes import decode_rows, encode_rows, pack_bits, unpack_bits
from support.classifiers import first
from support.command import invoke
from support.problems import raises_problem

THREAT = advnorm.ThreatModel(eps=0.2)
OLD = Path(__file__).parents[2] / "results/evaluations/A/table3/single/eps8/paper-seed0.json"


@given(st.lists(st.booleans(), max_size=40))
def test_bits_are_packed_without_loss(values):
    packed = pack_bits(torch.tensor(values, dtype=torch.bool))
    assert unpack_bits(packed, len(values)).tolist() == values
    with raises_problem("damaged_file", "outcomes"):
        unpack_bits(packed, len(values) + 8)


@given(st.sets(st.integers(0, 60)))
def test_rows_are_encoded_as_ranges(rows):
    ordered = torch.tensor(sorted(rows), dtype=torch.long)
    assert decode_rows(encode_rows(ordered)).tolist() == sorted(rows)
    assert encode_rows(torch.tensor([0, 1, 2, 7, 9, 10])) == [[0, 3], 7, [9, 11]]


def test_an_old_record_loads_and_gives_the_same_accuracies():
    record = json.loads(OLD.read_text())
    result = BenchmarkResult.load(OLD)
    assert result.routes == ("default",) and result.rows.tolist() == list(range(10_000))
    assert result.accuracies["default"] == record["accuracy"]["as called"]
    assert BenchmarkResult.from_record(json.loads(json.dumps(result.record()))).accuracies == result.accuracies


def evaluated(rows, *, data="digits", **outcomes):
    """A result with the given outcomes of the attack ``pgd``, by route."""
    tensors = {route: torch.tensor(values, dtype=torch.bool) for route, values in outcomes.items()}
    return BenchmarkResult(
        threat=THREAT,
        attacks={"pgd": "PGD"},
        clean={route: torch.ones_like(values) for route, values in tensors.items()},
        robust={route: {"pgd": values} for route, values in tensors.items()},
        seconds={route: {"pgd": 1.0} for route in tensors},
        conditions={"about": {"data": data}, "seed": 0, "device": "cpu", "model": {"class": "M"}},
        rows=torch.tensor(rows),
    )


def test_the_difference_is_paired_by_the_rows_of_the_images():
    one = evaluated([3, 1, 0, 8], adv=[1, 0, 1, 1])
    other = evaluated([0, 1, 2, 3], adv=[0, 0, 1, 1])  # common rows 3, 1, 0: [1, 0, 1] and [1, 0, 0]
    (row,) = advnorm.compare(one, other, attack="pgd").rows
    assert (row.images, row.only_first, row.only_second, row.p_value) == (3, 1, 0, 1.0)
    assert row.accuracies == pytest.approx((2 / 3, 1 / 3)) and row.difference == pytest.approx(1 / 3)
    assert row.low < row.difference < row.high
    assert [row.first for row in advnorm.compare(one, other).rows] == ["adv, clean", "adv, pgd"]


def test_a_data_set_has_its_name_whatever_else_its_description_says():
    sides = [evaluated([0, 1], data=words, adv=[1, 0]) for words in ("digits, image_size 8", "digits", "cifar10")]
    assert advnorm.compare(sides[0], sides[1], attack="pgd").rows[0].images == 2
    with raises_problem("conflict", "data"):
        advnorm.compare(sides[0], sides[2], attack="pgd")


@given(st.dictionaries(st.integers(0, 12), st.booleans(), min_size=1), st.data())
def test_a_pair_consists_of_the_results_of_the_same_image(one, data):
    other = data.draw(st.dictionaries(st.integers(0, 12), st.booleans(), min_size=1))
    common = one.keys() & other.keys()
    assume(common)
    orders = [data.draw(st.permutations(sorted(side))) for side in (one, other)]
    sides = [evaluated(rows, adv=[side[row] for row in rows]) for rows, side in zip(orders, (one, other))]
    (row,) = advnorm.compare(*sides, attack="pgd").rows
    assert row.images == len(common)
    assert row.only_first == sum(one[image] and not other[image] for image in common)
    assert row.only_second == sum(other[image] and not one[image] for image in common)


def test_two_routes_or_attacks_of_one_result_are_compared():
    both = evaluated(list(range(8)), clean=[0] * 8, adv=[1] * 8)
    (row,) = advnorm.compare(both, route=("adv", "clean"), attack="pgd").rows
    assert row.difference == 1 and row.p_value == pytest.approx(2 / 2**8) and row.low > 0
    (row,) = advnorm.compare(both, route="clean", attack=("clean", "pgd")).rows
    assert row.difference == 1
    with raises_problem("missing_record", "second"):
        advnorm.compare(both)


def test_a_branch_is_compared_with_a_network_without_branches():
    single, dual = evaluated([0, 1], default=[0, 0]), evaluated([0, 1], clean=[0, 0], adv=[1, 1])
    for sides, sign in (((single, dual), -1), ((dual, single), 1)):
        (row,) = advnorm.compare(*sides, route="adv", attack="pgd").rows
        assert row.difference == sign
    with raises_problem("empty", "route") as caught:
        advnorm.compare(single, dual)
    assert "--route default adv" in str(caught.value)


def test_several_records_a_side_count_as_seeds():
    seeds = [evaluated(list(range(4)), adv=values) for values in ([1, 1, 0, 0], [1, 1, 1, 1])]
    (row,) = advnorm.compare(seeds, seeds[:1], attack="pgd").rows
    assert row.records == (2, 1) and row.difference == pytest.approx(0.25)
    assert row.spreads == (pytest.approx(0.5 / 2**0.5), None) and row.p_value is None


@pytest.mark.parametrize(
    ("other", "options", "code", "field"),
    [
        ({"rows": [5, 6]}, {}, "empty", "rows"),
        ({"data": "cifar10"}, {}, "conflict", "data"),
        ({}, {"route": "clean"}, "unknown_name", "route"),
        ({}, {"attack": "fgsm"}, "unknown_name", "attack"),
    ],
)
def test_evaluations_that_cannot_be_compared_are_rejected(other, options, code, field):
    with raises_problem(code, field):
        advnorm.compare(evaluated([0, 1], adv=[1, 1]), evaluated(**{"rows": [0, 1], "adv": [0, 1], **other}), **options)


def test_the_command_prints_and_writes_the_comparison(dual, data, tmp_path):
    for name, seed in (("one", 0), ("two", 1)):
        benchmark(dual, first(data), THREAT, ["pgd2"], ["clean", "adv"], record=tmp_path / f"{name}.json", seed=seed)
    one, two = tmp_path / "one.json", tmp_path / "two.json"
    with raises_problem("already_exists", str(one)):
        invoke("compare", one, two, "--json", one)
    invoke("compare", one, one, "--json", tmp_path / "c.json")
    text = invoke("compare", one, two, "--json", tmp_path / "c.json").output
    assert "adv, pgd2" in text and "Agresti" in text
    rows = json.loads((tmp_path / "c.json").read_text())["rows"]
    assert [row["first"] for row in rows] == ["clean, clean", "clean, pgd2", "adv, clean", "adv, pgd2"]
    assert rows[0]["difference"] == 0.0
    branches = invoke("compare", one, "--route", "clean", "adv", "--attack", "pgd2").output
    assert "clean, pgd2" in branches and "adv, pgd2" in branches
    assert invoke("compare", one, "--attack", "pgd2", "--against", one, two).exit_code == 0
    with raises_problem("conflict", "records"):
        invoke("compare", one, two, one)
    with raises_problem("conflict", "route"):
        invoke("compare", one, "--route", "clean", "adv", "adv")
    with raises_problem("wrong_type", "records") as caught:
        invoke("compare", tmp_path, one)
    assert "advnorm evaluate" in caught.value.problems[0].hint
    with raises_problem("not_supported") as caught:  # a comparison is no evaluation, and must not be deleted
        invoke("compare", tmp_path / "c.json", one)
    assert "delete" not in caught.value.problems[0].hint
    with raises_problem("unknown_name", "attack") as caught:
        invoke("compare", one, two, "--attack", "pgd3")
    assert len(caught.value.problems) == 1


def test_a_cell_without_results_per_image_is_rejected(tmp_path):
    path = tmp_path / "cell.json"
    record = {"format": "advnorm.cell/1", "run": {"config": {"data": {"name": "digits"}}}}
    path.write_text(json.dumps(record))
    with raises_problem("missing_outcomes", "record"):
        advnorm.compare(path, path)


def test_an_edited_record_of_a_cell_or_an_evaluation_is_not_compared(dual, data, tmp_path):
    outcomes = [{"rows": [[0, 9]], "bits": {"adv/pgd2": pack_bits(torch.arange(9) > 3)}}]
    cell = {"format": "advnorm.cell/1", "run": {"config": {"data": {"name": "digits"}}}, "outcomes": outcomes}
    path = tmp_path / "cell.json"
    path.write_text(json.dumps(with_digest(cell)))
    (row,) = advnorm.compare(path, path).rows
    assert (row.difference, row.accuracies) == (0.0, (5 / 9, 5 / 9))
    outcomes[0]["bits"]["adv/pgd2"] = pack_bits(torch.ones(9))
    path.write_text(json.dumps({**cell, "digest": with_digest(cell)["digest"][::-1]}))
    with raises_problem("damaged_file", f"{path}: digest"):
        advnorm.compare(path, path)
    path.write_text(json.dumps(cell))  # without a digest, which only cells without outcomes lack
    with raises_problem("damaged_file", f"{path}: digest"):
        advnorm.compare(path, path)
    path.write_text(json.dumps(with_digest({**cell, "outcomes": [{"rows": [[0, 9]], "bits": {"adv/pgd2": "?"}}]})))
    with raises_problem("damaged_file", f"{path}: outcomes"):
        advnorm.compare(path, path)
    path.write_text(json.dumps(with_digest({**cell, "run": 3})))
    with raises_problem("damaged_file", f"{path}: run"):
        advnorm.compare(path, path)
    evaluation = tmp_path / "evaluation.json"
    benchmark(dual, first(data), THREAT, ["fgsm"], ["adv"], record=evaluation)
    edited = json.loads(evaluation.read_text())
    edited["images"] += 1
    evaluation.write_text(json.dumps(edited))
    with raises_problem("damaged_file", f"{evaluation}: digest"):
        advnorm.compare(evaluation, evaluation)
