"""Studies of paper E run end to end on the stand-in for ImageNet: from a folder of images to the verdict."""

from dataclasses import replace

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from advnorm.cli.app import app
from advnorm.config import Named
from advnorm.report.results import outcome_sentence
from advnorm.studies import STUDIES
from advnorm.studies.registry import PAPER_PROTOCOLS
from advnorm.studies.report_data import summarize_studies
from advnorm.studies.results import evaluate_study
from advnorm.studies.store import RecordStore
from advnorm.studies.task import _planned_cell, list_tasks
from support.study_records import make_task, record_of, study_in, write_record

IMAGES = 2  # of each of 10 classes, in either split


@pytest.fixture
def imagenette(tmp_path):
    """A folder of noise in the layout of Imagenette."""
    draw = np.random.default_rng(0)
    for split in ("train", "val"):
        for name in range(10):
            folder = tmp_path / "data" / "imagenette2" / split / f"n{name}"
            folder.mkdir(parents=True)
            for image in range(IMAGES):
                pixels = draw.integers(0, 256, (32, 32, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / f"{image}.png")
    return tmp_path / "data"


@pytest.fixture
def tiny_stand_in(monkeypatch):
    """The stand-in's own plan with a narrow network, small images, and attacks of two steps."""
    STUDIES.names("E/*")  # imports the paper
    plan = PAPER_PROTOCOLS["E"]["imagenette"]

    def shrink(cell):
        planned = plan(cell)
        config = replace(
            planned.config,
            model=Named(planned.config.model.name, width=0.125),
            data=Named("imagenette", image_size=64),
            epochs=2,
            running_epochs=min(planned.config.running_epochs, 1),
            batch_size=10,
            lr=1e-3,
            attack=replace(planned.config.attack, steps=2),
        )
        measures = [replace(one, options={**one.options, "limit": 10}) for one in planned.measures]
        for one in measures:
            one.options["attacks"] = dict.fromkeys(one.options["attacks"], "pgd2-step1-targeted")
        return replace(planned, config=config, measures=tuple(measures))

    monkeypatch.setitem(PAPER_PROTOCOLS["E"], "imagenette", shrink)
    _planned_cell.cache_clear()
    yield
    _planned_cell.cache_clear()


@pytest.mark.parametrize("name", ["E/table2", "E/sec4.4"])  # running statistics; norms tuned after another training
def test_a_study_runs_from_a_folder_of_images_to_its_verdict(name, imagenette, tiny_stand_in, tmp_path):
    out = tmp_path / "results"
    words = ["study", name, "--stand-in", "imagenette", "--data-dir", imagenette, "--out", out, "--device", "cpu"]
    found = CliRunner().invoke(app, [str(word) for word in words], env={"COLUMNS": "200"})
    assert found.exit_code == 0, found.output
    study = STUDIES.get(name)
    tasks = list_tasks(study, protocol="imagenette", out=out, data_dir=imagenette, device="cpu")
    records = {task.cell: record_of(task) for task in tasks}
    for number in study.numbers:
        assert 0 <= records[number.cell]["values"][number.value] <= 100
    assert all(record["run"]["config"]["data"]["name"] == "imagenette" for record in records.values())
    assert " on a stand-in" in found.output and "not run" not in found.output
    assert "was made with other settings" not in found.output


def test_numbers_of_a_stand_in_say_nothing_about_the_papers_numbers_and_the_outcome_names_it(tmp_path):
    study = STUDIES.get("E/table7")  # its claim is the numbers themselves
    of_imagenet = {(number.cell, number.value): number.printed for number in study.numbers}
    for cell in study.by_name:
        values = {value: 1.0 for name, value in of_imagenet if name == cell}
        write_record(make_task(tmp_path, cell, study="E/table7", protocol="imagenette"), values)
    _, conclusion, _ = evaluate_study(study, RecordStore(tmp_path), protocol="imagenette")
    assert (conclusion.verdict, conclusion.needs) == ("undecided", "the paper's data set")
    summary = summarize_studies(tmp_path)
    (result,) = study_in(summary, "E/table7")["results"]
    assert (result["verdict"], result["clauses"]) == ("undecided", [])
    decided = [one for one in summary["studies"] if one["results"][0]["verdict"] != "not run"]
    assert len(decided) > 1  # other studies of the paper use these trainings
    assert f"{len(decided)} by `imagenette`" in outcome_sentence(summary)
