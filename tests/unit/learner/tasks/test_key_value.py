"""The key-value task: strict parsing, matching by key, targets that end in the truth; and whole runs of it (R38)."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from learner.config.load import config_of
from learner.config.sections.loss import LossConfig
from learner.config.sections.task import TaskConfig
from learner.policy.parallel import Ranks
from learner.records import Rollout, Sample
from learner.report.page import write_report
from learner.tasks.key_value import Field, FieldAssignment, KeyValueTask
from shared.errors import DataError
from tests.examples import examples
from tests.runs import events
from tests.tiers import slow
from tests.unit.learner.config.examples import changed
from tests.unit.learner.tasks.fakes import CuttingTokenizer
from tests.unit.learner.trainer_world import Seen, make_config, trainer

LOSS = LossConfig()
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=6).filter(
    lambda text: bool(text.strip()) and "<|" not in text
)
FIELDS = st.dictionaries(TEXTS, TEXTS, max_size=4)


def sample_of(fields: dict[str, str]) -> Sample:
    objects = tuple(Field(key, value) for key, value in fields.items())
    return Sample(sample_id="s", messages=(), images=(), objects=objects, width=1, height=1)


def rollout_of(ids: list[int], truth: dict[str, str]) -> Rollout:
    return Rollout(
        sample=sample_of(truth),
        prompt_token_ids=(1,),
        response_token_ids=tuple(ids),
        finish_reason="stop",
        ver=0,
        seed=0,
    )


def answered(text: str, truth: dict[str, str]) -> FieldAssignment:
    tokenizer = CuttingTokenizer()
    task = KeyValueTask(TaskConfig(type="key_value"), tokenizer)
    return task.match(task.parse(rollout_of(tokenizer.encode(text), truth)))


# ---- parsing and matching ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "fields", "drops"),
    [
        ('{"a": "1", "b": "2"}', {"a": "1", "b": "2"}, {}),
        (' { "a":"1" ,\n"b" : "2" } ', {"a": "1", "b": "2"}, {}),
        ("{}", {}, {}),
        ('{"a": "1", "b": 2, "c": "3"}', {"a": "1", "c": "3"}, {"not_text": 1}),
        ('{"a": "1", "a": "2"}', {"a": "1"}, {"repeated_key": 1}),
        ('{"a": " ", "b": "2"}', {"b": "2"}, {"blank": 1}),
        ('{"a": "1", "b": ["2"], "c": "3"}', {"a": "1"}, {"unreadable": 1}),
        ('{"a": "1", "b": "2', {"a": "1"}, {"unreadable": 1}),
        ('{"a": "1"} and more', {"a": "1"}, {"unreadable": 1}),
        ('{"a": "1",}', {"a": "1"}, {"unreadable": 1}),
        ('the answer is {"a": "1"}', {}, {"unreadable": 1}),
        ("", {}, {"unreadable": 1}),
    ],
)
def test_parsing_is_strict_and_counts_what_it_drops(text: str, fields: dict[str, str], drops: dict[str, int]) -> None:
    parsed = answered(text, {}).parsed
    assert dict(parsed.fields) == fields
    assert dict(parsed.drops) == drops
    assert parsed.closed == (not drops.get("unreadable"))


@settings(max_examples=examples(40))
@given(fields=FIELDS)
def test_json_of_texts_is_read_as_json_reads_it(fields: dict[str, str]) -> None:
    """Reference: Python's own writer, with and without escapes."""
    for ascii_only in (True, False):
        parsed = answered(json.dumps(fields, ensure_ascii=ascii_only), {}).parsed
        assert (dict(parsed.fields), parsed.closed, dict(parsed.drops)) == (fields, True, {})


@settings(max_examples=examples(40))
@given(text=st.text(st.sampled_from('{}":, \\ua1[]'), max_size=30))
def test_no_answer_makes_parsing_fail(text: str) -> None:
    parsed = answered(text, {}).parsed
    try:
        whole = json.loads(text)
    except ValueError:
        whole = None
    if not isinstance(whole, dict):
        assert not parsed.closed


