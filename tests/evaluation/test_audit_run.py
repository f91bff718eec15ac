"""The course of an audit: rungs, branches, statistics, memory, and records. A short ladder keeps it fast."""

import json
from importlib import import_module

import pytest
import torch
from torch import nn

import advnorm
from advnorm._core.shapes import with_digest
from advnorm.attacks.base import Attack
from advnorm.evaluation import Verdict, audit, benchmark
from advnorm.evaluation.audit import _Audit
from advnorm.evaluation.audit_ladder import Rung, build_ladder
from advnorm.evaluation.runner import EvaluationRunner
from support.classifiers import Masked, perceptron
from support.problems import raises_problem

THREAT = advnorm.ThreatModel(eps=0.2)


@pytest.fixture
def short_ladder(monkeypatch):
    """A ladder with two rungs behind the weak attacks."""
    rungs = [rung for rung in build_ladder("quick", 10) if rung.attack in ("noise-uniform", "fgsm", "pgd10")]
    rungs += [
        Rung(attack="fab-t-steps10-targets1-minimal", text="smallest perturbation", alone=True, distances=True),
        Rung(attack="apgd-t-steps5", text="targets each class"),
        Rung(attack="square-queries30", text="without gradients", gradients=False, needs_pixels=True),
    ]
    module = import_module("advnorm.evaluation.audit")  # the package has a function of this name
    monkeypatch.setattr(module, "build_ladder", lambda budget, classes: tuple(rungs))


def quick(model, data, threat=THREAT, **options) -> Verdict:
    return audit(model, data, threat, budget="quick", **{"limit": 12, **options})


def failed(verdict: Verdict) -> set[str]:
    return {item.name for item in verdict.evidence if not item.ok}


@pytest.mark.parametrize(("norm", "eps", "grey"), [("L2", 0.5, 4.0), ("L1", 1.0, 32.0)])
def test_the_largest_eps_turns_every_image_grey_in_every_norm(short_ladder, data, norm, eps, grey):
    keep = data[1] < 2
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 2))
    verdict = quick(model, (data[0][keep], data[1][keep]), advnorm.ThreatModel(norm=norm, eps=eps), limit=32)
    assert verdict.eps_curve[-1][0] == grey


def test_two_classes_have_a_ladder_without_the_dlr_loss(data):
    assert not any("dlr" in rung.attack for rung in build_ladder("quick", 2))
    assert any("dlr" in rung.attack for rung in build_ladder("quick", 3))


def test_the_budget_full_has_more_steps():
    names = {budget: [rung.attack for rung in build_ladder(budget, 10)] for budget in ("quick", "standard", "full")}
    assert {"pgd100", "pgd500"} == set(names["full"]) - set(names["standard"])
    assert "square-queries5000" in names["standard"] and "square-queries1000" in names["quick"]


# -- outputs -----------------------------------------------------------------------------------------------------------


def test_probabilities_batch_statistics_and_randomness_are_found(short_ladder, sound, data):
    few = {"limit": 24}
    (probabilities,) = [
        item
        for item in quick(Masked(sound, after=lambda z: z.softmax(1)), data, **few).evidence
        if item.name == "probabilities"
    ]
    assert not probabilities.ok and probabilities.weight == "note"
    by_batch = quick(Masked(sound, after=lambda z: z - z.mean(0) * (len(z) > 1)), data, **few)
    assert "batch" in failed(by_batch) and any("batch-dependent" in advice for advice in by_batch.advice)
    random = quick(Masked(sound, after=lambda z: z + torch.randn_like(z)), data, **few)
    assert "random" in failed(random) and "batch" not in failed(random)
    assert "batch" in failed(quick(sound, data, statistics="batch_frozen", **few))
    assert by_batch.verdict == random.verdict == "inconclusive"
    assert not any("budget" in advice for v in (by_batch, random) for advice in v.advice)


def test_a_random_model_is_decided_by_majority_and_independent_of_the_callers_generator(short_ladder, sound, data):
    noisy = Masked(sound, before=lambda x: x + 0.3 * torch.randn_like(x))
    verdicts = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        before = torch.get_rng_state()
        verdicts.append(quick(noisy, data, limit=40))
        assert torch.equal(before, torch.get_rng_state())
    assert verdicts[0].record() == verdicts[1].record() != quick(noisy, data, limit=40, seed=1).record()
    assert "random" in failed(verdicts[0]) and "apgd-eot-steps40" in {rung.attack for rung in verdicts[0].ladder}
    assert any("majority of 9 draws" in advice for advice in verdicts[0].advice)
    assert verdicts[0].clean > 0.8, "single draws have about 70 %"


