"""The model card: what a network is, how robust it is under which threat, and the digest of its weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from torch import nn

from advnorm._core.errors import ConfigError
from advnorm._core.provenance import own_version
from advnorm.config.text import Dumper, parse_yaml
from advnorm.evaluation.model_branches import branches
from advnorm.evaluation.results import DEFAULT_ROUTE, BenchmarkResult, label_of
from advnorm.evaluation.verdict import Verdict
from advnorm.norms import routed_modules
from advnorm.report.page import make_environment
from advnorm.report.rows import Row, record_rows

CARD = "README.md"


def render_card(
    model: nn.Module,
    name: str,
    config: Mapping[str, Any],
    weights: Mapping[str, Any],
    *,
    evaluations: Sequence[BenchmarkResult] = (),
    audits: Sequence[Verdict] = (),
    record: Mapping[str, Any] | None = None,
) -> str:
    """Return the card as Markdown with a YAML header that the Hugging Face Hub reads.

    ``config``: the content of config.json. ``weights``: file name, SHA-256 and bytes. ``record``: of a finished run.
    """
    numbers = _numbers(evaluations)
    header = {
        "library_name": "advnorm",
        "pipeline_tag": "image-classification",
        "tags": ["advnorm", "adversarial-robustness", "image-classification"],
        **({"model-index": [{"name": name, "results": _index(numbers)}]} if numbers else {}),
        "advnorm": {**weights, **own_version()},
    }
    attacks = [f"`{attack}`: `{text}`" for result in evaluations for attack, text in result.attacks.items()]
    warnings = [f"Note: {warning}" for result in evaluations for warning in result.warnings]
    environment = make_environment(Path(__file__).parent, autoescape=False)
    return environment.get_template("card.md").render(
        header=yaml.dump(header, Dumper=Dumper, sort_keys=False, allow_unicode=True, width=120),
        name=name,
        config=config,
        recipe=config["model"],
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        numbers=numbers,
        notes=list(dict.fromkeys(attacks + warnings)),
        audits=audits,
        banks=_banks(model),
        routes=branches(model),
        training=config.get("training"),
        record=record,
        weights=weights,
        percent=lambda value: f"{100 * value:.1f}",
        label_of=label_of,
    )


def read_header(path: Path) -> dict[str, Any]:
    """Read the YAML header of a card; empty if it has none."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("damaged_file", f"cannot read the card {path}: {error}", field=CARD) from None
    start, _, rest = text.partition("---\n")
    header = parse_yaml(rest.partition("\n---")[0]) if not start.strip() else None
    return header if isinstance(header, dict) else {}


def _numbers(evaluations: Sequence[BenchmarkResult]) -> list[Row]:
    """A row per branch and attack; what two evaluations repeat is listed once."""
    rows: dict[str, Row] = {}
    for result in evaluations:
        for row in record_rows(result.record()):
            label = f"all: {', '.join(result.attacks)}" if row["attack"] == "union" else row["attack"]
            row |= {"label": label, "threat": str(result.threat), "data": row["eval_data"] or "unknown"}
            rows[repr(row)] = row
    return list(rows.values())


def _index(numbers: Sequence[Row]) -> list[dict[str, Any]]:
    """The results of the Hub's ``model-index``, by data set."""
    found: dict[str, list[dict[str, Any]]] = {}
    for row in numbers:
        name = "clean accuracy" if row["attack"] == "clean" else f"robust accuracy, {row['label']}, {row['threat']}"
        branch = "" if row["branch"] == DEFAULT_ROUTE else f", branch {row['branch']}"
        args = {key: row[key] for key in ("branch", "attack", "threat", "images")}
        args["interval_95"] = [round(row[bound], 6) for bound in ("low", "high")]
        metric = {
            "type": "accuracy",
            "name": f"{name}{branch}",
            "value": row["accuracy"],
            "args": args,
        }
        found.setdefault(row["data"], []).append(metric)
    results = []
    for data, metrics in found.items():
        name, _, split = data.partition(", ")
        dataset = {"name": name, "type": name, **({"split": split} if split else {})}
        results.append({"task": {"type": "image-classification"}, "dataset": dataset, "metrics": metrics})
    return results


def _banks(model: nn.Module) -> list[tuple[str, ...]]:
    """Norm, domain, statistics bank and affine bank."""
    plans = [module.plan for module in routed_modules(model).values()]
    rows = []
    for plan in dict.fromkeys(plans):
        for place, domain in enumerate(plan.domains):
            banks = [banks[place] if banks else "–" for banks in (plan.normalized_by, plan.affine)]
            rows.append((f"{plan.name} ({plans.count(plan)})", domain, *banks))
    return rows
