"""Printed tables as measurements, for all papers."""

import pytest

from advnorm.studies import STUDIES


@pytest.fixture(scope="session")
def as_printed():
    """The numbers of a printed table as if they had been measured, by one seed."""

    def values(name):
        study = STUDIES.get(name)
        found = {(n.cell, n.value): [n.printed] for n in study.numbers if n.printed is not None}
        if name == "C/table2":  # prints the difference of two accuracies, of which the check reads each
            for row in study.printed["rows"]:
                cell, _ = study.locate(row["label"], "clean_pgd")
                found |= {(cell, "accuracy/adv"): [row["values"][0] / 100], (cell, "accuracy/autoattack"): [0.0]}
        return found

    return values
