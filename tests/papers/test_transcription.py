"""The printed numbers against a second, independent transcription of the papers."""

import json
from pathlib import Path

import pytest

import advnorm

PRINTED = Path(advnorm.__file__).parent / "papers" / "printed"
SECOND = Path(__file__).parent / "transcription"
PAPERS = ("a", "b", "c", "d", "e")
#: Settings of trainings, no results: only one of the two transcribed them.
SETTINGS = {"D/table6"}


def read(folder, paper):
    return json.loads((folder / f"{paper}.json").read_text())


TABLES = [(paper, name) for paper in PAPERS for name in read(SECOND, paper) if "/table" in name]


@pytest.mark.parametrize(("paper", "name"), [case for case in TABLES if case[1] not in SETTINGS])
def test_every_number_of_a_table_was_read_the_same_way_twice(paper, name):
    first, second = read(PRINTED, paper)[name], read(SECOND, paper)[name]
    rows = [row["values"] for row in first["rows"]], second["numbers"]
    dense, again = ([[value for value in row if value is not None] for row in side] for side in rows)
    assert dense == again  # empty cells are not compared: a column of differences may be beside another


@pytest.mark.parametrize("paper", PAPERS)
def test_both_transcriptions_have_the_same_tables(paper):
    first, second = ({name for name in read(folder, paper) if "/table" in name} for folder in (PRINTED, SECOND))
    assert first == second


@pytest.mark.parametrize("paper", PAPERS)
def test_every_entry_has_a_caption_and_every_row_fits_its_columns(paper):
    for name, entry in read(PRINTED, paper).items():
        assert entry["caption"] and entry["claim"], name
        for row in entry.get("rows", ()):
            assert len(row["values"]) == len(entry["columns"]), (name, row)
