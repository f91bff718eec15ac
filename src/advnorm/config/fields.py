"""The settings of a training run, each declared once with type, range, default and help."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Annotated, Any, Literal

from advnorm._core.errors import Problem, raise_problems
from advnorm._core.settings import SEEDS, Named, Setting, convert_fields
from advnorm.attacks import Attack
from advnorm.attacks import get as get_attack
from advnorm.attacks.pgd import PGD, PGDSettings
from advnorm.norms import Mode
from advnorm.threat import Norm, ThreatModel

Augmentation = Literal["none", "flip", "crop_flip", "crop_flip_edge"]
Mix = Literal["none", "mixup", "cutmix"]
OptimizerName = Literal["sgd", "adam", "adamw", "adagrad", "rmsprop"]
PrecisionName = Literal["auto", "float32", "tf32", "bf16"]
ScheduleName = Literal["step", "cosine", "one_cycle", "constant"]
#: The name of the training attack among the attacks for validation.
TRAINING = "training"


@dataclass(frozen=True, kw_only=True)
class AttackConfig(PGDSettings):
    """The attack of training: settings of :class:`advnorm.attacks.PGD`, or another attack by its name."""

    statistics: Annotated[Mode, Setting("Statistics of batch norms during the attack.")] = PGD.statistics
    name: Annotated[str, Setting("Another attack of `advnorm ls attacks`; it has `options` and `statistics`.")] = "pgd"
    options: Annotated[dict[str, Any], Setting("Settings of another attack.")] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        problems = convert_fields(self)
        own = [setting.name for setting in fields(PGDSettings)] if self.name != "pgd" else ["options"]
        defaults = {setting.name: setting.default for setting in fields(PGDSettings)} | {"options": {}}
        for name in own if not problems else ():
            if getattr(self, name) != defaults[name]:
                words = f"{{field}} has no effect on the attack {self.name!r}"
                hint = "leave it out" if self.name == "pgd" else f"use options, or a name such as {self.name}-…"
                problems.append(Problem(code="conflict", message=words, field=name, hint=hint))
        raise_problems(problems, "bad attack")

    def build(self, threat: ThreatModel, *, seed: int = 0) -> Attack:
        """Return the attack for a threat model."""
        if self.name != "pgd":
            return get_attack(self.name, threat=threat, seed=seed, statistics=self.statistics, **self.options)
        settings = {name: value for name, value in vars(self).items() if name not in ("name", "options")}
        return PGD(threat=threat, seed=seed, **settings)


@dataclass(frozen=True, kw_only=True)
class TrainingSettings:
    """Every setting that determines the result of a training run."""

    model: Annotated[Named, Setting("Model of `advnorm ls models` with its options.")] = Named("small_cnn")
    norm: Annotated[
        str | tuple[tuple[str, str], ...],
        Setting("Norm of `advnorm ls norms`, or norms by pattern of the layer's name: `{layer4.*: dual_bn, '*': bn}`."),
    ] = "bn"
    norm_options: Annotated[dict[str, Any], Setting("Options of the norm.")] = field(default_factory=dict, hash=False)
    dual_head: Annotated[bool, Setting("One linear layer per domain (paper A, table 7).")] = False
    weights: Annotated[
        str | None, Setting("Initial weights: a `.safetensors` or `.pt` file, or the folder of a run.")
    ] = None

    data: Annotated[Named, Setting("Data set of `advnorm ls datasets` with its options.")] = Named("digits")
    augment: Annotated[Augmentation, Setting("Augmentation: flips, random crops; `_edge`: borders repeat.")] = "none"
    held_out: Annotated[int | float, Setting("Held-out training images: share (0.1) or count (500).", "[0, inf)")] = 0.1
    mix: Annotated[Mix, Setting("Mix pairs of images and labels; attacks take the label of the larger share.")] = "none"
    mix_alpha: Annotated[float, Setting("α of the Beta(α, α) distribution of the mixing weight.", "(0, inf)")] = 1.0

    objective: Annotated[Named, Setting("Objective of `advnorm ls objectives` with its options.")] = Named("hybrid")
    regularizer: Annotated[Named | None, Setting("`ligs` with its options (paper D, fig. 5).")] = None
    second_pass: Annotated[Named | None, Setting("`apart`, `sam`, `apart_sam` or `awp` and options (paper B).")] = None
    threat: Annotated[Norm, Setting("Norm of the threat model: Linf, L2 or L1.")] = "Linf"
    eps: Annotated[float | str, Setting("Radius of the threat model in pixel scale: a number or a fraction.")] = "8/255"
    attack: Annotated[AttackConfig, Setting("Attack of training; its settings follow below.")] = AttackConfig()
    eps_warmup_epochs: Annotated[
        int, Setting("Number n of warm-up epochs: epoch e, from 0, trains with (e + 1) / (n + 1) of eps.", "[0, inf)")
    ] = 0
    steps_warmup_epochs: Annotated[int, Setting("The same rule for the attack's steps, rounded up.", "[0, inf)")] = 0
    second_pass_warmup_epochs: Annotated[
        int, Setting("Number of first epochs without the second pass (Wu et al. 2020).", "[0, inf)")
    ] = 0

    epochs: Annotated[int, Setting("Number of epochs.", "[1, inf)")] = 10
    budget: Annotated[int, Setting("Factor of every setting in epochs (paper B, table 1).", "[1, inf)")] = 1
    batch_size: Annotated[int, Setting("Batch size over all ranks; a smaller last batch is skipped.", "[1, inf)")] = 128
    accumulate: Annotated[
        int, Setting("Parts of a batch whose gradients are added one after another, to save memory.", "[1, inf)")
    ] = 1
    recompute: Annotated[bool, Setting("Activation checkpointing: blocks compute their activations twice.")] = False

    optimizer: Annotated[OptimizerName, Setting("Optimizer; `rmsprop`: decay 0.9, ε = 1 (paper E, table 3).")] = "sgd"
    lr: Annotated[float, Setting("Learning rate.", "(0, inf)")] = 0.1
    momentum: Annotated[float, Setting("Momentum; β₁ of `adam`, `adamw`; unused by `adagrad`.", "[0, 1)")] = 0.9
    nesterov: Annotated[bool, Setting("Nesterov momentum, for `sgd`.")] = False
    weight_decay: Annotated[float, Setting("Weight decay; decoupled from the gradient for `adamw`.", "[0, inf)")] = 5e-4
    norm_weight_decay: Annotated[bool, Setting("Whether weight decay applies to the parameters of norms.")] = True
    grad_clip: Annotated[float | None, Setting("Norm to which the gradient is clipped.", "(0, inf)")] = None

    schedule: Annotated[ScheduleName, Setting("Schedule of the learning rate.")] = "step"
    milestones: Annotated[
        tuple[float, ...],
        Setting("`step`: epochs after which `gamma` multiplies the rate; they scale if only `epochs` is overridden."),
    ] = ()
    gamma: Annotated[float, Setting("`step`: factor at a milestone.", "(0, 1]")] = 0.1
    warmup_epochs: Annotated[float, Setting("Linear warm-up of the rate; not with `one_cycle`.", "[0, inf)")] = 0.0
    peak_share: Annotated[float, Setting("`one_cycle`: share of the run until the peak.", "(0, 1)")] = 0.3

    ema: Annotated[float | None, Setting("Decay of averaged weights.", "(0, 1)")] = None
    ema_buffers: Annotated[
        Literal["average", "copy"], Setting("Norm statistics of the averaged model: averaged or copied.")
    ] = "copy"
    label_smoothing: Annotated[float, Setting("Label smoothing of the cross-entropy terms.", "[0, 1)")] = 0.0
    running_epochs: Annotated[
        int, Setting("Number of last epochs that train with running statistics (paper E, sec. 4.3).", "[0, inf)")
    ] = 0
    train_only: Annotated[
        Literal["all", "norms"], Setting("`norms`: train the norms alone, starting from `weights` (paper E, sec. 4.4).")
    ] = "all"
    sync_statistics: Annotated[bool, Setting("Compute batch statistics over all ranks.")] = False
    parallel: Annotated[
        Literal["ddp", "fsdp"], Setting("Several processes: a copy of the network each, or a part of its parameters.")
    ] = "ddp"

    precision: Annotated[PrecisionName, Setting("`auto`: bf16 on CUDA, float32 elsewhere.")] = "auto"
    channels_last: Annotated[Literal["auto"] | bool, Setting("Memory format of images and weights.")] = "auto"
    compile: Annotated[Literal["auto"] | bool, Setting("Whether to compile the training step.")] = "auto"
    deterministic: Annotated[bool, Setting("CUDA: use only kernels that always give the same bits; slower.")] = False

    validate_every: Annotated[int, Setting("Epochs between validations; 0: never.", "[0, inf)")] = 1
    validation_attack: Annotated[str, Setting("Attack on held-out images: a name, or `training`.")] = "pgd10"
    validation_images: Annotated[
        int | None, Setting("Number of held-out images to validate on, stratified by class; none: all.", "[1, inf)")
    ] = None
    monitor: Annotated[
        int, Setting("Held-out images on which each validation also measures false robustness; 0: none.", "[0, inf)")
    ] = 0
    monitor_attack: Annotated[str, Setting("Strong attack of the monitor.")] = "quick"
    snapshots: Annotated[
        tuple[int, ...], Setting("Epochs whose model is kept as the checkpoint `epoch5` and so on; scaled by `budget`.")
    ] = ()

    seed: Annotated[int, Setting("Seed of weights, batches and noise.", SEEDS)] = 0
    name: Annotated[str | None, Setting("Name of the run; none: made from the main settings and the digest.")] = None
