"""A separate package adds parts of every kind: installed, they train, resume, evaluate and are listed like ours."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import advnorm
from advnorm import Config
from advnorm._core import registry as registry_module
from advnorm.attacks import ATTACKS
from advnorm.config import AttackConfig
from advnorm.norms import NORMS
from advnorm.objectives import OBJECTIVES
from support.command import invoke
from support.problems import raises_problem

ROOT = Path(__file__).parents[2]
OWN_PARTS = ROOT / "examples" / "own_parts"
MORE_PARTS = ROOT / "tests" / "support" / "plugin_package"


def install(source: Path, into: Path, **plugins: str) -> None:
    """Copy modules and write the metadata that pip would write."""
    shutil.copytree(source, into, dirs_exist_ok=True)
    name = "_".join(plugins)
    metadata = into / f"{name}-0.1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.1\n")
    lines = [f"{plugin} = {module}" for plugin, module in plugins.items()]
    (metadata / "entry_points.txt").write_text("\n".join(["[advnorm.plugins]", *lines, ""]))


#: Runs several commands in one process, and prints a mark between their outputs.
DRIVER = """
import json, sys
from advnorm.cli.process import run_command
for words in json.load(open("commands.json")):
    sys.argv = ["advnorm", *words]
    print("EXIT", run_command(), flush=True)
