"""Benchmarks: right numbers, all conditions, everything checked first, and a kill that costs nothing."""

from __future__ import annotations

import copy
import dataclasses
import json
import re
import shutil
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console
from safetensors.torch import save_file
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import advnorm
from advnorm._core import provenance
from advnorm._core.errors import ConfigError
from advnorm._core.locks import exclusive
from advnorm.attacks import PGD
from advnorm.attacks.autoattack import AutoAttack
from advnorm.attacks.autoattack_record import Record
from advnorm.cli import evaluate as cli
from advnorm.cli import listing
from advnorm.data import ImageData, load, make_loader
from advnorm.evaluation import BenchmarkResult, accuracy_against_eps, accuracy_against_steps, benchmark
from advnorm.evaluation.data_source import gather
from advnorm.evaluation.partial_record import Partial
from advnorm.evaluation.plan import prepare
from advnorm.evaluation.target import load_test_data
from support.problems import raises_problem

THREAT = advnorm.ThreatModel(eps=0.2)
ATTACKS = ["fgsm", "pgd10", "apgd-ce-steps10"]


class Counting(nn.Module):
    """Counts forwards, and may answer with something else than logits."""

    def __init__(self, answer=None, classes: int = 10) -> None:
        super().__init__()
        self.fc = nn.Linear(64, classes)
        self.forwards = 0
        self.answer = answer

    def forward(self, x):
        self.forwards += 1
        logits = self.fc(x.flatten(1))
        return logits if self.answer is None else self.answer(logits)


class Closed:
    """A standard error that nobody reads any more."""

    def isatty(self):
        return False

    def write(self, text):
        raise BrokenPipeError


def some(data, count=40):
    return data[0][:count], data[1][:count]


def without_time(record: dict) -> dict:
    """Without the commit too: its mark for changed files may change while the tests run."""
    return {key: value for key, value in record.items() if key not in ("seconds", "commit")}


# -- numbers -----------------------------------------------------------------------------------------------------------


def test_accuracies_are_those_of_the_attacks_by_hand(sound, data):
    x, y = some(data)
    result = benchmark(sound, (x, y), THREAT, ATTACKS)
    sound.eval()
    with torch.no_grad():
        clean = sound(x).argmax(1) == y
        assert torch.equal(result.clean["as called"], clean)
        for name in ATTACKS:
            # Only right images are attacked; each keeps the noise of its place.
            x_adv = advnorm.attacks.get(name, threat=THREAT)(sound, x, y)
            assert torch.equal(result.robust["as called"][name], clean & (sound(x_adv).argmax(1) == y)), name
    union = torch.stack(list(result.robust["as called"].values())).all(0)
    assert torch.equal(result.union(), union)
    assert result.robust_accuracy() == union.sum().item() / len(union)
    assert result.robust_accuracy("pgd10") == result.accuracy["as called"]["pgd10"]
    assert 0.4 < result.robust_accuracy() <= result.robust_accuracy("fgsm") < result.clean_accuracy()


def test_the_batch_size_changes_nothing(sound, data):
    results = [benchmark(sound, some(data), THREAT, ATTACKS, batch_size=size) for size in (7, 64)]
    first, second = ({**r.record(), "batch_size": 0, "seconds": 0} for r in results)
    assert first == second


def test_several_routes_in_one_call_are_the_single_ones(dual, data):
    both = benchmark(dual, some(data), THREAT, "pgd10", ["clean", "adv"])
    assert both.routes == ("clean", "adv")
    for route in both.routes:
        single = benchmark(dual, some(data), THREAT, "pgd10", route)
        assert torch.equal(both.robust[route]["pgd10"], single.robust[route]["pgd10"])
    with pytest.raises(ConfigError, match="say which route"):
        both.robust_accuracy("pgd10")


def test_an_attack_with_a_route_of_its_own_is_transferred(dual, data):
    x, y = some(data)
    attack = PGD(threat=THREAT, steps=5, route="clean")
    result = benchmark(dual, (x, y), THREAT, {"from clean": attack}, "adv")
    x_adv = attack(dual, x, y)
    dual.eval()
    with torch.no_grad(), advnorm.route(dual, "adv"):
        expected = (dual(x).argmax(1) == y) & (dual(x_adv).argmax(1) == y)
    assert torch.equal(result.robust["adv"]["from clean"], expected)


def test_a_model_in_train_mode_is_judged_in_eval_mode_and_stays_as_it_was(sound, data):
    model = nn.Sequential(nn.Dropout(), nn.BatchNorm2d(1), sound).eval()
    expected = benchmark(model, some(data), THREAT, "pgd10").record()["verdicts"]
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model.train()
    sound.bn2.eval()
    assert benchmark(model, some(data), THREAT, "pgd10").record()["verdicts"] == expected
    assert [module for module in model.modules() if not module.training] == [sound.bn2]
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_the_callers_autocast_changes_no_verdict(data):
    model, (x, _) = Counting(lambda z: z + 1000), some(data)  # bf16 tells no two of these logits apart
    y, weak = model(x).argmax(1), advnorm.ThreatModel(eps=0.01)
    expected = benchmark(model, (x, y), weak, "pgd3")
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(benchmark(model, (x, y), weak, "pgd3").union(), expected.union())
    assert 0 < expected.robust_accuracy() < expected.clean_accuracy() == 1


def test_attacks_by_name_use_the_statistics_that_judge_and_move_none(sound, data):
    x, y = some(data)
    before = {name: value.clone() for name, value in sound.state_dict().items()}
    for mode in ("batch", "batch_frozen"):
        result = benchmark(sound, (x, y), THREAT, ["pgd10", PGD(threat=THREAT, steps=5, statistics="batch")],
                           statistics=mode, batch_size=40)  # fmt: skip
        clean = result.clean["as called"]
        x_adv = PGD(threat=THREAT, statistics="batch_frozen")(sound, x[clean], y[clean], index=torch.arange(40)[clean])
        with advnorm.attacks.attacked(sound, statistics="batch_frozen") as predict:
            expected = torch.zeros_like(clean).masked_scatter(clean, predict(x_adv).argmax(1) == y[clean])
        assert torch.equal(result.robust["as called"]["pgd10"], expected)
        assert all("statistics='batch_frozen'" in attack for attack in result.attacks.values())
        assert any(warning.startswith("batch-dependent") for warning in result.warnings)
        steps = accuracy_against_steps(sound, (x, y), THREAT, (10,), statistics=mode, batch_size=40)
        eps = accuracy_against_eps(sound, (x, y), THREAT, (0.2,), "pgd10", statistics=mode, batch_size=40)
        assert steps.accuracy() == eps.accuracy() == [result.robust_accuracy("pgd10")]
    assert all(torch.equal(before[name], value) for name, value in sound.state_dict().items())
    assert benchmark(sound, (x, y), THREAT, "fgsm").warnings == ()


