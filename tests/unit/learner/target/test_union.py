"""What several answers to one prompt say together (`best_of.use: union`), against the scene that they come from."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from learner.config.schema import LossConfig
from learner.records import Assignment, DetectionObject
from learner.target.target import build_target, ground_truth_target
from learner.target.union import agreed, union_target
from tests.examples import examples
from tests.unit.learner.target.test_prefix import Kept
from tests.unit.learner.tasks.fakes import box, make_rollout

PLACES = 6
KEPT = Kept(set())


def near(place: int, shift: int = 0) -> DetectionObject:
    """An object at one of the scene's places, which are far apart; shifted ones still overlap by more than 0.8."""
    return box(f"at{place}", 100 * place + 10 + shift, 500, 100 * place + 70 + shift, 600)


def answer(said: Sequence[DetectionObject], labelled: Sequence[int], *, cut_off: bool = False) -> Assignment:
    text = KEPT.task.serialize(said, after=None).text
    ids = KEPT.tokenizer.encode(text.removesuffix("}") if cut_off else text)
    truth = [near(place) for place in labelled]
    return KEPT.task.match(KEPT.task.parse(make_rollout(ids, truth)))


def names(objects: Sequence[DetectionObject]) -> set[str]:
    return {obj.desc for obj in objects}


subsets = st.sets(st.integers(0, PLACES - 1))


@settings(max_examples=examples(150), deadline=None)
@given(subsets, st.lists(subsets, min_size=1, max_size=5), st.sampled_from(["last_object", "first_miss"]), st.data())
def test_the_union_of_answers_against_the_scene(
    labelled: set[int], answers: list[set[int]], prefix_end: str, data: st.DataObject
) -> None:
    """Every labelled object once, learned unless the prefix has it; without a label only what enough answers have."""
    said = []
    for places in answers:
        objects = [near(place, data.draw(st.integers(-3, 3))) for place in sorted(places)]
        if places and data.draw(st.booleans()):  # an object that the answer repeats counts once
            objects.append(near(max(places), 4))
        said.append(answer(objects, sorted(labelled)))
    fewest = max(2, len(answers) / 2)
    shared = {p for p in range(PLACES) if sum(p in places for places in answers) >= fewest} - labelled
    assert names(agreed(said, KEPT.task)) == {f"at{place}" for place in shared}

    loss = LossConfig.model_validate({"prefix_end": prefix_end})
    union = union_target(said, KEPT.task, KEPT.tokenizer, loss)
    assert union.agreed == len(shared)
    prefix = said[0].parsed.token_ids[: union.target.prefix_length].tolist()
    assert union.target.token_ids[: union.target.prefix_length].tolist() == prefix
    begun = KEPT.task.parse(make_rollout(prefix))
    has = {int(p.object.desc.removeprefix("at")) for p in begun.objects}
    tail = KEPT.read(union.target)[len(begun.objects) :]
    assert tail == [(f"at{p}", p in labelled) for p in sorted((labelled | shared) - has)]
    assert union.target.labels[-1] == KEPT.tokenizer.eos_token_id


@settings(max_examples=examples(30), deadline=None)
@given(subsets, subsets, st.booleans())
def test_one_answer_is_its_own_union(labelled: set[int], places: set[int], keeps: bool) -> None:
    """As it is taught without a union, boxes without a label included."""
    one = answer([near(p) for p in sorted(places)], sorted(labelled))
    loss = LossConfig(prefix_end="first_miss", keep_unmatched=keeps)
    union = union_target([one], KEPT.task, KEPT.tokenizer, loss)
    plain = build_target(one, KEPT.task, KEPT.tokenizer, loss=loss)
    for name in ("token_ids", "labels", "loss_weights"):
        assert (getattr(union.target, name) == getattr(plain, name)).all()


def test_what_the_best_answer_cut_off_is_kept_once() -> None:
    """With `keep_unmatched` it keeps its own, and a box that the others have too does not come twice."""
    said = [answer([near(2), near(4, shift)], [0, 2]) for shift in (0, 3)]
    loss = LossConfig(prefix_end="first_miss", keep_unmatched=True)
    union = union_target(said, KEPT.task, KEPT.tokenizer, loss)
    assert KEPT.read(union.target) == [("at0", True), ("at2", True), ("at4", False)]


def test_an_answer_without_an_end_speaks_up_to_its_last_match() -> None:
    """What a runaway answer says after that means nothing."""
    said = [answer([near(0), near(1), near(2), near(3)], [0, 2], cut_off=cut_off) for cut_off in (True, False)]
    assert names(agreed(said, KEPT.task)) == {"at1"}


def test_a_union_is_never_longer_than_rows_allow() -> None:
    """The longest answer and the ground truth together: what is checked before a run. What fewest answers have goes
    first."""
    labelled = [5]
    best = answer([near(5)], labelled)
    others = [answer([near(p) for p in places], labelled) for places in ([0, 1, 2], [0, 1, 2], [0, 1], [0, 3], [3])]
    said = [best, *others]
    union = union_target(said, KEPT.task, KEPT.tokenizer, LossConfig())
    longest = max(len(one.parsed.token_ids) for one in said)
    truth = ground_truth_target(best.parsed.rollout.sample, KEPT.task, KEPT.tokenizer)
    assert len(union.target.token_ids) <= longest + len(truth.token_ids)
    assert union.agreed == 2
    kept = [name for name, is_learned in KEPT.read(union.target) if not is_learned]
    assert kept == ["at5", "at0", "at1"]

    short = [answer([near(5)], labelled), *(answer([near(0), near(1)], labelled) for _ in range(4))]
    short += [answer([near(p), near(p + 1)], labelled) for p in (1, 1, 2, 2)]
    union = union_target(short, KEPT.task, KEPT.tokenizer, LossConfig())
    assert len(union.target.token_ids) <= max(len(one.parsed.token_ids) for one in short) + len(truth.token_ids)
