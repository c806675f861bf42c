"""What a person's verdicts on some finds say about all of them (R49)."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from learner.records import Votes
from learner.tasks.detection.audit import (
    FEWEST,
    AuditedFind,
    Verdict,
    audit_text,
    draw,
    read_audit,
    refitted,
    require_verdicts,
)
from learner.tasks.detection.gaps import PROBABLE
from shared.errors import DataError

ANSWERS = 8


def finds(seed: int, number: int = 1500) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return what looks say, votes, and what is right. Looks are too sure, as those of another object would be."""
    rng = np.random.default_rng(seed)
    votes = 1 + rng.binomial(ANSWERS - 1, rng.beta(0.6, 1.6, number))
    logit = -1.6 + 1.4 * np.log2(votes) + rng.normal(0, 1.2, number)
    right = rng.random(number) < 1 / (1 + np.exp(-logit))
    told = 1 / (1 + np.exp(-(1.3 * logit + 0.5)))
    return told, votes, right


def judged(told: np.ndarray, votes: np.ndarray, right: np.ndarray, seed: int, *, number: int = 60, wrong: float = 0.0):
    rng = np.random.default_rng(seed)
    return [
        AuditedFind(
            i, int(votes[i]), ANSWERS, float(told[i]), "right" if right[i] ^ (rng.random() < wrong) else "nothing there"
        )
        for i in draw(votes.tolist(), number, seed)
    ]


def shares(values: np.ndarray, votes: np.ndarray) -> np.ndarray:
    return np.array([values[votes >= least].mean() for least in range(2, 7)])


def threshold(values: np.ndarray, votes: np.ndarray) -> int:
    return int(np.argmax([(2 * values[votes >= least] - 1).sum() for least in range(1, ANSWERS + 1)])) + 1


@pytest.mark.parametrize("wrong", [0.0, 0.05])
def test_sixty_verdicts_say_how_often_the_others_are_right(wrong: float) -> None:
    """Over 100 draws; with wrong verdicts too the threshold is that of the truth, or beside it."""
    near = thresholds = 0
    for seed in range(100):
        told, votes, right = finds(seed)
        line = [Votes(int(one), ANSWERS) for one in votes]
        better = refitted(told, line, judged(told, votes, right, seed, wrong=wrong))
        near += abs(shares(better, votes) - shares(right, votes)).max() <= 0.08
        thresholds += abs(threshold(better, votes) - threshold(right, votes)) <= 1
    assert thresholds >= 95
    assert wrong or near >= 90


def test_without_verdicts_probabilities_stay() -> None:
    told, votes, _ = finds(1, 50)
    told = told.clip(0.05, 0.95)
    assert refitted(told, [Votes(int(one), ANSWERS) for one in votes], []) == pytest.approx(told)


def test_verdicts_alone_say_what_votes_mean() -> None:
    """Where looks say too little of these finds, or said too little of the audited ones."""
    told, votes, right = finds(2)
    verdicts = judged(told, votes, right, 2, number=150)
    line = [Votes(int(one), ANSWERS) for one in votes]
    unknown = [one._replace(probability=None) for one in verdicts]
    for better in (refitted(None, line, verdicts), refitted(told, line, unknown)):
        assert abs(shares(better, votes) - shares(right, votes)).max() <= 0.1
    assert (refitted(None, line, verdicts) >= PROBABLE).sum() > 0


def test_rare_votes_are_drawn_too() -> None:
    votes = [1] * 900 + [4] * 100 + [8] * 9
    places = draw(votes, 60)
    assert len(places) == len(set(places)) == 60
    found = [votes[place] for place in places]
    assert [found.count(number) for number in (1, 4, 8)] == [42, 14, 4]
    assert found != sorted(found)
    assert sorted(draw([1, 2, 2], 60)) == [0, 1, 2]
    assert draw([], 60) == []


def test_an_audit_reads_back(tmp_path: Path) -> None:
    kinds: list[Verdict | None] = ["right", "wrong name", "nothing there", "cannot tell", None]
    found = [AuditedFind(i, 2, 4, 0.5 if i else None, kind) for i, kind in enumerate(kinds)]
    (tmp_path / "audit.json").write_text(audit_text(found))
    assert read_audit(tmp_path / "audit.json") == found
    assert [one.right for one in found] == [True, False, False, None, None]


@pytest.mark.parametrize(
    "wrong",
    [{"verdict": "maybe"}, {"votes": 5}, {"votes": 0}, {"probability": 2}, {"place": -1}, {"place": None}, {"x": 1}],
)
def test_a_damaged_audit_is_refused(tmp_path: Path, wrong: dict[str, object]) -> None:
    row = {**AuditedFind(0, 2, 4, 0.5, "right")._asdict(), **wrong}
    path = tmp_path / "audit.json"
    path.write_text(json.dumps({"finds": [row]}))
    with pytest.raises(DataError) as error:
        read_audit(path)
    assert str(path) in str(error.value)
    assert "find-missing audit" in str(error.value)


def test_an_audit_that_says_too_little_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "audit.json"
    path.write_text(audit_text([AuditedFind(i, 1, 4, 0.5, "cannot tell" if i else "right") for i in range(FEWEST)]))
    with pytest.raises(DataError) as error:
        require_verdicts(path)
    assert f"1 of {FEWEST}" in str(error.value)