def test_a_random_model_is_judged_by_other_draws_than_it_was_attacked_with(data):
    class Noisy(Counting):
        def forward(self, x):
            draws.append(torch.rand(len(x), 10))
            return super().forward(x) + draws[-1]

    torch.manual_seed(0)
    model, results = Noisy(), []
    for seed in (1, 2):
        torch.manual_seed(seed)
        draws, before = [], torch.get_rng_state()
        results.append(benchmark(model, some(data), THREAT, ["fgsm", "pgd2", "autoattack-rand-steps2"]))
        assert torch.equal(before, torch.get_rng_state())
        whole = [tuple(draw.flatten().tolist()) for draw in draws[1:]]
        assert len(set(whole)) == len(whole)  # no forward sees the draws of another
    first, second = (without_time(result.record()) for result in results)
    assert first == second != without_time(benchmark(model, some(data), THREAT, ["fgsm"], seed=1).record())
    assert [warning.split(":")[0] for warning in results[0].warnings[:1]] == ["the outputs are random"]
    assert sum("random" in warning for warning in results[0].warnings) == 1


def test_probabilities_are_told_for_every_attack_once(data):
    result = benchmark(Counting(lambda z: z.softmax(1)), some(data), THREAT, ["fgsm", "autoattack-steps2-queries5"])
    assert sum("probabilities" in warning for warning in result.warnings) == 1


def test_a_mixture_norm_is_told_and_its_components_are_judged_in_a_scope(data, tmp_path):
    torch.manual_seed(0)
    model = advnorm.create_model("small_cnn", in_channels=1, norm="gmm_bn")
    with advnorm.route(model, {"clean": 64, "adv": 64}), torch.no_grad():
        model(torch.cat([data[0][:64], 1 - data[0][:64]]))
    with pytest.raises(ConfigError, match="a route changes nothing.*leave route out.*advnorm.mixture_component"):
        benchmark(model, some(data), THREAT, "fgsm", ["clean", "adv"])
    assert benchmark(model, some(data), THREAT, "fgsm").warnings[0].startswith("input-dependent: gmm_bn")
    for domain in ("clean", "adv"):
        with advnorm.mixture_component(model, domain):
            found = benchmark(model, some(data), THREAT, "pgd2", record=tmp_path / f"{domain}.json")
        expected = benchmark(advnorm.strip(model, component=domain), some(data), THREAT, "pgd2")
        assert torch.equal(found.union(), expected.union()) and found.warnings == ()
        assert f"inside: component {domain}" in str(found)
    with advnorm.mixture_component(model, "adv"), pytest.raises(ConfigError, match="another evaluation"):
        benchmark(model, some(data), THREAT, "pgd2", record=tmp_path / "clean.json")


def test_an_attack_object_never_takes_the_place_of_a_named_one(data):
    attacks = [PGD(threat=THREAT, loss="cw", restarts=3), "pgd10", PGD(threat=THREAT, steps=2)]
    result = benchmark(Counting(), some(data), THREAT, attacks)
    assert list(result.attacks) == ["pgd10 (2)", "pgd10", "pgd2"]
    assert "loss='cw'" in result.attacks["pgd10 (2)"] and "loss='ce'" in result.attacks["pgd10"]


def test_a_slow_attack_is_saved_in_small_parts_with_the_same_result(sound, data, monkeypatch):
    expected = benchmark(sound, some(data), THREAT, ["pgd10", "apgd-ce-steps10"], batch_size=40)
    saved = []
    save = Partial.save
    monkeypatch.setattr(Partial, "save", lambda self, key, *rest: saved.append(key) or save(self, key, *rest))
    monkeypatch.setattr("advnorm.evaluation.runner.UNIT_SECONDS", 0.0)
    result = benchmark(sound, some(data), THREAT, ["pgd10", "apgd-ce-steps10"], batch_size=40)
    assert result.record()["verdicts"] == expected.record()["verdicts"]
    assert 8 <= len(saved) <= 10  # of 10 images each
    saved.clear()
    benchmark(sound, some(data), THREAT, "pgd10", batch_size=40, statistics="batch_frozen")
    assert len(saved) == 1  # where the others of its batch matter to an image, batches stay whole


def test_the_seconds_of_an_attack_are_those_of_all_its_parts_and_attempts(tmp_path):
    verdicts = torch.tensor([1, 0, -1], dtype=torch.int8)
    first = Partial(tmp_path / "r.partial", "of this evaluation")
    first.save("pgd10", verdicts, 2.0)
    first.save("pgd10", verdicts, 1.0)
    again = Partial(tmp_path / "r.partial", "of this evaluation")
    again.save("pgd10", verdicts, 0.5)
    assert again.seconds("pgd10") == 3.5 and again.seconds("fgsm") == 0
    assert torch.equal(again.verdicts("pgd10", 3), verdicts)


def test_a_log_gets_a_line_now_and_then(sound, data, monkeypatch, capsys):
    """Standard error is no terminal here."""
    benchmark(sound, some(data), THREAT, "pgd10", batch_size=10, progress=True)
    assert capsys.readouterr().err == ""  # over within half a minute
    monkeypatch.setattr("advnorm._core.progress.LINE_EVERY", 0.0)
    result = benchmark(sound, some(data), THREAT, "pgd10", batch_size=10, progress=True)
    (found,) = result.accuracy.values()
    right = round(40 * found["clean"])  # the others need no attack
    lines = capsys.readouterr().err.splitlines()
    for gone in (None, Closed()):
        monkeypatch.setattr(sys, "stderr", gone)
        again = benchmark(sound, some(data), THREAT, "pgd10", batch_size=10, progress=True)
        assert again.accuracy == result.accuracy
    assert f"pgd10: 10 of {right} images" in lines and not any(f"{right} of" in line for line in lines)


