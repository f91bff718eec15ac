"""Saved models: a folder with the weights (safetensors), the configuration (JSON) and the model card."""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from advnorm._core.devices import resolve_device
from advnorm._core.errors import AdvnormError, ConfigError, Problem, collect_problems, raise_problems
from advnorm._core.records import model_fingerprint, output_problems, read_json, write_atomic, write_json
from advnorm._core.settings import to_json
from advnorm._core.wrappers import dtype_of, unwrap_model
from advnorm.evaluation.report_data import collect_results
from advnorm.evaluation.results import BenchmarkResult
from advnorm.evaluation.verdict import Verdict
from advnorm.models import create_model
from advnorm.models.weights import load_weights, save_weights
from advnorm.norms import routed_modules
from advnorm.sharing.card import CARD, read_header, render_card
from advnorm.sharing.hub import download, upload
from advnorm.surgery import convert_head
from advnorm.training.run_folder import Run

FORMAT = "advnorm.model/1"
CONFIG, WEIGHTS = "config.json", "model.safetensors"
FILES = (CARD, CONFIG, WEIGHTS)
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def save_pretrained(
    model: nn.Module | Run,
    folder: Path | str,
    *,
    name: str | None = None,
    checkpoint: str | None = None,
    evaluations: Sequence[BenchmarkResult] = (),
    audits: Sequence[Verdict] = (),
) -> Path:
    """Save a model, or a checkpoint of a run, with its configuration and model card; return the folder.

    For a run, the card lists the evaluations and audits of these weights in the folder of the run.
    :func:`from_pretrained` rebuilds networks of :func:`create_model` and of runs, also with a converted head; for other
    networks the caller builds the ``model``.
    """
    folder = Path(folder)
    problems = output_problems(folder / CARD, lambda _: (folder / CONFIG).exists())
    raise_problems(output_problems(folder / CONFIG, lambda record: record.get("format") == FORMAT) + problems)
    config: dict[str, Any] = {"format": FORMAT}
    record = None
    if isinstance(model, Run):
        run, model = model, model.model(checkpoint)
        record = run.record if run.finished else None
        config |= {"training": to_json(run.config.to_dict()), "data": run.description["data"]}
        config |= {"checkpoint": run.checkpoint_name(checkpoint)}
        found, mine = collect_results(run.folder), model_fingerprint(model)
        records = {
            kind: [one["record"] for one in found[kind] if one["record"]["model"].get("fingerprint") == mine]
            for kind in ("benchmarks", "audits")
        }
        evaluations = [*evaluations, *map(BenchmarkResult.from_record, records["benchmarks"])]
        audits = [*audits, *map(Verdict.from_record, records["audits"])]
        name = name or run.folder.resolve().name
    model = unwrap_model(model)
    norms = sorted({module.plan.name for module in routed_modules(model).values() if module.plan.routed})
    config |= {"class": type(model).__name__, "norms": norms, **_recipe(model)}
    folder.mkdir(parents=True, exist_ok=True)
    path = save_weights(folder / WEIGHTS, model, config)
    data = path.read_bytes()
    weights = {"weights": WEIGHTS, "sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)}
    write_json(folder / CONFIG, config)
    card = render_card(
        model, name or folder.resolve().name, config, weights, evaluations=evaluations, audits=audits, record=record
    )
    write_atomic(folder / CARD, card.encode())
    return folder


def from_pretrained(
    source: Path | str,
    *,
    model: nn.Module | None = None,
    sha256: str | None = None,
    revision: str | None = None,
    device: str | torch.device = "cpu",
) -> nn.Module:
    """Load a saved model from a folder or from a repository of the Hugging Face Hub, in eval mode.

    The weights must match the SHA-256 in the card, and ``sha256`` if given. No pickle is opened, and no code of the
    repository runs. ``model``: load into this network, which the caller has built.
    """
    folder = Path(source)
    if not folder.is_dir():
        folder = download(str(source), revision, FILES)
    config = verify(folder, sha256=sha256)
    if model is None:
        model = _build(config, folder)
    saved = config.get("dtype")
    if str(dtype_of(model)) != f"torch.{saved}":
        hint = f"convert it: model.to(torch.{saved})"
        raise ConfigError("wrong_dtype", f"the weights are {saved}", field="model", got=dtype_of(model), hint=hint)
    try:
        notes = load_weights(model, folder / WEIGHTS).notes
    except ConfigError as error:
        if error.code != "ambiguous":
            raise
        message = f"{folder / WEIGHTS} has more banks than the norms of the model"
        norms = config.get("norms")
        norm = norms[0] if isinstance(norms, list) and norms else "dual_bn"
        hint = f"convert the model first, for example advnorm.convert_norm(model, {norm!r})"
        raise ConfigError("ambiguous", message, field="model", hint=hint) from None
    for note in notes:
        warnings.warn(f"{folder / WEIGHTS}: {note}", stacklevel=2)
    return model.to(resolve_device(device)).eval()


def push(folder: Path | str, repo: str, *, private: bool = False, message: str = "Upload model with advnorm") -> str:
    """Upload a saved model to ``USER/NAME`` on the Hugging Face Hub and return its address; only its three files go.

    The login is that of ``huggingface_hub``: ``hf auth login``, or the environment variable HF_TOKEN.
    """
    verify(folder)
    return upload(Path(folder), repo, FILES, private=private, message=message)


def is_saved_model(folder: Path | str) -> bool:
    """Whether a folder holds a saved model and is not a run."""
    return (Path(folder) / CONFIG).is_file() and not (Path(folder) / "run.json").is_file()


def verify(folder: Path | str, *, sha256: str | None = None) -> dict[str, Any]:
    """Check the weights against the card, and the configuration against the weights; return the configuration."""
    folder = Path(folder)
    for name in FILES:
        if not (folder / name).is_file():
            hint = "name a folder that save_pretrained wrote; pickled weights (.bin, .pt) are never opened"
            raise ConfigError("missing_file", f"{folder} has no {name}", field=name, hint=hint)
    header = read_header(folder / CARD).get("advnorm")
    expected = header.get("sha256") if isinstance(header, dict) else None
    if not isinstance(expected, str):
        message, hint = f"the card {folder / CARD} has no SHA-256 of the weights", "do not use weights without a digest"
        raise ConfigError("missing_entry", message, field="sha256", hint=hint)
    size = (folder / WEIGHTS).stat().st_size
    digest = hashlib.sha256((folder / WEIGHTS).read_bytes()).hexdigest()
    for wanted, origin in ((expected, "its card"), (sha256, "the given digest")):
        if wanted is not None and digest != wanted.lower():
            message = f"{folder / WEIGHTS} ({size:,} bytes) does not match {origin}: its SHA-256 must be {wanted}"
            hint = "fetch it again; if that does not help, the weights were changed: do not use them"
            raise ConfigError("wrong_digest", message, field=WEIGHTS, got=digest, hint=hint)
    config = read_json(folder / CONFIG)
    if config != _header_config(folder / WEIGHTS):
        message = f"{folder / CONFIG} is not the configuration that the weights were saved with"
        raise ConfigError("damaged_file", message, field=CONFIG, hint="fetch the folder again")
    if config.get("format") != FORMAT:
        message = f"{folder} has the format {config.get('format')!r}, this version reads {FORMAT!r}"
        raise ConfigError("not_supported", message, field=CONFIG, hint="use the version of advnorm that wrote it")
    return config


def _header_config(path: Path) -> Any:
    """The configuration inside the weights file, which its digest covers."""
    try:
        with safe_open(path, framework="pt") as file:
            return json.loads((file.metadata() or {})["advnorm"])["meta"]
    except (SafetensorError, LookupError, ValueError, TypeError) as error:
        message, hint = f"{path} was not written by save_pretrained ({error})", "save or fetch it again"
        raise ConfigError("damaged_file", message, field=WEIGHTS, hint=hint) from None


# -- networks ----------------------------------------------------------------------------------------------------------


def _recipe(model: nn.Module) -> dict[str, Any]:
    """The arguments of ``create_model``, whether the head is converted, and the dtype.

    The arguments are None if they do not give this network, as after surgery.
    """
    dtype = str(dtype_of(model)).removeprefix("torch.")
    recipe = to_json(getattr(model, "recipe", None))
    for head in (False, True) if recipe else ():
        config = {"dtype": dtype, "dual_head": head, "model": recipe}
        with suppress(AdvnormError, TypeError, ValueError), torch.device("meta"):  # such as an option that is no JSON
            if json.dumps(recipe, allow_nan=False) and _structure(_create(config)) == _structure(model):
                return config
    return {"dtype": dtype, "dual_head": False, "model": None}


def _structure(model: nn.Module) -> Any:
    return repr(model), [(name, value.shape, value.dtype) for name, value in model.state_dict().items()]


def _build(config: dict[str, Any], folder: Path) -> nn.Module:
    if not config.get("model"):
        message = f"{folder} holds weights of {config.get('class')}, a network of somebody's own code"
        raise ConfigError("missing_option", message, field="model", hint="build it and give it: model=my_model")
    problems: list[Problem] = []
    with collect_problems(problems), torch.random.fork_rng([]):
        try:
            return _create(config)
        except (TypeError, LookupError, AttributeError) as error:
            message = f"{folder / CONFIG} does not describe a network: {type(error).__name__}: {error}"
            raise ConfigError("damaged_file", message, field=CONFIG) from None
    raise ConfigError.listing(
        problems, f"cannot build the network of {folder}; if own code registers it, import that first"
    )


def _create(config: dict[str, Any]) -> nn.Module:
    made = create_model(**config["model"])
    if config["dual_head"]:
        convert_head(made)
    return made.to({str(dtype).removeprefix("torch."): dtype for dtype in DTYPES}[config["dtype"]])
