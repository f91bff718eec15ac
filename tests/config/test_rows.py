"""The rows of a configuration list every setting."""

from advnorm._core.settings import describe
from advnorm.config import AttackConfig, Config, Named, explain
from support.configs import SETTINGS


def test_explain_lists_every_setting_and_marks_the_changed_ones():
    rows = explain(
        Config(objective=Named("trades", beta=3.0), attack={"steps": 3}, norm="gn", norm_options={"num_groups": 4})
    )
    table = {key: (value, default) for key, value, default in rows}
    assert {key.partition(".")[0] for key in table} == set(SETTINGS) | {"norm_options"}
    assert table["attack.steps"] == (3, False) and table["attack.loss"] == ("ce", True)
    assert table["objective"] == ("trades", False) and table["objective.beta"] == (3.0, False)
    assert table["objective.layout"] == ("concatenated", True)
    assert table["norm_options.num_groups"] == (4, False) and table["model"] == ("small_cnn", True)
    keys = [key for key, _, _ in rows]
    assert keys.index("objective") + 1 == keys.index("objective.beta") or keys[keys.index("objective") + 1].startswith(
        "objective."
    )
    assert all(default for _, _, default in explain(Config()))
    around = Config(objective="standard", second_pass=Named("apart", groups=2), regularizer="ligs")
    table = {key: (value, default) for key, value, default in explain(around)}
    assert table["second_pass.groups"] == (2, False) and table["second_pass.radius"] == (0.1, True)
    assert table["regularizer"] == ("ligs", False) and table["regularizer.shift"] == ("gaussian", True)


def test_every_setting_has_help():
    for kind in (Config, AttackConfig):
        assert all(row.help.endswith(".") for row in describe(kind))
    assert [row.name for row in describe(Config)] == SETTINGS
