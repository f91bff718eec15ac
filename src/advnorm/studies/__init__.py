"""Studies: the tables and figures of the papers as configurations, measurements, printed numbers and claims."""

from advnorm.studies.registry import PAPERS, STUDIES, find, get, list_studies, register_study
from advnorm.studies.study import Cell, Measure, PrintedNumber, Study, printed_entry

__all__ = [
    "PAPERS",
    "STUDIES",
    "Cell",
    "Measure",
    "PrintedNumber",
    "Study",
    "find",
    "get",
    "list_studies",
    "printed_entry",
    "register_study",
]
