"""The rules of the audit: which numbers lead to which verdict."""

import pytest

from advnorm.evaluation.evidence import Evidence, decide, weigh_gap


def decided(pgd: float, worst: float, chance: float) -> str:
    """The verdict on accuracies in percent, without other evidence."""
    numbers = pgd / 100, worst / 100
    return decide(*numbers, [weigh_gap(*numbers)], chance=chance, images=1000)[0]


@pytest.mark.parametrize(
    ("pgd", "worst", "expected"),
    [
        (51.33, 46.19, "real"),  # A, table 1: dual BN, 8/255
        (31.67, 23.14, "real"),  # ... 16/255
        (33.16, 22.89, "real"),  # C, table 1: TRADES-Cat, 16/255
        (26.98, 16.90, "real"),  # A, table 4: dual affine LN
        (32.23, 18.59, "real"),  # C, table 3: KL 0.4
        (21.92, 10.64, "inconclusive"),  # A, table 3: Setup2, which fails according to the paper
        (49.75, 7.03, "false"),  # A, table 3: single BN, 8/255
        (29.86, 0.48, "false"),  # ... 16/255
        (23.06, 1.20, "false"),  # A, table 4: single IN
        (33.11, 3.70, "false"),  # C, table 1: MAT-Cat
        (32.19, 0.98, "false"),  # C, table 4: MAT-Cat with DBN
        (0.32, 0.10, "none"),  # A, table 1: the clean branch
    ],
)
def test_pairs_of_pgd_and_autoattack_get_the_verdict_of_the_papers(pgd, worst, expected):
    assert decided(pgd, worst, chance=0.1) == expected


@pytest.mark.parametrize(("signs", "expected"), [([], "inconclusive"), (["square"], "false")])
def test_under_l1_a_gap_is_false_only_with_another_sign(signs, expected):
    others = [Evidence(name=s, value=9, expected="", ok=False, weight="doubt", text="points that ...") for s in signs]
    gap = weigh_gap(0.35, 0.01, others, norm="L1")
    assert decide(0.35, 0.01, [gap, *others], chance=0.1, images=1000)[0] == expected


@pytest.mark.parametrize(
    ("pgd", "worst", "chance", "expected"),
    [
        (48, 2, 0.52, "false"),  # two classes
        (97.8, 0, 1.0, "false"),  # one class
        (48, 45, 0.52, "none"),  # no more than a constant answer, and PGD-10 agrees
        (9, 0, 0.1, "none"),
        (60, 55, 0.52, "real"),
        (16, 11.5, 0.14, "none"),  # a little more than a constant answer, and nothing is left of it
        (95, 60, 0.9, "none"),
        (11, 1, 0.14, "none"),  # a wide gap where nobody claims robustness
    ],
)
def test_no_robustness_is_found_only_if_pgd_agrees_with_the_worst_case(pgd, worst, chance, expected):
    assert decided(pgd, worst, chance) == expected


@pytest.mark.parametrize(("images", "stride"), [(30, 1), (60, 1), (200, 3), (1000, 17)])
def test_two_more_robust_images_never_turn_a_false_verdict(images, stride):
    """A gap of 10 points with a quarter left may be three images: 4 and 1 of 30."""
    false = []
    for claimed in range(1, images + 1, stride):
        for worst in range(0, claimed, stride):
            gap = weigh_gap(claimed / images, worst / images, images=images)
            kept = weigh_gap(claimed / images, min(claimed, worst + 2) / images)
            assert (gap.ok, gap.weight) == (kept.ok, kept.weight)
            assert abs(gap.value - 100 * (claimed - worst) / images) < 1e-9
            false.append(not gap.ok and gap.weight == "decides")
    assert any(false) and weigh_gap(4 / 30, 1 / 30, images=30).ok


def test_a_worst_case_below_a_constant_answer_is_never_real():
    for chance in (0.1, 0.3, 0.9):
        for pgd in range(0, 101, 3):
            for worst in range(0, min(pgd, int(100 * chance)) + 1, 3):
                assert decided(pgd, worst, chance) != "real", (pgd, worst, chance)
