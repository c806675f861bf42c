"""Damaged files: `python -m bench.fuzz [--cases 20000] [--name NAME] [--part PART] [--seed 0]`.

Each case takes a small valid file of one kind, damages it, and reads it as the program does. It may be read, or end in
a ProjectError, which a user sees as one message. Anything else is a traceback, and one too many.

- annotations of each format: `jsonl`, `coco` (boxes and outlines), `voc`, `yolo` (labels and data.yaml)
- a run's folder: `checkpoint` (manifest.json, trainer_state.json), `report` (metrics.jsonl, the resolved configuration,
  eval, groups), `servers` (state.json, requests)
- `config`: the YAML of a run
- `fields`: JSONL of `key_value`; `calibration`: of `recipe --only-measure`

A case damages bytes (cut, flipped, repeated, inserted), or values: a number or a JSON value becomes another one (NaN,
1e999, -1, true, null, "", a lone surrogate, a list), moves, doubles or goes. In YAML a value gets a tag. Sometimes the
file is a folder or a pipe instead, for which nobody may wait. Case i depends on (seed, kind, i).

Prints a table and the first tracebacks; with --name writes `bench/results/NAME.json`. The exit code is 1 if a case
ended in anything but a reading or a typed error, or took longer than SLOWEST_S.
"""

from __future__ import annotations

import copy
import hashlib
import io
import json
import logging
import os
import random
import shutil
import signal
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import typer
import yaml
from PIL import Image
from rich.console import Console

from bench.figures import Figure, save, show
from learner.config.load import load_config
from learner.config.schema import DataConfig, RunConfig
from learner.data.splits import load_split
from learner.records import GeometryKind, Sample
from learner.report.page import write_report
from learner.rollout.control import ServerControl, read_state, state_lines
from learner.run.checkpoint import _read_state, verify
from learner.tasks.detection.write import validate_sample
from learner.tasks.key_value import read_fields
from shared.errors import ProjectError

SLOWEST_S = 10.0
_VALUES: tuple[Any, ...] = (
    float("nan"), float("inf"), -float("inf"), 1e308, -1, 0, 1.7, 10**30, 10**400, True, None, "", " ", "nan", "1e999",
    "\ud800", "\0", "x" * 5000, "1", "-0.5", [], {}, [[]], [None], {"a": 1}, [1, 2, 3], "../../etc/passwd", "/dev/zero",
)  # fmt: skip
_TEXTS = (
    b"\0",
    b"\xff\xfe",
    b"\xef\xbb\xbf",
    b"[" * 20_000,
    b"<a>" * 5_000,
    b"NaN",
    b"1e999",
    b"\xed\xa0\x80",
    b"\r",
    b":",
)


_TAGS = (
    b"!!timestamp x", b"!!int x", b"!!float [1]", b"!!binary x", b"!!set [1]", b"!!omap 3", b"!!pairs {a: 1}",
    b"!!null x", b"!!bool 3", b"!!python/object/apply:os.getcwd []", b"!!python/name:os.system", b"!x 1", b"!<tag:x> 1",
    b"!!map [1]", b"&a [*a]", b"*nobody", b"<<: *nobody", b"{<<: 3}", b"? [1]\n: 2", b"---\n",
)  # fmt: skip


# ---- damage --------------------------------------------------------------------------------------------------------


def damaged(content: bytes, rng: random.Random) -> bytes:
    """Return the bytes with one to four kinds of damage."""
    for _ in range(rng.choice((1, 1, 2, 4))):
        content = rng.choice((_cut, _flip, _insert, _repeat, _number, _value, _value, _value))(content, rng)
    return content


def _tagged(content: bytes, rng: random.Random) -> bytes:
    """YAML in which the value of a key, or of an item, is one with a tag, an alias or the like."""
    lines = content.splitlines()
    places = [i for i, line in enumerate(lines) if b":" in line or line.lstrip().startswith(b"-")]
    if not places:
        return content
    at = rng.choice(places)
    head, sign, _ = lines[at].partition(b": " if b":" in lines[at] else b"-")
    lines[at] = head.rstrip(b":") + (sign if sign.strip() == b"-" else b":") + b" " + rng.choice(_TAGS)
    return b"\n".join(lines) + b"\n"


def _place(content: bytes, rng: random.Random) -> int:
    return rng.randrange(len(content) + 1)


def _cut(content: bytes, rng: random.Random) -> bytes:
    a, b = sorted((_place(content, rng), _place(content, rng)))
    return content[:a] + content[b:] if rng.random() < 0.5 else content[:a]


def _flip(content: bytes, rng: random.Random) -> bytes:
    out = bytearray(content)
    for _ in range(rng.choice((1, 3, 20)) if out else 0):
        out[rng.randrange(len(out))] = rng.randrange(256)
    return bytes(out)


