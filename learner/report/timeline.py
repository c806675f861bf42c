"""One step as bars: what every rank and every server did, and when (R25, R31, R32).

In: the `timeline` events of a run, one per optimizer step. Out: a drawing of one of them, a typical one: of the median
length, with rollouts where there are any. Calls that reach over the step's edges are cut there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from learner.report.axes import number, ticks
from learner.report.markup import Html, el, join

WIDTH, LEFT, RIGHT, TOP, ROW, BAR = 1140.0, 170.0, 12.0, 6.0, 26.0, 16.0
AXIS = 26.0
SMALLEST = 0.5  # units: what is shorter is still drawn
TONES = {
    "rollout": "rollout",
    "learn": "learn",
    "sync": "sync",
    "wait": "before",
    "data": "data",
    "target": "target",
    "pack": "pack",
}  # all else: "rest"


@dataclass(frozen=True, slots=True)
class Bar:
    """A span on a lane (`rank 0`, `rank 0 rollouts`, a server's URL), in Unix seconds."""

    lane: str
    name: str
    begin_s: float
    end_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTimeline:
    """A step's window, and the bars that ended in it."""

    global_step: int
    begin_s: float
    end_s: float
    bars: tuple[Bar, ...]


def timeline(steps: Sequence[StepTimeline]) -> Html | None:
    """The drawing of a typical step; None where nothing was recorded."""
    index = typical(steps)
    if index is None:
        return None
    step = steps[index]
    return _drawing(step, bars_of(steps, index))


def typical(steps: Sequence[StepTimeline]) -> int | None:
    """The index of a step of median length, among those with rollouts if there are any, the first one left out: it
    warms up."""
    usable = [i for i, step in enumerate(steps) if step.bars and step.end_s > step.begin_s]
    usable = usable[1:] or usable
    rolled = [i for i in usable if any(bar.name == "rollout" for bar in steps[i].bars)]
    ordered = sorted(rolled or usable, key=lambda i: steps[i].end_s - steps[i].begin_s)
    return ordered[len(ordered) // 2] if ordered else None


def bars_of(steps: Sequence[StepTimeline], index: int) -> list[Bar]:
    """What overlaps with the step, cut at its edges: a call that ran ahead is recorded with a later step. A server
    serves nothing while weights move, so rank 0's syncs are also bars of every server."""
    step = steps[index]
    found = [bar for later in steps[index:] for bar in later.bars if _overlaps(bar, step)]
    servers = {bar.lane for bar in found if not bar.lane.startswith("rank ")}
    syncs = [bar for bar in found if (bar.lane, bar.name) == ("rank 0", "sync")]
    found += [Bar(server, "sync", sync.begin_s, sync.end_s) for server in servers for sync in syncs]
    return [
        Bar(bar.lane, bar.name, max(bar.begin_s, step.begin_s), min(bar.end_s, step.end_s))
        for bar in sorted(found, key=lambda bar: (*_order(bar.lane), bar.begin_s))
    ]


def _overlaps(bar: Bar, step: StepTimeline) -> bool:
    return bar.begin_s < step.end_s and bar.end_s > step.begin_s


def _order(lane: str) -> tuple[bool, int, str]:
    """Ranks by number, each with its rollouts below it, then servers."""
    words = lane.split()
    is_rank = words[0] == "rank" and len(words) > 1 and words[1].isdigit()
    return not is_rank, int(words[1]) if is_rank else 0, lane


def _drawing(step: StepTimeline, bars: Sequence[Bar]) -> Html:
    lanes = list(dict.fromkeys(bar.lane for bar in bars))
    seconds = step.end_s - step.begin_s
    height = TOP + ROW * len(lanes) + AXIS

    def x(at_s: float) -> float:
        return LEFT + (at_s - step.begin_s) / seconds * (WIDTH - LEFT - RIGHT)

    def rect(bar: Bar) -> Html:
        y, width = TOP + ROW * lanes.index(bar.lane) + (ROW - BAR) / 2, max(SMALLEST, x(bar.end_s) - x(bar.begin_s))
        tip = f"{bar.lane}: {bar.name} {number(bar.end_s - bar.begin_s)} s, from {number(bar.begin_s - step.begin_s)} s"
        shape = {"x": x(bar.begin_s), "width": width, "y": y, "height": BAR, "rx": 1.5}
        return el("rect", el("title", tip), cls=f"f-{_tone(bar.name)}", **shape)

    names = [
        el("text", lane.removeprefix("http://"), cls="label", x=0, y=TOP + ROW * (i + 0.5) + 4)
        for i, lane in enumerate(lanes)
    ]
    marks = [t for t in ticks(0.0, seconds, 8) if t <= seconds]
    grid = [
        join(
            el("line", cls="grid", x1=x(step.begin_s + t), x2=x(step.begin_s + t), y1=TOP, y2=height - AXIS + 4),
            el("text", f"{number(t)} s", cls="tick mid", x=x(step.begin_s + t), y=height - 6),
        )
        for t in marks
    ]
    title = f"Step {step.global_step}: what ran when"
    drawing = el(
        "svg",
        el("title", title),
        *grid,
        *names,
        *map(rect, bars),
        viewBox=f"0 0 {WIDTH:.0f} {height:.0f}",
        role="img",
        aria_label=title,
    )
    kinds = {(bar.name if bar.name in TONES else "other"): _tone(bar.name) for bar in bars}
    keys = [el("span", el("i", cls=f"b-{tone}"), name, cls="key") for name, tone in kinds.items()]
    return el(
        "figure",
        el("figcaption", el("b", title), el("span", f"{number(seconds)} s", cls="value")),
        el("div", drawing, cls="wide"),
        el("div", *keys, cls="legend"),
        cls="chart timeline",
    )


def _tone(name: str) -> str:
    return TONES.get(name, "rest")
