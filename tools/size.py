"""How large the project is, as a table: `python -m tools.size`.

Lines are those of tracked code, as `wc -l` counts them, without pages, data and configurations.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterable
from pathlib import Path

from learner.config.schema import RunConfig
from rollout_server.config import ServerConfig
from shared.config.model import Section, section_of, walk_keys
from tools.imports import PROGRAMS, ROOT, circles, edges, imports_up

CODE = {".py", ".sh", ".html", ".css", ".jinja"}
LONG = 450  # lines above which a file is listed as long
LIMITS = {
    "core, lines": 47_000,
    "tests, lines": 54_000,
    "bench, lines": 10_500,
    "learner keys": 170,
    "server keys": 35,
    f"files of the core over {LONG} lines": 4,
    "imports up": 0,
    "circles": 0,
    "repository, MB": 20,
    "bench/README.md, KB": 25,
}

# Places of each subject. A file belongs to the longest place that it is in.
DETECTION = tuple(
    f"learner/tasks/detection/{name}.py"
    for name in (
        "agreement",
        "ap_interval",
        "appearance",
        "audit",
        "calibrate",
        "completion",
        "gaps",
        "ranking",
        "scores",
    )
)
SUBJECTS = {
    "parse, match, target, reward": ("learner/tasks",),
    "gaps, audit, predict, calibrate": (*DETECTION, "learner/detector", "learner/missing", "learner/predict"),
    "recipe": ("learner/recipe",),
    "data": ("learner/data",),
    "packing, steps, policy": ("learner/steps", "learner/policy"),
    "rollout": ("learner/rollout",),
    "sync": ("learner/sync", "shared/sync"),
    "server": ("rollout_server",),
    "wire and what both share": ("shared",),
    "configuration": ("learner/config", "shared/config"),
    "run, journal, wiring, trainer": ("learner",),
    "report": ("learner/report",),
    "init, check, machine": ("learner/doctor", "learner/__main__.py"),
    "deploy and demo": ("deploy",),
}


def tracked() -> list[Path]:
    """Return the paths of tracked files that are there, from the repository's root."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [Path(name) for name in listed.split("\0") if (ROOT / name).is_file()]


def lines_of(paths: Iterable[Path]) -> dict[Path, int]:
    """Return the lines of each file of code among `paths`."""
    return {path: (ROOT / path).read_bytes().count(b"\n") for path in paths if path.suffix in CODE}


def num_keys(model: type[Section]) -> int:
    """Return how many keys a configuration may set. Sections are not counted, nor are keys of a list's items."""
    return sum(0 not in path and section_of(field.annotation) is None for path, field in walk_keys(model))


def measured() -> dict[str, float]:
    """Return the measured numbers, by the names in LIMITS."""
    files = tracked()
    lines = lines_of(files)
    places = {"core": PROGRAMS, "tests": ("tests",), "bench": ("bench",)}
    of_place = {f"{name}, lines": sum(n for p, n in lines.items() if p.parts[0] in at) for name, at in places.items()}
    return of_place | {
        "learner keys": num_keys(RunConfig),
        "server keys": num_keys(ServerConfig),
        f"files of the core over {LONG} lines": len(long_files(lines)),
        "imports up": len(imports_up(edges())),
        "circles": len(circles(edges(typing=False))),
        "repository, MB": round(sum((ROOT / path).stat().st_size for path in files) / 1e6, 1),
        "bench/README.md, KB": round((ROOT / "bench/README.md").stat().st_size / 1e3, 1),
    }


def long_files(lines: dict[Path, int]) -> list[Path]:
    """Return the core's files of more than LONG lines, the longest first."""
    return sorted((p for p, n in lines.items() if n > LONG and p.parts[0] in PROGRAMS), key=lambda path: -lines[path])


def by_subject(lines: dict[Path, int]) -> dict[str, int]:
    """Return the core's lines by SUBJECTS."""
    places = sorted(
        ((place, subject) for subject, own in SUBJECTS.items() for place in own), key=lambda one: -len(one[0])
    )
    found = dict.fromkeys(SUBJECTS, 0)
    for path, number in lines.items():
        if path.parts[0] in PROGRAMS:
            found[next(subject for place, subject in places if path.is_relative_to(place))] += number
    return found


if __name__ == "__main__":
    for name, value in measured().items():
        print(f"{name:36} {value:8,g}  wanted <= {LIMITS[name]:,}")
    for path, number in lines_of(long_files(lines_of(tracked()))).items():
        print(f"{path}: {number}")
    for subject, number in by_subject(lines_of(tracked())).items():
        print(f"{subject:36} {number:8,}")
