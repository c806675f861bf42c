"""Figures from the process that measured them to the one that shows them, as JSON in a file. Called by all parts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from bench.figures import Figure


def write(path: Path, figures: Sequence[Figure]) -> None:
    path.write_text(json.dumps([asdict(figure) for figure in figures], default=float), encoding="utf-8")


def read(path: Path) -> list[Figure]:
    return [Figure(**figure) for figure in json.loads(path.read_text(encoding="utf-8"))]
