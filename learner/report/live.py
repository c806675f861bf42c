"""Serves a page that follows a run: `rollout-learner report --live RUN_DIR`.

In: the run directory, as a learner writes it, and the rollout servers' `/status/`. Out: HTML over HTTP, by default on
the loopback address. The page shows loss, F1, match rate, queue, the servers' states, how busy ranks and servers are,
and the newest answers, with their boxes drawn over their images, and all their tokens. `/` is the whole page. Every
POLL_S its script fetches `/now` and replaces what has changed. `learner.report.web` decides who may read the page.

This module only reads: it writes no file, trains nothing, and calls only `/status/` of a server.
"""

from __future__ import annotations

import math
import os
import re
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import httpx
from fastapi import FastAPI, Response

from learner.journal.answers import NAME as ANSWERS
from learner.records import DetectionObject
from learner.report.charts import Bar, Chart, Series, Table, bar_chart, line_chart, number, parted
from learner.report.page import TEMPLATES
from learner.report.read import METRICS, is_run, mappings_in, newest_scenes, read_object, read_sheet, run_of
from learner.report.records import RunRecord
from learner.report.results import Card, duration
from learner.report.scenes import LEGEND, Picture, SceneRow, image_roots, load_picture, newest
from learner.report.scores import F1
from learner.report.training import AHEAD, named_charts
from learner.report.web import html, page_app, serve_page
from learner.rollout.control import read_state
from shared.answers import ask
from shared.errors import ConfigError, DataError
from shared.masking import bare_url
from shared.reading import json_in
from shared.tokens import TOKEN_VARIABLE, read_token
from shared.wire import ServerStatus

POLL_S = 2.0  # seconds between two updates of the page
MOST_SCENES = 6  # max scenes shown of the newest evaluation
SILENT_S = 120.0  # seconds without an event after which the page says that the run's process may have been killed
ASK_S = 1.0  # max seconds to wait for a server's status
BUSY_STEPS = 20  # number of last steps for which the page shows how busy ranks and servers were
CHARTS = ("Loss", "Match rate", "Objects per step", "Seconds per step", "Packs waiting, per rank")  # titles of charts
IDLE = ("wait", "data", "other")  # activities that do not count as work
SHAPES = {name: LEGEND[name] for name in ("truth", "missed")}  # legend of an answer's drawing: color -> meaning
SHAPES |= {"hit": "prediction, matched", "spurious": "prediction without a match"}
KINDS = {  # kind of an answer's token -> its text in the legend
    "kept": "kept, not learned",
    "matched": "kept, learned: towards the label",
    "dropped": "dropped: malformed",
    "cut": "replaced by what is appended",
    "appended": "appended, learned",
    "unlearned": "appended, not learned",
}
SAID = {"kept": "without a label, kept", "spurious": "without a match"}
ENDED = {"finished": ("Finished", "good"), "stopped": ("Stopped", "bad"), "failed": ("Failed", "bad")}


@dataclass(frozen=True, kw_only=True, slots=True)
class ShownAnswer:
    """One of the newest answers, ready to be shown. `shapes`: the objects to draw, as (color, tooltip, object).
    `tokens`: (text, kind, note), see `learner.journal.answers`."""

    sample_id: str
    facts: Sequence[str]  # short texts: numbers of matched, missed and dropped objects, and the weights' version
    width: int  # width of the answer's drawing, in pixels
    height: int
    picture: Picture | None
    file: str  # file name of the answer's first image
    shapes: Sequence[tuple[str, str, DetectionObject]]
    tokens: Sequence[tuple[str, str, str]]


