"""Accuracy that a label or a twin decides: classes, retrieval, and plain outputs where there is neither.

All take arrays of both sides and give rows: a share never stands without its interval, and a difference to the original
is taken item by item, because both sides saw the same ones.
"""

from quantkit.measurement.accuracy.labelled.about import About
from quantkit.measurement.accuracy.labelled.classes import classification, retrieval
from quantkit.measurement.accuracy.labelled.outputs import outputs

__all__ = ["About", "classification", "outputs", "retrieval"]
