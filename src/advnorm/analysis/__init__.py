"""Seeing inside: what the papers measure about a trained network, as functions that return data and draw the figure."""

from advnorm.analysis.base import ANALYSES, Finding, Subject, list_analyses

__all__ = ["ANALYSES", "Finding", "Subject", "list_analyses"]