def test_the_table_has_whole_names_on_a_narrow_terminal(dual, data):
    attacks = ["fgsm", "pgd2-restarts2-cw-worst", "apgd-ce-steps2", "apgd-t-steps2", "pgd2-momentum0.9"]
    result = benchmark(dual, some(data, 8), THREAT, attacks, ["clean", "adv"])
    console = Console(record=True, width=80, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(result.table(80))
    lines = console.export_text().splitlines()
    for name in ("clean", *attacks, "union"):
        assert any(line.startswith(f"│ {name} ") for line in lines), name
    assert "│ adv" in str(result)


def test_a_second_process_on_one_record_is_refused(data, tmp_path):
    path = tmp_path / "deep" / "r.json"
    with exclusive(path), raises_problem("busy"):
        benchmark(Counting(), some(data), THREAT, "fgsm", record=path)
    benchmark(Counting(), some(data), THREAT, "fgsm", record=path)
    assert list(path.parent.iterdir()) == [path]


def test_a_record_that_cannot_be_written_is_refused_before_any_work(data, tmp_path):
    (tmp_path / "file").touch()
    for path in (tmp_path, tmp_path / "file" / "r.json"):
        model = Counting()
        with raises_problem("not_writable", str(path)):
            benchmark(model, some(data), THREAT, "fgsm", record=path)
        assert model.forwards <= 1


def test_accuracy_against_steps_and_eps(sound, data):
    steps = accuracy_against_steps(sound, some(data), THREAT, (1, 5, 20))
    assert steps.values == (1, 5, 20) and steps.accuracy() == sorted(steps.accuracy(), reverse=True)
    eps = accuracy_against_eps(sound, some(data), THREAT, (0.05, "51/255", 0.5))
    assert eps.values == (0.05, 0.2, 0.5)
    assert eps.accuracy()[0] > eps.accuracy()[1] > eps.accuracy()[2] == 0
    assert eps.accuracy()[1] == benchmark(sound, some(data), THREAT, "pgd20").robust_accuracy()
    for curve in (steps, eps):
        assert json.loads(json.dumps(curve.record()))["values"] == list(curve.values)
        assert "as called" in str(curve)
    assert "│ 51/255 " in str(eps)
    near = accuracy_against_eps(sound, some(data), THREAT, (0.2, 0.2 + 1e-9, "2/255", "2/255"), "pgd2")
    assert len(near.values) == len(near.accuracy()) == 3


def test_one_value_stands_for_a_list_of_it(data):
    model = Counting()
    assert accuracy_against_steps(model, some(data), THREAT, 3).labels == ("3",)
    assert accuracy_against_eps(model, some(data), THREAT, "8/255", "fgsm").labels == ("8/255",)
    assert accuracy_against_eps(model, some(data), THREAT, 0.1, "fgsm").values == (0.1,)
    for wrong in (
        lambda: accuracy_against_steps(model, some(data), THREAT, None),
        lambda: accuracy_against_eps(model, some(data), THREAT, None),
        lambda: accuracy_against_eps(model, some(data), THREAT, 0.1, 3),
        lambda: accuracy_against_eps(model, some(data), 0.1),
    ):
        with pytest.raises(ConfigError):
            wrong()


# -- data --------------------------------------------------------------------------------------------------------------


class MapStyle(Dataset):
    def __init__(self, x, y):
        self.x, self.y = x, y

    def __len__(self):
        return len(self.x)

    def __getitem__(self, place):
        return self.x[place], int(self.y[place])  # never an IndexError of its own


@pytest.mark.parametrize(
    "wrap",
    [
        lambda x, y: (x, y),
        lambda x, y: [x.numpy(), y.numpy()],
        TensorDataset,
        MapStyle,
        lambda x, y: DataLoader(TensorDataset(x, y), batch_size=7),
        lambda x, y: ((x[i : i + 9], y[i : i + 9]) for i in range(0, len(x), 9)),
        lambda x, y: ImageData(name="some", split="test", images=x, labels=y, num_classes=10),
    ],
    ids=["tensors", "arrays", "TensorDataset", "map style", "loader", "generator", "ours"],
)
def test_data_comes_in_many_forms(wrap, data):
    x, y = some(data, 20)
    for limit in (None, 11):
        images, labels = gather(wrap(x, y), limit)
        assert torch.equal(images, x[:limit]) and torch.equal(labels, y[:limit])


class Listed(MapStyle):
    """Lists what is read."""

    def __init__(self, x, y):
        super().__init__(x, y)
        self.read = []

    def __getitem__(self, place):
        self.read.append(place)
        return super().__getitem__(place)


@pytest.fixture
def mostly_damaged(tmp_path) -> tuple[Path, list[int]]:
    """A folder of 40 images of which every fourth can be decoded, and these places."""
    from PIL import Image

    for name in "ab":
        folder = tmp_path / "images" / "test" / name
        folder.mkdir(parents=True)
        for number in range(20):
            if number % 4 == 0:
                Image.new("RGB", (8, 8), (number, 0, 0)).save(folder / f"{number:02}.png")
            else:
                (folder / f"{number:02}.png").write_bytes(b"no image")
    return tmp_path / "images", list(range(0, 40, 4))


def test_of_a_data_set_no_more_is_read_than_is_judged(mostly_damaged, data):
    root, places = mostly_damaged
    listed = Listed(*some(data, 40))
    case = prepare(Counting(), listed, THREAT, "fgsm", limit=10, spread=True)
    assert listed.read == case.index.tolist() == places and torch.equal(case.images, listed.x[places])
    whole = prepare(Counting(), some(data, 40), THREAT, "fgsm", limit=10, spread=True)
    assert whole.fingerprint == dataclasses.replace(case, model=whole.model).fingerprint
    model = nn.Sequential(nn.Flatten(), nn.Linear(192, 2))
    case = prepare(
        model, load("imagefolder", "test", root, image_size=8, resize=8), THREAT, "fgsm", limit=10, spread=True
    )
    assert case.index.tolist() == places and torch.equal(case.labels, torch.tensor([0] * 5 + [1] * 5))
    assert torch.equal((case.images[:, 0, 0, 0] * 255).round().long(), torch.tensor(places) % 20)
    batches = [(x[None], torch.tensor([y])) for x, y in MapStyle(*some(data, 40))]
    assert torch.equal(prepare(Counting(), batches, THREAT, "fgsm", limit=10, spread=True).index, whole.index)

    class Batches(Listed):
        def __getitem__(self, place):
            return self.x[4 * place : 4 * place + 4], self.y[4 * place : 4 * place + 4]

        def __len__(self):
            return 10

    pairs = prepare(Counting(), Batches(*some(data, 40)), THREAT, "fgsm", limit=10, spread=True)
    assert torch.equal(pairs.images, whole.images) and torch.equal(pairs.index, whole.index)


def test_the_command_decodes_no_more_of_a_folder_than_it_judges(own_model, mostly_damaged):
    root, _ = mostly_damaged
    (own_model / "my_model_of_tests.py").write_text(
        "from torch import nn\ndef build():\n    return nn.Sequential(nn.Flatten(), nn.Linear(3 * 224 * 224, 2))\n"
    )
    asked = cli.Asked(target="my_model_of_tests:build", data=f"imagefolder:{root}", limit=1, device="cpu")
    assert cli.evaluate(Console(quiet=True), asked, attacks=["fgsm"]) == 0
    with pytest.raises(ConfigError, match=r"cannot decode .*01\.png"):
        cli.evaluate(Console(quiet=True), dataclasses.replace(asked, limit=2), attacks=["fgsm"])


class Pictures(MapStyle):
    def __getitem__(self, place):
        from PIL import Image

        return Image.new("RGB", (8, 8)), 0


# -- before any long work ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"data": lambda x, y: (x[:0], y[:0])}, "the batch is empty"),
        ({"data": lambda x, y: []}, "the data set is empty"),
        ({"data": lambda x, y: (x * 255, y)}, "must lie in \\[0, 1\\].*divide by 255"),
        ({"data": lambda x, y: ((x - 0.5) / 0.5, y)}, "input normalization belongs inside the model"),
        ({"data": lambda x, y: (x.double(), y)}, "use x.float()"),
        ({"data": lambda x, y: (x, y + 1)}, "labels go up to 10 and the model has 10 classes"),
        ({"data": lambda x, y: (x, y - 1)}, "labels must be at least 0"),
        ({"data": lambda x, y: (x, y.float())}, "use y.long()"),
        ({"data": lambda x, y: (x[:, :, :4], y)}, "the model fails on images of shape"),
        ({"data": lambda x, y: x}, "data must hold images and labels, got Tensor"),
        ({"data": lambda x, y: [x, x, x]}, "data must yield \\(images, labels\\)"),
        ({"data": lambda x, y: "digits"}, "load the images: advnorm.data.load\\('digits', 'test'\\)"),
        ({"data": lambda x, y: make_loader(load("digits", "test"), batch_size=8)}, "give its data set, loader.data"),
        ({"data": Pictures}, "must be tensors or arrays, got Image and int; .*ToTensor"),
        ({"data": lambda x, y: ((x * 255).byte(), y)}, "use x.float\\(\\) / 255"),
        ({"data": lambda x, y: ((x * 65535).to(torch.uint16), y)}, "use x.float\\(\\) / 65535"),
        ({"data": lambda x, y: (x * 65535, y)}, "divide by 65535"),
        ({"attacks": 3}, "an attack is a name or an Attack, got 3"),
        ({"route": 3}, "a route is the name of a branch, got 3"),
        ({"route": ["adv", ["clean"]]}, "a route is the name of a branch, got \\['clean'\\]"),
        ({"model": lambda: Counting(lambda z: z * float("nan"))}, "returns NaN logits"),
        ({"model": lambda: Counting(lambda z: (z, z))}, "returned tuple .*return self.model\\(x\\)\\[0\\]"),
        ({"model": lambda: Counting(lambda z: z[:, 0])}, "needs logits of shape"),
        ({"model": lambda: torch.sin}, "must be an nn.Module"),
        ({"attacks": ["pgd10", "autoatack"]}, "did you mean 'autoattack'"),
        ({"attacks": "pgd10-restart5"}, "did you mean 'restarts'"),
        ({"attacks": ["pgd10-restarts1.5", "pgd10-momentum1.2.3"]}, "'restarts' needs .*'momentum' needs"),
        ({"attacks": ["pgd10-step2"], "threat": advnorm.ThreatModel(norm="L2", eps=1)}, "'step' is for Linf"),
        ({"statistics": "frozen"}, "unknown statistics mode 'frozen'"),
        ({"attacks": []}, "no attack given"),
        ({"attacks": {"strong": PGD(threat=advnorm.ThreatModel(eps=0.5))}}, "has the threat model"),
        ({"route": "adv"}, "no routed norms"),
        ({"batch_size": 0}, "batch_size must be an integer of at least 1"),
        ({"limit": 0}, "limit must be an integer of at least 1"),
        ({"device": "tpu"}, "unknown device 'tpu'"),
        ({"threat": 8 / 255}, "threat must be a ThreatModel"),
    ],
)
def test_what_cannot_be_meant_is_refused_before_any_long_work(change, message, data):
    x, y = some(data)
    model = change.get("model", Counting)()
    given = {key: value for key, value in change.items() if key not in ("model", "data", "threat")}
    with pytest.raises(ConfigError, match=message):
        benchmark(model, change.get("data", lambda x, y: (x, y))(x, y), change.get("threat", THREAT), **given)
    assert getattr(model, "forwards", 0) <= 1


