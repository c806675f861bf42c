"""Finds scored boxes in photographs: `predict`, `calibrate`, `evaluate`, and `Detector` for Python.

`learner.predict` is another package: it measures what training would gain.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from learner.detector.detector import Detector

__all__ = ["Detector"]


def __getattr__(name: str) -> object:
    """Load `Detector` on first use, so that the other modules of this package import quickly."""
    if name == "Detector":
        from learner.detector.detector import Detector

        return Detector
    raise AttributeError(name)
