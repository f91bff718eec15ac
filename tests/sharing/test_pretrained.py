"""Saved models: the same bits after loading, and no trust in what does not match the card."""

import json
import pickle

import pytest
import torch
from huggingface_hub import ModelCard
from safetensors.torch import save_file
from torch import nn

import advnorm
from advnorm._core.records import model_fingerprint
from advnorm.data import digits
from advnorm.evaluation.intervals import wilson_interval
from advnorm.models.weights import save_weights
from advnorm.sharing.card import read_header
from support.command import invoke
from support.problems import raises_problem

THREAT = advnorm.ThreatModel(norm="Linf", eps=0.1)
CPU = ("--device", "cpu")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run that is evaluated and audited."""
    settings = {
        "norm": "dual_bn",
        "eps": 0.1,
        "epochs": 2,
        "batch_size": 256,
        "attack": {"steps": 1},
        "held_out": 0.1,
        "snapshots": [1],
    }
    run = advnorm.train(
        advnorm.Config.from_dict({**settings, "name": "mine"}), out=tmp_path_factory.mktemp("r"), device="cpu"
    )
    few = ("--limit", 20, *CPU)
    assert invoke("evaluate", run.folder, "--attacks", "fgsm", "pgd2", *few).exit_code == 0
    assert invoke("evaluate", run.folder, "--attacks", "fgsm", "--checkpoint", "epoch1", *few).exit_code == 0
    assert invoke("audit", run.folder, "--budget", "quick", *few).exit_code in (0, 1, 3, 4)
    return run


@pytest.fixture
def saved(run, tmp_path):
    return advnorm.save_pretrained(run, tmp_path / "saved")


def same(a: nn.Module, b: nn.Module) -> bool:
    return model_fingerprint(a) == model_fingerprint(b)


# -- save, load, evaluate ----------------------------------------------------------------------------------------------


def test_a_saved_run_loads_and_evaluates_with_the_same_bits(run, saved):
    before, after = run.model(), advnorm.from_pretrained(saved)
    assert same(before, after) and not after.training
    results = [
        advnorm.benchmark(m, digits("test"), THREAT, ["pgd2"], ["clean", "adv"], limit=50) for m in (before, after)
    ]
    one, other = ({**result.record(), "seconds": None} for result in results)
    assert one == other


MODELS = {
    "norm options": lambda: advnorm.create_model(
        "small_cnn", 4, "triple_bn", norm_options={"domains": ("a", "b", "c")}, in_channels=1
    ),
    "mean and width": lambda: advnorm.create_model(
        "preact_resnet18", 3, "dual_bn", width=0.125, mean=(0.5, 0.4, 0.3), std=0.25, activation="silu"
    ),
    "own options": lambda: advnorm.create_model("preact_resnet34", 5, "gmm_bn", width=0.125, final_norm=False),
    "no norm": lambda: advnorm.create_model("small_cnn", norm="none", normalize=False),
    "bfloat16": lambda: advnorm.create_model("small_cnn", norm="bn").bfloat16(),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_created_model_is_built_again(name, tmp_path):
    torch.manual_seed(1)
    model = MODELS[name]()
    for parameter in model.parameters():
        nn.init.normal_(parameter.data)
    state = torch.random.get_rng_state()
    advnorm.save_pretrained(model, tmp_path)
    loaded = advnorm.from_pretrained(tmp_path)
    assert same(model, loaded) and torch.equal(torch.random.get_rng_state(), state)


def test_a_converted_head_is_built_again(tmp_path):
    model = advnorm.create_model("small_cnn", norm="dual_bn")
    advnorm.convert_head(model)
    advnorm.save_pretrained(model, tmp_path)
    assert same(model, advnorm.from_pretrained(tmp_path))


OTHERS = {
    "own code": lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 10)),
    "converted": lambda: (model := advnorm.create_model("small_cnn"), advnorm.convert_norm(model, "dual_bn"))[0],
    "stripped": lambda: advnorm.strip(advnorm.create_model("small_cnn", norm="dual_bn"), route="adv"),
    "edited": lambda: setattr(model := advnorm.create_model("small_cnn"), "fc", nn.Linear(64, 3)) or model,
}


@pytest.mark.parametrize("name", OTHERS)
def test_any_other_network_is_loaded_into_one_that_the_caller_builds(name, tmp_path):
    model = OTHERS[name]()
    advnorm.save_pretrained(model, tmp_path)
    with raises_problem("missing_option", "model"):
        advnorm.from_pretrained(tmp_path)
    assert same(model, advnorm.from_pretrained(tmp_path, model=OTHERS[name]()))
    with raises_problem("wrong_tensors"):
        advnorm.from_pretrained(tmp_path, model=nn.Linear(3, 4))
    with raises_problem("wrong_dtype", "model"):
        advnorm.from_pretrained(tmp_path, model=OTHERS[name]().bfloat16())


def test_an_unconverted_network_is_an_error_that_names_the_conversion(tmp_path):
    model = nn.Sequential(nn.Flatten(), nn.LayerNorm(64), nn.Linear(64, 10))
    advnorm.convert_norm(model, "dual_affine_ln")
    nn.init.ones_(dict(model.named_parameters())["1.bias_adv"])  # equal banks would fit a single one
    advnorm.save_pretrained(model, tmp_path)
    plain = nn.Sequential(nn.Flatten(), nn.LayerNorm(64), nn.Linear(64, 10))
    with raises_problem("ambiguous", "model") as caught:
        advnorm.from_pretrained(tmp_path, model=plain)
    assert "convert_norm(model, 'dual_affine_ln')" in caught.value.problems[0].hint
    advnorm.convert_norm(plain, "dual_affine_ln")
    assert same(model, advnorm.from_pretrained(tmp_path, model=plain))


def test_the_command_asks_for_the_function_that_builds_a_network_of_own_code(tmp_path):
    advnorm.save_pretrained(OTHERS["own code"](), tmp_path)
    with raises_problem("missing_option", "target") as caught:
        invoke("evaluate", tmp_path, "--data", "digits", *CPU)
    assert f"my_module:build --weights {tmp_path / 'model.safetensors'}" in caught.value.problems[0].hint


def test_the_command_evaluates_a_saved_model_on_its_own_data_and_threat(run, saved):
    (record,) = run.folder.glob("evaluation-best-*.json")
    out = invoke("evaluate", saved, "--attacks", "fgsm", "pgd2", "--limit", 20, *CPU)
    assert out.exit_code == 0, out.output
    (again,) = saved.glob("evaluation-saved-*.json")
    before, after = (json.loads(path.read_text()) for path in (record, again))
    for key in ("accuracy", "outcomes", "threat", "model"):
        assert before[key] == after[key]
    (saved / "model.safetensors").write_bytes(b"")
    with raises_problem("wrong_digest", "model.safetensors") as caught:
        invoke("evaluate", saved, "--attacks", "fgsm", *CPU)
    assert len(caught.value.problems) == 1


def test_a_saved_model_has_no_checkpoints_and_no_other_weights(saved):
    for option in ("checkpoint", "weights"):
        with raises_problem("conflict", option):
            invoke("evaluate", saved, f"--{option}", "last", *CPU)


# -- the card ----------------------------------------------------------------------------------------------------------


def test_the_card_has_numbers_intervals_verdict_banks_cost_and_digest(run, saved):
    text = (saved / "README.md").read_text()
    (path,) = run.folder.glob("evaluation-best-*.json")
    record = json.loads(path.read_text())
    accuracy = record["accuracy"]["adv"]["pgd2"]
    low, high = wilson_interval(round(20 * accuracy), 20)
    interval = f"{100 * low:.1f} to {100 * high:.1f}"
    assert f"| adv | pgd2 | {100 * accuracy:.1f} | {interval} | Linf eps=0.1 | digits, test | 20 |" in text
    assert "| adv | all: fgsm, pgd2 |" in text
    (audit,) = run.folder.glob("audit-*.json")
    verdict = json.loads(audit.read_text())
    assert f"| {verdict['route']} | **{verdict['verdict']}** |" in text
    assert "| dual_bn (3) | adv | adv | adv |" in text and "minutes of training on 1 × cpu" in text
    assert "PGD(threat=ThreatModel(norm='Linf', eps=0.1)" in text and run.record["commit"] in text
    assert text.count("| adv | fgsm |") == 1, "the evaluation of another checkpoint is not on it"
    first = advnorm.save_pretrained(run, saved.parent / "first", checkpoint="epoch1")
    text = (first / "README.md").read_text()
    assert "| adv | fgsm |" in text and "pgd2" not in text and "Not audited" in text and "checkpoint: epoch1" in text


def test_the_hub_reads_the_card(saved):
    card = ModelCard.load(saved / "README.md")
    results = card.data.eval_results
    assert card.data.library_name == "advnorm" and {result.dataset_type for result in results} == {"digits"}
    found = {(result.metric_args["branch"], result.metric_args["attack"]) for result in results}
    assert found == {(branch, attack) for branch in ("clean", "adv") for attack in ("clean", "fgsm", "pgd2", "union")}
    for result in results:
        low, high = result.metric_args["interval_95"]
        assert low <= result.metric_value <= high and result.task_type == "image-classification"


def test_a_model_without_a_run_has_a_card_too(tmp_path):
    model = advnorm.create_model("small_cnn", in_channels=1)
    result = advnorm.benchmark(model, digits("test"), THREAT, ["fgsm"], limit=10)
    advnorm.save_pretrained(model, tmp_path / "plain", evaluations=[result], name="plain")
    text = (tmp_path / "plain" / "README.md").read_text()
    assert "# plain" in text and "| default route | fgsm |" in text and "Not audited" in text and "Not recorded" in text


def test_the_command_writes_the_card_into_the_run_or_another_folder(run, tmp_path):
    out = invoke("card", run.folder, "--out", tmp_path / "model")
    assert out.exit_code == 0 and f"advnorm push {tmp_path / 'model'} USER/mine-seed0" in " ".join(out.output.split())
    assert same(advnorm.from_pretrained(tmp_path / "model"), run.model())
    assert invoke("card", run.folder, "--checkpoint", "last").exit_code == 0
    assert same(advnorm.from_pretrained(run.folder), run.model("last"))
    assert invoke("evaluate", run.folder, "--attacks", "fgsm", "--limit", 4, *CPU).exit_code == 0, "it is still a run"
    for name in ("README.md", "config.json", "model.safetensors"):
        (run.folder / name).unlink()


# -- weights of a stranger ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["README.md", "config.json"])
def test_a_folder_of_something_else_keeps_its_files(run, tmp_path, name):
    (tmp_path / name).write_text("mine")
    with raises_problem("already_exists", str(tmp_path / name)):
        invoke("card", run.folder, "--out", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [name] and (tmp_path / name).read_text() == "mine"
    with raises_problem("not_writable"):
        invoke("card", run.folder, "--out", tmp_path / name)


def change(path, **entries):
    path.write_text(json.dumps({**json.loads(path.read_text()), **entries}))


def replace_text(path, old, new):
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))


class Evil:
    def __reduce__(self):
        return (pytest.fail, ("a pickle was opened",))


def flip(path):
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


DAMAGE = {
    "tampered": (lambda f: flip(f / "model.safetensors"), "wrong_digest", "model.safetensors"),
    "truncated": (
        lambda f: (f / "model.safetensors").write_bytes((f / "model.safetensors").read_bytes()[:-100]),
        "wrong_digest",
        "model.safetensors",
    ),
    "pickle": (lambda f: (f / "model.safetensors").write_bytes(pickle.dumps(Evil())), "wrong_digest", None),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "missing_file", "model.safetensors"),
    "no card": (lambda f: (f / "README.md").unlink(), "missing_file", "README.md"),
    "no configuration": (lambda f: (f / "config.json").unlink(), "missing_file", "config.json"),
    "no header": (lambda f: (f / "README.md").write_text("# a model\n"), "missing_entry", "sha256"),
    "no digest": (lambda f: replace_text(f / "README.md", "  sha256:", "  sha:"), "missing_entry", "sha256"),
    "number as digest": (
        lambda f: (f / "README.md").write_text("---\nadvnorm:\n  sha256: 12\n---\n"), "missing_entry", "sha256",
    ),
    "other digest": (lambda f: replace_text(f / "README.md", "  sha256: ", "  sha256: a"), "wrong_digest", None),
    "other configuration": (lambda f: change(f / "config.json", dual_head=True), "damaged_file", "config.json"),
    "no JSON": (lambda f: (f / "config.json").write_text("{"), "damaged_file", None),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGE)
def test_what_does_not_match_the_card_is_rejected(saved, damage):
    act, code, field = DAMAGE[damage]
    act(saved)
    with raises_problem(code, field):
        advnorm.from_pretrained(saved)


def forge(folder, data: bytes):
    """Replace the weights and make the card match."""
    import hashlib

    before = read_header(folder / "README.md")["advnorm"]["sha256"]
    (folder / "model.safetensors").write_bytes(data)
    replace_text(folder / "README.md", before, hashlib.sha256(data).hexdigest())


def test_a_configuration_of_a_stranger_can_only_be_an_error(saved):
    for changed in (
        {"dtype": "load"},
        {"model": [1]},
        {"model": {"name": []}},
        {"model": {"name": "small_cnn", "norm": 3}},
    ):
        config = {**json.loads((saved / "config.json").read_text()), **changed}
        save_weights(saved / "other.safetensors", advnorm.create_model("small_cnn"), config)
        forge(saved, (saved / "other.safetensors").read_bytes())
        (saved / "config.json").write_text(json.dumps(config))
        with pytest.raises(advnorm.AdvnormError):
            advnorm.from_pretrained(saved)


def test_a_pickle_with_a_matching_card_is_never_opened(saved):
    forge(saved, pickle.dumps(Evil()))
    with raises_problem("damaged_file", "model.safetensors"):
        advnorm.from_pretrained(saved)


def test_foreign_safetensors_with_a_matching_card_are_rejected(saved, tmp_path):
    save_file({"fc.weight": torch.zeros(1)}, tmp_path / "w.safetensors")
    forge(saved, (tmp_path / "w.safetensors").read_bytes())
    with raises_problem("damaged_file", "model.safetensors"):
        advnorm.from_pretrained(saved)


def test_a_digest_from_elsewhere_is_checked_too(saved):
    digest = read_header(saved / "README.md")["advnorm"]["sha256"]
    assert advnorm.from_pretrained(saved, sha256=digest.upper())
    with raises_problem("wrong_digest", "model.safetensors"):
        advnorm.from_pretrained(saved, sha256="0" * 64)


def test_another_format_and_an_unknown_network_are_named(tmp_path, monkeypatch):
    from advnorm.models import MODELS, register_model
    from advnorm.sharing import pretrained

    monkeypatch.setattr(MODELS, "_entries", dict(MODELS._entries))
    register_model("mine", mean=None, std=None)(lambda layers: nn.Sequential(nn.Flatten(), nn.Linear(4, 2)))
    advnorm.save_pretrained(advnorm.create_model("mine"), tmp_path / "own")
    assert advnorm.from_pretrained(tmp_path / "own")
    del MODELS._entries["mine"]
    with raises_problem("unknown_name", "model"):
        advnorm.from_pretrained(tmp_path / "own")
    monkeypatch.setattr(pretrained, "FORMAT", "advnorm.model/2")
    with raises_problem("not_supported", "config.json"):
        advnorm.from_pretrained(tmp_path / "own")


def test_results_of_other_weights_stay_off_the_card(run, tmp_path):
    path = next(run.folder.glob("evaluation-best-*.json"))
    record = json.loads(path.read_text())
    record["model"]["fingerprint"] = "of another network"
    record["accuracy"]["adv"]["pgd2"] = 1.0
    other = run.folder / "other.json"
    other.write_text(json.dumps(record))
    try:
        saved = advnorm.save_pretrained(run, tmp_path / "saved")
        assert (saved / "README.md").read_text().count("| adv | pgd2 |") == 1
    finally:
        other.unlink()
