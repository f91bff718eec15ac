"""Audit of a robustness claim: a ladder of attacks, signs of gradient masking, and a verdict in plain words.

Signs and their interpretation: Athalye et al. 2018, "Obfuscated gradients give a false sense of security", section 3;
Carlini et al. 2019, "On evaluating adversarial robustness"; papers A (table 3) and C (section 3.2) on falsely robust
models.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from advnorm._core.errors import Problem, raise_problems
from advnorm._core.records import digest, model_fingerprint
from advnorm.attacks import Attack
from advnorm.attacks.names import get as get_attack
from advnorm.evaluation import audit_thresholds as limits
from advnorm.evaluation.audit_gradients import has_gradients, is_blocked, measure_gradients
from advnorm.evaluation.audit_ladder import (
    BUDGET_IMAGES,
    FROM_COPY,
    Budget,
    Obstacles,
    adaptive_rungs,
    budget_problems,
    build_ladder,
    copy_rungs,
)
from advnorm.evaluation.distilled_copy import distill
from advnorm.evaluation.evidence import EvidenceList, RungResult, VerdictName, decide_verdict, weigh_gap, weigh_one_step
from advnorm.evaluation.jobs import AttackJob
from advnorm.evaluation.model_branches import branches, mixing_norms, same_branch
from advnorm.evaluation.outcomes import encode_rows
from advnorm.evaluation.plan import EvaluationOptions, plan_evaluation, type_problems
from advnorm.evaluation.reference_logits import OutputCheck
from advnorm.evaluation.results import DEFAULT_ROUTE, fraction
from advnorm.evaluation.runner import EvaluationRunner, run_or_load
from advnorm.evaluation.verdict import FIXED, Verdict
from advnorm.norms import frozen_mode, mixture_component, routed_modules
from advnorm.threat import ThreatModel

#: Forwards of a randomized model whose majority decides on an image.
DRAWS = 9
#: Points of the curve of accuracy against eps, as multiples of the threat's eps.
EPS_FACTORS = (0.125, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0)
#: Attacks at the threat's eps that PGD-20 on two losses at a larger eps must not fall behind.
USUAL_ATTACKS = ("pgd10", "pgd10-cw", "pgd50")
#: Signs of an obstacle between attack and model, which more steps of the same attacks do not overcome.
OBSTACLES = frozenset({"zero gradients", "broken gradients", "logit gap", "probabilities", "random", "batch"})


def audit(
    model: nn.Module,
    data: Any,
    threat: ThreatModel,
    *,
    route: str | None = None,
    budget: Budget = "standard",
    surrogate: nn.Module | None = None,
    progress: bool = False,
    **options: Unpack[EvaluationOptions],
) -> Verdict:
    """Decide whether robustness is real: run a ladder of attacks, measure the signs of masking, and give a verdict.

    ``budget``: ``quick`` (200 images), ``standard`` (1000) or ``full`` (all images, PGD up to 500 steps); ``limit``
    overrides the number of images. ``route``: the branch to evaluate. Without a route, a model with several branches
    is evaluated through the branch with the highest PGD-10 accuracy, and the other branches are reported.
    ``surrogate``: a copy of the model without the suspected masking; attacks on it are transferred.
    ``options``: ``batch_size``, ``device``, ``seed``, ``limit``, ``statistics``, ``record`` and ``about`` of
    :class:`EvaluationOptions`. An interrupted audit resumes from ``<record>.partial``.
    """
    problems = type_problems(
        model=(model, nn.Module),
        threat=(threat, ThreatModel),
        route=(route, str | None),
        surrogate=(surrogate, nn.Module | None),
    )
    if isinstance(threat, ThreatModel) and threat.eps == 0:
        problems.append(Problem(code="out_of_range", message="an audit needs an eps above 0", field="eps", got=0))
    raise_problems(problems + budget_problems(budget), "bad audit")
    if options.get("limit") is None:
        options["limit"] = BUDGET_IMAGES[budget]
    routes = _routes_to_evaluate(model, route)
    special = {"surrogate": surrogate, "gradients": False}  # rungs without gradients still run
    plan = plan_evaluation(model, data, threat, "pgd10", routes, **special, **options)
    origin = "" if surrogate is None else model_fingerprint(surrogate)
    references = plan.references
    if surrogate is not None:
        found = plan.with_surrogate(surrogate).references
        references = references | {f"surrogate {origin[:8]}, {name}": logits for name, logits in found.items()}
    given = route if branches(model) else None

    def evaluate(runner: EvaluationRunner, identity: Mapping[str, Any]) -> Verdict:
        return _Audit(runner, budget, surrogate, origin, given).run(identity)

    fingerprint = digest(plan.fingerprint, plan.threat, budget, plan.routes, route, origin)
    return run_or_load(plan, Verdict, evaluate, references, fingerprint=fingerprint, progress=progress)


def _routes_to_evaluate(model: nn.Module, route: str | None) -> Sequence[str | None]:
    known = branches(model)
    if not known or (route is not None and route not in known):
        return [route]
    if route is None and all(module.state.route is not None for module in routed_modules(model).values()):
        return [None]  # an enclosing scope sets the route
    return list(known)


class _Audit:
    """The audit of one branch: the ``given`` route, or by default the branch with the highest PGD-10 accuracy."""

    def __init__(
        self, runner: EvaluationRunner, budget: Budget, surrogate: nn.Module | None, origin: str, given: str | None
    ) -> None:
        self.runner, self.plan, self.surrogate, self.origin = runner, runner.plan, surrogate, origin
        self.budget: Budget = budget
        self.threat: ThreatModel = runner.plan.threat
        labels, routes = runner.plan.labels, runner.plan.routes
        self.chance = labels.bincount().max().item() / len(labels)
        self.evidence = EvidenceList(len(labels))
        self.advice: list[str] = []
        if any(reference.is_random for reference in runner.plan.references.values()):
            runner.draws = DRAWS
        self.gradients = {route: has_gradients(runner.plan, route) for route in routes}
        self.clean = {route: runner.evaluate_clean(route) for route in routes}
        self.outputs = {route: runner.check_outputs(route) for route in routes}
        self.claims = {route: self._claim(route, self.clean[route]) for route in routes}
        self.route = given or max(routes, key=lambda route: fraction(self.claims[route]))
        self.correct = self.clean[self.route]
        self.ladder: list[RungResult] = []
        self.worst = self.correct  # the images that are robust to every rung so far
        self.results: dict[str, Tensor] = {}  # of the ladder
        #: Of the nearest adversarial image found.
        self.distances = torch.zeros(len(labels), dtype=torch.float64).masked_fill(self.correct, math.inf)

    def run(self, identity: Mapping[str, Any]) -> Verdict:
        plan, runner, route = self.plan, self.runner, self.route
        self._measure_outputs(self.outputs[route])
        self._run_ladder()
        obstacles = self._find_obstacles()
        self._overcome_obstacles(obstacles)
        if self.budget == "full" or obstacles:
            self._transfer_from_copy()
        self._transfer()
        curve = self._vary_eps()
        others = {
            str(other): self._summarize(other, self.clean[other], self.claims[other])
            for other in plan.routes
            if other != route
        }
        others |= self._evaluate_components()
        claimed, worst_case, images = fraction(self.claims[route]), fraction(self.worst), len(self.correct)
        gap = weigh_gap(claimed, worst_case, self.evidence.items, norm=self.threat.norm, images=images)
        one_step = next((rung.alone for rung in self.ladder if rung.attack == "fgsm"), None)
        if one_step is not None:
            clean = fraction(self.correct)
            item = weigh_one_step(one_step, worst_case, clean, images=images, norm=self.threat.norm)
            self.evidence.items.insert(0, item)
        evidence = [gap, *self.evidence.items]
        verdict, reasons = decide_verdict(claimed, worst_case, evidence, chance=self.chance, images=images)
        return Verdict(
            verdict=verdict,
            reasons=tuple(reasons),
            advice=tuple(self._advise(verdict, claimed, others, gap_ok=gap.ok)),
            threat=self.threat,
            route=route or DEFAULT_ROUTE,
            images=images,
            ladder=tuple(self.ladder),
            evidence=tuple(evidence),
            eps_curve=tuple(curve),
            chance=self.chance,
            others=others,
            conditions={
                **plan.conditions(),
                "budget": self.budget,
                "surrogate": None if self.surrogate is None else type(self.surrogate).__name__,
                **identity,
                "rows": encode_rows(plan.index),
                "warnings": list(runner.partial.warnings()),
            },
        )

    def _attack(
        self, name: str, route: str | None, among: Tensor, *, threat: ThreatModel | None = None, origin: str = ""
    ) -> Tensor:
        attack = self._build_attack(name, route, threat)
        return self.runner.evaluate_attack(AttackJob(name=name, attack=attack, route=route, origin=origin), among)

    def _build_attack(self, name: str, route: str | None, threat: ThreatModel | None = None) -> Attack:
        settings = {"seed": self.plan.seed, "route": route, "statistics": frozen_mode(self.plan.statistics)}
        return get_attack(name, threat=threat or self.threat, **settings)

    def _claim(self, route: str | None, clean: Tensor, origin: str = "") -> Tensor:
        """Return which images are robust to PGD-10. Without gradients it changes no image."""
        return self._attack("pgd10", route, clean, origin=origin) if self.gradients[route] else clean

    def _summarize(self, route: str | None, clean: Tensor, claimed: Tensor, origin: str = "") -> dict[str, float]:
        """Return three accuracies of a branch that is reported beside the evaluated one."""
        worst = claimed
        if self.gradients[route]:
            worst = self._attack("apgd-t-steps40", route, claimed, origin=origin)
        elif self.plan.images.dim() == 4:
            worst = self._attack("square-queries1000", route, claimed, origin=origin)
        return {"clean": fraction(clean), "PGD-10": fraction(claimed), "worst case": fraction(worst)}

    # -- attacks -------------------------------------------------------------------------------------------------------

    def _add_rung(self, name: str, text: str, robust: Tensor | None, *, alone: bool = False, skipped: str = "") -> None:
        """Add a rung to the ladder. ``robust``: the images that withstand its attack; None if it did not run.

        ``alone``: the attack ran on all images, not only on the survivors of the rungs before.
        """
        if robust is not None:
            self.worst = self.worst & robust
        accuracy = fraction(robust) if robust is not None and alone else None
        rung = RungResult(attack=name, text=text, alone=accuracy, worst=fraction(self.worst), skipped=skipped)
        self.ladder.append(rung)

    def _expect_few_lost(self, name: str, text: str, before: Tensor) -> None:
        """Expect the rungs since ``before`` to take few points from the survivors."""
        lost = 100 * (fraction(before) - fraction(self.worst))
        self.evidence.expect(name, text, lost, limits.SURVIVOR_POINTS, points=True)

    def _run_ladder(self) -> None:
        gradients = self.gradients[self.route]
        self._add_rung("clean", "no attack", self.correct, alone=True)
        classes = self.plan.references[self.route or DEFAULT_ROUTE].logits.shape[1]
        for rung in build_ladder(self.budget, classes):
            skipped = "no gradients" if rung.gradients and not gradients else ""
            skipped = "not images" if rung.needs_pixels and self.plan.images.dim() != 4 else skipped
            skipped = "random outputs" if rung.distances and self.runner.draws > 1 else skipped
            if skipped:
                # Without gradients PGD-10 changes nothing, so the claim is the clean accuracy.
                robust = self.correct if rung.attack == "pgd10" else None
                self._add_rung(rung.attack, rung.text, robust, alone=True, skipped=skipped)
                continue
            survivors = self.worst
            if rung.distances:
                robust = self._measure_distances(rung.attack)
            else:
                robust = self._attack(rung.attack, self.route, self.correct if rung.alone else survivors)
            self.results[rung.attack] = robust
            self._add_rung(rung.attack, rung.text, robust, alone=rung.alone)
            if rung.needs_pixels:
                text = "points that Square, without gradients, takes from the survivors of gradient attacks"
                self._expect_few_lost("square", text, survivors)
        if gradients:
            self._compare_strengths()

    def _overcome_obstacles(self, obstacles: Obstacles) -> None:
        """Attack the survivors with attacks that overcome the obstacles found."""
        for rung in adaptive_rungs(self.budget, obstacles):
            gradients = self.gradients[self.route] or "bpda" in rung.attack
            robust = self._attack(rung.attack, self.route, self.worst) if gradients else None
            self._add_rung(rung.attack, rung.text, robust, skipped="" if gradients else "no gradients")

    def _find_obstacles(self) -> Obstacles:
        failed = {item.name for item in self.evidence.items if not item.ok}
        random = "random" in failed  # such gradients change their direction by chance
        return Obstacles(
            blocked=is_blocked(self.plan, self.route),
            missing=not failed.isdisjoint(("zero gradients", "broken gradients")),
            random=random,
            shattered="gradient angle" in failed and not random,
            misleading=any(name == "square" or name.startswith("noise") for name in failed),
        )

    def _compare_strengths(self) -> None:
        """Expect noise and a single step not to beat ten steps, and many steps not to beat ten steps by much."""
        points = {name: 100 * fraction(robust) for name, robust in self.results.items()}
        noise = next(name for name in points if name.startswith("noise"))
        for weak, text in ((noise, "random noise"), ("fgsm", "one step")):
            beaten, text = points["pgd10"] - points[weak], f"points by which {text} beats PGD-10"
            self.evidence.expect(weak, text, beaten, limits.ORDER_POINTS, points=True)
        steps = [name for name in ("pgd10", "pgd50", "pgd100", "pgd500") if name in points]
        for fewer, more in pairwise(steps):
            text = f"points that {more} takes from {fewer}; more steps must level off"
            allowed = max(limits.STEPS_POINTS, limits.STEPS_RATIO * points[fewer])
            self.evidence.expect(f"{fewer} to {more}", text, points[fewer] - points[more], allowed, points=True)

    def _measure_distances(self, name: str) -> Tensor:
        """Measure the distances of adversarial images up to the largest eps; return which images are robust at eps."""
        attack = self._build_attack(name, self.route, self._grey())
        job = AttackJob(name=name, attack=attack, route=self.route)
        self.distances = self.runner.measure_distances(job, self.correct)
        return self.distances > self.threat.eps

    def _grey(self) -> ThreatModel:
        """The eps at which every ball contains the grey image, so that no classifier beats a constant answer."""
        pixels, norm = math.prod(self.plan.images.shape[1:]), self.threat.norm
        grey = {"Linf": 0.5, "L2": 0.5 * math.sqrt(pixels), "L1": 0.5 * pixels}[norm]
        return ThreatModel(norm=norm, eps=max(grey, self.threat.eps))

    def _vary_eps(self) -> list[tuple[float, float]]:
        """Return the accuracy by eps, from the smallest perturbations found.

        They are the distances of the nearest adversarial images, eps where another attack succeeds, and the eps that
        turns every image grey where PGD-20 succeeds there on one of two losses.
        """
        eps, grey, radii = self.threat.eps, self._grey(), [self.threat.eps]
        distances = torch.where(self.worst, self.distances, self.distances.clamp_max(eps))
        if self.gradients[self.route]:
            radii = [*(factor * eps for factor in EPS_FACTORS if factor * eps < grey.eps), grey.eps]
            robust = self._attack("pgd20", self.route, self.correct, threat=grey)
            robust = self._attack("cw20", self.route, robust, threat=grey)
            distances = torch.where(robust, distances, distances.clamp_max(grey.eps))
            small = torch.stack([self.results[name] for name in USUAL_ATTACKS if name in self.results]).all(0)
            rise = 100 * (fraction(robust) - fraction(small))
            text = f"points of accuracy under PGD gained from eps {eps:.3g} to {grey.eps:.3g}"
            self.evidence.expect("eps", text, rise, limits.ORDER_POINTS, points=True)
            text = f"accuracy (%) at eps {grey.eps:.3g}, where every image can be turned grey"
            most = 100 * self.chance + limits.LARGE_EPS_POINTS
            self.evidence.expect("large eps", text, 100 * fraction(robust), most, points=True)
        return [(0.0, fraction(self.correct)), *((radius, fraction(distances > radius)) for radius in radii)]

    def _transfer(self) -> None:
        """Transfer attacks from the other branches and from the surrogate to the evaluated branch."""
        others = [route for route in self.plan.routes if route != self.route and self.gradients[route]]
        attacks: dict[str, tuple[Attack, nn.Module | None]] = {
            f"from {route}": (self._build_attack("pgd50", route), None) for route in others
        }
        if self.surrogate is not None:
            attack = self._build_attack("pgd50", same_branch(self.surrogate, self.route))
            attacks["from surrogate"] = replace(attack, statistics="running"), self.surrogate
        pgd10 = next(rung.alone for rung in self.ladder if rung.attack == "pgd10") or 0.0
        for name, (attack, source) in attacks.items():
            job = AttackJob(name=name, attack=attack, route=self.route, origin="" if source is None else self.origin)
            robust = self.runner.evaluate_attack(job, self.correct, source=source)
            self._add_rung(name, "PGD-50 transferred", robust, alone=True)
            beaten, text = pgd10 - fraction(robust), f"points by which PGD-50 {name} beats PGD-10 on the model itself"
            self.evidence.expect(f"transfer {name}", text, 100 * beaten, limits.ORDER_POINTS, points=True)

    def _transfer_from_copy(self) -> None:
        """Transfer attacks from a copy that learned the answers of the evaluated branch, if images survive."""
        if not bool(self.worst.any()):
            return
        survivors, copy = self.worst, distill(self.plan, self.route)
        for rung in copy_rungs(self.budget):
            attack = self._build_attack(rung.attack.removesuffix(FROM_COPY), None)
            attack = replace(attack, statistics="running")
            job = AttackJob(name=rung.attack, attack=attack, route=self.route, origin="copy")
            robust = self.runner.evaluate_attack(job, self.correct if rung.alone else self.worst, source=copy)
            self._add_rung(rung.attack, rung.text, robust, alone=rung.alone)
        text = "points that attacks on a trained copy take from the survivors of all attacks on the model"
        self._expect_few_lost("copy", text, survivors)

    def _evaluate_components(self) -> dict[str, dict[str, float]]:
        """Evaluate each Gaussian alone if norms weight their statistics by the input."""
        mixing = mixing_norms(self.plan.model)
        if not mixing:
            return {}
        text = "norms that weight their statistics by the input; every attack differentiates through this choice"
        self.evidence.expect("choice", text, len(mixing), math.inf, weight="note")
        found = {}
        for domain in next(iter(mixing.values())).plan.domains:
            name = FIXED + domain
            with mixture_component(self.plan.model, domain):
                clean = self.runner.evaluate_clean(self.route)
                claimed = self._claim(self.route, clean, origin=name)
                found[name] = self._summarize(self.route, clean, claimed, origin=name)
        return found

    # -- outputs and gradients -----------------------------------------------------------------------------------------

    def _measure_outputs(self, outputs: OutputCheck) -> None:
        sample = measure_gradients(self.plan, self.route, self.correct, differentiable=self.gradients[self.route])
        self._weigh_gradients(sample.norms, sample.angles)
        expect, reference = self.evidence.expect, outputs.reference
        text = "relative difference of logits, alone and in a batch"
        expect("batch", text, outputs.batch_difference, reference.tolerance)
        text = "relative difference of logits, two forwards of an image"
        expect("random", text, reference.difference, reference.tolerance, weight="note")
        text = "outputs are probabilities, not logits (1: yes)"
        expect("probabilities", text, float(outputs.probabilities), 0, weight="note")  # zero gradients are a sign
        draws = f"the outputs are random: the majority of {DRAWS} draws decides on an image"
        self.advice += [draws] if reference.is_random else outputs.warnings()
        top = sample.logits.topk(2, dim=1).values
        gap = (top[:, 0] - top[:, 1]).median().item()
        if not expect("logit gap", "median difference of the two largest logits", gap, limits.LOGIT_GAP, weight="note"):
            self.advice.append("divide the logits: they are so large that float32 cross-entropy loses its gradient")

    def _weigh_gradients(self, norms: Tensor, angles: Tensor) -> None:
        finite = norms.isfinite()
        zero = (norms == 0).double().mean().item()
        text = "share of the images whose loss gradient is zero"
        few_zeros = self.evidence.expect("zero gradients", text, zero, limits.ZERO_SHARE)
        broken = (~finite).double().mean().item()
        self.evidence.expect("broken gradients", "share of the images whose loss gradient is not finite", broken, 0)
        sizes = norms[finite & (norms > 0)].cpu()
        if len(sizes):
            low, middle, high = sizes.quantile(torch.tensor([0.05, 0.5, 0.95], dtype=sizes.dtype)).tolist()
            text = f"median norm of the loss gradient; 5 % are below {low:.2g}, 5 % above {high:.2g}"
            self.evidence.expect("gradient norm", text, middle, math.inf, weight="note")
        text = f"median angle (degrees) between loss gradients {limits.ANGLE_STEP:g} eps apart"
        angle = angles.nanmedian().item()
        self.evidence.expect("gradient angle", text, angle, limits.GRADIENT_ANGLE, weight="note")
        if not few_zeros:
            without = "and give the model without it as the surrogate"
            self.advice.append(
                "find what stops the gradients (quantization, rounding, detach, huge logits) "
                + (without if self.surrogate is None else "and remove it; the surrogate shows the accuracy without it")
            )

    def _advise(
        self, verdict: VerdictName, claimed: float, others: Mapping[str, Mapping[str, float]], *, gap_ok: bool
    ) -> list[str]:
        advice = list(self.advice)
        blind = any(item.name in OBSTACLES for item in self.evidence.items if not item.ok)
        if verdict == "false" and not blind and not branches(self.plan.model):
            advice.append(
                "was it trained on clean and adversarial images with one norm? Add a KL term between the two outputs "
                "(paper A, table 8: AutoAttack 0.5 % to 23.6 %), or give each an affine of its own ('dual_affine_bn')"
            )
        if verdict == "false" and not blind:
            advice.append("train against more attack steps, with random starts, or at a smaller eps")
        if verdict == "inconclusive" and len(self.correct) < limits.LEAST_IMAGES:
            advice.append("give more images")
        elif verdict == "inconclusive" and self.budget != "full" and not blind:
            advice.append("run again with the budget 'full'")
        if verdict == "inconclusive" and self.threat.norm == "L1" and not gap_ok:
            advice.append(
                "trust the worst case: under L1 PGD is weak on every model, and a gap alone proves no masking"
            )
        if verdict == "none":
            advice.append("train adversarially, for example on PGD-10 images of this eps")
            better = [name for name, row in others.items() if row["PGD-10"] > max(claimed, limits.NONE_CLAIMED)]
            advice += [f"evaluate {name!r}, which is more accurate under PGD-10" for name in better]
        return advice
