"""`bench.scores` goes on where it stopped. What it measures is tested where it is computed (R43)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from bench import scores
from learner.records import Rollout, Sample
from learner.tasks.detection.task import DetectionTask


class Truthful:
    """Answers with the truth, and is killed at a call."""

    images_at_once = 2

    def __init__(self, task: DetectionTask, *, killed_at: int = -1) -> None:
        self.task, self.killed_at = task, killed_at
        self.asked: Any = scores.AnswerSettings()
        self.places: list[int] = []

    def of(self, groups: Mapping[int, Sequence[Sample]]) -> dict[int, list[list[Rollout]]]:
        if len(self.places) == self.killed_at:
            raise KeyboardInterrupt
        self.places += groups
        return {place: [[self._answer(one)] * (1 + self.asked.samples)] for place, (one,) in groups.items()}

    def _answer(self, sample: Sample) -> Rollout:
        tokens = self.task.tokenizer.encode(self.task.serialize(sample.objects, after=None).text)
        return Rollout(
            sample=sample,
            prompt_token_ids=(),
            response_token_ids=tuple(tokens),
            finish_reason="stop",
            ver=0,
            seed=None,
            logprobs=(-0.5,) * len(tokens),
        )


def test_answers_are_made_once_also_if_it_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scores, "SCENES", 5)
    data = scores.MeasuredCheckpoint(scores.DIGITS, tmp_path, backend="hf", bccd=None)
    first, second, third = (Truthful(data.task, killed_at=at) for at in (4, -1, -1))
    data.answers = first  # type: ignore[assignment]
    with pytest.raises(KeyboardInterrupt):
        data._parsed("test")
    file = tmp_path / "test-answers.jsonl"
    file.write_text(file.read_text()[:-40])  # the last line was being written
    data.answers = second  # type: ignore[assignment]
    parsed = data._parsed("test")
    assert (first.places, second.places) == ([0, 1, 2, 3], [3, 4])
    data.answers = third  # type: ignore[assignment]
    again = data._parsed("test")
    assert third.places == []
    for sample, own, other in zip(data.samples["test"], parsed, again, strict=True):
        assert len(own) == len(other) == 1 + max(scores.DRAWN)
        assert [one.object for one in own[8].objects] == list(sample.objects)
        assert own[0].rollout == other[0].rollout


def test_a_part_that_is_in_the_file_is_not_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []

    class Counted:
        def __init__(self, name: str, *_: Any, **__: Any) -> None:
            self.answers = self
            self.name = name

        def __enter__(self) -> None: ...

        def __exit__(self, *_: object) -> None: ...

        def scores(self) -> dict[str, Any]:
            done.append("scores")
            return {"test": {}}

        def seconds(self) -> dict[str, Any]:
            done.append("seconds")
            if len(done) == 2:
                raise KeyboardInterrupt
            return {"K=0": {}}

    monkeypatch.setattr(scores, "MeasuredCheckpoint", Counted)
    out = tmp_path / "scores.json"
    with pytest.raises(KeyboardInterrupt):
        scores.main(out=out, work=tmp_path, only=[scores.DIGITS])
    for _ in range(2):
        scores.main(out=out, work=tmp_path, only=[scores.DIGITS])
    assert done == ["scores", "seconds", "seconds"]
    only_cost = tmp_path / "cost.json"
    scores.main(out=only_cost, work=tmp_path, only=[scores.DIGITS], cost_only=True)
    assert done[3:] == ["seconds"]
    scores.main(out=only_cost, work=tmp_path, only=[scores.DIGITS])
    assert done[4:] == ["scores"]
