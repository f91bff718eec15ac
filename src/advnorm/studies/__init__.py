"""Every table and figure of the papers by name: configurations, what is measured, and the printed numbers."""

from advnorm.studies.base import STUDIES, Cell, Measure, Number, Study, find, get, list_studies, printed

__all__ = [
    "STUDIES",
    "Cell",
    "Measure",
    "Number",
    "Study",
    "find",
    "get",
    "list_studies",
    "printed",
]