def test_eps_8_is_refused_with_the_cure():
    with pytest.raises(ConfigError, match="did you mean '8/255'"):
        advnorm.ThreatModel(eps=8)


def test_a_missing_and_an_unknown_route_are_explained(data):
    model = advnorm.create_model("small_cnn", in_channels=1, norm="dual_bn")
    with pytest.raises(ConfigError, match="no route is set"):
        benchmark(model, some(data), THREAT, "pgd10")
    with pytest.raises(ConfigError, match="unknown domain 'avd', did you mean 'adv'"):
        benchmark(model, some(data), THREAT, "pgd10", "avd")
    with advnorm.route(model, "adv"):
        assert benchmark(model, some(data), THREAT, "fgsm").routes == ("as called",)


def test_what_all_routes_have_in_common_is_told_once(data):
    model = advnorm.create_model("small_cnn", in_channels=1, norm="dual_bn")
    colour = torch.rand(8, 3, 8, 8), torch.zeros(8, dtype=torch.long)
    with pytest.raises(ConfigError) as error:
        benchmark(model, colour, THREAT, "pgd10", ["clean", "adv"])
    assert str(error.value).count("the model fails on images of shape") == 1 and "through route" not in str(error.value)
    with pytest.raises(ConfigError) as error:
        advnorm.audit(advnorm.create_model("small_cnn", norm="dual_bn"), colour, THREAT, surrogate=model)
    assert str(error.value).count("the surrogate: the model fails on images of shape") == 1
    next(buffer for name, buffer in model.named_buffers() if name.endswith("running_mean_adv")).fill_(torch.nan)
    with pytest.raises(ConfigError, match="NaN logits through route 'adv'; check"):
        benchmark(model, some(data), THREAT, "pgd10", ["clean", "adv"])


def test_all_problems_come_in_one_error(data):
    x, y = some(data)
    with pytest.raises(ConfigError) as error:
        benchmark(Counting(lambda z: z * float("nan")), (x, y), THREAT, ["pdg10", "pgd0"], batch_size=-1)
    for part in ("did you mean 'pgd", "steps must be an integer", "batch_size", "NaN logits"):
        assert part in str(error.value)


def test_nan_for_one_image_is_found_before_the_attacks(data):
    x, y = some(data)
    model = Counting(lambda z: torch.where(torch.arange(len(z))[:, None] == 30, torch.nan, z) if len(z) > 30 else z)
    with pytest.raises(ConfigError, match="NaN logits for image 30"):
        benchmark(model, (x, y), THREAT, "pgd10")
    assert model.forwards == 4  # a few images, two looks at the first ones, and all of them


def test_a_tuple_is_no_problem_where_the_logits_are_named(data):
    result = benchmark(Counting(lambda z: {"logits": z, "features": z}), some(data), THREAT, "fgsm")
    assert result.images == 40


# -- records -----------------------------------------------------------------------------------------------------------


def test_the_record_has_all_conditions_and_leads_back_to_the_result(dual, data, tmp_path):
    path = tmp_path / "deep" / "result.json"
    result = benchmark(dual, some(data), THREAT, ["pgd10", "fgsm"], ["adv"], record=path, seed=3)
    record = json.loads(path.read_text())
    assert record == json.loads(json.dumps(result.record()))
    assert {
        "threat",
        "attacks",
        "routes",
        "images",
        "seed",
        "batch_size",
        "device",
        "torch",
        "advnorm",
        "commit",
    } <= set(record)
    assert record["model"]["norms"] == ["dual_bn"] and record["model"]["domains"] == ["clean", "adv"]
    assert record["model"]["parameters"] == sum(p.numel() for p in dual.parameters())
    assert "steps=10" in record["attacks"]["pgd10"] and "seed=3" in record["attacks"]["pgd10"]
    assert record["seconds"]["adv"]["pgd10"] > 0
    assert list(tmp_path.glob("deep/*")) == [path]
    loaded = BenchmarkResult.load(path)
    assert loaded.record() == record and str(loaded) == str(result)
    assert torch.equal(loaded.robust["adv"]["pgd10"], result.robust["adv"]["pgd10"])


@pytest.mark.parametrize("about", ["run 3", {"place": Path("x")}, {"lr": float("nan")}])
def test_what_a_record_cannot_hold_is_refused_before_any_work(sound, data, about):
    with pytest.raises(ConfigError, match="about must be a mapping of plain data"):
        benchmark(sound, some(data), THREAT, "fgsm", about=about)


