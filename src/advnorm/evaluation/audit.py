"""Is the robustness real? A ladder of attacks, the signs of gradient masking, and a verdict in plain words.

Signs and their reading: Athalye et al. 2018, "Obfuscated gradients give a false sense of security", section 3; Carlini
et al. 2019, "On evaluating adversarial robustness"; papers A (table 3) and C (section 3.2) for falsely robust models.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

import advnorm.attacks as attack_names
from advnorm._core.errors import ConfigError, did_you_mean, raise_all
from advnorm._core.locks import exclusive
from advnorm._core.memory import AdaptiveBatchSize
from advnorm._core.precision import float32_as
from advnorm._core.progress import show_progress
from advnorm._core.records import digest, model_fingerprint, write_json, writing
from advnorm.attacks import attacked, input_gradient
from advnorm.attacks.losses import cross_entropy
from advnorm.evaluation.partial_record import Partial, finished, partial_path
from advnorm.evaluation.plan import AS_CALLED, Case, branches, mixing_norms, prepare, same_branch
from advnorm.evaluation.runner import Job, Outputs, Runner, seeded
from advnorm.evaluation.verdict import (
    FIXED,
    LEAST_IMAGES,
    NONE_CLAIMED,
    SLACK_IMAGES,
    Evidence,
    Step,
    Verdict,
    Weight,
    Word,
    decide,
    weigh_gap,
)
from advnorm.norms import Mode, frozen_mode, mixture_component, routed_modules
from advnorm.threat import ThreatModel

Budget = Literal["quick", "standard", "full"]

#: A weaker attack may be better than a stronger one on so many points, by its random start.
ORDER_POINTS = 2.0
#: More steps may lower the accuracy by so much: sound models lose 1 to 3 points from 10 to 50 steps, hybrid ones of
#: paper E keep falling (fig. 2).
STEPS_POINTS, STEPS_RATIO = 5.0, 0.15
#: Survivors of all gradient attacks that Square fools: on sound models next to none.
SQUARE_POINTS = 1.0
#: Right images whose loss gradient is exactly zero: a confident model has a few in float32.
ZERO_SHARE = 0.1
#: Where every image can be turned grey, accuracy is at most the share of the commonest class; and these points.
LARGE_EPS_POINTS = 3.0
#: Difference of the two largest logits beyond which float32 cross-entropy loses its gradient: exp(-88) underflows.
LOGIT_GAP = 50.0

#: Of right images for the statistics of gradients.
GRADIENT_IMAGES = 256

#: Signs that something stands between the attacks and the model, which more of the same attacks do not overcome.
BLIND = frozenset({"zero gradients", "broken gradients", "logit gap", "probabilities", "random", "batch"})


@dataclass(frozen=True, kw_only=True)
class Rung:
    """An attack of the ladder; ``alone`` on every right image, else only on what withstood the rungs before."""

    attack: str
    text: str
    alone: bool = False
    gradients: bool = True


def _ladder(budget: Budget, classes: int) -> tuple[Rung, ...]:
    quick, full = budget == "quick", budget == "full"
    some = "-steps40" if quick else ""
    noise = "noise-uniform" if quick else "noise-uniform-restarts10"
    loss = "dlr" if classes > 2 else "cw"
    rungs = [
        Rung(attack=noise, text="random noise", alone=True, gradients=False),
        Rung(attack="fgsm", text="one step", alone=True),
        Rung(attack="pgd10", text="the usual claim", alone=True),
        Rung(attack="pgd10-cw", text="another loss", alone=True),
        Rung(attack="pgd50", text="more steps", alone=True),
    ]
    if full:
        rungs += [Rung(attack=f"pgd{n}", text="more steps", alone=True) for n in (100, 500)]
    rungs += [
        Rung(attack=f"pgd50-restarts{2 if quick else 5}-{loss}-worst", text="restarts, a loss without scale"),
        Rung(attack="apgd-ce" + some, text="adaptive steps"),
        Rung(attack="apgd-t" + some, text="towards each class"),
        Rung(attack="fab-t" + some, text="nearest boundary"),
        Rung(attack=f"square-queries{1000 if quick else 5000}", text="without gradients", gradients=False),
    ]
    return tuple(rungs)


#: Images unless the caller says, spread evenly over the data; None: all.
LIMITS: Mapping[Budget, int | None] = {"quick": 200, "standard": 1000, "full": None}


def budget_problems(budget: object) -> list[str]:
    """What is wrong with the name of a budget."""
    known = get_args(Budget)
    return [] if budget in known else [f"unknown budget {budget!r}{did_you_mean(budget, known)}"]


def audit(
    model: nn.Module,
    data: Any,
    threat: ThreatModel,
    *,
    route: str | None = None,
    budget: Budget = "standard",
    surrogate: nn.Module | None = None,
    limit: int | None = None,
    batch_size: int | None = None,
    device: str | torch.device | None = None,
    record: Path | str | None = None,
    progress: bool = False,
    seed: int = 0,
    statistics: Mode = "running",
    about: Mapping[str, Any] | None = None,
) -> Verdict:
    """Tell real robustness from false: climb a ladder of attacks, look for the signs of masking, and say what follows.

    ``budget``: ``quick`` (200 images), ``standard`` (1000) or ``full`` (all of them, PGD up to 500 steps); ``limit``
    overrides the number of images. ``route``: the branch to judge. A model with several branches and no route is judged
    by the branch that withstands PGD-10 best, and the others are reported.
    ``surrogate``: a copy of the model without what may mask its gradients; attacks on it are transferred.
    ``statistics="batch_frozen"``: the model uses the statistics of the batch at test time.
    ``record``: JSON file for the verdict; a killed audit continues from ``<record>.partial``, one that is finished is
    read back, and the record of another audit is refused. ``about``: as in :func:`benchmark`.
    """
    problems = budget_problems(budget)
    if not (route is None or isinstance(route, str)):
        problems.append(f"an audit judges one route, got {route!r}; the other branches are reported beside it")
    if surrogate is not None and not isinstance(surrogate, nn.Module):
        problems.append(f"the surrogate must be an nn.Module, got {type(surrogate).__name__}")
    raise_all(problems, "bad audit")
    if isinstance(model, nn.Module) and isinstance(threat, ThreatModel) and threat.eps == 0:
        raise ConfigError("an audit needs an eps above 0; without a perturbation there is nothing to withstand")
    known = branches(model) if isinstance(model, nn.Module) else ()
    routes = _routes(model, known, route)
    case = prepare(
        model,
        data,
        threat,
        "pgd10",
        routes,
        batch_size=batch_size,
        device=device,
        seed=seed,
        limit=LIMITS[budget] if limit is None else limit,
        spread=True,
        statistics=statistics,
        record=record,
        surrogate=surrogate,
        gradients=False,  # without any an audit climbs what is left of its ladder
        about=about,
    )
    origin = "" if surrogate is None else model_fingerprint(surrogate)
    fingerprint = digest(case.fingerprint, case.threat, budget, case.routes, route, origin)
    known_by = case.known_by
    if surrogate is not None:
        routes = tuple(dict.fromkeys(same_branch(surrogate, name) for name in case.routes))
        other = dataclasses.replace(case, model=surrogate, routes=routes, statistics="running")
        known_by |= {f"surrogate {origin[:8]}, {name}": first for name, first in other.known_by.items()}
    done = finished(record, fingerprint, known_by)
    if done is not None:
        return Verdict.of_record(done)
    with exclusive(record), show_progress(progress) as display:
        partial = Partial(None if record is None else partial_path(record), case.fingerprint, known_by)
        work = _Audit(case, Runner(case, partial, display), budget, surrogate, origin)
        logits = {name: first.written() for name, first in known_by.items()}
        verdict = work.run(judged=route if known else None, known={"fingerprint": fingerprint, "logits": logits})
        if record is not None:
            with writing(record, verdict):
                write_json(record, verdict.record())
                partial.remove()
    return verdict


def _routes(model: nn.Module, known: Sequence[str], route: str | None) -> Sequence[str | None]:
    if not known or (route is not None and route not in known):
        return [route]
    if route is None and all(module.state.route is not None for module in routed_modules(model).values()):
        return [None]  # an enclosing scope says which
    return list(known)


class _Audit:
    """One audit under way."""

    def __init__(
        self, case: Case, runner: Runner, budget: Budget, surrogate: nn.Module | None = None, origin: str = ""
    ) -> None:
        self.case, self.runner, self.surrogate, self.origin = case, runner, surrogate, origin
        self.budget: Budget = budget
        self.threat: ThreatModel = case.threat
        self.chance = case.labels.bincount().max().item() / len(case.labels)
        #: Points that two images make: no order of attacks is refuted by less.
        self.slack = 100 * SLACK_IMAGES / len(case.labels)
        self.evidence: list[Evidence] = []
        self.advice: list[str] = []

    def run(self, judged: str | None, known: Mapping[str, Any]) -> Verdict:
        """The verdict on a route; ``known``: what its record is known by."""
        case = self.case
        self.probes = {route: self._probe(route) for route in case.routes}
        clean = {route: self.runner.clean(route) for route in case.routes}
        outputs = {route: self.runner.look(route) for route in case.routes}
        claims = {
            route: self._attack("pgd10", route, clean[route]) if self.probes[route].gradients else clean[route]
            for route in case.routes
        }
        if judged is None:  # the branch that claims most
            judged = max(case.routes, key=lambda route: _share(claims[route]))
        self.route, self.right, self.probe = judged, clean[judged], self.probes[judged]
        self._look_at_outputs(outputs[judged])
        ladder, worst = self._climb()
        curve = self._raise_eps()
        worst = self._transfer(ladder, worst)
        others = {
            str(route): self._in_short(route, clean[route], claims[route], gradients=self.probes[route].gradients)
            for route in case.routes
            if route != judged
        }
        others |= self._components()
        claimed = _share(claims[judged])
        how = {"norm": self.threat.norm, "images": len(self.right)}
        self.evidence.insert(0, weigh_gap(claimed, _share(worst), self.evidence, **how))
        word, reasons = decide(claimed, _share(worst), self.evidence, chance=self.chance, images=len(self.right))
        return Verdict(
            verdict=word,
            reasons=tuple(reasons),
            advice=tuple(self._what_to_try(word, claimed, others)),
            threat=self.threat,
            route=judged or AS_CALLED,
            images=len(self.right),
            ladder=tuple(ladder),
            evidence=tuple(self.evidence),
            eps_curve=tuple(curve),
            chance=self.chance,
            others=others,
            conditions={
                **case.conditions(),
                "budget": self.budget,
                "surrogate": None if self.surrogate is None else type(self.surrogate).__name__,
                **known,
                "warnings": list(self.runner.partial.warnings()),
            },
        )

    def _attack(
        self, name: str, route: str | None, among: Tensor, *, threat: ThreatModel | None = None, origin: str = ""
    ) -> Tensor:
        settings = {"seed": self.case.seed, "route": route, "statistics": frozen_mode(self.case.statistics)}
        attack = attack_names.get(name, threat=threat or self.threat, **settings)
        return self.runner.robust(Job(name=name, attack=attack, route=route, origin=origin), among)

    def _in_short(
        self, route: str | None, clean: Tensor, claimed: Tensor, *, gradients: bool, origin: str = ""
    ) -> dict[str, float]:
        """Three numbers for what is reported beside the branch that is judged."""
        worst = claimed
        if gradients:
            worst = self._attack("apgd-t-steps40", route, claimed, origin=origin)
        elif self.case.images.dim() == 4:
            worst = self._attack("square-queries1000", route, claimed, origin=origin)
        return {"clean": _share(clean), "PGD-10": _share(claimed), "worst case": _share(worst)}

    def _probe(self, route: str | None) -> _Probe:
        """Whether the loss has a gradient with respect to the image, and the number of classes."""
        case = self.case
        x, y = (part[:4].to(case.device) for part in (case.images, case.labels))
        with attacked(case.model, route=route, statistics=frozen_mode(case.statistics)) as predict:
            logits = predict(x.requires_grad_())
            try:
                input_gradient(cross_entropy(logits, y), x)
            except (ConfigError, RuntimeError):
                return _Probe(gradients=False, classes=logits.shape[1])
        return _Probe(gradients=True, classes=logits.shape[1])

    def _climb(self) -> tuple[list[Step], Tensor]:
        clean = _share(self.right)
        ladder, worst = [Step(attack="clean", text="no attack", alone=clean, worst=clean)], self.right
        results: dict[str, Tensor] = {}
        for rung in _ladder(self.budget, self.probe.classes):
            skipped = "no gradients" if rung.gradients and not self.probe.gradients else ""
            if rung.attack.startswith("square") and self.case.images.dim() != 4:
                skipped = "not images"
            if skipped:
                # An attack that cannot move leaves the claim at the clean accuracy.
                alone = clean if rung.attack == "pgd10" else None
                step = Step(attack=rung.attack, text=rung.text, alone=alone, worst=_share(worst), skipped=skipped)
                ladder.append(step)
                continue
            before = worst
            robust = self._attack(rung.attack, self.route, self.right if rung.alone else worst)
            worst, results[rung.attack] = worst & robust, robust
            alone = _share(robust) if rung.alone else None
            ladder.append(Step(attack=rung.attack, text=rung.text, alone=alone, worst=_share(worst)))
            if rung.attack.startswith("square"):
                text = "points that Square, without gradients, takes from the survivors of gradient attacks"
                self._expect("square", text, 100 * (_share(before) - _share(worst)), SQUARE_POINTS)
        if self.probe.gradients:
            self._compare(results)
        return ladder, worst

    def _compare(self, results: Mapping[str, Tensor]) -> None:
        """What must not be better: noise and one step than ten steps, many steps than ten by much."""
        points = {name: 100 * _share(robust) for name, robust in results.items()}
        noise = next(name for name in points if name.startswith("noise"))
        for weak, text in ((noise, "random noise"), ("fgsm", "one step")):
            self._expect(weak, f"points by which {text} beats PGD-10", points["pgd10"] - points[weak], ORDER_POINTS)
        steps = [name for name in ("pgd10", "pgd50", "pgd100", "pgd500") if name in points]
        for fewer, more in pairwise(steps):
            text = f"points that {more} takes from {fewer}; more steps must level off"
            allowed = max(STEPS_POINTS, STEPS_RATIO * points[fewer])
            self._expect(f"{fewer} to {more}", text, points[fewer] - points[more], allowed)

    def _raise_eps(self) -> list[tuple[float, float]]:
        """PGD-20 on two losses at growing eps, up to where every image can be turned grey."""
        curve = [(0.0, _share(self.right))]
        if not self.probe.gradients:
            return curve
        grey = max(self._grey(), self.threat.eps)
        factors = (1.0, 2.0) if self.budget == "quick" else (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
        for eps in [*(self.threat.eps * factor for factor in factors if self.threat.eps * factor < grey), grey]:
            threat = ThreatModel(norm=self.threat.norm, eps=eps)
            robust = self._attack("pgd20", self.route, self.right, threat=threat)
            robust = self._attack("cw20", self.route, robust, threat=threat)
            curve.append((eps, _share(robust)))
        rise = 100 * max(after - before for (_, before), (_, after) in pairwise(curve))
        self._expect("eps", "points gained by a larger eps", rise, ORDER_POINTS)
        text = f"accuracy (%) at eps {grey:.3g}, where every image can be turned grey"
        self._expect("large eps", text, 100 * curve[-1][1], 100 * self.chance + LARGE_EPS_POINTS)
        return curve

    def _grey(self) -> float:
        """The eps at which the grey image lies in every ball, so that no classifier is better than a constant."""
        pixels = math.prod(self.case.images.shape[1:])
        return {"Linf": 0.5, "L2": 0.5 * math.sqrt(pixels), "L1": 0.5 * pixels}[self.threat.norm]

    def _transfer(self, ladder: list[Step], worst: Tensor) -> Tensor:
        """Attacks computed on the other branches and on the surrogate, judged on this one."""
        sources: list[tuple[str, str | None, nn.Module | None]] = [
            (f"from {route}", route, None)
            for route in self.case.routes
            if route != self.route and self.probes[route].gradients
        ]
        if self.surrogate is not None:
            sources.append(("from surrogate", same_branch(self.surrogate, self.route), self.surrogate))
        pgd = next(step.alone for step in ladder if step.attack == "pgd10") or 0.0
        for name, route, source in sources:
            statistics = frozen_mode(self.case.statistics) if source is None else "running"
            settings = {"seed": self.case.seed, "route": route, "statistics": statistics}
            attack = attack_names.get("pgd50", threat=self.threat, **settings)
            job = Job(name=name, attack=attack, route=self.route, origin="" if source is None else self.origin)
            robust = self.runner.robust(job, self.right, source=source)
            worst = worst & robust
            ladder.append(Step(attack=name, text="PGD-50 transferred", alone=_share(robust), worst=_share(worst)))
            text = f"points by which PGD-50 {name} beats PGD-10 on the model itself"
            self._expect(f"transfer {name}", text, 100 * (pgd - _share(robust)), ORDER_POINTS)
        return worst

    def _look_at_outputs(self, outputs: Outputs) -> None:
        """Logits and gradients of some of the right images."""
        case = self.case
        rows = self.right.nonzero()[:GRADIENT_IMAGES, 0]
        rows = rows if len(rows) >= case.least else torch.arange(min(len(case.images), GRADIENT_IMAGES))
        with (
            seeded(case, "gradients"),
            attacked(case.model, route=self.route, statistics=frozen_mode(case.statistics)) as predict,
            float32_as("ieee", case.device),
        ):

            def work(part: slice) -> tuple[Tensor, Tensor]:
                x, y = (v[rows[part]].to(case.device) for v in (case.images, case.labels))
                logits = predict(x.requires_grad_())
                if not self.probe.gradients:
                    return logits.detach(), torch.zeros(len(x))
                gradient = input_gradient(cross_entropy(logits, y), x)
                return logits.detach(), gradient.double().flatten(1).norm(dim=1).cpu()

            seen = AdaptiveBatchSize(min(case.batch_size, 64), minimum=case.least).map(len(rows), work)
        logits, norms = (torch.cat(parts) for parts in zip(*seen))
        self._look_at_gradients(norms)
        text = "an image's logits alone and in a batch: relative difference"
        self._expect("batch", text, outputs.by_batch, outputs.same)
        self._expect("random", "two forwards of the same images: relative difference", outputs.varies, outputs.same)
        text = "outputs are probabilities, not logits (1: yes)"
        self._expect("probabilities", text, float(outputs.probabilities), 0)
        self.advice += outputs.warnings()
        top = logits.topk(2, dim=1).values
        gap = (top[:, 0] - top[:, 1]).median().item()
        self._expect("logit gap", "median difference of the two largest logits", gap, LOGIT_GAP, weight="note")
        if gap > LOGIT_GAP:
            self.advice.append("the logits are so large that float32 cross-entropy loses its gradient: divide them")

    def _look_at_gradients(self, norms: Tensor) -> None:
        finite = norms.isfinite()
        zero = (norms == 0).double().mean().item()
        self._expect("zero gradients", "share of the images whose loss gradient is zero", zero, ZERO_SHARE)
        broken = (~finite).double().mean().item()
        self._expect("broken gradients", "share of the images whose loss gradient is not finite", broken, 0)
        sizes = norms[finite & (norms > 0)].cpu()
        if len(sizes):
            low, middle, high = sizes.quantile(torch.tensor([0.05, 0.5, 0.95], dtype=sizes.dtype)).tolist()
            text = f"median norm of the loss gradient; 5 % are below {low:.2g}, 5 % above {high:.2g}"
            self._expect("gradient norm", text, middle, math.inf, weight="note")
        if zero > ZERO_SHARE:
            without = "and give the model without it as the surrogate"
            self.advice.append(
                "find what stops the gradients (quantization, rounding, detach, huge logits) "
                + (without if self.surrogate is None else "and take it out; the surrogate shows what is left then")
            )

    def _components(self) -> dict[str, dict[str, float]]:
        """Of norms that weigh their statistics by the input: every Gaussian alone, so that nothing is chosen."""
        mixing = mixing_norms(self.case.model)
        if not mixing:
            return {}
        text = "norms that weigh their statistics by the input; every attack went through this choice"
        self._expect("choice", text, len(mixing), math.inf, weight="note")
        found = {}
        for domain in next(iter(mixing.values())).plan.domains:
            name = FIXED + domain
            with mixture_component(self.case.model, domain):
                clean = self.runner.clean(self.route)
                gradients = self.probe.gradients
                claimed = self._attack("pgd10", self.route, clean, origin=name) if gradients else clean
                found[name] = self._in_short(self.route, clean, claimed, gradients=gradients, origin=name)
        return found

    def _expect(self, name: str, text: str, value: float, most: float, *, weight: Weight = "doubt") -> None:
        """Add a measurement that should be at most so large; two images more are never a sign where it is in points."""
        most = max(most, self.slack) if text.startswith(("points", "accuracy")) else most
        expected = "" if math.isinf(most) else f"at most {most:.3g}"
        self.evidence.append(
            Evidence(name=name, value=value, expected=expected, ok=value <= most, weight=weight, text=text)
        )

    def _what_to_try(self, word: Word, claimed: float, others: Mapping[str, Mapping[str, float]]) -> list[str]:
        advice = list(self.advice)
        blind = any(item.name in BLIND for item in self.evidence if not item.ok)
        if word == "false" and not blind and not branches(self.case.model):
            advice.append(
                "trained on clean and adversarial images with one norm? Add a KL term between the two outputs "
                "(paper A, table 8: AutoAttack 0.5 % to 23.6 %), or give each an affine of its own ('dual_affine_bn')"
            )
        if word == "false" and not blind:
            advice.append("train against more attack steps, with random starts, or at a smaller eps")
        if word == "inconclusive" and len(self.right) < LEAST_IMAGES:
            advice.append("give more images")
        elif word == "inconclusive" and self.budget != "full" and not blind:
            advice.append("run again with the budget 'full'")
        if word == "inconclusive" and self.threat.norm == "L1" and not self.evidence[0].ok:
            advice.append(
                "under L1 PGD is weak on every model, and the gap alone proves no masking: trust the worst case"
            )
        if word == "none":
            advice.append("train adversarially, for example on PGD-10 images of this eps")
            better = [name for name, row in others.items() if row["PGD-10"] > max(claimed, NONE_CLAIMED)]
            advice += [f"{name!r} withstands PGD-10 better: judge that" for name in better]
        return advice


@dataclass(frozen=True, kw_only=True)
class _Probe:
    gradients: bool
    classes: int


def _share(verdicts: Tensor) -> float:
    return verdicts.sum().item() / len(verdicts)
