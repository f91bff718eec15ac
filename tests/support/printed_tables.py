"""Printed tables as measurements, for all papers."""

import pytest

from advnorm.studies import STUDIES


@pytest.fixture(scope="session")
def as_printed():
    """The numbers of a printed table as if they had been measured, by one seed."""

    def values(name):
        return dict(STUDIES.get(name).printed_values)

    return values