def _insert(content: bytes, rng: random.Random) -> bytes:
    at = _place(content, rng)
    return content[:at] + rng.choice(_TEXTS) + content[at:]


def _repeat(content: bytes, rng: random.Random) -> bytes:
    a, b = sorted((_place(content, rng), _place(content, rng)))
    return content[:b] + content[a:b] + content[b:]


def _number(content: bytes, rng: random.Random) -> bytes:
    """One of its numbers is another one."""
    places = [i for i, byte in enumerate(content) if chr(byte).isdigit()]
    if not places:
        return content
    at = rng.choice(places)
    return (
        content[:at]
        + rng.choice((b"-1", b"1e400", b"nan", b"0.5", b"", b"9" * 5000, b"1_0", b"0x1"))
        + content[at + 1 :]
    )


def _value(content: bytes, rng: random.Random) -> bytes:
    """A value inside JSON (or its first damaged line) is another one."""
    lines = content.splitlines() if content.count(b"\n{") else [content]
    at = rng.randrange(len(lines)) if lines else 0
    try:
        parsed = json.loads(lines[at])
    except (ValueError, IndexError, RecursionError):
        return _flip(content, rng)
    lines[at] = json.dumps(_changed(parsed, rng)).encode()
    return b"\n".join(lines)


def _changed(value: Any, rng: random.Random) -> Any:
    if not isinstance(value, dict | list) or not value or rng.random() < 0.15:
        return copy.deepcopy(rng.choice(_VALUES))
    keys = list(value) if isinstance(value, dict) else list(range(len(value)))
    key = rng.choice(keys)
    action = rng.random()
    if action < 0.1:
        del value[key]
    elif action < 0.2 and isinstance(value, list):
        value.append(value[key])
    elif action < 0.2:
        value[rng.choice(keys)] = value[key]
    else:
        value[key] = _changed(value[key], rng)
    return value


# ---- what is read --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class FileKind:
    """Files by their names, those of them that are damaged, and how a folder with them is read."""

    files: Mapping[str, bytes]
    damaged: tuple[str, ...]
    read: Callable[[Path], object]
    may_be_pipes: tuple[str, ...] = ()  # files that a user may name as `<(command)`: their writer is waited for

    def write(self, folder: Path) -> None:
        """Write all its files, undamaged."""
        for path, content in self.files.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_bytes(content)


class _Checks:
    def validate(self, sample: Sample) -> None:
        validate_sample(sample, pieces=None)


def _split(path: str, geometry: GeometryKind = "bbox_2d", **data: Any) -> Callable[[Path], object]:
    def read(folder: Path) -> object:
        name = str(folder / path)
        return load_split(DataConfig(train=name, **data), name, _Checks(), geometry=geometry)

    return read


def _png() -> bytes:
    out = io.BytesIO()
    Image.new("RGB", (200, 100)).save(out, "PNG")
    return out.getvalue()


def _json(value: Any) -> bytes:
    return json.dumps(value).encode()


def kinds() -> dict[str, FileKind]:
    """Return every kind of file."""
    return {
        **_annotations(),
        "checkpoint": _checkpoint(),
        "report": _run_folder(),
        "servers": _servers(),
        "config": FileKind(
            files={"run.yaml": b"base: base.yaml\n" + _config(), "base.yaml": _config()},
            damaged=("run.yaml", "base.yaml"),
            read=_load_config,
            may_be_pipes=("run.yaml",),
        ),
    }


