"""A forward of a constant batch before a training: an error of shapes is raised before any file is written."""

from __future__ import annotations

import math
from contextlib import ExitStack

import torch

from advnorm._core.errors import ConfigError, first_line
from advnorm.attacks import predicting
from advnorm.config import Config
from advnorm.data import FolderData, ImageData
from advnorm.models.libraries import split_name
from advnorm.norms import Scope, domains, routed_modules
from advnorm.objectives import CraftedBatch
from advnorm.objectives.execution import EAGER
from advnorm.objectives.second_pass import SecondPass
from advnorm.training.ranks import Ranks
from advnorm.training.step_program import StepProgram, autocast


def check_forwards(program: StepProgram, config: Config, ranks: Ranks, data: ImageData | FolderData) -> None:
    """Reject images and batches that the network cannot take, by forwards that change nothing in it.

    They run in the program's scope, because cuDNN keeps the kernels that it chooses here.
    """
    objective, model, device = program.objective.innermost, program.objective.model, ranks.device
    parts = ranks.world * config.accumulate
    if config.batch_size % parts:
        message = f"{{field}} must be a multiple of {parts}: {ranks.world} processes times {config.accumulate} parts"
        raise ConfigError("out_of_range", message, field="batch_size", got=config.batch_size)
    count = config.batch_size // parts
    share = getattr(objective, "clean_share", 1)
    if parts > 1 and not math.isclose(share * count, round(share * count)):
        raise ConfigError(
            "conflict",
            f"{{field}} {share} of the {count} images of each process and part is not a whole number, so that they "
            "would not train like one batch",
            field="objective.clean_share",
            hint=f"change clean_share or batch_size so that clean_share · batch_size / {parts} is whole",
        )
    memory_format = torch.channels_last if config.channels_last is True else torch.contiguous_format
    x = torch.full((count, *data.image_shape), 0.5, device=device).contiguous(memory_format=memory_format)
    index = torch.arange(count, device=device)
    labels = index % data.num_classes
    if config.mix != "none":
        labels = torch.nn.functional.one_hot(labels, data.num_classes).to(x.dtype)
    batch = CraftedBatch(x, labels, index, x)
    size = "×".join(map(str, data.image_shape))
    field, tried = "model", f"model {config.model.name} with norm {config.norm} cannot take {count} images of {size}"
    hint = "use another model, norm, batch_size or image size"
    if split_name(config.model.name) is not None:
        hint += f"; networks that fix the size take model.img_size={data.image_shape[1]}"
    try:
        with program.scope(), autocast(program.precision, device), torch.no_grad():
            for domain in objective.trained_domains():
                branch = domain if domain in domains(model) else None
                with predicting(model, route=branch) as predict:
                    predict(x)
            with predicting(model, statistics="batch_frozen"), ExitStack() as stack:
                if routed_modules(model):  # over all processes, as in training
                    stack.enter_context(Scope(model, {"local": False}))
                objective.compute_loss(batch, EAGER)
                if config.second_pass is not None:
                    assert isinstance(program.objective, SecondPass)
                    field, tried = "second_pass", f"second_pass {config.second_pass.name} cannot take {count} images"
                    hint = "change second_pass.samples, second_pass.groups or batch_size"
                    program.objective.run_forwards(batch)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # a network may raise anything for a shape that it cannot take
        raise ConfigError("wrong_shape", f"{tried}: {first_line(error)}", field=field, hint=hint) from error
