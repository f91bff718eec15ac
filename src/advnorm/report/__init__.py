"""Reports from plain data, for the terminal and as self-contained pages. Nothing here needs torch."""

from advnorm.report.figures import BarChart, DotPlot, Figure, LineChart, draw_figure
from advnorm.report.page import ReportPage, render_page
from advnorm.report.studies import render_studies_page
from advnorm.report.tables import ReportColumn, ReportTable, format_cell, to_rich_table

__all__ = [
    "BarChart",
    "DotPlot",
    "Figure",
    "LineChart",
    "ReportColumn",
    "ReportPage",
    "ReportTable",
    "draw_figure",
    "format_cell",
    "render_page",
    "render_studies_page",
    "to_rich_table",
]