def test_pairs_are_matched_by_key() -> None:
    found = answered('{"a": "1", "b": "no", "x": "?"}', {"b": "2", "a": "1", "c": "3"})
    assert (found.right, found.wrong, found.extra, found.missed) == (
        (Field("a", "1"),),
        (Field("b", "no"),),
        (Field("x", "?"),),
        ("c",),
    )


def test_metrics_count_pairs() -> None:
    task = KeyValueTask(TaskConfig(type="key_value"), CuttingTokenizer())
    truth = {"a": "1", "b": "2"}
    metrics = task.evaluate(
        [answered('{"a": "1", "b": "no", "x": "?"}', truth), answered('{"a": "1", "b": "2"}', truth)]
    )
    assert metrics["precision"] == 3 / 5
    assert metrics["recall"] == 3 / 4
    assert metrics["f1"] == pytest.approx(2 * 3 / (5 + 4))
    assert (metrics["key_recall"], metrics["exact_match"], metrics["parse_rate"]) == (1.0, 0.5, 1.0)
    assert set(task.evaluate([]).values()) == {0.0}


# ---- targets -------------------------------------------------------------------------------------------------------


@st.composite
def cases(draw: st.DrawFn) -> tuple[KeyValueTask, CuttingTokenizer, list[int], dict[str, str]]:
    """Draw an answer that has some right pairs, then maybe a wrong one, maybe cut off, in tokens cut anywhere."""
    truth = draw(FIELDS)
    said = dict(draw(st.permutations(list(truth.items())))[: draw(st.integers(0, 4))])
    if draw(st.booleans()):
        said |= draw(st.dictionaries(TEXTS, TEXTS, max_size=2))
    text = json.dumps(said, ensure_ascii=False, separators=draw(st.sampled_from([(", ", ": "), (",", ":")])))
    data = text[: draw(st.integers(0, len(text)))].encode() if draw(st.booleans()) else text.encode()
    tokenizer = CuttingTokenizer()
    ids = tokenizer.split(data, draw(st.sets(st.integers(0, max(len(data), 1)))), whole_coords=False)
    return KeyValueTask(TaskConfig(type="key_value"), tokenizer), tokenizer, ids, truth


@settings(max_examples=examples(40))
@given(case=cases())
def test_a_target_is_the_own_right_prefix_and_ends_in_the_whole_truth(
    case: tuple[KeyValueTask, CuttingTokenizer, list[int], dict[str, str]],
) -> None:
    task, tokenizer, ids, truth = case
    assignment = task.match(task.parse(rollout_of(ids, truth)))
    target = task.target(assignment, LOSS)
    length = target.prefix_length
    assert target.token_ids[:length].tolist() == ids[:length], "the prefix is the rollout's own tokens"
    text = b"".join(map(tokenizer.piece, target.token_ids[:-1].tolist())).decode()
    assert json.loads(text) == truth, "no wrong pair stays, and none is missing"
    assert target.token_ids[-1] == tokenizer.eos_token_id
    assert (target.labels[:length] == -100).all()
    assert (target.labels[length:] == target.token_ids[length:]).all()
    assert (target.loss_weights == (target.labels != -100)).all()
    right_first = [entry.field in assignment.right for entry in assignment.parsed.entries]
    if all(right_first) and right_first and Counter(map(len, map(tokenizer.piece, ids))).keys() == {1}:
        whole = len(assignment.parsed.text.data[: assignment.parsed.entries[-1].end])
        assert length == whole, "right pairs are kept as the model wrote them"


def test_a_right_answer_is_taught_only_to_end() -> None:
    tokenizer = CuttingTokenizer()
    task = KeyValueTask(TaskConfig(type="key_value"), tokenizer)
    ids = tokenizer.encode('{"a": "1"}')
    target = task.target(task.match(task.parse(rollout_of(ids, {"a": "1"}))), LOSS)
    assert target.prefix_length == len(ids) - 1
    assert target.labels[-2:].tolist() == [ids[-1], tokenizer.eos_token_id]


