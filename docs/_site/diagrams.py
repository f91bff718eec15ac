"""Pictures of the README and of the explanation pages, as SVG.

Plans are drawn from the plans themselves, digits from the embedded data, accuracies from records under results/.
``python docs/_site/diagrams.py`` rewrites the picture of the README, the only one that is kept in the repository.
"""

import json
import math
from collections.abc import Iterator
from html import escape
from itertools import groupby
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RECORDS, PICTURE = ROOT / "results" / "records", ROOT / "docs" / "assets" / "false_robustness.svg"
CLEAN, ADV, BOTH, INK, PALE = "#0072B2", "#D55E00", "#5b6770", "#24313a", "#eef1f4"
COLOURS = {"clean": CLEAN, "adv": ADV, "shared": BOTH}


class Drawing:
    """An SVG picture of a given size, on white."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self.size, self.title, self.parts = (
            (width, height),
            title,
            [f'<rect width="{width}" height="{height}" fill="#fff"/>'],
        )

    def box(self, x: float, y: float, w: float, h: float, fill: str = "#fff", edge: str = INK, dash: str = "") -> None:
        self.parts.append(
            f'<rect x="{x}" y="{y}" width="{w}" height="{h}" rx="7" fill="{fill}" stroke="{edge}" stroke-width="1.6" '
            f'stroke-dasharray="{dash}"/>'
        )

    def text(self, x: float, y: float, words: str, size: float = 13, fill: str = INK, **style: str) -> None:
        details = " ".join(
            f'{name.replace("_", "-")}="{value}"' for name, value in {"text_anchor": "middle", **style}.items()
        )
        self.parts.append(f'<text x="{x}" y="{y}" font-size="{size}" fill="{fill}" {details}>{escape(words)}</text>')

    def code(self, x: float, y: float, words: str, fill: str = INK, size: float = 12.5) -> None:
        self.text(
            x,
            y,
            words,
            size,
            fill,
            font_family="ui-monospace,Menlo,Consolas,DejaVu Sans Mono,monospace",
            text_anchor="start",
            style="white-space:pre",
        )

    def path(
        self, points: str, stroke: str, width: float = 2, fill: str = "none", dash: str = "", opacity: float = 1
    ) -> None:
        self.parts.append(
            f'<path d="{points}" stroke="{stroke}" stroke-width="{width}" fill="{fill}" stroke-dasharray="{dash}" '
            f'fill-opacity="{opacity}" stroke-linejoin="round"/>'
        )

    def arrow(self, x1: float, y1: float, x2: float, y2: float, colour: str, dash: str = "") -> None:
        """A curve that leaves and arrives horizontally."""
        middle = (x1 + x2) / 2
        self.path(f"M{x1} {y1} C{middle} {y1} {middle} {y2} {x2 - 6} {y2}", colour, dash=dash)
        self.path(f"M{x2} {y2} l-8 -4.5 v9 Z", colour, width=0, fill=colour)

    def image(self, x: float, y: float, side: float, pixels: list[list[float]], edge: str) -> None:
        """Draw grey pixels in [0, 1]; 1 is dark."""
        step = side / len(pixels)
        for row, values in enumerate(pixels):
            for column, value in enumerate(values):
                grey = round(255 * (1 - value))
                self.parts.append(
                    f'<rect x="{x + column * step:.2f}" y="{y + row * step:.2f}" width="{step + 0.3:.2f}" '
                    f'height="{step + 0.3:.2f}" fill="rgb({grey},{grey},{grey})"/>'
                )
        self.parts.append(
            f'<rect x="{x}" y="{y}" width="{side}" height="{side}" fill="none" stroke="{edge}" stroke-width="3"/>'
        )

    def bell(self, x: float, y: float, scale: float, height: float, mean: float, deviation: float, colour: str) -> None:
        """The density of a Gaussian around ``x``, from -4 to 4 units of ``scale``."""
        values = [
            (i / 10, math.exp(-(((i / 10) - mean) ** 2) / (2 * deviation**2)) / deviation) for i in range(-40, 53)
        ]
        points = " ".join(f"L{x + scale * at:.1f} {y - height * value:.1f}" for at, value in values)
        self.path(f"M{x - 4 * scale} {y} {points} L{x + 5.2 * scale} {y} Z", colour, fill=colour, opacity=0.18)

    def svg(self) -> str:
        width, height = self.size
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
            f'font-family="system-ui,Segoe UI,Roboto,DejaVu Sans,sans-serif" role="img">'
            + "".join([f"<title>{escape(self.title)}</title>", *self.parts])
            + "</svg>\n"
        )


def domains() -> Drawing:
    """Where samples come from, and what that does to the input of a norm."""
    from advnorm.data import digits

    images, _ = digits("test")
    d = Drawing(760, 300, "Clean and adversarial images have different statistics at the input of a norm")
    for column, pick in enumerate((1, 4, 7)):
        pixels = images[pick, 0]
        sign = ((pixels * 997).int() % 2 * 2 - 1).float()  # some perturbation of each pixel by eps
        x = 22 + 74 * column
        d.image(x, 46, 62, pixels.tolist(), CLEAN)
        d.image(x, 186, 62, (pixels + 0.25 * sign).clamp(0, 1).tolist(), ADV)
        d.path(f"M{x + 31} 116 V172", BOTH, dash="3 3")
        d.path(f"M{x + 31} 178 l-4 -8 h8 Z", BOTH, width=0, fill=BOTH)
    d.text(130, 32, "domain “clean”", 15, CLEAN, font_weight="600")
    d.text(130, 274, "domain “adv”", 15, ADV, font_weight="600")
    d.text(245, 152, "attack", 13, BOTH, text_anchor="start")
    d.box(318, 116, 96, 62, PALE)
    d.text(366, 143, "layers of", 13)
    d.text(366, 160, "the network", 13)
    d.arrow(248, 77, 316, 138, CLEAN)
    d.arrow(248, 217, 316, 158, ADV)
    d.arrow(416, 138, 470, 122, CLEAN)
    d.arrow(416, 158, 470, 188, ADV)
    d.text(612, 32, "input of a norm, one channel", 15, font_weight="600")
    d.bell(590, 238, 30, 110, -1.1, 0.75, CLEAN)
    d.bell(590, 238, 30, 110, 1.5, 1.25, ADV)
    d.path("M470 238 H752", INK, 1.4)
    d.text(538, 78, "μ, σ of clean", 12.5, CLEAN)
    d.text(688, 136, "μ, σ of adv", 12.5, ADV)
    d.text(612, 268, "one mean and one deviation fit neither", 13, BOTH)
    return d


def banks() -> Drawing:
    """What a norm layer holds."""
    d = Drawing(760, 270, "A routed norm holds statistics banks and affine banks")
    d.box(150, 20, 460, 190, "#fbfcfd", BOTH, dash="6 4")
    d.text(380, 44, "one norm layer: dual_bn", 15, font_weight="600")
    for title, symbols, x in (("statistics banks", "μ  σ²", 178), ("affine banks", "γ  β", 406)):
        d.text(x + 88, 72, title, 13.5, BOTH)
        for row, name in enumerate(("clean", "adv")):
            y = 86 + 58 * row
            d.box(x, y, 176, 44, "#fff", COLOURS[name])
            d.text(x + 46, y + 28, name, 14, COLOURS[name], font_weight="600")
            d.text(x + 122, y + 28, symbols, 16, INK, font_family="Georgia,serif", font_style="italic")
    for row, name in enumerate(("clean", "adv")):
        y = 108 + 58 * row
        d.text(66, y + 5, f"{name} samples", 13.5, COLOURS[name])
        d.arrow(124, y, 176, y, COLOURS[name])
        d.arrow(354, y, 404, y, COLOURS[name])
        d.arrow(582, y, 640, y, COLOURS[name])
        d.text(650, y + 5, "next layer", 13, BOTH, text_anchor="start")
    d.text(266, 234, "measured from samples", 13, BOTH)
    d.text(494, 234, "learned by gradients", 13, BOTH)
    d.text(380, 260, "y = γ · (x − μ) / √(σ² + ε) + β", 16, INK, font_family="Georgia,serif", font_style="italic")
    return d


PLANS = {
    "bn": "one bank for all",
    "dual_bn": "everything apart",
    "dual_affine_bn": "mixed statistics",
    "dual_stats_bn": "mixed affine",
    "cross_bn": "the other's statistics",
}


def plans() -> Drawing:
    """A panel for each plan: domain → statistics bank → affine bank; dashed: the bank that the samples update."""
    from advnorm.norms import make_plan

    d = Drawing(760, 330, "Plans: which statistics bank and which affine bank each domain uses")
    for index, (name, words) in enumerate(PLANS.items()):
        plan = make_plan(name)
        x, y = 8 + 252 * (index % 3), 8 + 162 * (index // 3)
        d.box(x, y, 240, 150, "#fbfcfd", "#c8d0d6")
        d.code(x + 12, y + 22, name, size=14)
        d.text(x + 228, y + 22, words, 12, BOTH, text_anchor="end")
        rows = dict(zip(plan.domains, (y + 66, y + 116)))
        places = {
            kind: _places(banks, rows, y + 91)
            for kind, banks in (("statistics", plan.statistics_banks), ("affine", plan.affine_banks))
        }
        for kind, left, label in (("statistics", x + 88, "μ σ"), ("affine", x + 172, "γ β")):
            for bank, at in places[kind].items():
                d.box(left, at - 15, 46, 30, "#fff", COLOURS[bank])
                d.text(left + 23, at + 5, label, 13, COLOURS[bank], font_family="Georgia,serif", font_style="italic")
        for position, domain in enumerate(plan.domains):
            colour, at = COLOURS[domain], rows[domain]
            by, feeds, affine = plan.normalized_by[position], plan.feeds[position], plan.affine[position]
            d.text(x + 30, at + 5, domain, 13, colour, font_weight="600")
            d.arrow(x + 52, at, x + 86, places["statistics"][by], colour)
            d.arrow(x + 136, places["statistics"][by], x + 170, places["affine"][affine], colour)
            if feeds != by:
                d.arrow(x + 52, at, x + 86, places["statistics"][feeds], colour, dash="3 3")
    d.text(524, 196, "solid: the banks that treat", 13, INK, text_anchor="start")
    d.text(524, 213, "the samples of a domain", 13, INK, text_anchor="start")
    d.text(524, 235, "dashed: the bank that they update", 13, INK, text_anchor="start")
    for row, (name, words) in enumerate(
        (("clean", "bank of clean"), ("adv", "bank of adv"), ("shared", "bank of all"))
    ):
        d.box(526, 256 + 22 * row, 18, 14, "#fff", COLOURS[name])
        d.text(554, 268 + 22 * row, words, 13, COLOURS[name], text_anchor="start")
    return d


def _places(banks: tuple[str, ...], rows: dict[str, float], middle: float) -> dict[str, float]:
    """The height of each bank: in the row of its domain, or between the rows if it is shared."""
    return {bank: rows.get(bank, middle) for bank in banks}


#: Lines of code, and the route and the statistics mode while each of them runs.
SCOPE_LINES = (
    ("model.train()", None, "batch"),
    ('with advnorm.route(model, "adv"):', "adv", "batch"),
    ("    model(x_adv)", "adv", "batch"),
    ('    with advnorm.statistics(model, mode="running"):', "adv", "running"),
    ("        attack(model, x, y)", "adv", "running"),
    ('    with advnorm.route(model, {"clean": 64, "adv": 64}):', "both", "batch"),
    ("        model(torch.cat([x, x_adv]))", "both", "batch"),
    ("    model(x_adv)", "adv", "batch"),
    ("model(x)", None, "batch"),
)


def scopes() -> Drawing:
    """State along nested scopes."""
    d = Drawing(760, 316, "Scopes nest: the innermost wins, and on exit the state is what it was before")
    d.text(20, 30, "code", 14, BOTH, text_anchor="start", font_weight="600")
    d.text(520, 30, "route", 14, BOTH, font_weight="600")
    d.text(670, 30, "statistics", 14, BOTH, font_weight="600")
    for row, (line, route, mode) in enumerate(SCOPE_LINES):
        y = 46 + 28 * row
        d.code(20, y + 17, line)
        _state(d, 460, y, 120, *_route(route))
        fill = {"batch": (PALE, "batch"), "running": ("#dff1e9", "running")}[mode]
        _state(d, 610, y, 120, *fill, INK)
    for x, first, last in ((14, 1, 7), (46, 3, 4), (46, 5, 6)):
        d.path(f"M{x} {46 + 28 * first + 5} V{46 + 28 * (last + 1) - 5}", "#9fb0bb", 2)
    return d


def _route(route: str | None) -> tuple[str, str, str]:
    if route is None:
        return "#fff", "none: error", "#b3261e"
    return ("#fbe7da", "adv", ADV) if route == "adv" else ("#e4eef5", "clean 64 + adv 64", CLEAN)


def _state(d: Drawing, x: float, y: float, w: float, fill: str, words: str, colour: str) -> None:
    d.parts.append(f'<rect x="{x}" y="{y + 1}" width="{w}" height="26" rx="5" fill="{fill}"/>')
    d.text(x + w / 2, y + 18, words, 12.5, colour)


VERDICT_COLOURS = {"real": "#cfeadd", "inconclusive": "#fbeecb", "false": "#f9d5c2", "none": "#e3e8ec"}


def verdicts() -> Drawing:
    """The audit's verdict for each pair of PGD-10 and worst-case accuracy, without any other sign; with our records."""
    from advnorm.evaluation.evidence import decide_verdict, weigh_gap

    d = Drawing(760, 470, "The verdict of an audit by PGD-10 accuracy and worst-case accuracy")
    left, base, unit, end = 70, 410, 6.2, 60

    def verdict(claimed: int, worst: int) -> str:
        gap = weigh_gap(claimed / 100, worst / 100, images=1000)
        return decide_verdict(claimed / 100, worst / 100, [gap], chance=0.1, images=1000)[0]

    for worst in range(end):
        claimed = worst
        for name, group in groupby(verdict(each, worst) for each in range(worst, end)):
            count = len(list(group))
            d.parts.append(
                f'<rect x="{left + unit * claimed:.1f}" y="{base - unit * (worst + 1):.1f}" width="{unit * count:.1f}" '
                f'height="{unit + 0.3:.1f}" fill="{VERDICT_COLOURS[name]}"/>'
            )
            claimed += count
    d.path(f"M{left} {base} H{left + end * unit} M{left} {base} L{left + end * unit} {base - end * unit}", INK, 1.4)
    for percent in range(0, end + 1, 10):
        d.text(left + unit * percent, base + 18, f"{percent} %", 12, BOTH)
        if percent:
            d.text(left + unit * percent - 8, base - unit * percent, f"{percent} %", 12, BOTH, text_anchor="end")
    d.text(left + end * unit / 2, base + 40, "accuracy under PGD-10", 14)
    for (label, branch), record in _records():
        if label in ("dual_affine_bn", "bn + KL term"):  # beside dual_bn
            continue
        weak, strong = (record["values"][f"{branch}/{attack}"] for attack in ("pgd10", "autoattack"))
        x, y = left + unit * weak, base - unit * strong
        d.parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4.5" fill="{CLEAN}" stroke="#fff" stroke-width="1.5"/>')
        d.text(x - 9, y + 4, label, 12, CLEAN, text_anchor="end", font_weight="600")
    d.text(500, 60, "Verdict without any other sign", 15, INK, text_anchor="start", font_weight="600")
    words = {
        "real": "real: most of it remains",
        "inconclusive": "inconclusive: a wide gap alone",
        "false": "false: most of it is lost",
        "none": "none: no robustness left",
    }
    for row, (name, text) in enumerate(words.items()):
        d.parts.append(f'<rect x="500" y="{78 + 26 * row}" width="18" height="15" fill="{VERDICT_COLOURS[name]}"/>')
        d.text(526, 90 + 26 * row, text, 12.5, INK, text_anchor="start")
    d.text(500, 206, "points: networks of the first picture,", 12.5, CLEAN, text_anchor="start")
    d.text(500, 223, "measured with AutoAttack", 12.5, CLEAN, text_anchor="start")
    d.parts.append(
        f'<text transform="translate(22 {base - end * unit / 2}) rotate(-90)" font-size="14" fill="{INK}" '
        'text-anchor="middle">accuracy in the worst case</text>'
    )
    return d


