"""Tests of how much of an answer is kept (`loss.prefix_end`)."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from learner.config.sections.loss import LossConfig
from learner.records import Assignment, DetectionObject, Target
from learner.tasks.detection.prefix import up_to_first_miss, up_to_last_match
from learner.tasks.detection.target import build_target
from learner.tasks.detection.task import DetectionTask
from learner.tasks.supervision import IGNORED
from tests.examples import examples
from tests.unit.learner.tasks.detection.answers import CONTAINERS, COORDINATES
from tests.unit.learner.tasks.fakes import CuttingTokenizer, box, make_rollout, make_task

TRUTH = [box(str(i), 1 + 10 * i, 20 + i, 300 + i, 400 + i) for i in range(4)]
MERGES = [b"]}", b"]}}", b"]}, ", b'"}', b'"}]', b'"}, ', b"}}", b"}, ", b"0]}, ", b", "]


def said(task: DetectionTask, tokenizer: CuttingTokenizer, found: list[int | None]) -> tuple[Assignment, list[int]]:
    """Return an answer that has the objects of these indices, and others."""
    objects = [TRUTH[i] if i is not None else box("x", 500, 600 + n, 700, 900) for n, i in enumerate(found)]
    ids = tokenizer.encode(task.serialize(objects, after=None).text)
    parsed = task.parse(make_rollout(ids, TRUTH))
    pairs = tuple((n, i, 1.0) for n, i in enumerate(found) if i is not None)
    missed = tuple(i for i in range(len(TRUTH)) if i not in found)
    spurious = tuple(n for n, i in enumerate(found) if i is None)
    return Assignment(parsed=parsed, pairs=pairs, missed=missed, spurious=spurious), ids


@st.composite
def answers(draw: st.DrawFn) -> list[int | None]:
    found: list[int | None] = list(draw(st.permutations(range(len(TRUTH)))))[: draw(st.integers(0, len(TRUTH)))]
    for _ in range(draw(st.integers(0, 2))):
        found.insert(draw(st.integers(0, len(found))), None)
    return found


def kept_by(prefix_end: str, found: list[int | None]) -> int:
    """Return how many predictions are kept, by trying every place: the reference."""
    places = [
        n
        for n in range(len(found) + 1)
        if (n == 0 or found[n - 1] is not None)
        and (
            sorted(i for i in found[:n] if i is not None) == list(range(sum(i is not None for i in found[:n])))
            if prefix_end == "first_miss"
            else all(i is None for i in found[n:])
        )
    ]
    return max(places)


@settings(max_examples=examples(300), deadline=None)
@given(
    st.sampled_from(["last_match", "first_miss"]),
    st.sampled_from(CONTAINERS),
    st.sampled_from(COORDINATES),
    st.sets(st.sampled_from(MERGES)),
    answers(),
)
def test_what_is_kept_is_the_rollouts_own_and_what_it_lacks_follows(
    prefix_end: str, container: str, coordinates: str, merges: set[bytes], found: list[int | None]
) -> None:
    task, tokenizer = make_task(container, coordinates, merges)
    assignment, ids = said(task, tokenizer, found)
    if len(assignment.parsed.objects) < len(found):
        assert any(b"0" in merge for merge in merges), "only a fused coordinate may hide an object"
        return
    cut = (up_to_last_match if prefix_end == "last_match" else up_to_first_miss)(assignment, task)
    if cut is assignment:
        assert any(b"0" in merge for merge in merges), "only a coordinate fused with the end may keep what follows"
        return
    kept = kept_by(prefix_end, found)
    assert len(cut.parsed.objects) == kept
    assert [i for _, i, _ in cut.pairs] == [i for i in found[:kept] if i is not None]
    target = build_target(assignment, task, tokenizer, loss=LossConfig.model_validate({"prefix_end": prefix_end}))
    prefix = target.token_ids[: target.prefix_length].tolist()
    assert prefix == ids[: len(prefix)]
    whole = task.parse(make_rollout(target.token_ids[:-1].tolist()))
    assert whole.closed
    names = [p.object.desc for p in whole.objects]
    assert names[:kept] == [p.object.desc for p in assignment.parsed.objects[:kept]]
    assert names[kept:] == [str(i) for i in range(len(TRUTH)) if i not in found[:kept]]
    assert (target.labels[target.prefix_length + 1 :] == target.token_ids[target.prefix_length + 1 :]).all()


def test_a_swap_is_no_miss_and_what_matches_nothing_in_between_stays() -> None:
    task, tokenizer = make_task()
    cases: list[tuple[list[int | None], int]] = [
        ([1, 0, 2], 3),
        ([0, None, 1, 3, 2], 5),
        ([0, 2, 3], 1),
        ([2], 0),
        ([0, 1, None], 2),
    ]
    for found, kept in cases:
        assignment, _ = said(task, tokenizer, found)
        assert len(up_to_first_miss(assignment, task).parsed.objects) == kept


@pytest.mark.parametrize("prefix_end", ["last_object", "last_match", "first_miss"])
def test_a_right_answer_is_kept_whole(prefix_end: str) -> None:
    task, tokenizer = make_task()
    assignment, ids = said(task, tokenizer, [0, 1, 2, 3])
    target = build_target(assignment, task, tokenizer, loss=LossConfig.model_validate({"prefix_end": prefix_end}))
    plain = build_target(assignment, task, tokenizer)
    assert target.token_ids.tolist() == plain.token_ids.tolist() == [*ids, tokenizer.eos_token_id]
    assert target.labels.tolist() == plain.labels.tolist()
    assert (target.labels[: target.prefix_length] != IGNORED).sum() == 4 * len(TRUTH)


class Kept:
    """Y_train of scenes whose objects stand 100 bins apart, some of them without a label."""

    def __init__(self, merges: set[bytes]) -> None:
        self.task, self.tokenizer = make_task("index_map", "tokens", merges)

    @staticmethod
    def at(place: int, name: str) -> DetectionObject:
        return box(name, 100 * place, 500, 100 * place + 60, 600)

    def target(self, said: list[DetectionObject], truth: list[DetectionObject], *, cut_off: bool) -> Target:
        text = self.task.serialize(said, after=None).text
        ids = self.tokenizer.encode(text.removesuffix("}") if cut_off else text)
        assignment = self.task.match(self.task.parse(make_rollout(ids, truth)))
        loss = LossConfig(prefix_end="first_miss", keep_unmatched=True)
        return build_target(assignment, self.task, self.tokenizer, loss=loss)

    def read(self, target: Target) -> list[tuple[str, bool]]:
        """Return every object's name, and whether all of its own tokens behind the prefix are learned."""
        parsed = self.task.parse(make_rollout(target.token_ids[:-1].tolist()))
        assert parsed.closed
        read = []
        for predicted in parsed.objects:
            slots = list(predicted.slots)
            tokens = np.arange(parsed.slots.start[slots[0]], parsed.slots.end[slots[-1]])
            learned = target.labels[tokens] != IGNORED
            assert learned.all() or not learned.any() or tokens[0] < target.prefix_length
            read.append((predicted.object.desc, bool(learned.all() and tokens[0] >= target.prefix_length)))
        return read