"""


def run_commands(folder: Path, packages: Path, *commands: str) -> list[tuple[str, int]]:
    """Output and exit status of each command, in a process that finds the installed packages."""
    (folder / "commands.json").write_text(json.dumps([command.split() for command in commands]))
    paths = [str(packages), str(Path(advnorm.__file__).parents[1])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "COLUMNS": "200", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", DRIVER], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    *outputs, rest = done.stdout.split("EXIT ")
    statuses = [int(text.split()[0]) for text in [*outputs[1:], rest]] if outputs else []
    assert len(statuses) == len(commands), done.stderr
    return list(zip(outputs, statuses))


TRAIN = (
    "train --set norm=natural_bn objective=three_domains attack.name=cosine2 data.limit=120 batch_size=16 epochs=2 "
    "held_out=24 validation_attack=cosine2 eps=0.2 name={name} --device cpu"
)
MODEL = "train --set model=plugin_net data=plugin_stripes norm=dual_bn batch_size=16 epochs=1 attack.steps=1 name=net"


def test_the_parts_of_an_installed_package_work_like_ours(tmp_path):
    packages = tmp_path / "packages"
    install(OWN_PARTS / "src", packages, own_parts="own_parts")
    install(MORE_PARTS, packages, more_parts="more_parts", broken="no_such_module")
    interrupted = f"{TRAIN.format(name='mine')} --max-minutes 0"
    found = run_commands(
        tmp_path,
        packages,
        "ls norms natural*",
        "ls attacks cosine*",
        "ls objectives three*",
        "ls models plugin*",
        "ls datasets plugin*",
        "ls analyses plugin*",
        interrupted,
        interrupted,
        TRAIN.format(name="mine"),
        f"{TRAIN.format(name='mine')} --out whole",
        "evaluate runs/mine-seed0 --attacks cosine3 pgd2 --limit 16 --device cpu",
        f"{MODEL} --device cpu",
        "analyze plugin_count runs/net-seed0 --device cpu",
        "report runs --out report.html",
    )
    assert [status for _, status in found] == [0] * 6 + [75, 75] + [0] * 6, found
    outputs = [output for output, _ in found]
    names = ("natural_bn", "cosine10", "three_domains", "plugin_net", "plugin_stripes", "plugin_count")
    assert all(name in output for name, output in zip(names, outputs))
    resumed, whole = (advnorm.Run(tmp_path / folder / "mine-seed0") for folder in ("runs", "whole"))
    assert resumed.metrics() == whole.metrics() and len(resumed.metrics()) == 2
    record = json.loads((resumed.folder / "record.json").read_text())
    assert record["attack"].startswith("CosinePGD(") and record["objective"].startswith("ThreeDomains(")
    assert record["validation_attack"].startswith("CosinePGD(")
    assert "cosine3" in outputs[10] and "noise" in outputs[10] and "--import" not in outputs[8]
    page = (tmp_path / "report.html").read_text()
    assert "natural_bn" in page and "three_domains" in page and "cosine3" in page and "skipped" not in outputs[-1]


def test_a_report_without_the_package_skips_nothing(tmp_path):
    packages = tmp_path / "packages"
    install(OWN_PARTS / "src", packages, own_parts="own_parts")
    run_commands(tmp_path, packages, TRAIN.format(name="mine"))
    result = invoke("report", tmp_path / "runs", "--out", tmp_path / "report.html")
    assert result.exit_code == 0 and "skipped" not in result.output
    assert "natural_bn" in (tmp_path / "report.html").read_text()


@pytest.mark.slow
def test_pip_installs_the_entry_point_of_the_example(tmp_path):
    source = shutil.copytree(OWN_PARTS, tmp_path / "own_parts")
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--target", str(tmp_path / "packages")]
    subprocess.run([sys.executable, "-m", "pip", "install", *options, str(source)], check=True)
    ((output, status),) = run_commands(tmp_path, tmp_path / "packages", "ls norms natural*")
    assert status == 0 and "natural_bn" in output


def test_a_broken_plugin_is_a_warning(tmp_path, monkeypatch):
    (tmp_path / "nothing").mkdir()
    install(tmp_path / "nothing", tmp_path / "p", x="no_such")
    monkeypatch.syspath_prepend(str(tmp_path / "p"))
    monkeypatch.setattr(registry_module, "_plugins_loaded", False)
    with pytest.warns(UserWarning, match="plugin x"):
        assert "bn" in list(NORMS)
    list(NORMS)  # once


# -- attacks by name in a configuration --------------------------------------------------------------------------------


@pytest.fixture
def own_parts(monkeypatch):
    """The parts of the example, registered in this process for one test."""
    for registry in (NORMS, ATTACKS, OBJECTIVES):
        monkeypatch.setattr(registry, "_entries", dict(registry._entries))
    monkeypatch.syspath_prepend(str(OWN_PARTS / "src"))
    import own_parts

    yield own_parts
    for name in [name for name in sys.modules if name.partition(".")[0] == "own_parts"]:
        del sys.modules[name]


def test_an_attack_of_another_kind_is_a_setting(own_parts):
    config = Config(attack={"name": "cosine4", "statistics": "batch_frozen"}, steps_warmup_epochs=2, norm="natural_bn")
    attack = config.build_attack()
    assert type(attack).__name__ == "CosinePGD" and attack.steps == 4 and attack.statistics == "batch_frozen"
    assert [config.build_attack(epoch).steps for epoch in (0, 1, 2)] == [2, 3, 4]
    assert (
        Config.from_dict(config.to_dict())
        == config
        == Config().with_overrides(
            ["attack.name=cosine4", "attack.statistics=batch_frozen", "steps_warmup_epochs=2", "norm=natural_bn"]
        )
    )
    assert config.digest != Config(steps_warmup_epochs=2, norm="natural_bn").digest
    by_option = Config(attack={"name": "apgd-ce", "options": {"steps": 7}})
    assert by_option.build_attack().steps == 7


@pytest.mark.parametrize(
    ("attack", "code", "field"),
    [
        ({"name": "cosin"}, "unknown_name", "attack.attack"),
        ({"name": "fgsm", "steps": 3}, "conflict", "attack.steps"),
        ({"options": {"steps": 3}}, "conflict", "attack.options"),
        ({"name": "apgd-ce", "options": {"stepz": 3}}, "unknown_name", "attack.stepz"),
        ({"name": "apgd-ce", "options": {"steps": 0}}, "out_of_range", "attack.steps"),
    ],
)
def test_a_wrong_attack_is_an_error(attack, code, field):
    with raises_problem(code, field):
        Config(attack=attack)


def test_the_default_attack_keeps_its_digest():
    """Runs and records of older versions are found again."""
    assert (
        Config(attack=AttackConfig(steps=3)).digest == Config(attack={"steps": 3, "name": "pgd", "options": {}}).digest
    )
    assert Config().digest == "d2642d6da6aa43b66cc1811a8abb25ab"