def _records() -> Iterator[tuple[tuple[str, str], dict[str, Any]]]:
    for cell, network in NETWORKS.items():
        yield network, json.loads((RECORDS / cell / "fast-seed0.json").read_text())


#: The records and labels of the README's picture.
NETWORKS = {
    "A/table3/single/eps16": ("bn", "shared"),
    "A/table3/dual_bn/eps16": ("dual_bn", "adv"),
    "A/table3/setup1/eps16": ("dual_affine_bn", "adv"),
    "A/table3/setup2/eps16": ("dual_stats_bn", "adv"),
    "A/table8/single_kl/eps16": ("bn + KL term", "shared"),
}


def false_robustness() -> Drawing:
    """Robust accuracy by PGD-10 and by AutoAttack for one training recipe with five norms."""
    d = Drawing(760, 336, "Accuracy under PGD-10 and under AutoAttack, by norm")
    d.text(20, 30, "PGD-10 reports robustness that AutoAttack removes", 17, INK, text_anchor="start", font_weight="600")
    d.parts.append(
        '<pattern id="false" width="7" height="7" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
        f'<rect width="7" height="7" fill="#fbe7da"/><rect width="2.4" height="7" fill="{ADV}"/></pattern>'
    )
    base, unit = 262, 5.0
    for percent in (0, 10, 20, 30, 40):
        d.path(f"M58 {base - unit * percent} H748", "#dde3e7", 1)
        d.text(50, base - unit * percent + 4, f"{percent} %", 12, BOTH, text_anchor="end")
    for index, ((label, branch), record) in enumerate(_records()):
        weak, strong = (record["values"][f"{branch}/{attack}"] for attack in ("pgd10", "autoattack"))
        x = 84 + 136 * index
        for top, bottom, fill in ((weak, strong, "url(#false)"), (strong, 0, CLEAN)):
            size = f'width="84" height="{unit * (top - bottom):.1f}"'
            d.parts.append(f'<rect x="{x}" y="{base - unit * top:.1f}" {size} fill="{fill}"/>')
        d.text(x + 42, base - unit * weak - 7, f"{weak:.1f}", 13, ADV, font_weight="600")
        d.text(x + 42, base - unit * strong + 17, f"{strong:.1f}", 13, "#fff", font_weight="600")
        d.text(x + 42, base + 20, label, 13, INK, font_weight="600")
        d.text(x + 42, base + 37, "one branch" if branch == "shared" else "adversarial branch", 11.5, BOTH)
    d.parts.append(f'<rect x="84" y="312" width="16" height="12" fill="{CLEAN}"/>')
    d.text(108, 323, "robust to AutoAttack", 12.5, INK, text_anchor="start")
    d.parts.append('<rect x="266" y="312" width="16" height="12" fill="url(#false)"/>')
    d.text(290, 323, "robust to PGD-10 only", 12.5, INK, text_anchor="start")
    config = record["run"]["config"]
    d.text(
        748, 323, f"CIFAR-10, {config['model']['name']}, hybrid AT, eps {config['eps']}", 12, BOTH, text_anchor="end"
    )
    return d


def write_tradeoff(path: Path) -> None:
    """Draw the recorded trade-off between two branches, by the figure of its analysis."""
    from advnorm._core.records import write_figure
    from advnorm.analysis.tradeoff import MixtureRow, TradeOff

    (found,) = (ROOT / "results" / "analysis").glob("tradeoff-*.json")
    record = json.loads(found.read_text())
    rows = tuple(MixtureRow(**row) for row in record["rows"])
    finding = TradeOff(domains=tuple(record["domains"]), attack=record["attack"], rows=rows)
    write_figure(path, finding.figure())


def write_diagrams(out: Path) -> None:
    """Write every diagram to a folder."""
    out.mkdir(parents=True, exist_ok=True)
    write_tradeoff(out / "tradeoff.svg")
    for draw in (domains, banks, plans, scopes, verdicts):
        (out / f"{draw.__name__}.svg").write_text(draw().svg())


if __name__ == "__main__":
    PICTURE.write_text(false_robustness().svg())