def _annotations() -> dict[str, FileKind]:
    """Return annotations in every format."""
    image = {"images/1.png": _png()}
    row = {
        "messages": [{"role": "user", "content": "<image>?"}],
        "images": ["images/1.png"],
        "width": 200,
        "height": 100,
    }
    objects = [
        {"desc": "cat", "bbox_2d": [1, 2, 30, 40]},
        {"desc": "dog", "poly": [1, 2, 50, 2, 50, 60], "ignore": False},
    ]
    rows = b"\n".join(_json({**row, "id": i, "objects": objects}) for i in range(3))
    outlines: list[dict[str, Any]] = [
        {"segmentation": [[1, 2, 50, 2, 50, 60.5]]},
        {"segmentation": {"size": [100, 200], "counts": [5000, 1000, 14000]}},
        {
            "segmentation": {
                "size": [100, 200],
                "counts": "hm2Xi8Pj7",
            },
            "iscrowd": 1,
        },
    ]
    coco = _json(
        {
            "images": [{"id": i, "file_name": "images/1.png", "width": 200, "height": 100} for i in (1, 2)],
            "annotations": [
                {"id": i, "image_id": 1 + i % 2, "category_id": 1, "bbox": [i, 2, 30, 40], "iscrowd": 0, **one}
                for i, one in enumerate(outlines)
            ],
            "categories": [{"id": 1, "name": "cat"}, {"id": 2, "name": "dog"}],
        }
    )
    voc = (
        b"<annotation><filename>1.png</filename><size><width>200</width><height>100</height></size><object><name>cat"
        b"</name><difficult>0</difficult><bndbox><xmin>1</xmin><ymin>2</ymin><xmax>30</xmax><ymax>40</ymax></bndbox>"
        b"</object></annotation>"
    )
    labels = b"0 0.5 0.5 0.2 0.2\n1 0.1 0.1 0.2 0.1 0.2 0.3\n"
    data_yaml = b"path: .\ntrain: images\nval: [images]\nnames:\n  0: cat\n  1: dog\nnc: 2\n"
    return {
        "jsonl": FileKind(files={**image, "d.jsonl": rows}, damaged=("d.jsonl",), read=_split("d.jsonl")),
        "coco": FileKind(files={**image, "d.json": coco}, damaged=("d.json",), read=_split("d.json", format="coco")),
        "coco outlines": FileKind(files={**image, "d.json": coco}, damaged=("d.json",), read=_split("d.json", "poly")),
        "voc": FileKind(files={**image, "xml/1.xml": voc}, damaged=("xml/1.xml",), read=_split("xml")),
        "yolo": FileKind(
            files={**image, "labels/1.txt": labels, "data.yaml": data_yaml},
            damaged=("labels/1.txt", "data.yaml"),
            read=_split("data.yaml:train", "poly", on_bad_record="clip"),
        ),
        "fields": FileKind(
            files={**image, "d.jsonl": b"\n".join(_json({**row, "fields": {"total": "12.50"}}) for _ in range(2))},
            damaged=("d.jsonl",),
            read=lambda folder: list(read_fields(str(folder / "d.jsonl"), DataConfig(train="x"))),
        ),
    }


def _checkpoint() -> FileKind:
    state = _json({"global_step": 7, "ver": 3, "cursor": {"epoch": 0, "batch": 2}, "config_digest": "abc"})
    others = {
        "model.safetensors": b"x",
        "optimizer.safetensors": b"y",
        "rng.safetensors": b"z",
        "trainer_state.json": state,
    }
    manifest = {n: {"bytes": len(c), "sha256": hashlib.sha256(c).hexdigest()} for n, c in others.items()}

    def read(folder: Path) -> object:
        for look in (verify, _read_state):
            try:
                look(folder)
            except ProjectError:
                if look is _read_state:
                    raise
        return None

    files = {**others, "manifest.json": json.dumps(manifest).encode()}
    return FileKind(files=files, damaged=("manifest.json", "trainer_state.json"), read=read)


def _run_folder() -> FileKind:
    events: list[dict[str, Any]] = [
        {"event": "data", "time": 1.0, "train": 3, "evaluation": 2, "bad_records": {"train": {"no_area": {"drop": 1}}}},
        {"event": "sync", "time": 2.0, "ver": 1, "mode": "full", "fallback": "", "seconds": 0.5, "bytes": 100},
        {"event": "step", "time": 3.0, "global_step": 1, "channel": "B", "metrics": {"loss": 1.5, "parse_rate": 0.5}},
        {"event": "timeline", "global_step": 1, "origin": 0.0, "spans": [["learner", "pack", 0.0, 1.0]]},
        {"event": "eval", "time": 4.0, "global_step": 1, "metrics": {"f1@0.5": 0.5}},
    ]
    box = {"desc": "cat", "bbox_2d": [1, 2, 30, 40]}
    scene = {"id": "1", "images": ["images/1.png"], "width": 200, "height": 100, "truth": [box], "predictions": [box]}
    files = {
        "metrics.jsonl": b"\n".join(map(_json, events)) + b"\n",
        "config.yaml": _config(),
        "eval/step_1.jsonl": _json(scene) + b"\n",
        "groups.jsonl": _json({"global_step": 1, "groups": [{"id": "1", "rewards": [0.1, 0.5]}]}) + b"\n",
    }
    return FileKind(files=files, damaged=tuple(files), read=lambda folder: write_report(folder))


def _servers() -> FileKind:
    server = {"base_url": "http://a:1", "state": "serving", "since_s": 1.0, "because": ""}
    state = {"time": 1.0, "min_servers": 1, "served": {"ver": 3}, "servers": [server]}

    def read(folder: Path) -> object:
        taken = ServerControl(folder).take()
        return taken, state_lines(read_state(folder))

    request = _json({"action": "add", "base_url": "http://b:1", "group_port": 5})
    files = {"servers/state.json": _json(state), "servers/requests/1.json": request}
    return FileKind(files=files, damaged=tuple(files), read=read)