def test_an_audit_with_batch_statistics_updates_no_running_statistics(short_ladder, sound, data):
    before = {name: value.clone() for name, value in sound.state_dict().items()}
    verdict = quick(sound, data, statistics="batch")
    assert all(torch.equal(before[name], value) for name, value in sound.state_dict().items())
    assert verdict.verdict == "inconclusive" and "12 images are too few" in verdict.summary()


def test_an_audit_with_batch_statistics_handles_a_single_last_image(short_ladder, data):
    verdict = quick(perceptron(), data, limit=33, batch_size=32, statistics="batch_frozen")
    assert 0 < verdict.clean < 0.2 and "batch" in failed(verdict)


def test_an_audit_continues_when_memory_runs_out(short_ladder, undefended, data):
    class Large(Masked):
        def forward(self, x):
            if len(x) > 5:
                raise torch.OutOfMemoryError("CUDA out of memory (simulated)")
            return super().forward(x)

    assert quick(Large(undefended), data, limit=30).claimed == quick(undefended, data, limit=30).claimed


def test_few_images_are_inconclusive_and_the_advice_is_more_images(short_ladder, undefended, data):
    few = quick(undefended, data, advnorm.ThreatModel(eps="2/255"))
    assert few.summary().startswith("INCONCLUSIVE: 12 images are too few") and few.advice == ("give more images",)


# -- branches ----------------------------------------------------------------------------------------------------------


def test_the_best_branch_is_evaluated_and_the_others_are_reported(short_ladder, dual, data):
    data = data[0][:40], data[1][:40]
    verdict = quick(dual, data, limit=40)
    assert verdict.route in ("clean", "adv") and len(verdict.others) == 1
    (other,) = verdict.others
    assert verdict.claimed >= verdict.others[other]["PGD-10"]
    transfer = {"pgd50": advnorm.attacks.get("pgd50", threat=THREAT, route=other)}
    transferred = benchmark(dual, data, THREAT, transfer, verdict.route).robust_accuracy()
    assert verdict.ladder[-1].attack == f"from {other}" and verdict.ladder[-1].alone == transferred != verdict.claimed
    found = benchmark(dual, data, THREAT, ["pgd10", "apgd-t-steps40"], other)
    accuracies = found.accuracy(), found.robust_accuracy("pgd10"), found.robust_accuracy()
    assert tuple(verdict.others[other].values()) == accuracies and accuracies[1] > accuracies[2]
    given = quick(dual, data, limit=40, route=other)
    assert given.route == other and list(given.others) == [verdict.route]
    assert given.claimed == verdict.others[other]["PGD-10"]


def test_branches_without_gradients_are_reported(short_ladder, dual, data):
    verdict = quick(Masked(dual, before=torch.detach), data)
    (other,) = verdict.others.values()
    assert other["PGD-10"] == other["clean"] >= other["worst case"]


def test_a_norm_that_chooses_by_input_is_attacked_through_the_choice():
    """An attack that ignored the choice would move away from the other class.

    The Gaussians are N(0, 0.04) and N(1, 0.04). Near 0.5 the output falls if the input rises, but it would rise with
    fixed weights.
    """
    norm = advnorm.make_norm("gmm_bn", 1).eval()
    for domain, mean in (("clean", 0.0), ("adv", 1.0)):
        norm.set_statistics_bank(domain, torch.tensor([mean]), torch.tensor([0.04]), torch.tensor(1))
    model = Masked(norm, after=lambda z: 10 * torch.stack([z.mean((1, 2, 3)), -z.mean((1, 2, 3))], 1))
    labels = (torch.arange(16) % 4 == 0).long()
    images = (0.47 + 0.06 * labels).view(-1, 1, 1, 1).expand(-1, 1, 4, 4)
    near = advnorm.ThreatModel(eps=0.05)
    verdict = quick(model, (images, labels), near, limit=None)
    assert verdict.clean == 1 and verdict.claimed == 0
    (choice,) = [item for item in verdict.evidence if item.name == "choice"]
    assert choice.value == 1 and verdict.route == "default" and verdict.verdict == "none"
    assert list(verdict.others) == ["fixed clean", "fixed adv"] and "fixed adv" in str(verdict)
    for found in ("clean", "PGD-10", "worst case"):  # one class for all images, far from the boundary
        assert [row[found] for row in verdict.others.values()] == [0.75, 0.25]
    with advnorm.mixture_component(model, "adv"):  # no choice is left
        verdict = quick(model, (images, labels), near, limit=None)
    assert verdict.others == {} and verdict.conditions["scopes"] == {"component": "adv"}


# -- accuracy against eps ----------------------------------------------------------------------------------------------


