"""The records below a results folder. A command opens one store, and each file is read once."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from itertools import chain
from pathlib import Path
from typing import Literal

from advnorm._core.errors import AdvnormError, ConfigError, Problem
from advnorm._core.records import read_json, write_json
from advnorm._core.shapes import with_digest
from advnorm.evaluation.outcomes import check_cell
from advnorm.studies.record import CellRecord, matches_cell, outdated_settings, record_name, record_problems
from advnorm.studies.registry import STUDIES, equivalent_cells
from advnorm.studies.study import Protocol, Study
from advnorm.studies.task import Task
from advnorm.studies.uncertainty import collect_samples

TaskState = Literal["done", "damaged", "started", "pending"]


class RecordStore:
    """Reads and writes the records of cells below ``out/records``.

    A file is read when it is first needed and then kept. A file that did not exist is looked up again, because another
    process may have written it meanwhile.
    """

    def __init__(self, out: Path | str) -> None:
        self.out = Path(out)
        self.folder = self.out / "records"
        self._files: dict[str, CellRecord | Problem] = {}

    def read(self, name: str) -> CellRecord | Problem | None:
        """Return a record, the problem with its file, or None if the file does not exist."""
        if name not in self._files and os.path.lexists(self.folder / name):  # a broken link is reported too
            self._files[name] = self._read_file(name)
        return self._files.get(name)

    def write(self, task: Task, record: CellRecord) -> None:
        record = with_digest(record)
        write_json(self.folder / task.record_name, record)
        self._files[task.record_name] = record

    def find(self, task: Task) -> CellRecord | Problem | None:
        """Return the record with a task's numbers, the problem with its damaged file, or None.

        A current record of the task itself is preferred, then one of an equivalent cell of another study, then an
        outdated one of the task itself.
        """
        cells, own = STUDIES.get(task.study).by_name, self.read(task.record_name)
        cell = cells[task.cell]
        if isinstance(own, dict) and matches_cell(own, cell):
            return own
        others = equivalent_cells(task.study, task.cell)
        if others and any(task.cell in task.sibling(name).prerequisites for name in cells):
            others = ()  # another cell needs this task's network
        for study, name in others:
            record = self.read(record_name(study, name, task.protocol, task.seed))
            if isinstance(record, dict) and matches_cell(record, cell):
                return record
        return own

    def load(self, task: Task) -> CellRecord | None:
        """Like :meth:`find`, but raise an error for a damaged file. It is never overwritten."""
        found = self.find(task)
        if isinstance(found, Problem):
            hint = f"delete {task.record_path}, then the same command runs the cell again"
            raise ConfigError(found.code, f"{found}", field=found.field, hint=hint)
        return found

    def state(self, task: Task) -> TaskState:
        found = self.find(task)
        if found is not None:
            return "damaged" if isinstance(found, Problem) else "done"
        return "started" if task.run.folder.exists() else "pending"

    def read_all(self, studies: Iterable[str] = ("",)) -> tuple[list[CellRecord], list[Problem]]:
        """Return all records, or those of some studies, sorted by file name, and the problems with files.

        The field of a problem is the file's path below ``out``. Outdated records are returned and reported.
        """
        records: list[CellRecord] = []
        problems: list[Problem] = []

        def report_folder(error: OSError) -> None:
            if not isinstance(error, FileNotFoundError):  # nothing was run yet
                message = f"{{field}} cannot be read: {error.strerror}"
                problems.append(self._problem("damaged_file", message, Path(error.filename)))

        folders = (self.folder / name for name in studies)
        walk = chain.from_iterable(os.walk(one, onerror=report_folder, followlinks=True) for one in folders)
        # Hidden files are partial files of a killed process (see write_atomic); the cell counts as missing.
        paths = [Path(parent) / name for parent, _, names in walk for name in names if not name.startswith(".")]
        for path in sorted(paths):
            record = self.read(path.relative_to(self.folder).as_posix())
            if isinstance(record, Problem):
                problems.append(record)
            elif record is not None:
                records.append(record)
                if settings := outdated_settings(record, STUDIES.get(record["study"]).cell(record["cell"])):
                    message = f"{{field}} was made with other settings than the study has now: {', '.join(settings)}"
                    problems.append(self._problem("outdated", message, path))
        return records, problems

    def read_study(
        self, study: Study, protocol: Protocol, seeds: Iterable[int] | None = None
    ) -> tuple[list[CellRecord], list[Problem]]:
        """Return the records that serve a study under a protocol, and the problems with the study's own files."""
        others = (other for cell in study.by_name for other, _ in equivalent_cells(study.name, cell))
        records, problems = self.read_all(dict.fromkeys([study.name, *others]))
        own = f"records/{study.name}"
        problems = [problem for problem in problems if problem.field == own or problem.field.startswith(f"{own}/")]
        wanted = None if seeds is None else set(seeds)
        return [
            record
            for record in select_for_study(study, records)
            if record["protocol"] == protocol and (wanted is None or record["seed"] in wanted)
        ], problems

    def _read_file(self, name: str) -> CellRecord | Problem:
        path = self.folder / name
        try:
            record = read_json(path)
        except (AdvnormError, RecursionError):  # its message would repeat the whole path
            return self._problem("damaged_file", "{field} is skipped: it is damaged or not a record", path)
        if problems := record_problems(record, name):
            reasons = "; ".join(map(str, problems))
            return self._problem(problems[0].code, f"{{field}} is skipped: not a record of a cell: {reasons}", path)
        try:
            check_cell(record, name, "delete the file, then the same command measures the cell again")
            collect_samples([record])
        except (ConfigError, AttributeError, IndexError, TypeError, ValueError) as error:
            return self._problem("damaged_file", f"{{field}} is skipped: {error}", path)
        return record

    def _problem(self, code: str, message: str, path: Path) -> Problem:
        return Problem(code=code, message=message, field=path.relative_to(self.out).as_posix())


def select_for_study(study: Study, records: Sequence[CellRecord]) -> list[CellRecord]:
    """Choose one record per cell, protocol and seed, in the preference of :meth:`RecordStore.find`.

    Each gets the study and cell that it serves, and ``measured_for``, the study that it was made for.
    """
    cells, chosen = study.by_name, {}
    served = {address: cell for cell in cells for address in [(study.name, cell), *equivalent_cells(study.name, cell)]}
    for record in records:  # sorted by file name
        own, cell = record["study"] == study.name, served.get((record["study"], record["cell"]))
        if cell is None:
            continue
        key = cell, record["protocol"], record["seed"]
        rank = (2 if own else 1) if matches_cell(record, cells[cell]) else 0
        if (own or rank) and rank > chosen.get(key, (-1, None))[0]:
            chosen[key] = rank, {**record, "study": study.name, "cell": cell, "measured_for": record["study"]}
    return [chosen[key][1] for key in sorted(chosen, key=lambda key: (key[0], key[2]))]
