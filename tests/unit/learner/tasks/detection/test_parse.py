"""Token-aligned strict parsing (SPEC.md "Words"): against a slow reference, for every tokenization of the same text."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from learner.records import ParsedRollout, PredictedObject
from learner.tasks.detection.task import DetectionTask
from learner.tasks.tokens import pieces_of
from tests.examples import examples
from tests.unit.learner.tasks.detection import reference
from tests.unit.learner.tasks.detection.answers import CONTAINERS, COORDINATES, OBJECTS, answers, corrupted, cuts
from tests.unit.learner.tasks.fakes import CuttingTokenizer, box, make_rollout, make_task, poly

C = "<|coord_{}|>".format


def parse_text(task: DetectionTask, tokenizer: CuttingTokenizer, text: str) -> ParsedRollout:
    return task.parse(make_rollout(tokenizer.encode(text)))


def index_map(*bodies: str) -> str:
    return "{" + ", ".join(f'"object_{i}": {body}' for i, body in enumerate(bodies, 1)) + "}"


GOOD = '{"desc": "one", "bbox_2d": [1, 2, 3, 4]}'


@st.composite
def tokenized_answers(draw: st.DrawFn, *, corrupt: bool, num_images: int = 1) -> tuple[str, str, str, list[int]]:
    """Draw container, coordinates, text and where to cut it."""
    container, coordinates = draw(st.sampled_from(CONTAINERS)), draw(st.sampled_from(COORDINATES))
    text = draw(answers(container, coordinates, num_images))
    if corrupt:
        text = draw(corrupted(text))
    return container, coordinates, text, draw(cuts(text.encode()))


def check_against_reference(container: str, coordinates: str, text: str, where: list[int], num_images: int = 1) -> None:
    task, tokenizer = make_task(container, coordinates)
    ids = tokenizer.split(text.encode(), where)
    parsed = task.parse(make_rollout(ids, num_images=num_images))
    indexed, digits = container == "index_map", coordinates == "digits"
    expected = reference.parse(text, indexed=indexed, digits=digits, num_images=num_images)
    pieces = pieces_of(tokenizer).text(ids)
    kept = check_prefix(parsed, expected, text, pieces.data, pieces.ends)

    assert parsed.usable == expected.opened
    assert parsed.truncated == (not expected.closed)
    assert parsed.next_index == 1 + max((e.number for e in expected.entries[:kept]), default=0)
    readable = [e.outcome for e in expected.entries[:kept] if isinstance(e.outcome, tuple)]
    found = [p.object for p in parsed.objects]
    assert [(o.desc, o.kind, o.bins, *([o.image] if num_images > 1 else [])) for o in found] == readable
    check_drops(parsed, expected)
    for predicted in parsed.objects:
        for (start, end, said, lead), value in zip(slots_of(parsed, predicted), predicted.object.bins, strict=True):
            held = b"".join(map(tokenizer.piece, ids[start:end]))[lead:]
            number = task.coordinate_text(value).encode()
            assert said == value
            assert held.startswith(number)
            assert end <= parsed.prefix_length
            assert len(held) - len(number) < len(tokenizer.piece(ids[end - 1]))


def slots_of(parsed: ParsedRollout, predicted: PredictedObject) -> list[tuple[int, int, int, int]]:
    """(start, end, bin, lead) of each coordinate."""
    return [(int(s), int(e), int(b), int(lead)) for s, e, b, lead in np.transpose(parsed.slots)[list(predicted.slots)]]


def check_prefix(
    parsed: ParsedRollout, expected: reference.ReferenceAnswer, text: str, data: bytes, ends: list[int]
) -> int:
    """The prefix ends after the last entry that tokens allow; the number of entries in it."""
    boundaries = {0, *ends}
    for kept in range(len(expected.entries), 0, -1):
        end = len(text[: expected.entries[kept - 1].end].encode())
        start = max(b for b in boundaries if b <= end)
        taken = data[start:end].decode(errors="replace")
        body = taken[1:] if taken[:1] == '"' else taken
        if all(char in "]} \t\n\r" for char in body):
            held = 0 if not parsed.prefix_length else ends[parsed.prefix_length - 1]
            assert (held, parsed.tail_opening) == (start, taken)
            assert parsed.needs_separator
            return kept
    assert parsed.prefix_length == 0
    assert not parsed.needs_separator
    assert parsed.tail_opening in ("{", "[")
    return 0


def check_drops(parsed: ParsedRollout, expected: reference.ReferenceAnswer) -> None:
    wanted: Counter[str] = Counter(e.outcome for e in expected.entries if isinstance(e.outcome, str))
    unreadable = wanted.pop("?", 0)
    wanted["truncated"] += expected.lost
    found: Counter[str] = Counter(parsed.drops)
    assert found.total() == wanted.total() + unreadable
    assert all(found[reason] >= count for reason, count in wanted.items())


@settings(max_examples=examples(400), deadline=None)
@given(tokenized_answers(corrupt=False))
def test_agrees_with_the_reference_whatever_the_tokens(case: tuple[str, str, str, list[int]]) -> None:
    check_against_reference(*case)


@settings(max_examples=examples(400), deadline=None)
@given(st.one_of(tokenized_answers(corrupt=corrupt, num_images=3) for corrupt in (False, True)))
def test_agrees_with_the_reference_if_the_sample_has_several_images(case: tuple[str, str, str, list[int]]) -> None:
    check_against_reference(*case, num_images=3)


@settings(max_examples=examples(400), deadline=None)
@given(tokenized_answers(corrupt=True))
def test_agrees_with_the_reference_on_corrupted_answers(case: tuple[str, str, str, list[int]]) -> None:
    check_against_reference(*case)


@settings(max_examples=examples(300), deadline=None)
@given(
    st.sampled_from(CONTAINERS),
    st.sampled_from(COORDINATES),
    st.lists(
        st.one_of(
            st.sampled_from(['{"object_1": {', '"desc": "', '"bbox_2d": [', "]}", "},", C(7), "12, ", '"', "\\", "[{"]),
            st.binary(max_size=3).map(lambda raw: raw.decode(errors="ignore")),
        )
    ),
    st.data(),
)
def test_never_raises_and_always_keeps_a_prefix(
    container: str, coords: str, bits: list[str], data: st.DataObject
) -> None:
    task, tokenizer = make_task(container, coords)
    raw = "".join(bits).encode()
    ids = tokenizer.split(raw, data.draw(cuts(raw)))
    parsed = task.parse(make_rollout(ids))
    assert 0 <= parsed.prefix_length <= len(ids)
    tail = task.serialize([], after=parsed)
    again = task.parse(make_rollout([*ids[: parsed.prefix_length], *tokenizer.encode(tail.text)]))
    assert again.closed
    assert [p.object for p in again.objects] == [p.object for p in parsed.objects]


@settings(max_examples=examples(400), deadline=None)
@given(tokenized_answers(corrupt=True), st.lists(OBJECTS, max_size=3))
def test_prefix_and_tail_parse_to_what_was_kept_and_what_was_missed(
    case: tuple[str, str, str, list[int]], missed: list
) -> None:
    """SPEC.md Y_train: every FN object is always appended, after the rollout's own tokens."""
    container, coordinates, text, where = case
    task, tokenizer = make_task(container, coordinates)
    ids = tokenizer.split(text.encode(), where)
    parsed = task.parse(make_rollout(ids))
    tail = task.serialize(missed, after=parsed)
    again = task.parse(make_rollout([*ids[: parsed.prefix_length], *tokenizer.encode(tail.text)]))
    assert [p.object for p in again.objects] == [p.object for p in parsed.objects] + missed
    assert again.usable
    assert again.closed
    assert not again.truncated
    assert "truncated" not in again.drops
    for before, after in zip(parsed.objects, again.objects[: len(parsed.objects)], strict=True):
        assert slots_of(again, after) == slots_of(parsed, before)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ('{"bbox_2d": [1, 2, 3, 4]}', "missing_desc"),
        ('{"desc": "", "bbox_2d": [1, 2, 3, 4]}', "missing_desc"),
        ('{"desc": "\\ud800", "bbox_2d": [1, 2, 3, 4]}', "missing_desc"),
        ("{}", "missing_desc"),
        ('{"desc": "one"}', "missing_geom"),
        ('{"desc": "one", "bbox_2d": "1, 2, 3, 4"}', "missing_geom"),
        ('{"desc": "one", "bbox_2d": [[1, 2], [3, 4]]}', "missing_geom"),
        ('{"desc": "one", "bbox_2d": [1, 2, 3]}', "wrong_arity"),
        ('{"desc": "one", "bbox_2d": []}', "wrong_arity"),
        ('{"desc": "one", "poly": [1, 2, 3, 4]}', "wrong_arity"),
        ('{"desc": "one", "poly": [1, 2, 3, 4, 5, 6, 7]}', "wrong_arity"),
        ('{"desc": "one", "bbox_2d": [1, 2, 3, 1000]}', "non_coord_token"),
        ('{"desc": "one", "bbox_2d": [1, 2, 3, 04]}', "non_coord_token"),
        ('{"desc": "one", "bbox_2d": [1, 2, 3, 4.0]}', "non_coord_token"),
        ('{"desc": "one", "bbox_2d": [1, 2, 3, 4,]}', "non_coord_token"),
        ('{"desc": "one", "bbox_2d": [1, 2, 3, <|coord_4|>]}', "non_coord_token"),
        ('{"desc": "one", "bbox_2d": [1, 2, 1, 4]}', "bbox_invalid"),
        ('{"desc": "one", "bbox_2d": [3, 2, 1, 4]}', "bbox_invalid"),
        ('{"desc": "one", "poly": [1, 2, 1, 4, 1, 9]}', "bbox_invalid"),
        ('{"desc": "one", "bbox": [1, 2, 3, 4]}', "unknown_geom"),
        ('{"desc": "one", "bbox_2d": [1, 2, 3, 4], "score": 0.5}', "unknown_geom"),
        ('{"desc": "one", "bbox_2d": [1, 2, 3, 4], "poly": [1, 2, 3, 4, 5, 9]}', "unknown_geom"),
        ('{"desc": "one", "bbox_2d": [1, 2, 3, 4],}', "unknown_geom"),
        ('{"desc": "one", "desc": "two", "bbox_2d": [1, 2, 3, 4]}', "key_invalid"),
    ],
)
def test_malformed_object_is_dropped_with_its_reason_and_parsing_goes_on(body: str, reason: str) -> None:
    task, tokenizer = make_task(coordinates="digits")
    parsed = parse_text(task, tokenizer, index_map(GOOD, body, GOOD))
    assert parsed.drops == {reason: 1}
    assert [p.object for p in parsed.objects] == [box("one", 1, 2, 3, 4)] * 2
    assert parsed.closed
    assert not parsed.truncated