class Follower:
    """Reads a running run repeatedly, each time only the new lines of `metrics.jsonl`. The scenes of evaluations are
    not read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._events: list[Mapping[str, object]] = []
        self._num_read = 0  # number of bytes of `metrics.jsonl` that were read

    def read(self) -> RunRecord:
        """Return the record of the run, as far as its files are written."""
        file = self.path / METRICS
        if file.is_file():
            with file.open("rb") as lines:
                # The file became shorter, so a new run writes into the folder.
                if file.stat().st_size < self._num_read:
                    self._events, self._num_read = [], 0
                lines.seek(self._num_read)
                for line in lines:
                    if not line.endswith(b"\n"):
                        # The learner has not written the whole line yet, so the line is read next time.
                        break
                    self._num_read += len(line)
                    self._events += mappings_in([line.decode(errors="replace")])
        return run_of(self.path, self._events, 0, with_scenes=False)


class LiveView:
    """Makes the page of one run. Each call of `now` reads the run's files again. Only one thread may call `now` at a
    time. `token`: the servers' token; None: it is not sent."""

    def __init__(self, run_dir: Path, token: str | None) -> None:
        self._follower, self._run_dir, self._token = Follower(run_dir), run_dir, token
        self._picture = lru_cache(maxsize=64)(load_picture)
        # Servers are called in parallel, so the page waits only for the slowest server.
        self._threads = ThreadPoolExecutor(8)
        self._drawn: tuple[tuple[int, int], list[SceneRow]] | None = None  # (step, number of scenes), the rows shown

    def now(self) -> str:
        """Return the HTML of the part of the page that changes while the run continues."""
        run = self._follower.read()
        global_step, answers = self._answers(run)
        keeps = any(color == "kept" for answer in answers for color, *_ in answer.shapes)
        shown, flat = charts(run)
        step, scenes = self._scenes(run)
        return TEMPLATES.get_template("now.html").render(
            title=run.name,
            standing=standing(run, time.time()),
            cards=cards(run),
            notes=run.notes,
            charts_of=shown,
            flat=flat,
            scenes_step=step,
            scenes_of=scenes,
            scene_legend={name: LEGEND[name] for name in ("truth", "missed", "hit", "class", "spurious")},
            servers=self._servers(run),
            answers_step=global_step,
            answers=answers,
            legend=SHAPES | ({"kept": f"prediction {SAID['kept']}"} if keeps else {}),
            kinds=KINDS | ({"unlearned": "written again, not learned: without a label"} if keeps else {}),
        )

    def _scenes(self, run: RunRecord) -> tuple[int, list[SceneRow]]:
        """Return the step and the first scenes of the newest evaluation."""
        step, scenes = newest_scenes(run, MOST_SCENES)
        # Images are loaded once per evaluation, not at each call.
        if self._drawn is None or self._drawn[0] != (step, len(scenes)):
            self._drawn = (step, len(scenes)), newest(run, step, scenes)
        return step, self._drawn[1]

    def _answers(self, run: RunRecord) -> tuple[int, list[ShownAnswer]]:
        try:
            told = json_in(self._run_dir / ANSWERS)
            roots = tuple(image_roots(run))
            return int(told["global_step"]), [self._answer(line, roots) for line in told["answers"]]
        except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError):
            return 0, []  # the file is missing, or was not written by a learner

    def _answer(self, line: Mapping[str, Any], roots: tuple[Path, ...]) -> ShownAnswer:
        images = tuple(str(image) for image in line["images"])
        drawn = shapes(line)
        sheet = read_sheet(line, [item for *_, item in drawn])
        width, height = sheet.size if sheet else (int(line["width"]), int(line["height"]))
        if sheet:
            drawn = [(color, tip, sheet.placed(item)) for color, tip, item in drawn]
        kept = len(line.get("kept", ()))
        facts = [f"{len(line['pairs'])} matched", f"{len(line['missed'])} missed, appended"]
        others = len(line["predictions"]) - len(line["pairs"]) - kept
        facts += [f"{count} {SAID[kind]}" for kind, count in (("spurious", others), ("kept", kept)) if count]
        facts += [f"{int(count)} dropped: {reason}" for reason, count in line["drops"].items()]
        facts += ["unusable"] if not line["usable"] else []
        facts.append(f"version {int(line['ver'])}")
        return ShownAnswer(
            sample_id=str(line["id"]),
            facts=facts,
            width=max(1, width),
            height=max(1, height),
            picture=self._picture(images, roots, sheet),
            file=Path(images[0][-80:]).name if images else "no image",
            shapes=drawn,
            tokens=[(str(text), str(kind), str(note)) for text, kind, note in line["tokens"]],
        )

    def _servers(self, run: RunRecord) -> Table | None:
        known = members(self._run_dir, run)
        # A URL may hold a password or a token.
        rows: list[list[str | tuple[str, str]]] = [[bare_url(url), place] for url, place in known]
        told = self._threads.map(self._server, [url for url, _ in known])
        head = ["Server", "In the run", "Gate", "Version", "In flight", "Waiting"]
        return Table(head, [[*row, *status] for row, status in zip(rows, told, strict=True)]) if rows else None

    def _server(self, url: str) -> list[str]:
        """Ask a server for its status. Return four texts: the server's gate (whether it accepts calls) or why the gate
        is not known, the version of its weights, and the numbers of calls in flight and waiting."""
        if (hidden := _HIDDEN.search(url)) is not None:
            # The variable's value is not filled in, even if it is set here: the author of the run's files chose the
            # host that would get the value.
            return [f"unknown: the run's folder has {hidden[0]} for a part of its URL", "–", "–", "–"]
        headers = {"Authorization": f"Bearer {self._token}"} if self._token else {}
        try:
            # A proxy of the environment would see the token.
            with httpx.Client(trust_env=False) as client:
                # A run's files may name a server that never ends its answer: `ask` bounds time and bytes.
                code, content = ask(client, f"{url}/status/", timeout_s=ASK_S, headers=headers)
            if code == httpx.codes.UNAUTHORIZED:
                return [f"unknown: needs --send-token and {TOKEN_VARIABLE}", "–", "–", "–"]
            status = ServerStatus.model_validate_json(content)
        except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
            return [f"no answer ({type(error).__name__})", "–", "–", "–"]
        gate = f"poisoned: {status.poisoned_because[:80]}" if status.gate == "poisoned" else status.gate
        return [gate, str(status.ver), str(status.in_flight), str(status.waiting)]


