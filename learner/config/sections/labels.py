"""The section `labels`: the treatment of objects that nobody labelled."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from learner.config.modes import Rule
from shared.config.model import Mistake, Section, key

if TYPE_CHECKING:
    from learner.config.schema import RunConfig


class CompleteConfig(Section):
    """Labels with gaps are completed before they are learned. The model answers each training image several times.
    Boxes on which enough answers agree, and which overlap no label, become labels of that image. This works with every
    trainer variant."""

    rollouts: int = key("answers to each training image", 4, unit="rollouts", req="D20 R48", ge=2)
    # No fixed number suits all data: of the boxes that 2 of 4 answers agreed on, 84% were right on the digits data set,
    # but 33% on the cells data set (judged by its published labels).
    min_votes: Literal["auto"] | int = key(
        "how many of the answers must have a box. `auto`: the number from which on the most labels are gained, right "
        "ones minus wrong ones, as estimated from how the boxes and the labelled objects look, or from the votes if "
        "that says too little. Nothing is completed if the estimate is poor; the run says why",
        "auto",
        req="R48",
    )
    accept: Literal["votes", "probability"] = key(
        "`votes`: every box with `min_votes` becomes a label. `probability`: each box that is right with a probability "
        "of 0.5 or more, by how it looks and by its votes; a number of `min_votes` is asked for besides",
        "votes",
        req="R48",
    )
    audit: str | None = key(
        "the `audit.json` of `find-missing audit`: a person's verdicts on some boxes, which correct the estimate of "
        "all. null: none",
        None,
        min_length=1,
        req="R49",
    )
    refresh: Literal["once"] | int = key(
        "`once`: before the first step. N: also every N optimizer steps, by the weights of that time; all completed "
        "labels are made anew. Each time costs `rollouts` answers to every training image",
        "once",
        unit="optimizer steps",
        req="R48",
    )
    write: str | None = key(
        "a new file (COCO, JSONL) or folder (Pascal VOC, YOLO) for the completed annotations of "
        "`data.train`, in the format that came in. It is written again at each completion. Nothing is overwritten but "
        "what the run wrote; null: none",
        None,
        min_length=1,
        req="R43 R48",
    )


class LabelsConfig(Section):
    """Labels with gaps."""

    complete: CompleteConfig | None = key(
        "complete them by the model's own agreeing answers; null: no", None, req="R48"
    )


def completion_has_objects(config: RunConfig) -> Iterator[Mistake]:
    """`labels.complete` needs `task.type: detection` (R48)."""
    if config.labels.complete is not None and config.task.type != "detection":
        wanted, remedy = "task.type: detection, whose answers have boxes to compare", "set labels.complete: null"
        yield Mistake(path="labels.complete", found=f"task.type: {config.task.type}", wanted=wanted, remedy=remedy)


def completion_votes(config: RunConfig) -> Iterator[Mistake]:
    """`labels.complete.min_votes` is `auto`, or from 1 to `rollouts`; `refresh` is `once`, or 1 and more (R48)."""
    complete = config.labels.complete
    if complete is None:
        return
    votes, every = complete.min_votes, complete.refresh
    if votes != "auto" and not 1 <= votes <= complete.rollouts:
        path, wanted = "labels.complete.min_votes", f"auto, or 1 to rollouts ({complete.rollouts})"
        yield Mistake(path=path, found=str(votes), wanted=wanted, remedy="correct it, or raise rollouts")
    if every != "once" and every < 1:
        path, wanted = "labels.complete.refresh", "once, or a number of optimizer steps from 1 on"
        yield Mistake(path=path, found=str(every), wanted=wanted, remedy="set it to once")


RULES: tuple[Rule, ...] = (
    completion_has_objects,
    completion_votes,
)
