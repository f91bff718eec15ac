"""A task is a cell of a study with a seed: everything that another process needs. Its properties read no files."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from advnorm._core.records import digest
from advnorm.config import Config, Named
from advnorm.data.registry import ENVIRONMENT
from advnorm.studies.protocols import plan_cell, with_search
from advnorm.studies.record import record_name
from advnorm.studies.registry import STUDIES
from advnorm.studies.study import Cell, Protocol, Study
from advnorm.training.run_folder import Run


@dataclass(frozen=True, kw_only=True)
class Task:
    """One cell with one seed under one protocol, and the folders of its results and its data.

    With ``strict_search`` the attacks of benchmarks search in float32. By default AutoAttack searches in bf16 on a GPU
    and under ``fast``, and so does PGD on paper E's stand-in. A float32 forward decides in both cases.
    """

    study: str
    cell: str
    seed: int
    protocol: Protocol
    out: str
    data_dir: str | None = None
    device: str | None = None
    strict_search: bool = False

    @property
    def record_name(self) -> str:
        """The path of its record below the folder of records."""
        return record_name(self.study, self.cell, self.protocol, self.seed)

    @property
    def record_path(self) -> Path:
        return Path(self.out) / "records" / self.record_name

    @property
    def planned_cell(self) -> Cell:
        """Its cell as the protocol runs it."""
        return _planned_cell(self.study, self.cell, self.protocol, self.strict_search)

    def sibling(self, cell: str) -> Task:
        """Return the task of another cell of the same study."""
        return replace(self, cell=cell)

    @property
    def prerequisites(self) -> list[str]:
        """Cells that must be trained before this task can run."""
        cell = self.planned_cell
        beside = [name for measure in cell.measures for name in measure.options.get("beside", ())]
        return list(dict.fromkeys(name for name in (cell.after, cell.feature_images, *beside) if name))

    @property
    def lineage(self) -> list[Task]:
        """The task and all tasks that it depends on, the nearest first."""
        before = (step for name in self.prerequisites for step in self.sibling(name).lineage)
        return list(dict.fromkeys([self, *before]))

    @property
    def features_folder(self) -> Path | None:
        """The folder of the features that it trains on, and of the trainings on them."""
        cell = self.planned_cell
        if cell.features is None or cell.after is None:
            return None
        parts = [self.sibling(cell.after).run.folder.name, cell.features]
        if cell.feature_images:
            parts.append(digest(str(self.sibling(cell.feature_images).features_folder))[:8])
        return Path(self.out) / "features" / "-".join(parts)

    @property
    def training(self) -> tuple[Config, Path | None]:
        """The configuration to train, with weights or features of the cell before, and the folder of its data."""
        cell = self.planned_cell
        if self.features_folder is not None:
            return replace(cell.config, data=Named("features")), self.features_folder
        data_dir = None if self.data_dir is None else Path(self.data_dir)
        if cell.after is None:
            return cell.config, data_dir
        return replace(cell.config, weights=str(self.sibling(cell.after).run.folder)), data_dir

    @property
    def runs_folder(self) -> Path:
        """The folder of its run. Runs on features lie beside the features: their settings do not name them."""
        return (self.features_folder or Path(self.out)) / "runs"

    @property
    def run(self) -> Run:
        """Its training run, which other tasks may share."""
        return Run(self.runs_folder / f"{self.training[0].run_name}-seed{self.seed}")


@cache  # a configuration is validated whenever it is made
def _planned_cell(study: str, cell: str, protocol: Protocol, strict_search: bool) -> Cell:
    planned = plan_cell(STUDIES.get(study).cell(cell), protocol)
    if not strict_search:
        return planned
    strict = (replace(one, options=with_search(one.options, "float32", "autoattack")) for one in planned.measures)
    return replace(planned, measures=tuple(strict))


def list_tasks(
    study: Study,
    *,
    cell: str | None = None,
    seeds: Iterable[int] = (0,),
    protocol: Protocol = "paper",
    out: Path | str = "results",
    data_dir: Path | str | None = None,
    device: str | None = None,
    strict_search: bool = False,
) -> list[Task]:
    """Return the tasks of a study, or of one cell and its prerequisites. Prerequisites come first."""
    seeds = tuple(dict.fromkeys(seeds))
    for seed in seeds:
        Config(seed=seed)  # validates it
    tasks = [
        Task(
            study=study.name,
            cell=name,
            seed=seed,
            protocol=protocol,
            out=str(Path(out).resolve()),  # a run's name depends on the path of its weights
            data_dir=str(data_dir) if data_dir is not None else os.environ.get(ENVIRONMENT) or None,
            device=device,
            strict_search=strict_search,
        )
        for seed in seeds
        for name in study.by_name
    ]
    if cell is None:
        return tasks
    wanted = {step for task in tasks if task.cell == cell for step in task.lineage}
    return [task for task in tasks if task in wanted]