def members(run_dir: Path, run: RunRecord) -> list[tuple[str, str | tuple[str, str]]]:
    """Return each server's URL, and its state in the run with the reason, as the run wrote them last. If the run has
    written no states yet, return the servers of its configuration, with an en dash as state."""
    try:
        return [
            (str(server["base_url"]), (str(server["state"]), str(server["because"])))
            for server in read_state(run_dir)["servers"]
        ]
    except (ConfigError, KeyError, TypeError):
        entries = run.setting("custom", "extra", "rollout_matching", "vllm", "server", "servers")
        known = entries if isinstance(entries, list) else []
        return [(str(entry["base_url"]), "–") for entry in known if isinstance(entry, Mapping) and "base_url" in entry]


def shapes(line: Mapping[str, Any]) -> list[tuple[str, str, DetectionObject]]:
    """Return the shapes to draw over an answer's image, as (color, tooltip, object). The colors of predictions and
    labels come from the matching in training, which differs from an evaluation's."""
    matched = {int(p): (int(t), float(iou)) for p, t, iou in line["pairs"]}
    missed, kept = set(map(int, line["missed"])), set(map(int, line.get("kept", ())))
    found = [("region", "ignore region", read_object(item)) for item in line["ignored"]]
    for i, item in enumerate(map(read_object, line["truth"])):
        color = "missed" if i in missed else "truth"
        found.append((color, f"{LEGEND[color]}: {item.desc}", item))
    for p, item in enumerate(map(read_object, line["predictions"])):
        color = "hit" if p in matched else "kept" if p in kept else "spurious"
        said = f"matched, IoU {matched[p][1]:.2f}" if p in matched else SAID[color]
        found.append((color, f"{said}: {item.desc}", item))
    return found


@dataclass(frozen=True, kw_only=True, slots=True)
class Standing:
    """The state of a run, for the head of the page."""

    name: str  # a word for the state, such as "Running"
    tone: str  # `good` if the run finished, `bad` if it failed or was stopped, else empty; decides the color
    facts: str  # progress of the run, and the time left
    done: int  # number of steps done
    total: int  # number of steps; 0: not known, or a time limit ends the run


def standing(run: RunRecord, now: float) -> Standing:
    """Return the run's state at the Unix time `now`: whether it is running, its progress, and the time left."""
    status, done = run.status, run.steps[-1].global_step if run.steps else 0
    total = 0 if math.isfinite(status.time_up_s) else status.total_steps
    parts = [f"step {done}" + (f" of {total}" if total else "")]
    if run.last_event_s is None:
        return Standing(name="Starting", tone="", facts="nothing was written yet", done=0, total=0)
    age = max(0.0, now - run.last_event_s)
    name, tone = ENDED.get(status.ended, ("Running", ""))
    if status.ended:
        parts += [f"{duration(age)} ago", *([status.because] if status.because else [])]
    elif age > SILENT_S:
        name = "No news"
        parts.append(f"last news {duration(age)} ago: its process may have been killed")
    else:
        parts += [*left(run, now), f"last news {duration(age)} ago"]
    return Standing(name=name, tone=tone, facts="  ·  ".join(parts), done=done, total=total)


def left(run: RunRecord, now: float) -> list[str]:
    """Return as a text how long the run will still take: until its minutes are over, or until its last step. Each step
    is expected to take as long as the last steps. [] if the time is not known."""
    status, done = run.status, run.steps[-1].global_step if run.steps else 0
    if math.isfinite(status.time_up_s):
        return [f"{duration(max(0.0, status.time_up_s - now))} left"]
    if not status.total_steps or done >= status.total_steps:
        return ["all steps are done"] if done else []
    if not math.isfinite(status.seconds_per_step):
        return []
    return [f"about {duration((status.total_steps - done) * status.seconds_per_step)} left"]