@pytest.mark.parametrize("name", ["object_1", "object_0", "object_02", "object_", "seven", "object_1x", "9" * 5000])
def test_key_that_is_no_new_object_number_is_invalid(name: str) -> None:
    task, tokenizer = make_task(coordinates="digits")
    text = f'{{"object_1": {GOOD}, "{name}": {GOOD}}}'
    parsed = parse_text(task, tokenizer, text)
    assert parsed.drops == {"key_invalid": 1}
    assert len(parsed.objects) == 1


@pytest.mark.parametrize(
    ("text", "kept", "drops"),
    [
        (index_map(GOOD)[:-1] + ', "object_2": {"desc": "on', 1, {"truncated": 1}),
        (index_map(GOOD)[:-1] + ', "object_2', 1, {"truncated": 1}),
        (index_map(GOOD)[:-1] + ", ", 1, {}),
        (index_map(GOOD)[:-1], 1, {}),
        (index_map(GOOD)[:-1] + f' "object_2": {GOOD}}}', 1, {"truncated": 1}),
        (index_map(GOOD)[:-1] + ', "object_2": 7}', 1, {"truncated": 1}),
        (index_map(GOOD)[:-1] + ', "object_2": {"desc": [}]}}', 1, {"truncated": 1}),
        ("{", 0, {}),
        ("", 0, {}),
    ],
)
def test_where_reading_stops_the_lost_rest_counts_once(text: str, kept: int, drops: dict[str, int]) -> None:
    task, tokenizer = make_task(coordinates="digits")
    parsed = parse_text(task, tokenizer, text)
    assert (len(parsed.objects), parsed.drops) == (kept, drops)
    assert parsed.truncated
    assert not parsed.closed