@settings(max_examples=examples(200), deadline=None)
@given(
    st.lists(st.sampled_from(["found", "missed", "unlabelled"]), max_size=9),
    st.booleans(),
    st.sets(st.sampled_from(MERGES)),
)
def test_what_nobody_labelled_stays_in_its_place_and_is_not_learned(
    scene: list[str], cut_off: bool, merges: set[bytes]
) -> None:
    """The scene itself is the reference: from the first miss on all that was said or labelled, in reading order."""
    kept = Kept({merge for merge in merges if b"0" not in merge})
    objects = [(kept.at(place, f"{word}{place}"), word) for place, word in enumerate(scene)]
    said = [obj for obj, word in objects if word != "missed"]
    truth = [obj for obj, word in objects if word != "unlabelled"]
    cut_off = cut_off and bool(said)
    target = kept.target(said, truth, cut_off=cut_off)
    first_miss = scene.index("missed") if "missed" in scene else len(scene)
    last_found = max((i for i, word in enumerate(scene) if word == "found"), default=-1)
    read = kept.read(target)
    wanted = []
    for place, word in enumerate(scene):
        in_prefix = place <= max((i for i, w in enumerate(scene[:first_miss]) if w == "found"), default=-1)
        if word != "unlabelled" or in_prefix or not cut_off or place < last_found:
            wanted.append((f"{word}{place}", word != "unlabelled" and not in_prefix))
    assert read == wanted
    assert target.labels[-1] == kept.tokenizer.eos_token_id


def test_a_second_prediction_of_what_has_a_label_does_not_stay() -> None:
    kept = Kept(set())
    truth = [kept.at(0, "missed"), kept.at(2, "two")]
    again = box("again", 202, 500, 262, 600)
    third = box("third", 204, 500, 264, 600)
    said = [truth[1], again, third, kept.at(5, "unlabelled")]
    names = [name for name, _ in kept.read(kept.target(said, truth, cut_off=False))]
    assert names == ["missed", "two", "unlabelled"]


def test_what_could_not_be_written_as_it_was_said_does_not_stay() -> None:
    kept = Kept(set())
    truth = [kept.at(0, "missed"), kept.at(2, "two")]
    said = [truth[1], kept.at(3, "<|special|>"), kept.at(4, "four")]
    names = [name for name, _ in kept.read(kept.target(said, truth, cut_off=False))]
    assert names == ["missed", "two", "four"]