def cards(run: RunRecord) -> list[Card]:
    """Return cards with the newest loss, match rate, speed, queue and F1, as far as the run has measured them."""
    found = []
    if run.steps:
        last = run.steps[-1]
        m = last.metrics
        channel = "" if run.setting("custom", "trainer_variant") == "sft" else f"channel {last.channel}, "
        found.append(Card(name="Loss", big=number(last.loss), sub=f"{channel}step {last.global_step}"))
        rated = next((s for s in reversed(run.steps) if "match_rate" in s.metrics), None)
        if rated is not None:
            missed = f"{number(rated.metrics.get('missed', 0.0))} objects missed"
            found.append(Card(name="Match rate", big=f"{rated.metrics['match_rate']:.2f}", sub=missed))
        speed = f"{number(m.get('step_s', 0.0))} s per step"
        found.append(Card(name="Tokens/s", big=number(m.get("tokens_per_s", 0.0)), sub=speed))
        if f"{AHEAD}queue_depth" in m:
            queue = f"{number(m.get(f'{AHEAD}age_versions', 0.0))} versions old"
            found.append(Card(name="Queue, packs per rank", big=number(m[f"{AHEAD}queue_depth"]), sub=queue))
    scored = [point for point in run.evals if F1 in point.metrics]
    if scored:
        first, last_eval = scored[0], scored[-1]
        was = f"{first.metrics[F1]:.3f} → " if len(scored) > 1 else ""
        found.append(
            Card(name=F1.upper(), big=f"{last_eval.metrics[F1]:.3f}", sub=f"step {last_eval.global_step}", was=was)
        )
    return found


def charts(run: RunRecord) -> tuple[list[Chart], Table | None]:
    """Return the charts of CHARTS, of F1, and of how busy ranks and servers are. Charts whose value has not changed are
    rows of the table instead; None: there are no such charts."""
    by_title = {chart.title: chart for chart in named_charts(run).values() if chart}
    points = [(float(point.global_step), point.metrics[F1]) for point in run.evals if F1 in point.metrics]
    f1 = line_chart("F1@0.5 by step", [Series("F1@0.5", points, "after")], dots=True, y_max=1.0)
    found = [by_title.get("Loss"), f1, *(by_title.get(title) for title in CHARTS[1:]), busy(run)]
    return parted(found)


def busy(run: RunRecord) -> Chart | None:
    """Return a chart of the fraction of the time in which each rank and server worked, over the last BUSY_STEPS steps.
    Activities in IDLE do not count as work. None without a timeline."""
    last = run.timelines[-BUSY_STEPS:]
    span = sum(line.end_s - line.begin_s for line in last)
    if span <= 0:
        return None
    spans: dict[str, list[tuple[float, float]]] = {}
    for line in last:
        for a in line.activities:
            spans.setdefault(a.lane, [])
            if a.name not in IDLE:
                # A rollout may begin long before the steps that are shown.
                spans[a.lane].append((max(a.begin_s, last[0].begin_s), a.end_s))
    bars = [Bar(lane.replace("http://", ""), min(1.0, covered(found) / span), "learn") for lane, found in spans.items()]
    return bar_chart(f"Busy share, last {len(last)} steps", bars)


def covered(spans: Sequence[tuple[float, float]]) -> float:
    """Return how many seconds the intervals `(begin, end)` cover. Seconds in several intervals count once."""
    total, until = 0.0, -float("inf")
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, until))
        until = max(until, end)
    return total


def create_app(run_dir: Path, *, host: str, token: str | None) -> FastAPI:
    """Return the application that serves the live page (`/`) and the part of it that changes (`/now`)."""
    app = page_app(host=host)
    view = LiveView(run_dir, token)
    made: list[tuple[float, str]] = []

    async def now() -> str:
        """Return the changing part of the page. The part is made at most once per POLL_S / 2, even if many browsers
        ask."""
        # `now` runs in the event loop, so only one thread calls `view.now`.
        if not made or time.monotonic() - made[0][0] > POLL_S / 2:
            made[:] = [(time.monotonic(), view.now())]
        return made[0][1]

    @app.get("/")
    async def page() -> Response:
        template = TEMPLATES.get_template("live.html")
        return html(template, title=run_dir.resolve().name, now=await now(), poll_ms=int(POLL_S * 1000))

    @app.get("/now")
    async def now_only() -> Response:
        return Response(await now(), media_type="text/html")

    return app


_HIDDEN = re.compile(r"\$\{\w+\}")  # the name of a variable, which a run's files have in place of a secret value


def serve(run_dir: Path, *, host: str, port: int, send_token: bool = False) -> int:
    """Serve the live page of the run in `run_dir` until Ctrl-C. Returns the exit code. `send_token`: send the servers'
    token to the servers in the run's files; only if you trust the author of the files. Raises DataError if there is no
    run, ServerError if the port is taken."""

    if not is_run(run_dir):
        raise DataError(
            "the directory is no run",
            found=str(run_dir),
            wanted="metrics.jsonl or config.yaml in it",
            remedy="give training.output_dir of a run",
        )
    app = create_app(run_dir, host=host, token=read_token(os.environ) if send_token else None)
    return serve_page(app, name=f"live view of {run_dir}", host=host, port=port)