def _config() -> bytes:
    run = {
        "model": {"path": "model", "lora": {"r": 8, "target_modules": "all-linear"}},
        "data": {"train": "train.jsonl", "val": "val.jsonl", "on_bad_record": "drop"},
        "training": {"output_dir": "out", "seed": 7, "max_steps": 10, "learning_rate": 1e-4},
        "custom": {"trainer_variant": "sft"},
    }
    return yaml.safe_dump(run).encode()


def _load_config(folder: Path) -> RunConfig:
    return load_config(str(folder / "run.yaml"), world_size=1, env={})


# ---- the run -------------------------------------------------------------------------------------------------------


@dataclass
class Ends:
    """The ends of the cases of one kind."""

    counts: Counter[str] = field(default_factory=Counter)
    tracebacks: list[str] = field(default_factory=list)
    slowest_s: float = 0.0


class LateError(Exception):
    """No OSError, which readers may expect."""


@contextmanager
def _alarm(seconds: float) -> Iterator[None]:
    """Raises LateError in a block that waits for longer, as for the writer of a pipe."""

    def late(signum: int, frame: FrameType | None) -> None:
        raise LateError(f"no end after {seconds:g} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


def run_case(kind: FileKind, folder: Path, rng: random.Random, ends: Ends) -> None:
    """Damage one file of the kind, or the way to it, and read."""
    name = rng.choice(kind.damaged)
    path = folder / name
    is_yaml = path.suffix == ".yaml" and rng.random() < 0.3
    content = _tagged(kind.files[name], rng) if is_yaml else damaged(kind.files[name], rng)
    shape = rng.random()
    path.unlink(missing_ok=True)  # whoever took a request has removed it
    if shape < 0.01:
        path.mkdir()
    elif shape < 0.02 and name not in kind.may_be_pipes:
        os.mkfifo(path)
    elif shape < 0.99:
        path.write_bytes(content)
    started = time.monotonic()
    try:
        with _alarm(SLOWEST_S):
            kind.read(folder)
        ends.counts["read"] += 1
    except ProjectError as error:
        str(error).encode(errors="backslashreplace")
        ends.counts["typed error"] += 1
    except Exception:
        ends.counts["traceback"] += 1
        ends.tracebacks.append(f"{name}: {content[:300]!r}\n{traceback.format_exc()[-1500:]}")
    ends.slowest_s = max(ends.slowest_s, time.monotonic() - started)
    if path.is_dir():
        path.rmdir()
    path.unlink(missing_ok=True)
    path.write_bytes(kind.files[name])


def fuzz(names: list[str], cases: int, seed: int) -> dict[str, Ends]:
    """Run `cases` cases in all, the same number of each kind."""
    found = {}
    for name, kind in kinds().items():
        if names and name not in names:
            continue
        ends = found[name] = Ends()
        folder = Path(tempfile.mkdtemp(prefix="fuzz-"))
        kind.write(folder)
        for i in range(cases):
            run_case(kind, folder, random.Random(f"{seed} {name} {i}"), ends)
        shutil.rmtree(folder)
    return found


def main(
    cases: Annotated[int, typer.Option(help="Cases in all.")] = 20_000,
    name: Annotated[str | None, typer.Option(help="Write bench/results/NAME.json.")] = None,
    part: Annotated[list[str] | None, typer.Option(help="Kinds of files; default: all.")] = None,
    seed: Annotated[int, typer.Option(help="Another seed gives other cases.")] = 0,
) -> None:
    """Read damaged files of every kind."""
    logging.disable(logging.CRITICAL)
    num_kinds = len(part or kinds())
    found = fuzz(part or [], -(-cases // num_kinds), seed)
    figures = []
    for kind, ends in found.items():
        total = ends.counts.total()
        figures += [
            Figure(name=f"{kind}: cases", value=total, unit="cases"),
            Figure(name=f"{kind}: typed errors", value=ends.counts["typed error"], unit="cases"),
            Figure(name=f"{kind}: tracebacks", value=ends.counts["traceback"], unit="cases", wanted=0, at_least=False),
            Figure(name=f"{kind}: slowest", value=ends.slowest_s, unit="s", wanted=SLOWEST_S, at_least=False),
        ]
    show(figures, Console(width=120))
    for kind, ends in found.items():
        for text in ends.tracebacks[:5]:
            print(f"---- {kind}\n{text}")
    if name:
        save(name, figures)
    raise typer.Exit(int(any(figure.good is False for figure in figures)))


if __name__ == "__main__":
    typer.run(main)