@pytest.mark.parametrize("fields", [{"": "1"}, {"a": " "}, {"a": "<|coord_1|>"}])
def test_fields_that_cannot_be_taught_are_refused(fields: dict[str, str]) -> None:
    with pytest.raises(DataError, match="sample s"):
        KeyValueTask.check(sample_of(fields))


# ---- whole runs ----------------------------------------------------------------------------------------------------


def write_documents(path: Path, fields: dict[str, str], *, pages: int) -> str:
    """Four samples with the same fields, of so many images each, every one of another size."""
    rows = []
    for i in range(4):
        turn = {"role": "user", "content": "<image>" * pages + "Which fields?"}
        rows.append({"id": f"d{i}", "messages": [turn], "fields": fields})
        for page in range(pages):
            Image.fromarray(np.full((64, 64 + 32 * page, 3), 40 * i, np.uint8)).save(path / f"{i}-{page}.png")
            rows[-1].setdefault("images", []).append(f"{i}-{page}.png")
    (path / "fields.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path / "fields.jsonl")


def run(model: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], **training: Any) -> Path:
    base = make_config(model, folder, eval_on_end=True, **training).model_dump()
    base["custom"]["trainer_variant"] = "rollout_matching_sft"
    base["custom"]["extra"]["rollout_matching"] = {
        "rollout_backend": "hf",
        "decode_batch_size": 4,
        "decoding": {"temperature": 0.0, "max_new_tokens": 24},
    }
    with trainer(config_of(changed(base, {"task.type": "key_value", **changes})), Ranks(), monkeypatch, Seen()) as made:
        made.run()
    return folder / "run"


@pytest.mark.slow
def test_a_model_learns_the_fields_from_its_own_answers(
    tiny_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It goes from random weights to the exact answer, end included; nothing but rollouts is learned."""
    data = write_documents(tmp_path, {"one": "two", "six": "ten"}, pages=0)
    keys = {"max_steps": 20, "effective_batch_size": 2, "learning_rate": 1e-2, "eval_on_start": True}
    run_dir = run(tiny_text, tmp_path, monkeypatch, {"data.train": data, "data.test": data}, **keys)
    before, after = (event["metrics"] for event in events(run_dir, "eval"))
    assert (before["f1"], before["exact_match"]) == (0.0, 0.0)
    assert (after["f1"], after["exact_match"], after["parse_rate"]) == (1.0, 1.0, 1.0)
    (last,) = [event["metrics"] for event in events(run_dir, "step")][-1:]
    assert (last["right"], last["missed"], last["wrong"]) == (4.0, 0.0, 0.0)


@pytest.mark.parametrize("pages", [slow(1), 3])
def test_fields_of_pictures_are_learned_evaluated_and_reported(
    pages: int, tiny_vlm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A document may have several pages: read, rolled out, packed and learned as one sample."""
    data = write_documents(tmp_path, {"one": "two"}, pages=pages)
    keys = {"max_steps": 1, "effective_batch_size": 2}
    run_dir = run(tiny_vlm, tmp_path, monkeypatch, {"data.train": data, "data.test": data}, **keys)
    scenes = [json.loads(line) for line in (run_dir / "eval" / "step_000001.jsonl").read_text().splitlines()]
    assert [(scene["id"], scene["fields"]) for scene in scenes] == [(f"d{i}", {"one": "two"}) for i in range(4)]
    assert [Path(image).name for image in scenes[0]["images"]] == [f"0-{page}.png" for page in range(pages)]
    assert (scenes[0]["width"], scenes[0]["height"]) == (64, 64), "as the first image has them"
    (step,) = [event["metrics"] for event in events(run_dir, "step")]
    assert step["missed"] == 2.0, "the step learned two documents"
    page = write_report(run_dir).read_text()
    assert "exact_match" in page
    assert "damaged" not in page
