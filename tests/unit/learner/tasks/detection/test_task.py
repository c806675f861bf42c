"""The task's own edges: serialized text, validation of ground truth, unfit tokenizers; and a real tokenizer."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from learner.config.sections.task import TaskConfig
from learner.records import DetectionObject
from learner.tasks.detection.task import DetectionTask
from shared.errors import ConfigError, DataError
from tests.examples import examples
from tests.unit.learner.tasks.detection.answers import CONTAINERS, COORDINATES, OBJECTS
from tests.unit.learner.tasks.fakes import box, make_rollout, make_sample, make_task, poly

PAIR = (box("seven", 1, 2, 3, 4), poly('the "猫"', 5, 6, 7, 8, 9, 6))


@pytest.mark.parametrize(
    ("container", "coordinates", "text"),
    [
        (
            "index_map",
            "digits",
            '{"object_1": {"desc": "seven", "bbox_2d": [1, 2, 3, 4]}, '
            '"object_2": {"desc": "the \\"猫\\"", "poly": [5, 6, 7, 8, 9, 6]}}',
        ),
        (
            "array",
            "digits",
            '[{"bbox_2d": [1, 2, 3, 4], "label": "seven"}, {"poly": [5, 6, 7, 8, 9, 6], "label": "the \\"猫\\""}]',
        ),
    ],
)
def test_text_is_canonical(container: str, coordinates: str, text: str) -> None:
    task, _ = make_task(container, coordinates)
    tail = task.serialize(PAIR, after=None)
    assert tail.text == text
    assert [tail.text[a:b] for a, b in tail.desc_spans] == ["seven", 'the \\"猫\\"']


def test_coordinate_tokens_are_bare() -> None:
    task, _ = make_task()
    text = '{"object_1": {"desc": "seven", "bbox_2d": [<|coord_1|>, <|coord_2|>, <|coord_3|>, <|coord_4|>]}}'
    assert task.serialize(PAIR[:1], after=None).text == text


@pytest.mark.parametrize(("container", "empty"), [("index_map", "{}"), ("array", "[]")])
def test_no_objects_make_an_empty_container(container: str, empty: str) -> None:
    task, tokenizer = make_task(container)
    assert task.serialize([], after=None).text == empty
    unusable = task.parse(make_rollout(tokenizer.encode("nothing")))
    assert task.serialize([], after=unusable).text == empty


def test_tail_goes_on_numbering_after_the_highest_number_of_the_prefix() -> None:
    task, tokenizer = make_task(coordinates="digits")
    text = '{"object_7": {"desc": "a", "bbox_2d": [1, 2, 3, 4]}, "object_3": {"desc": ""}}'
    parsed = task.parse(make_rollout(tokenizer.encode(text)))
    assert task.serialize(PAIR[:1], after=parsed).text.startswith(', "object_8": {')


@pytest.mark.parametrize(
    ("obj", "found"),
    [
        (box("a", 1, 2, 1, 4), "[1, 2, 1, 4]"),
        (box("a", 1, 2, 3, 1000), "1000"),
        (box("a", -1, 2, 3, 4), "-1"),
        (box("a", 1, 2, 3), "[1, 2, 3]"),
        (poly("a", 1, 2, 3, 4, 5), "[1, 2, 3, 4, 5]"),
        (poly("a", 0, 0, 5, 5, 9, 9), "[0, 0, 5, 5, 9, 9]"),
        (box(" ", 1, 2, 3, 4), "' '"),
        (box("<|coord_4|>", 1, 2, 3, 4), "coord_4"),
        (box("\ud800", 1, 2, 3, 4), "ud800"),
    ],
)
def test_ground_truth_that_can_not_be_a_target_is_refused(obj: DetectionObject, found: str) -> None:
    """R12: nothing is skipped in silence; the sample and the object are named."""
    task, _ = make_task()
    with pytest.raises(DataError) as error:
        task.validate(make_sample([PAIR[0], obj], "scene-9"))
    assert "scene-9" in error.value.what
    assert "object 2" in error.value.what
    assert found in error.value.found
    assert error.value.remedy


def test_ground_truth_out_of_order_is_refused() -> None:
    task, _ = make_task()
    task.validate(make_sample(PAIR))
    with pytest.raises(DataError, match="canonical order"):
        task.validate(make_sample(reversed(PAIR)))


def byte_level_bpe(*, coords: bool) -> PreTrainedTokenizerFast:
    """A real Hugging Face tokenizer, trained on the spot, with merges across structure (`]}}`, `{"`)."""
    model = Tokenizer(models.BPE())
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    texts = [make_task(c, "digits")[0].serialize(PAIR, after=None).text for c in CONTAINERS]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    model.train_from_iterator(
        texts * 9, trainers.BpeTrainer(vocab_size=330, initial_alphabet=alphabet, show_progress=False)
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=model, eos_token="<|im_end|>")
    if coords:
        tokenizer.add_tokens([AddedToken(f"<|coord_{k}|>", normalized=False) for k in range(1000)])
    return tokenizer


REAL = byte_level_bpe(coords=True)


# A BPE token may fuse a description's last punctuation with the quote behind it, and the object is then not kept.
WORDS = OBJECTS.filter(lambda obj: obj.desc[-1].isalnum())


@settings(max_examples=examples(100), deadline=None)
@given(st.sampled_from(CONTAINERS), st.sampled_from(COORDINATES), st.lists(WORDS, max_size=4), st.data())
def test_real_tokenizer_round_trip_and_continuation(
    container: str, coordinates: str, objects: list[DetectionObject], data: st.DataObject
) -> None:
    task = DetectionTask(TaskConfig.model_validate({"container": container, "coordinates": coordinates}), REAL)
    ids = REAL.encode(task.serialize(objects, after=None).text, add_special_tokens=False)
    parsed = task.parse(make_rollout(ids[: data.draw(st.integers(0, len(ids)))]))
    kept = [p.object for p in parsed.objects]
    assert kept == objects[: len(kept)]
    tail = task.serialize(objects[len(kept) :], after=parsed)
    prefix = parsed.rollout.response_token_ids[: parsed.prefix_length]
    again = task.parse(make_rollout([*prefix, *REAL.encode(tail.text, add_special_tokens=False)]))
    assert [p.object for p in again.objects] == objects
    assert again.closed
    whole = task.parse(make_rollout(ids))
    assert [p.object for p in whole.objects] == objects
    assert whole.closed


def test_tokenizer_without_coordinate_tokens_is_refused_unless_digits_are_wanted() -> None:
    """R16's manner: the key, what was found, the way out."""
    tokenizer = byte_level_bpe(coords=False)
    with pytest.raises(ConfigError, match="coordinates") as error:
        DetectionTask(TaskConfig(), tokenizer)
    assert "digits" in error.value.remedy
    DetectionTask(TaskConfig(coordinates="digits"), tokenizer)
