"""The studies of paper B: trainings that they share, budgets, and checks that say what the paper says."""

import pytest

from advnorm.studies import STUDIES, printed_entry
from support.claim_values import fig1_values, fig2_values, supporting

TABLES = ["B/table1", "B/table2", "B/table3"]

# -- the trainings -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TABLES)
def test_the_trainings_of_a_table_differ(name):
    cells = list(STUDIES.get(name).cells())
    assert len({cell.config.digest for cell in cells}) == len(cells)


def test_the_ablation_and_the_figures_share_trainings_with_table_1():
    def digest(study, cell):
        return STUDIES.get(study).cell(cell).config.digest

    plain = digest("B/table1", "wrn_40_2/cifar100/standard/1x")
    assert plain == digest("B/table3", "standard/1.00x") == digest("B/fig1", "standard")
    best = digest("B/table1", "wrn_40_2/cifar100/apart/2x")
    assert best == digest("B/table3", "apart/N128/eps0.1/n16") == digest("B/fig2", "apart/N128/eps0.1/n16")
    for cell in STUDIES.get("B/fig2").cells():
        assert cell.config.digest == digest("B/table3", cell.name)


@pytest.mark.parametrize("name", TABLES)
def test_the_printed_budget_is_the_cost_of_the_training(name):
    study = STUDIES.get(name)
    budgets = {
        study.locate(row["label"], column)[0]: float(row["label"]["budget"][:-1])
        for row in printed_entry(name)["rows"]
        for column in {number.column for number in study.numbers}
    }
    for cell in study.cells():
        config = cell.config.scaled()
        whole = 105 if config.data.name == "imagenet" else 200
        second = 0.0 if config.second_pass is None else config.second_pass.options.get("samples", 1.0)
        assert config.epochs / whole * (1 + second) == pytest.approx(budgets[cell.name], abs=0.005)


# -- the claims --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "cell", "other"),
    [
        ("B/table1", "wrn_40_2/cifar10/apart/2x", 94.9),
        ("B/table1", "preact_resnet18/cifar100/apart_sam/2x", 79.0),
        ("B/table1", "preact_resnet18/cifar100/apart_mixup/2x", 78.0),  # a second exception
        ("B/table2", "tiny_imagenet/apart/2x", 63.0),
        ("B/table2", "imagenet/apart/2x", 71.3),
        ("B/table2", "imagenet/apart/4x", 71.4),
        ("B/table1", "wrn_40_2/cifar10/apart/2x", 95.1),  # more accurate, not significantly
        ("B/table1", "wrn_40_2/cifar10/sam/2x", 95.75),
        ("B/table1", "preact_resnet18/cifar10/apart_sam_mixup/2x", 90.0),
        ("B/table2", "tiny_imagenet/apart/2x", 64.0),
        ("B/table2", "tiny_imagenet/apart_mixup/2x", 64.6),
        ("B/table2", "tiny_imagenet/apart_sam_mixup/2x", 67.5),
        ("B/table2", "imagenet/apart_sam/2x", 70.2),
        ("B/table3", "apart/N128/eps0.4/n8", 78.9),  # does not degenerate
        ("B/table3", "apart/N128/eps0.4/n8", 75.0),  # below standard training: not whatever the hyperparameters
        ("B/table1", "wrn_40_2/cifar100/apart_sam_mixup/2x", 77.0),  # degenerates, and not slightly
        ("B/table1", "wrn_40_2/cifar100/apart_sam_mixup/2x", 79.3),  # does not degenerate
        ("B/table1", "wrn_40_2/cifar10/apart_mixup/2x", 96.2),  # the named exception is none
        ("B/table2", "imagenet/apart_sam/2x", 71.0),
        ("B/table3", "apart/N24/eps0.1/n8", 76.7),
        ("B/table3", "apart/N128/eps0.1/n1", 77.0),
    ],
)
def test_a_number_that_contradicts_the_claim_is_contradicted(name, cell, other):
    values = supporting(name)
    assert (cell, "shared/clean") in values and STUDIES.get(name).verdict(values) == "supported"
    assert STUDIES.get(name).verdict({**values, (cell, "shared/clean"): [other]}) == "contradicted"


@pytest.mark.parametrize(
    ("changed", "verdict"),
    [
        ({}, "supported"),
        ({"binary random": (0.99, 0.97, 0.05)}, "contradicted"),  # noise that is stronger than the attack
        ({"uniform random": (0.99, 0.9, 0.5)}, "contradicted"),
        ({"uniform random": (0.99, 0.98, 0.9)}, "contradicted"),  # reduces, if less than all others
        ({"binary random": (0.99, 0.9, 0.6)}, "contradicted"),  # does at a small radius
        ({"binary random": (0.99, 0.98, 0.965)}, "contradicted"),  # does at none
        ({f"gradient, {n} group{'s' * (n > 1)}": (0.99, 0.97, 0.1) for n in (1, 2, 8, 16, 32)}, "contradicted"),
        ({"binary random": (0.99, 0.9805, 0.6)}, "supported"),  # neither reduces, in an order of chance
        ({"binary random": (0.99, 0.97, 0.1)}, "supported"),  # nothing is left by either
        ({"gradient, 8 groups": (0.99, 0.75, 0.1)}, "contradicted"),
    ],
)
def test_the_attack_on_statistics_is_compared_with_noise_and_by_groups(changed, verdict):
    assert STUDIES.get("B/fig1").verdict(fig1_values(**changed)) == verdict


def test_the_notes_say_that_the_attack_on_statistics_uses_other_images():
    assert "training set" in printed_entry("B/fig1")["caption"]
    assert "evaluates on the test images" in printed_entry("B/fig1")["notes"]


@pytest.mark.parametrize(
    ("changed", "verdict"),
    [
        ({}, "supported"),
        ({"apart/N128/eps0.1/n2": (0.76, 0.7)}, "contradicted"),  # not more accurate than standard training
        ({f"apart/N128/eps0.1/n{groups}": (0.9, 0.6) for groups in (1, 2, 8, 16, 32)}, "contradicted"),  # loses more
        ({"apart/N128/eps0.4/n8": (0.77, 0.7)}, "contradicted"),
    ],
)
def test_robustness_to_perturbed_statistics_is_measured_by_accuracy_and_loss(changed, verdict):
    assert STUDIES.get("B/fig2").verdict(fig2_values(changed)) == verdict
