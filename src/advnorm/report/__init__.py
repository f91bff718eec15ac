"""Reports from plain data, for the terminal and as pages that need nothing else; made where there is no torch."""

from advnorm.report.figures import Bars, Dots, Figure, Lines, draw
from advnorm.report.page import Page, render
from advnorm.report.studies import render_studies
from advnorm.report.tables import Column, Table, shown, terminal

__all__ = [
    "Bars",
    "Column",
    "Dots",
    "Figure",
    "Lines",
    "Page",
    "Table",
    "draw",
    "render",
    "render_studies",
    "shown",
    "terminal",
]
