"""Shared parts of the figures."""

from advnorm.analysis.plots import formula


def test_symbols_become_formulas_and_other_text_stays_unchanged():
    assert formula("NS^adv_clean") == r"$\mathrm{NS}^{\mathrm{adv}}_{\mathrm{clean}}$"
    assert formula("AP_adv") == r"$\mathrm{AP}_{\mathrm{adv}}$"
    assert formula("batch 1") == "batch 1"
