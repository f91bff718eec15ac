"""A folder of runs for the tests of tables and pages."""

import pytest

import advnorm
from support.command import invoke

SMALL = {"model": "small_cnn", "eps": 0.1, "epochs": 2, "batch_size": 256, "attack": {"steps": 1}, "held_out": 0.1}


@pytest.fixture(scope="session")
def runs(tmp_path_factory):
    """A folder with two runs, of which one is evaluated and one audited."""
    folder = tmp_path_factory.mktemp("runs")
    for norm in ("bn", "dual_bn"):
        run = advnorm.train(advnorm.Config.from_dict({**SMALL, "norm": norm, "name": norm}), out=folder, device="cpu")
    few = ("--limit", 12, "--device", "cpu")
    out = invoke("evaluate", run.folder, "--attacks", "fgsm", "pgd2", *few, "--json", run.folder / "evaluation.json")
    assert out.exit_code == 0, out.output
    out = invoke("audit", folder / "bn-seed0", "--budget", "quick", *few, "--json", folder / "audit.json")
    assert out.exit_code in (0, 1, 3, 4), out.output
    return folder