def test_a_data_set_is_named_in_the_record_and_the_callers_name_goes_before(sound):
    digits = load("digits", "test")
    assert benchmark(sound, digits, THREAT, "fgsm", limit=8).record()["about"] == {"data": "digits, test"}
    named = benchmark(sound, digits, THREAT, "fgsm", limit=8, about={"data": "mine", "run": "r"})
    assert named.record()["about"] == {"data": "mine", "run": "r"} and "run r, data mine" in str(named)


def test_a_finished_record_is_read_back_and_a_foreign_one_refused(data, tmp_path):
    path = tmp_path / "r.json"
    model = Counting()
    first = benchmark(model, some(data), THREAT, "fgsm", record=path)
    model.forwards = 0
    assert benchmark(model, some(data), THREAT, "fgsm", record=path).record() == first.record()
    assert model.forwards == 3  # a few images, and two looks at the first ones
    for other in ({"attacks": "pgd1"}, {"data": some(data, 41)}):
        with pytest.raises(ConfigError, match=f"{path} holds the record of another evaluation"):
            benchmark(model, **{"data": some(data), "attacks": "fgsm", **other}, threat=THREAT, record=path)
    nn.init.zeros_(model.fc.weight)
    with pytest.raises(ConfigError, match="another evaluation"):
        benchmark(model, some(data), THREAT, "fgsm", record=path)
    path.write_text("{")
    with pytest.raises(ConfigError, match=f"{path} is damaged"):
        benchmark(model, some(data), THREAT, "fgsm", record=path)


def test_a_record_of_a_model_with_the_same_tensors_that_computes_something_else_is_refused(data, tmp_path):
    path, unfinished = tmp_path / "r.json", tmp_path / "p.json"
    model = Counting(lambda z: torch.cat([z[:, :9], torch.full_like(z[:, 9:], -torch.inf)], 1))  # for JSON a trap
    first = benchmark(model, some(data), THREAT, "fgsm", record=path)

    class Stop(Exception):
        pass

    def stop(*_):
        raise Stop

    attacks = {"a": PGD(threat=THREAT, steps=1), "b": PGD(threat=THREAT, steps=2, progress=stop)}
    with pytest.raises(Stop):
        benchmark(model, some(data), THREAT, attacks, record=unfinished)
    answer = model.answer
    model.answer = lambda z: answer(z) * (1 + 1e-4)  # as another device rounds
    assert benchmark(model, some(data), THREAT, "fgsm", record=path).record() == first.record()
    model.answer = lambda z: answer(z).clamp(-0.5, 0.5)
    with pytest.raises(ConfigError, match=f"{path} holds the record of another evaluation"):
        benchmark(model, some(data), THREAT, "fgsm", record=path)
    with pytest.raises(ConfigError, match=r"p\.json\.partial belongs to another evaluation"):
        benchmark(model, some(data), THREAT, {"a": attacks["a"]}, record=unfinished)
    old = json.loads(path.read_text())
    del old["logits"]
    path.write_text(json.dumps(old))  # of a version that kept no logits
    assert benchmark(model, some(data), THREAT, "fgsm", record=path).accuracy == first.accuracy


def test_a_randomized_model_is_not_known_by_its_logits(data, tmp_path):
    model = Counting(lambda z: z + torch.randn_like(z))
    first = benchmark(model, some(data), THREAT, "fgsm", record=tmp_path / "r.json")
    assert first.record()["logits"] == {"as called": None}
    model.answer = lambda z: z - torch.randn_like(z)
    assert benchmark(model, some(data), THREAT, "fgsm", record=tmp_path / "r.json").record() == first.record()


@pytest.mark.parametrize("name", ["r.json", "r.json.partial"])
def test_a_result_is_shown_where_its_record_cannot_be_written(own_model, name):
    (own_model / "my_model_of_tests.py").write_text(
        "import pathlib, torch\n"
        "class Net(torch.nn.Linear):\n"
        "    def forward(self, x):\n"
        f"        len(x) > 4 and x.requires_grad and pathlib.Path({name!r}).mkdir(exist_ok=True)\n"  # during an attack
        "        return super().forward(x.flatten(1))\n"
        "def build():\n    return Net(64, 10)\n"
    )
    console = Console(record=True, width=120, file=open("/dev/null", "w"))  # noqa: SIM115
    asked = cli.Asked(
        target="my_model_of_tests:build", data="digits", limit=40, device="cpu", json=Path("r.json"), eps="0.01"
    )
    with raises_problem("not_writable", name):
        cli.evaluate(console, asked, attacks=["fgsm"])
    assert ("accuracy, 40 images" in console.export_text()) == (name == "r.json")  # the partial one fails half-way


# -- statistics of the batch -------------------------------------------------------------------------------------------


