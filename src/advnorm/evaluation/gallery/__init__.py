"""A gallery of small classifiers whose robustness is known: sound, falsely robust and undefended ones."""

from advnorm.evaluation.gallery.parents import SCALES, Parents, Scale
from advnorm.evaluation.gallery.specimens import SPECIMENS, Specimen, Truth, held_out, list_specimens
from advnorm.evaluation.gallery.truth import known_accuracy

__all__ = [
    "SCALES",
    "SPECIMENS",
    "Parents",
    "Scale",
    "Specimen",
    "Truth",
    "held_out",
    "known_accuracy",
    "list_specimens",
]