def test_the_curve_of_a_linear_model_follows_from_its_exact_distances(short_ladder, data):
    keep = data[1] < 2
    images, labels = data[0][keep][:60], data[1][keep][:60]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 2))
    with torch.no_grad():
        model[1].weight[0] = 0.1 * (images[labels == 0].mean(0) - images[labels == 1].mean(0)).flatten()
        model[1].weight[1] = 0
        model[1].bias.copy_(torch.tensor([0.0, model(images)[:, 0].median().item()]))
        logits = model(images)
    correct = logits.argmax(1) == labels
    normal, need = (model[1].weight[0] - model[1].weight[1]).double(), (logits[:, 0] - logits[:, 1]).double()
    room = torch.where(normal * need[:, None].sign() > 0, images.flatten(1), 1 - images.flatten(1)).double()

    def withstands(eps):  # the least margin in the ball and in the box
        return correct & ((normal.abs() * room.clamp_max(eps)).sum(1) < need.abs())

    verdict = quick(model, (images, labels), advnorm.ThreatModel(eps=0.1), limit=None)
    accuracies = [accuracy for _, accuracy in verdict.eps_curve]
    assert accuracies == sorted(accuracies, reverse=True) and verdict.clean == accuracies[0] > 0.9
    assert 0.1 < dict(verdict.eps_curve)[0.1] == verdict.worst_case < 0.9
    for eps, accuracy in verdict.eps_curve[1:]:
        most, least = (withstands(factor * eps).double().mean().item() for factor in (0.98, 1.0))
        assert least <= accuracy <= most, eps


def test_an_image_that_another_attack_fools_has_a_distance_of_at_most_eps(short_ladder, undefended, data):
    quantized = Masked(undefended, before=lambda x: (x * 8).round() / 8)
    verdict = quick(quantized, data, limit=30)
    (alone,) = [rung.alone for rung in verdict.ladder if rung.attack.endswith("minimal")]
    curve = dict(verdict.eps_curve)
    assert alone > 0.8 and curve[0.1] == verdict.clean and curve[THREAT.eps] == verdict.worst_case < alone
    assert {"large eps"} <= failed(verdict), "PGD alone does not find the grey image"


def test_models_without_gradients_and_with_random_outputs_have_the_points_that_are_known(short_ladder, sound, data):
    detached = quick(Masked(sound, before=lambda x: torch.from_numpy(x.detach().numpy().copy())), data)
    assert detached.eps_curve == ((0.0, detached.clean), (THREAT.eps, detached.worst_case))
    random = quick(Masked(sound, before=lambda x: x + 0.05 * torch.randn_like(x)), data)
    (rung,) = [rung for rung in random.ladder if rung.attack.endswith("minimal")]
    assert rung.skipped == "random outputs" and rung.alone is None
    curve = dict(random.eps_curve)
    assert curve[THREAT.eps] == random.worst_case and curve[0.1] == random.clean > curve[0.5] == 0


# -- rungs and images --------------------------------------------------------------------------------------------------


def test_rungs_that_do_not_run_alone_attack_the_survivors(sound, data, monkeypatch):
    attacked, evaluate = [], EvaluationRunner.evaluate_attack

    def counted(runner, job, among, **more):
        attacked.append((job.name, int(among.sum())))
        return evaluate(runner, job, among, **more)

    monkeypatch.setattr(EvaluationRunner, "evaluate_attack", counted)
    verdict = quick(sound, data)
    clean, *ladder = verdict.ladder
    left = [round(12 * rung.worst) for rung in verdict.ladder]
    expected = [left[0] if rung.alone is not None else before for rung, before in zip(ladder, left)]
    start = attacked.index((ladder[0].attack, left[0]))
    assert attacked[start : start + len(ladder)] == [(rung.attack, n) for rung, n in zip(ladder, expected)]
    assert clean.worst == clean.alone and left == sorted(left, reverse=True) and left[-1] < left[0]
    assert all(rung.worst <= rung.alone for rung in ladder if rung.alone is not None)


def test_images_are_spread_over_the_data_and_keep_their_rows(short_ladder, undefended, data, monkeypatch):
    seen, call = [], Attack.__call__

    def kept(attack, model, x, y, **more):
        seen.append((x, more["index"]))
        return call(attack, model, x, y, **more)

    order = data[1].argsort(stable=True)  # the order of a folder
    images, labels = data[0][order], data[1][order]
    monkeypatch.setattr(Attack, "__call__", kept)
    verdict = quick(undefended, (images, labels), limit=30)
    assert verdict.chance < 0.15 and seen
    assert all(torch.equal(x, images[index]) for x, index in seen)
    assert labels[torch.cat([index for _, index in seen]).unique()].unique().tolist() == list(range(10))


# -- records -----------------------------------------------------------------------------------------------------------