def perceptron(norm: str | None = None) -> nn.Module:
    """Of an image alone its norm sees one value per channel, which has no statistics."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 10))
    if norm:
        advnorm.convert_norm(model, norm)
    return model


@pytest.mark.parametrize("norm", [None, "bn"])
def test_with_statistics_of_the_batch_no_image_is_left_alone(norm, data):
    model, (x, _) = perceptron(norm), some(data, 21)
    model.train()
    with torch.no_grad(), advnorm.attacks.attacked(model, statistics="batch_frozen") as predict:
        y = torch.cat([predict(part) for part in (x[:10], x[10:])]).argmax(1)  # the rest of one with the batch before
    y[:19] += 1  # wrong: two images to attack, each alone in its batch
    y %= 10
    attacks = ["pgd2", "pgd2-restarts2", "apgd-ce-steps5", "fab-t-steps5", "square-queries10"]
    attacks = [*attacks, AutoAttack(threat=THREAT, steps=3, targets=2, queries=5)]
    for left in (2, 1):
        result = benchmark(model, (x, y), THREAT, attacks, batch_size=10, statistics="batch_frozen")
        assert result.clean["as called"].nonzero()[:, 0].tolist() == list(range(21 - left, 21))
        assert any("batch-dependent" in warning for warning in result.warnings)
        y[19] = (y[19] + 1) % 10


@pytest.mark.parametrize("options", [{"limit": 1}, {"batch_size": 1}])
def test_a_batch_of_one_image_is_refused_where_its_statistics_are_asked_for(options, data):
    with pytest.raises(ConfigError, match="statistics of the batch need two images or more at a time; give more"):
        benchmark(perceptron(), some(data), THREAT, "fgsm", statistics="batch_frozen", **options)
    assert benchmark(perceptron(), some(data), THREAT, "fgsm", **options).clean_accuracy() <= 1


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is damaged"),
        ("[]", "is damaged"),
        ('{"format": "advnorm.benchmark/1"}', "is not a partial evaluation"),
        ('{"format": "advnorm.partial/1", "jobs": {}, "fingerprint": "x"}', "belongs to another evaluation"),
    ],
)
def test_a_partial_file_that_does_not_fit_is_named(content, message, data, tmp_path):
    partial = tmp_path / "r.json.partial"
    partial.write_text(content)
    with pytest.raises(ConfigError, match=message) as error:
        benchmark(Counting(), some(data), THREAT, "fgsm", record=tmp_path / "r.json")
    assert str(partial) in str(error.value)


def test_the_commit_is_that_of_the_package_with_a_plus_where_its_files_differ(tmp_path, monkeypatch):
    def git(*words: str) -> str:
        command = ["git", "-c", "user.name=x", "-c", "user.email=x", "-c", "commit.gpgsign=false", *words]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout.strip()

    monkeypatch.setattr(provenance, "__file__", str(tmp_path / "advnorm" / "_core" / "provenance.py"))
    monkeypatch.setenv("ADVNORM_COMMIT", "of a container")
    (tmp_path / "advnorm" / "_core").mkdir(parents=True)
    first = tmp_path / "advnorm" / "__init__.py"
    first.touch()
    git("init", "-q")
    found = provenance._commit.__wrapped__
    assert found() == "of a container"  # a repository around it that is not its own
    git("add", ".")
    git("commit", "-q", "-m", "x")
    (tmp_path / "advnorm" / "new.txt").touch()
    assert found() == git("rev-parse", "HEAD")
    first.write_text("changed")
    assert found() == git("rev-parse", "HEAD") + "+"


def test_memory_that_runs_out_halves_the_batch_and_is_told(data):
    class Large(Counting):
        def forward(self, x):
            if len(x) > 10:
                raise torch.OutOfMemoryError("CUDA out of memory (pretended)")
            return super().forward(x)

    model, weak = Large(), advnorm.ThreatModel(eps=0.01)
    x = data[0][:40]
    y = Counting.forward(model, x).argmax(1)  # all right
    result = benchmark(model, (x, y), weak, "pgd3", batch_size=40)
    assert result.warnings == tuple(
        f"{name}: memory did not suffice for 40, 20 images at a time, went on with 10" for name in ("clean", "pgd3")
    )
    model.__class__ = Counting
    assert torch.equal(result.union(), benchmark(model, (x, y), weak, "pgd3").union())


SCRIPT = """
    import os, signal, sys
    import torch
    import advnorm
    from advnorm.attacks import autoattack
    from advnorm.data import digits
    from advnorm.evaluation import benchmark
    from advnorm.evaluation.partial_record import Partial

    torch.set_num_threads(1)
    x, y = digits("train")
    means = torch.stack([x[y == c].mean(0).flatten() for c in range(10)])
    linear = torch.nn.Linear(64, 10)  # the nearest class mean: deterministic, and right on nine of ten digits
    linear.weight.data, linear.bias.data = means, -means.square().sum(1) / 2
    model = torch.nn.Sequential(torch.nn.Flatten(), linear)
    x, y = (part[:40] for part in digits("test"))
    threat = advnorm.ThreatModel(eps=0.1)
    cascade = autoattack.AutoAttack(threat=threat, steps=10, queries=50, batch_size=36)

    def killed(function, when):
        count = 0
        def wrapped(self, *arguments):
            nonlocal count
            function(self, *arguments)
            count += when(*arguments)
            if count == 2:
                os.kill(os.getpid(), signal.SIGKILL)
        return wrapped

    def counted(self, *arguments):
        print("batch", flush=True)
        return perturb(self, *arguments)

    perturb, advnorm.attacks.PGD.perturb = advnorm.attacks.PGD.perturb, counted
    record, kill = sys.argv[1], sys.argv[2]
    if kill == "pgd":
        Partial.save = killed(Partial.save, lambda *_: 1)
    elif kill == "apgd-t":
        autoattack.Record.add = killed(autoattack.Record.add, lambda batch: batch.stage == "apgd-t")
    result = benchmark(
        model, (x, y), threat, {"pgd": advnorm.attacks.PGD(threat=threat, steps=5), "aa": cascade},
        batch_size=8, record=record,
    )
    print(result)
"""


def test_a_killed_evaluation_continues_and_ends_with_the_same_record(tmp_path):
    script = tmp_path / "run.py"
    script.write_text(textwrap.dedent(SCRIPT))

    def run(name: str, kill: str = "") -> tuple[int, int]:
        """The exit status, and the batches that PGD attacked."""
        command = [sys.executable, str(script), str(tmp_path / name), kill]
        done = subprocess.run(command, capture_output=True, check=False)
        return done.returncode, done.stdout.count(b"batch\n")

    assert run("whole.json") == (0, 5)
    assert run("killed.json", "pgd") == (-signal.SIGKILL, 2)
    partial = json.loads((tmp_path / "killed.json.partial").read_text())
    (pgd,) = partial["jobs"].values()
    assert not (tmp_path / "killed.json").exists() and set("1?") <= set(pgd["verdicts"])
    assert run("killed.json", "apgd-t") == (-signal.SIGKILL, 3)
    folder = next(tmp_path.glob("killed.json.partial.*"))
    batches = len(list(folder.glob("batch-*")))
    assert batches >= 3  # APGD-CE and two batches of APGD-T
    assert run("killed.json") == (0, 0)
    whole, killed = (json.loads((tmp_path / name).read_text()) for name in ("whole.json", "killed.json"))
    assert without_time(whole) == without_time(killed)
    assert 0 < whole["accuracy"]["as called"]["union"] < whole["accuracy"]["as called"]["clean"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["killed.json", "run.py", "whole.json"]


def test_what_a_first_cascade_leaves_belongs_to_its_model_and_adds_up(sound, data, tmp_path, monkeypatch):
    x, y = some(data)
    record, cascade = tmp_path / "r.json", {"aa": AutoAttack(threat=THREAT, steps=3, targets=2, queries=5)}
    original = Record.add

    def last(self, batch):
        original(self, dataclasses.replace(batch, seconds=1000.0))
        raise KeyboardInterrupt

    monkeypatch.setattr(Record, "add", last)
    with pytest.raises(KeyboardInterrupt):
        benchmark(sound, (x, y), THREAT, cascade, record=record)
    monkeypatch.undo()
    other = copy.deepcopy(sound)
    next(other.parameters()).data.view(-1)[0] += 1e-6
    with pytest.raises(ConfigError, match=r"r\.json\.partial belongs to another evaluation"):
        benchmark(other, (x, y), THREAT, cascade, record=record)
    monkeypatch.setattr(Partial, "remove", lambda self: None)
    resumed = benchmark(sound, (x, y), THREAT, cascade, record=record)
    assert 1000 < resumed.seconds["as called"]["aa"] < 1100  # the first process's too
    record.unlink()
    Path(f"{record}.partial").unlink()
    with pytest.raises(ConfigError, match=r"record\.json belongs to another evaluation \(different: model\)"):
        benchmark(other, (x, y), THREAT, cascade, record=record)


# -- the command -------------------------------------------------------------------------------------------------------


@pytest.fixture
def own_model(sound, tmp_path, monkeypatch) -> Path:
    """A folder with a module of the user's and weights."""
    (tmp_path / "my_model_of_tests.py").write_text(
        "import advnorm\n"
        "def build():\n    return advnorm.create_model('small_cnn', in_channels=1)\n"
        "def number():\n    return 7\n"
        "def broken():\n    raise KeyError('no weights')\n"
        "def leaving():\n    raise SystemExit(1)\n"
        "def dual():\n    return advnorm.create_model('small_cnn', in_channels=1, norm='dual_bn')\n"
    )
    save_file(sound.state_dict(), tmp_path / "w.safetensors")
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    sys.modules.pop("my_model_of_tests", None)