@pytest.mark.parametrize("text", ["", "I see a one.", "```json\n{}\n```", "[]", '"object_1": {}'])
def test_answer_without_its_container_is_unusable(text: str) -> None:
    task, tokenizer = make_task(coordinates="digits")
    parsed = parse_text(task, tokenizer, text)
    assert not parsed.usable
    assert (parsed.prefix_length, parsed.tail_opening, parsed.next_index) == (0, "{", 1)


@pytest.mark.parametrize(("text", "closed"), [("{}", True), ("{ }\n", True), ("{} and more", False)])
def test_empty_container_is_usable_and_keeps_nothing(text: str, closed: bool) -> None:
    task, tokenizer = make_task(coordinates="digits")
    parsed = parse_text(task, tokenizer, text)
    assert parsed.usable
    assert parsed.closed == closed
    assert parsed.prefix_length == 0


def test_coordinate_tokens_spelled_out_by_others_are_no_coordinates() -> None:
    task, tokenizer = make_task()
    text = index_map(f'{{"desc": "one", "bbox_2d": [{C(1)}, {C(2)}, {C(3)}, {C(4)}]}}')
    real = task.parse(make_rollout(tokenizer.encode(text)))
    spelled = task.parse(make_rollout(tokenizer.split(text.encode(), range(len(text)), whole_coords=False)))
    assert [p.object for p in real.objects] == [box("one", 1, 2, 3, 4)]
    assert spelled.drops == {"non_coord_token": 1}