def test_an_interrupted_audit_resumes(short_ladder, sound, data, tmp_path, monkeypatch):
    class Stop(Exception):
        pass

    def stop(*_):
        raise Stop

    path, whole = tmp_path / "v.json", quick(sound, data)
    with monkeypatch.context() as patch:
        patch.setattr(_Audit, "_evaluate_components", stop)
        with pytest.raises(Stop):
            quick(sound, data, record=path)
    assert (tmp_path / "v.json.partial").exists()
    monkeypatch.setattr(advnorm.attacks.Square, "search", stop)
    monkeypatch.setattr(advnorm.attacks.FAB, "search", stop)
    monkeypatch.setattr(advnorm.attacks.PGD, "perturb", stop)
    verdict = quick(sound, data, record=path)
    commit = {"commit": verdict.conditions["commit"]}
    assert verdict.record() == {**whole.record(), **commit}
    assert with_digest(json.loads(json.dumps(verdict.record()))) == json.loads(path.read_text())
    assert list(tmp_path.iterdir()) == [path]


def test_a_finished_audit_is_read_back_and_another_one_rejected(short_ladder, undefended, data, tmp_path):
    model, path = Masked(undefended), tmp_path / "v.json"
    done = quick(model, data, record=path)
    calls = []
    handle = model.register_forward_pre_hook(lambda *_: calls.append(1))
    again = quick(model, data, record=path)
    handle.remove()
    assert again.record() == done.record() and str(again) == str(done) and len(calls) == 3
    assert Verdict.load(path).record() == done.record()
    same_tensors = Masked(undefended, before=lambda x: 1 - x)
    other = Masked(undefended)
    other.extra = nn.Parameter(torch.ones(1))
    for change in (
        {"model": same_tensors},
        {"model": other},
        {"seed": 1},
        {"threat": advnorm.ThreatModel(eps=0.1)},
        {"surrogate": undefended},
    ):
        with raises_problem("other_evaluation", "record"):
            quick(**{"model": model, "data": data, "record": path, **change})
    with raises_problem("not_supported", "the record: format"):
        Verdict.from_record({"format": "x"})
    edited = {**json.loads(path.read_text()), "verdict": "real"}
    path.write_text(json.dumps(edited))
    for read in (Verdict.load, lambda path: quick(model, data, record=path)):
        with raises_problem("damaged_file", f"{path}: digest"):
            read(path)
    del edited["digest"]  # a record of an older version
    path.write_text(json.dumps(edited))
    assert "record without digest" in str(Verdict.load(path)) and "without digest" not in str(done)


def test_an_audit_with_another_surrogate_of_the_same_tensors_is_rejected(short_ladder, undefended, data, tmp_path):
    path = tmp_path / "v.json"
    done = quick(undefended, data, surrogate=Masked(undefended), record=path)
    assert quick(undefended, data, surrogate=Masked(undefended), record=path).record() == done.record()
    with raises_problem("other_evaluation", "record"):
        quick(undefended, data, surrogate=Masked(undefended, before=lambda x: 1 - x), record=path)


# -- wrong arguments ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("surrogate", "field"),
    [
        (lambda: nn.Sequential(nn.Flatten(), nn.Linear(3, 10)), "surrogate.model"),
        (lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 4)), "surrogate.labels"),
        (lambda: advnorm.create_model("small_cnn", in_channels=1, norm="dual_bn"), "surrogate"),
        (lambda: Masked(nn.Flatten(), after=torch.detach), "surrogate.attacks"),
    ],
)
def test_a_surrogate_that_cannot_be_attacked_is_rejected_before_any_attack(undefended, data, surrogate, field):
    calls = []
    model = Masked(undefended, before=lambda x: calls.append(1) or x)
    with pytest.raises(advnorm.ConfigError) as error:
        quick(model, data, surrogate=surrogate())
    assert [problem.field for problem in error.value.problems] == [field] and len(calls) == 1


@pytest.mark.parametrize(
    ("options", "code", "field"),
    [
        ({"budget": "fast"}, "unknown_name", "budget"),
        ({"budget": ["quick"]}, "unknown_name", "budget"),
        ({"route": ["clean", "adv"]}, "wrong_type", "route"),
        ({"surrogate": torch.sin}, "wrong_type", "surrogate"),
        ({"threat": advnorm.ThreatModel(eps=0)}, "out_of_range", "eps"),
    ],
)
def test_a_wrong_argument_is_reported(options, code, field, data):
    model = advnorm.create_model("small_cnn", in_channels=1, norm="dual_bn")
    with raises_problem(code, field):
        audit(model, data, **{"threat": THREAT, **options})


def test_an_unknown_route_is_reported(data):
    model = advnorm.create_model("small_cnn", in_channels=1, norm="dual_bn")
    with pytest.raises(advnorm.ConfigError, match="'adv'"):
        audit(model, data, THREAT, route="avd")
