"""One launch file, several places: `rollout-launch --config launch.yaml --to PLACE --out DIR` (R46).

A place is a module with three functions. `mistakes(plan, out)` yields the parts of the plan that the place does not
support. `files(plan, out)` returns the texts of the place's files, by file name. `submit(plan, out)` says how to start
the run with these files. The three functions read only the `Plan`, which is made from the launch file. `python -m
tools.docs` writes the shipped files under deploy/slurm, deploy/kubernetes, deploy/skypilot and deploy/compose.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from types import ModuleType

from deploy.places import compose, kubernetes, skypilot, slurm
from deploy.places.plan import read_plan
from shared.config.model import ConfigErrors
from shared.errors import OutputError


class Place(StrEnum):
    SLURM = "slurm"
    KUBERNETES = "kubernetes"
    SKYPILOT = "skypilot"
    COMPOSE = "compose"


WRITERS: Mapping[Place, ModuleType] = {
    Place.SLURM: slurm,
    Place.KUBERNETES: kubernetes,
    Place.SKYPILOT: skypilot,
    Place.COMPOSE: compose,
}


def write_place(place: Place, config_path: str, overrides: Sequence[str], out: Path) -> int:
    """Write the files of `place` into `out`, and print how to submit them. Raises ConfigErrors, and OutputError."""
    plan, writer = read_plan(config_path, overrides), WRITERS[place]
    # The name becomes part of shell commands, in which `-rf` would be an option.
    if not re.fullmatch(r"[\w./][\w./-]*", str(out)):
        wanted, remedy = "letters, digits, _ . and /, later - too, which no shell changes", "name another folder"
        raise ConfigErrors.one("--out", str(out), wanted, remedy)
    if mistakes := list(writer.mistakes(plan, out)):
        raise ConfigErrors(f"{config_path} does not fit {place}", mistakes=mistakes)
    files = writer.files(plan, out)
    try:
        out.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (out / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise OutputError(
            f"{out} cannot be written",
            found=error.strerror or str(error),
            wanted="a folder",
            remedy="name another one with --out",
        ) from error
    print(f"wrote {', '.join(str(out / name) for name in files)}\n\n{writer.submit(plan, out)}")
    return 0
