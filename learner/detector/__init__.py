"""The way from photographs to scored boxes: `predict`, `calibrate`, `evaluate`, and `Detector` for Python.

(`learner.predict` is something else: it predicts what training would gain.)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from learner.detector.detector import Detector

__all__ = ["Detector"]


def __getattr__(name: str) -> object:
    """`Detector` is loaded when it is asked for: parts of this package are quick to import."""
    if name == "Detector":
        from learner.detector.detector import Detector

        return Detector
    raise AttributeError(name)
