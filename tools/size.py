"""How large the project is, as a table: `python -m tools.size`.

Lines are those of tracked code, as `wc -l` counts them, without pages, data and configurations.
"""

from __future__ import annotations

import ast
import subprocess
from collections.abc import Iterable
from pathlib import Path

from learner.config.schema import RunConfig
from rollout_server.config import ServerConfig
from shared.config.model import Section, section_of, walk_keys
from tools.imports import PROGRAMS, ROOT, circles, edges, imports_up

CODE = {".py", ".sh", ".html", ".css", ".jinja"}
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
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
# What holds each subject's lines. "Nothing that a user needs, and no check, is cut for a number."
HOLDS = {
    "parse, match, target, reward": "strict parsing of six forms of answers, a label for each token of any tokenizer",
    "gaps, audit, predict, calibrate": "five commands with estimates and intervals; matching and clusters are shared",
    "recipe": "stages that resume, signals, and the choice of the best stage",
    "data": "eleven formats of annotations, each with errors that name the line; splits, tiles, exact resume",
    "packing, steps, policy": "four ways to make steps, each sample once; LoRA, FSDP, packed attention, CUDA graphs",
    "rollout": "servers, colocated vLLM and transformers; failover, members that join and leave",
    "sync": "full and adapter, to servers and colocated; three proofs, blame, and recovery of a lost server",
    "server": "the gate, limits against hostile callers, processes that decode images, OpenAI's API",
    "wire and what both share": "sealed groups, secrets that are masked, rules of images, checks of every record",
    "configuration": "each key with its description, range and rules, from which the documents are made",
    "run, journal, wiring, trainer": "checkpoints, signals, and trackers that cannot stop a run",
    "report": "the figures that the documents show: results, classes, confusion, scenes, timeline, live page",
    "init, check, machine": "one check of data, model, machine and servers, with a remedy for each mistake",
    "deploy and demo": "four places with generated files, a launcher that restarts servers, the demo",
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


def kinds(paths: Iterable[Path]) -> tuple[int, int, int]:
    """Return how many lines of Python files are code, docstrings and comments of their own, and blank."""
    code = words = blank = 0
    for path in paths:
        text = (ROOT / path).read_text()
        lines = text.splitlines()
        of_words = {i for i, line in enumerate(lines, 1) if line.lstrip().startswith("#")}
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, DOCUMENTED) and ast.get_docstring(node) is not None:
                of_words |= set(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
        empty = {i for i, line in enumerate(lines, 1) if not line.strip()} - of_words
        words, blank = words + len(of_words), blank + len(empty)
        code += len(lines) - len(of_words) - len(empty)
    return code, words, blank


if __name__ == "__main__":
    for name, value in measured().items():
        print(f"{name:36} {value:8,g}  wanted <= {LIMITS[name]:,}")
    for path, number in lines_of(long_files(lines_of(tracked()))).items():
        print(f"{path}: {number}")
    for subject, number in by_subject(lines_of(tracked())).items():
        print(f"{subject:36} {number:8,}  {HOLDS[subject]}")
    code, words, blank = kinds(path for path in tracked() if path.parts[0] in PROGRAMS and path.suffix == ".py")
    print(f"Of the core's Python, {code:,} lines are code, {words:,} docstrings and comments, {blank:,} blank.")