@pytest.mark.parametrize(
    ("pieces", "prefix_length", "tail_opening", "num_objects"),
    [
        (['{"object_1": {"desc": "a", "bbox_2d": [1, 2, 3, 4', "]}}"], 1, "]}", 1),
        (['{"object_1": {"desc": "a", "bbox_2d": [1, 2, 3, 4', "]", "}}"], 2, "}", 1),
        (['{"object_1": {"desc": "a", "bbox_2d": [1, 2, 3, 4', "]}", "}"], 2, "", 1),
        (['{"object_1": {"desc": "a", "bbox_2d": [1, 2, 3, 4', ']}, "object_2": {"desc'], 1, "]}", 1),
        (['{"object_1": {"desc": "a", "bbox_2d": [1, 2, 3, ', "4]}}"], 0, "{", 0),
        (['{"object_1": {"bbox_2d": [1, 2, 3, 4], "desc": "a', '"}}'], 1, '"}', 1),
        (['{"object_1": {"bbox_2d": [1, 2, 3, 4], "desc": "a\\', '""}}'], 0, "{", 0),
        (['{"object_1": {"bbox_2d": [1, 2, 3, 4], "desc": "a', ' "}}'], 0, "{", 0),
    ],
)
def test_cut_before_a_fused_token(pieces: list[str], prefix_length: int, tail_opening: str, num_objects: int) -> None:
    """The tail gives back structure that a fused token took; a token with content in it sends the cut further back."""
    task, tokenizer = make_task(coordinates="digits")
    parsed = task.parse(make_rollout(tokenizer.id_of(piece.encode()) for piece in pieces))
    assert (parsed.prefix_length, parsed.tail_opening, len(parsed.objects)) == (
        prefix_length,
        tail_opening,
        num_objects,
    )


def test_objects_behind_the_cut_are_no_part_of_the_result() -> None:
    task, tokenizer = make_task(coordinates="digits")
    first = '{"object_1": {"desc": "a", "bbox_2d": [1, 2, 3, 4]}'
    second = ', "object_2": {"desc": "b", "bbox_2d": [5, 6, 7, '
    truth = [box("a", 1, 2, 3, 4), box("b", 5, 6, 7, 8)]
    parsed = task.parse(make_rollout([tokenizer.id_of(p.encode()) for p in (first, second, "8]}}")], truth))
    assert [p.object.desc for p in parsed.objects] == ["a"]
    assert parsed.next_index == 2
    assert task.match(parsed).missed == (1,)


def test_descriptions_are_read_over_torn_characters() -> None:
    """Byte-level pieces may hold part of a UTF-8 character; escapes and raw text read alike."""
    task, tokenizer = make_task(coordinates="digits")
    raw = index_map(
        '{"desc": "猫é", "poly": [1, 2, 3, 4, 5, 9]}', '{"desc": "\\u732b\\u00e9", "bbox_2d": [1, 2, 3, 4]}'
    )
    parsed = task.parse(make_rollout(tokenizer.split(raw.encode(), range(len(raw.encode())))))
    assert [p.object for p in parsed.objects] == [poly("猫é", 1, 2, 3, 4, 5, 9), box("猫é", 1, 2, 3, 4)]


def test_description_that_is_no_valid_utf8_is_missing() -> None:
    task, tokenizer = make_task(coordinates="digits")
    raw = b'{"object_1": {"desc": "\xe7\x8c", "bbox_2d": [1, 2, 3, 4]}}'
    assert task.parse(make_rollout(tokenizer.split(raw, [10, 30]))).drops == {"missing_desc": 1}


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "text", ['{"object_1": {"desc": ' + "[" * 50_000, '{"object_1": {"' + "\\" * 50_000, "{" + '"a' * 50_000]
)
def test_hostile_answers_are_read_in_linear_time(text: str) -> None:
    task, tokenizer = make_task()
    assert parse_text(task, tokenizer, text).objects == ()