def test_evaluate_prints_the_table_of_ones_own_model(own_model, data):
    x, y = some(data)
    np.savez("d.npz", x=(x * 255).round().byte().numpy(), y=y.int().numpy())
    save_file({"images": (x * 255).round() / 255, "labels": y}, "d.safetensors")
    console = Console(record=True, width=120, file=open("/dev/null", "w"))  # noqa: SIM115
    accuracies = []
    for name in ("d.npz", "d.safetensors"):
        asked = cli.Asked(
            target="my_model_of_tests:build", weights=Path("w.safetensors"), data=name, eps="51/255", device="cpu",
            json=Path(f"{name}.json"),
        )  # fmt: skip
        assert cli.evaluate(console, asked, attacks=["pgd10"]) == 0
        accuracies.append(json.loads(Path(f"{name}.json").read_text())["accuracy"]["as called"])
    assert accuracies[0] == accuracies[1] and accuracies[0]["clean"] > 0.9
    assert "pgd10" in console.export_text() and "as called" not in sys.path


@pytest.mark.parametrize(
    ("target", "weights", "data", "message"),
    [
        ("my_model_of_tests", None, "digits", "no module:function such as"),
        ("my_model_of_tests:broken", None, "digits", "my_model_of_tests:broken raised KeyError.*tests.py, line 7"),
        ("my_model_of_tests:leaving", None, "digits", "leaving raised SystemExit"),
        ("my_model_of_tests:dual", None, "digits", "say which to judge: --route clean adv"),
        ("my_modell:build", None, "digits", "no module 'my_modell'"),
        ("my_model_of_tests:bild", None, "digits", "did you mean 'build'"),
        ("my_model_of_tests:number", None, "digits", "must return an nn.Module, got int"),
        ("my_model_of_tests:build", "w.pth", "digits", "must be a .safetensors file.*save_file"),
        ("my_model_of_tests:build", "x.safetensors", "digits", "cannot read x.safetensors"),
        ("my_model_of_tests:build", "other.safetensors", "digits", "does not fit the model: .*missing.* more"),
        ("my_model_of_tests:build", None, "digitz", "unknown data 'digitz'"),
        ("my_model_of_tests:build", None, "d.npz", "no file d.npz"),
        ("my_model_of_tests:build", None, "other.safetensors", "holds a; name the images 'x'"),
    ],
)
def test_a_command_that_cannot_work_says_why(own_model, target, weights, data, message):
    save_file({"a": torch.zeros(1)}, "other.safetensors")
    asked = cli.Asked(target=target, weights=None if weights is None else Path(weights), data=data, device="cpu")
    with pytest.raises(ConfigError, match=message):
        cli.evaluate(Console(quiet=True), asked, attacks=["fgsm"])


def test_a_record_that_is_there_is_said_to_be_read_back_and_edited_code_is_noticed(own_model):
    console = Console(record=True, width=120, file=open("/dev/null", "w"))  # noqa: SIM115
    module = own_model / "my_model_of_tests.py"
    asked = cli.Asked(
        target="my_model_of_tests:build", data="digits", eps="0.01", limit=20, device="cpu", json=Path("r.json")
    )

    def evaluate(levels: int) -> str:
        module.write_text(
            "import torch\nclass Net(torch.nn.Linear):\n"
            f"    def forward(self, x):\n        return super().forward((x * {levels}).round().flatten(1) / {levels})\n"
            "def build():\n    torch.manual_seed(0)\n    return Net(64, 10)\n"
        )
        shutil.rmtree("__pycache__", ignore_errors=True)
        sys.modules.pop("my_model_of_tests", None)
        cli.evaluate(console, asked, attacks=["noise-uniform"])
        return console.export_text()

    assert "record: r.json" in evaluate(16)
    assert "read back from r.json" in evaluate(16)
    with pytest.raises(ConfigError, match=r"r\.json holds the record of another evaluation"):
        evaluate(2)


@pytest.mark.parametrize(
    "other", [{"names": ["zero", "one"]}, {"names": np.array(["zero", None])}, {"made": np.datetime64("2026-01-01")}]
)
def test_what_else_a_file_holds_is_left_unread(other, data, tmp_path):
    x, y = some(data, 5)
    np.savez(tmp_path / "d.npz", **other, x=x.numpy(), y=y.numpy())
    images, labels = load_test_data(str(tmp_path / "d.npz"))
    assert torch.equal(images, x) and torch.equal(labels, y)


def test_a_file_is_never_unpickled(data, tmp_path):
    np.savez(tmp_path / "d.npz", x=np.array([None]), y=data[1].numpy())
    with pytest.raises(ConfigError, match="cannot read .*allow_pickle"):
        load_test_data(str(tmp_path / "d.npz"))


def test_all_that_is_wrong_with_a_command_is_told_at_once(own_model):
    quiet = Console(quiet=True)
    asked = cli.Asked(
        target="my_model_of_tests:bild", data="digitz", eps="8", statistics="frozen", json=own_model, device="cpu"
    )
    with pytest.raises(ConfigError) as error:
        cli.evaluate(quiet, asked, attacks=["pdg10", "pgd10-cv"])
    for part in ("'pgd10'", "'cw'", "'build'", "'digitz'", "'8/255'", "mode 'frozen'", "is a folder"):
        assert part in str(error.value)
    asked = cli.Asked(target="my_model_of_tests:build", norm="L3", device="cpu")
    with pytest.raises(ConfigError) as error:
        cli.audit(quiet, asked, budget="quik", plot=Path("v.xyz"), surrogate="my_model_of_tests:number")
    for part in ("norm 'L3'", "'quick'", "v.xyz names no known kind", "the surrogate: .*got int"):
        assert re.search(part, str(error.value)), part
    with pytest.raises(ConfigError) as error:
        cli.evaluate(quiet, cli.Asked(target="my_model_of_tests:broken", data="digits", device="cpu"))
    assert isinstance(error.value.__cause__, KeyError)
    asked = cli.Asked(target="my_model_of_tests:build", data="digits", norm="l2", limit=4, device="cpu")
    assert cli.evaluate(quiet, asked, attacks=["fgsm"]) == 0


def test_on_a_gpu_the_fast_search_is_named_where_it_was_not_chosen():
    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    told = cli.in_less_time(["pgd10", "autoattack-steps10"], cuda)
    assert "autoattack-steps10-bf16 is many times as fast" in told
    assert cli.in_less_time(["autoattack"], cpu) is None
    for names in (["pgd10", "square"], ["autoattack-bf16"], ["autoattack-float32"]):
        assert cli.in_less_time(names, cuda) is None


