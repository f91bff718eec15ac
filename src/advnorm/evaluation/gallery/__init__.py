"""A gallery of small classifiers whose robustness is known: sound, falsely robust and undefended ones."""

from advnorm.evaluation.gallery import black_boxes as black_boxes  # registers its specimens
from advnorm.evaluation.gallery import blind as blind  # registers its specimens
from advnorm.evaluation.gallery.parents import SCALES, Parents, Scale
from advnorm.evaluation.gallery.specimens import SPECIMENS, Part, Specimen, Truth, list_specimens, part_of
from advnorm.evaluation.gallery.truth import known_accuracy

__all__ = [
    "SCALES",
    "SPECIMENS",
    "Parents",
    "Part",
    "Scale",
    "Specimen",
    "Truth",
    "known_accuracy",
    "list_specimens",
    "part_of",
]