def test_the_table_of_attacks_lists_every_one():
    console = Console(record=True, width=200, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(listing.attacks("*"))
    text = console.export_text()
    assert [name for name in advnorm.attacks.list_attacks() if name not in text] == []
    with pytest.raises(ConfigError, match="no attack matches 'x\\*'"):
        listing.attacks("x*")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_the_verdicts_are_those_of_the_cpu_and_tf32_is_left_as_it_was(sound, data):
    import copy

    attacks = ["pgd10", "autoattack-steps10-queries50"]
    expected = benchmark(sound, some(data), THREAT, attacks)
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    matmul.fp32_precision = "tf32"
    try:
        result = benchmark(copy.deepcopy(sound).cuda(), some(data), THREAT, attacks, device="cuda")
        assert matmul.fp32_precision == "tf32"
    finally:
        matmul.fp32_precision = before
    for name in attacks:
        same = result.robust["as called"][name] == expected.robust["as called"][name]
        assert same.double().mean() >= 0.95
    with pytest.raises(ConfigError, match="model.to\\('cuda'\\)"):
        benchmark(sound, some(data), THREAT, "fgsm", device="cuda")


# -- where there is no number ------------------------------------------------------------------------------------------


class Brittle(nn.Module):
    """A linear classifier that gives NaN for pixels which are no multiples of 1/16, as every perturbed image's are."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fc = nn.Linear(64, 10)

    def forward(self, x):
        exact = ((16 * x).round() == 16 * x).flatten(1).all(1, keepdim=True)
        return torch.where(exact, self.fc(x.flatten(1)), torch.nan)


@pytest.mark.parametrize(
    "attack",
    [
        "noise-uniform",
        "pgd3",
        "pgd2-restarts2-worst",
        "pgd3-momentum1",
        "apgd-ce-steps5",
        "square-queries20",
        "autoattack-steps5-queries20",
    ],
)
def test_no_number_is_a_wrong_answer_for_every_attack(data, attack):
    """Some called such an image robust, and others refused to go on: the first images they saw were perturbed ones."""
    model = Brittle().eval()
    x = data[0][:24]
    y = model(x).argmax(1)
    result = benchmark(model, (x, y), advnorm.ThreatModel(eps=0.03), attack)
    assert result.clean_accuracy() == 1 and result.robust_accuracy(attack) == 0


def test_no_number_for_a_clean_image_is_refused_by_an_attack_itself(data):
    model = Brittle().eval()
    x, y = data[0][:4] + 0.001, data[1][:4]
    with pytest.raises(ConfigError, match="NaN logits"):
        PGD(threat=THREAT, steps=1)(model, x.clamp(0, 1), y)


# -- what does not go together -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "change", "attacks", "told"),
    [
        (lambda: Counting(classes=2), lambda x: x, ["apgd-ce-steps3", "pgd10-dlr"], "pgd10-dlr: the dlr loss needs"),
        (lambda: Counting(classes=3), lambda x: x, ["fgsm", "pgd3-dlr-targeted"], "at least 4 classes, got 3"),
        (
            lambda: Counting(lambda z: z.detach()),
            lambda x: x,
            ["square-queries9", "pgd10", "fgsm"],
            "pgd10, fgsm: the logits do not depend",
        ),
        (Counting, lambda x: x.flatten(1), ["pgd3", "autoattack-steps2"], "autoattack-steps2: Square needs images"),
    ],
)
def test_attacks_that_do_not_go_with_model_or_images_are_refused_before_any_work(data, model, change, attacks, told):
    model = model()
    with pytest.raises(ConfigError, match=told):
        benchmark(model, (change(data[0][:20]), data[1][:20] % 2), THREAT, attacks)
    assert model.forwards == 1


def test_without_gradients_what_needs_none_runs(data):
    model = Counting(lambda z: z.detach())
    result = benchmark(model, some(data), THREAT, ["square-queries9", "noise-uniform", "autoattack-steps2-queries9"])
    assert len(result.attacks) == 3


# -- bookkeeping -------------------------------------------------------------------------------------------------------


class Rounding(Counting):
    """Has no gradients, and falls to what needs none."""

    def forward(self, x):
        return super().forward(x + ((8 * x).round() / 8 - x).detach() - (x - x.detach()))


def test_points_that_square_takes_are_of_all_images(data):
    """The share was that of the images that are right without an attack."""
    torch.manual_seed(0)
    x, _ = some(data, 60)
    model = Rounding()
    y = torch.where(torch.arange(60) < 30, model(x).argmax(1), (model(x).argmax(1) + 1) % 10)
    result = benchmark(model, (x, y), THREAT, AutoAttack(threat=THREAT, steps=3, targets=2, queries=300))
    (stages,) = result.record()["stages"]["as called"].values()
    lost = 100 * (stages["fab-t"] - stages["square"])
    assert lost > 0.2
    (told,) = [text for text in result.warnings if "Square lowered" in text]
    assert f"another {lost:.2f} points" in told


def test_batch_statistics_of_autoattack_are_those_of_the_batches(data, monkeypatch):
    asked = []
    evaluate = AutoAttack.evaluate
    monkeypatch.setattr(
        AutoAttack, "evaluate", lambda self, *a, **k: (asked.append(self.batch_size), evaluate(self, *a, **k))[1]
    )
    attack = AutoAttack(threat=THREAT, attacks=("apgd-ce",), steps=2)
    for statistics in ("running", "batch_frozen"):
        frozen = dataclasses.replace(attack, statistics=statistics)
        benchmark(perceptron(), some(data), THREAT, frozen, batch_size=8, statistics=statistics)
    assert asked == [None, 8]


def test_stages_of_a_transferred_cascade_are_not_told_as_those_of_the_branch_that_judges(data):
    torch.manual_seed(0)
    model = advnorm.create_model("small_cnn", norm="dual_bn", in_channels=1).eval()
    attack = AutoAttack(threat=THREAT, attacks=("apgd-ce",), steps=2)
    own, transferred = (
        benchmark(model, some(data), THREAT, {"aa": dataclasses.replace(attack, route=route)}, "adv").record()["stages"]
        for route in (None, "clean")
    )
    assert set(own["adv"]) == {"aa"} and transferred == {}


def test_the_record_of_attacks_under_other_names_is_another_one(data, tmp_path):
    model, attack = Counting(), PGD(threat=THREAT, steps=1)
    first = benchmark(model, some(data), THREAT, {"mine": attack}, record=tmp_path / "r.json")
    again = benchmark(model, some(data), THREAT, {"mine": attack}, record=tmp_path / "r.json")
    assert again.record() == first.record()
    with pytest.raises(ConfigError):
        benchmark(model, some(data), THREAT, {"other": attack}, record=tmp_path / "r.json")


def test_a_surrogate_has_weights_of_its_own(own_model, sound):
    (own_model / "wrapped_of_tests.py").write_text(
        "import torch, my_model_of_tests\n"
        "class Quantized(torch.nn.Module):\n"
        "    def __init__(self):\n        super().__init__()\n        self.model = my_model_of_tests.build()\n"
        "    def forward(self, x):\n        return self.model((x * 16).round() / 16)\n"
    )
    save_file({f"model.{name}": value for name, value in sound.state_dict().items()}, "q.safetensors")
    quiet = Console(record=True, width=160, file=open("/dev/null", "w"))  # noqa: SIM115
    common = {"target": "wrapped_of_tests:Quantized", "weights": Path("q.safetensors"), "data": "digits"}
    asked = cli.Asked(**common, eps="0.2", limit=30, device="cpu")
    own = {"surrogate": "my_model_of_tests:build", "budget": "quick"}
    cli.audit(quiet, asked, **own, surrogate_weights=Path("w.safetensors"))
    assert "from surrogate" in quiet.export_text()
    with pytest.raises(ConfigError, match="the surrogate: .*missing in the file"):
        cli.audit(quiet, asked, **own)
    with pytest.raises(ConfigError, match="go with a --surrogate"):
        cli.audit(quiet, asked, surrogate_weights=Path("w.safetensors"))
