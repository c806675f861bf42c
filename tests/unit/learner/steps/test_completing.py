"""Labels completed in the real loop: what is learned then, on which ranks, and after a resume (R48, D20)."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from learner.config.load import config_of
from learner.config.schema import RunConfig
from learner.config.sections.labels import CompleteConfig
from learner.policy.parallel import Ranks
from learner.records import DetectionObject, Rollout, Sample, Votes
from learner.rollout.backend import COMPLETES_LABELS, MicroStep
from learner.run.output_dir import claim_output_dir
from learner.steps import completing
from learner.steps.completing import Completion, LabelCompletion, _added, read_label
from learner.tasks.detection.completion import CompletionEstimate
from shared.config.model import ConfigErrors
from shared.errors import CheckpointError, OutputError
from tests.tiers import slow
from tests.unit.learner.steps.test_segments import SAMPLES, TASK, TOKENIZER
from tests.unit.learner.trainer_log import all_learned, events_of, everyone
from tests.unit.learner.trainer_world import FakeBackend, Seen, make_config, run

EXTRA = {"desc": "seven", "bbox_2d": [75, 82, 95, 98]}  # pixels; no label of the data comes near it
EXTRA_BINS = (749, 819, 949, 979)
VARIANTS = ("sft", "rollout_matching_sft", slow("stage2_ab_training"), slow("grpo"))
COMPLETE = {"rollouts": 2, "min_votes": 2}


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def _finds_one_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers that are drawn to complete labels have all annotated objects, and the extra one."""
    answer = FakeBackend.generate

    def generate(self: FakeBackend, samples: Sequence[Sample], **place: Any) -> list[Rollout]:
        rollouts = answer(self, samples, **place)
        if place.get("temperature") is None:
            return rollouts
        return [answer_of(rollout, self._task, self.policy.tokenizer) for rollout in rollouts]

    monkeypatch.setattr(FakeBackend, "generate", generate)


def answer_of(rollout: Rollout, task: Any, tokenizer: Any) -> Rollout:
    from dataclasses import replace

    objects = [obj._replace(votes=None) for obj in rollout.sample.objects if obj.votes is None]
    text = task.serialize([*objects, DetectionObject("seven", "bbox_2d", EXTRA_BINS)], after=None).text
    return replace(rollout, response_token_ids=tuple(tokenizer.encode(text, add_special_tokens=False)))


def config_for(model: Path, folder: Path, variant: str, complete: dict[str, Any] | None, **training: Any) -> RunConfig:
    folder.mkdir(exist_ok=True)
    settings = {"effective_batch_size": 4, "per_device_train_batch_size": 2, "max_steps": 4, **training}
    values = make_config(model, folder, **settings).model_dump(exclude_unset=True)
    path = Path(values["data"]["train"])
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    rows[0]["objects"].append({"desc": "seven", "bbox_2d": [0, 60, 9, 69]})  # makes the name known
    if complete is None:  # the labels as they become
        for row in rows:
            row["objects"].append(EXTRA)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    values["custom"]["trainer_variant"] = variant
    if variant == "grpo":
        values["custom"]["extra"]["rollout_matching"]["decoding"]["temperature"] = 1.0
        values["grpo"] = {"num_generations": 2}
    if variant == "stage2_ab_training":
        values["stage2_ab"] = {"schedule": {"b_ratio": 0.5}}
        values["training"]["per_device_train_batch_size"] = 1
    return config_of({**values, "labels": {"complete": complete}})


Train = Callable[..., list[Seen]]


@pytest.fixture
def train(tiny_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Train:
    def train(
        variant: str, complete: dict[str, Any] | None, folder: str, world_size: int = 1, **training: Any
    ) -> list[Seen]:
        config = config_for(tiny_text, tmp_path / folder, variant, complete, **training)
        return run(config, monkeypatch, world_size)

    return train


@pytest.mark.parametrize("variant", VARIANTS)
def test_what_is_learned_is_what_complete_labels_teach(train: Train, tmp_path: Path, variant: str) -> None:
    """Bit for bit: the run on labels with gaps becomes the run whose annotations have the objects."""
    (completed,) = train(variant, COMPLETE, "gaps")
    (annotated,) = train(variant, None, "whole")
    assert completed.weights.keys() == annotated.weights.keys()
    assert all(torch.equal(completed.weights[name], annotated.weights[name]) for name in annotated.weights)
    (event,) = events_of(tmp_path / "gaps", "labels")
    assert (event["added"], event["samples"], event["min_votes"], event["global_step"]) == (8, 8, 2, 0)
    drawn = [call for call in completed.calls if call.temperature is not None]
    assert sorted(i for call in drawn for i in call.sample_ids) == sorted(everyone(8, times=2).elements())


def test_all_ranks_learn_the_same_labels(train: Train, tmp_path: Path) -> None:
    """D5: each rank asks for its share, and the labels are those of one rank."""
    seen = train("sft", COMPLETE, "two", 2, max_steps=2)
    train("sft", COMPLETE, "one", max_steps=2, per_device_train_batch_size=4)
    files = [(tmp_path / name / "run" / "labels" / "step_000000.json").read_text() for name in ("one", "two")]
    assert files[0] == files[1]
    calls = [call for one in seen for call in one.calls if call.temperature is not None]
    assert sorted(i for call in calls for i in call.sample_ids) == sorted(everyone(8, times=2).elements())
    assert len({call.first_req_idx for call in calls}) == len(calls)
    assert all_learned(seen) == everyone(8)


@pytest.mark.parametrize(
    ("stopped_at", "refresh"),
    [(2, 2), slow(3, "once"), slow(2, "once"), slow(3, 2)],
)
def test_a_resumed_run_goes_on_with_its_labels(
    train: Train, tmp_path: Path, refresh: str | int, stopped_at: int
) -> None:
    """D11: completed exactly once per due step, whatever is resumed; the weights are those of the whole run."""
    settings = {**COMPLETE, "refresh": refresh}
    (whole,) = train("rollout_matching_sft", settings, "whole", max_steps=6, save_steps=2)
    (first,) = train("rollout_matching_sft", settings, "parts", max_steps=6, save_steps=stopped_at)
    checkpoint = tmp_path / "parts" / "run" / f"checkpoint-{stopped_at}"
    (second,) = train("rollout_matching_sft", settings, "parts", max_steps=6, resume_from_checkpoint=str(checkpoint))
    assert all(torch.equal(second.weights[name], whole.weights[name]) for name in whole.weights)
    due = [0] if refresh == "once" else [0, 2, 4]
    assert [e["global_step"] for e in events_of(tmp_path / "whole", "labels")] == due
    again = {call.global_step for call in second.calls if call.temperature is not None}
    assert again == {step for step in due if step > stopped_at}
    assert {call.global_step for call in first.calls if call.temperature is not None} == set(due)


@pytest.mark.parametrize("world_size", [slow(1), 2])
def test_the_completed_annotations_are_a_file(train: Train, tmp_path: Path, world_size: int) -> None:
    """`write`: those of the newest completion, also after a resume from an older one."""
    out = tmp_path / "completed.jsonl"
    settings = {**COMPLETE, "refresh": 2, "write": str(out)}
    train("sft", settings, "parts", world_size, max_steps=3, save_steps=1)
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    extra = [[obj for obj in row["objects"] if "votes" in obj] for row in rows]
    assert [(one["desc"], one["votes"], one["answers"]) for (one,) in extra] == 8 * [("seven", 2, 2)]
    newest = out.read_bytes()
    stored = tmp_path / "parts" / "run" / "labels" / "step_000000.json"
    content = json.loads(stored.read_text())
    content["samples"].popitem()
    stored.write_text(json.dumps(content))
    checkpoint = str(tmp_path / "parts" / "run" / "checkpoint-1")
    train("sft", settings, "parts", world_size, max_steps=2, resume_from_checkpoint=checkpoint)
    again = [json.loads(line) for line in out.read_text().splitlines()]
    assert [sum("votes" in obj for obj in row["objects"]) for row in again] == [*7 * [1], 0]
    train("sft", settings, "parts", world_size, max_steps=3, resume_from_checkpoint=checkpoint)
    assert out.read_bytes() == newest


def test_a_file_that_is_there_is_refused_before_anything_is_spent(tiny_text: Path, tmp_path: Path) -> None:
    out = tmp_path / "mine.jsonl"
    out.write_text("mine")
    config = config_for(tiny_text, tmp_path, "sft", {**COMPLETE, "write": str(out)})
    with pytest.raises(OutputError) as error:
        claim_output_dir(config, Ranks())
    assert str(out) in str(error.value)
    assert out.read_text() == "mine"


def test_a_sample_grows_no_longer_than_a_row() -> None:
    """The label with the fewest votes is left out."""
    sample = SAMPLES[0]
    limit = len(sample.objects) + 1
    completion = completion_of(
        [sample],
        answers=[[(0, 750, 50, 800), (900, 900, 950, 950)], [(0, 750, 50, 800)]],
        too_long=lambda one: "too long" if len(one.objects) > limit else None,
        min_votes=1,
    )
    result = completion.complete(0, 1)
    assert (result.added, result.left_out) == (1, 1)
    (kept,) = [obj for obj in completion._samples[0].objects if obj.votes is not None]
    assert (kept.bins, kept.votes.found if kept.votes else 0) == ((0, 750, 50, 800), 2)


@pytest.mark.parametrize(("every_s", "wanted"), [(3600.0, []), (-1.0, [1, 2])])
def test_a_long_completion_says_how_far_it_is(
    monkeypatch: pytest.MonkeyPatch, every_s: float, wanted: list[int]
) -> None:
    """Now and then, and not after its last answer."""
    monkeypatch.setattr(completing, "_AT_ONCE", 1)
    monkeypatch.setattr(completing, "_TELL_EVERY_S", every_s)
    told: list[str] = []
    completion = completion_of(list(SAMPLES[:3]), answers=[[], []], tell=told.append, min_votes=1)
    completion.complete(0, 1)
    assert len(told) == len(wanted)
    assert all(f"{number} of 3 samples" in text for number, text in zip(wanted, told, strict=True))


def test_a_poor_estimate_completes_nothing_and_says_why() -> None:
    completion = completion_of(list(SAMPLES), answers=[[(0, 750, 50, 800)], [(0, 750, 50, 800)]], min_votes="auto")
    result = completion.complete(0, 1)
    assert (result.added, result.samples, result.min_votes) == (0, 0, None)
    assert result.why
    assert result.why in str(result)
    assert completion._samples == list(SAMPLES)


def test_a_completion_begins_from_the_annotations() -> None:
    """D20: what an earlier one added is no label any more if the answers of now lack it."""
    first, second = (0, 750, 50, 800), (900, 900, 950, 950)
    answers: list[list[tuple[int, int, int, int]]] = [[first], [first]]
    completion = completion_of([SAMPLES[0]], answers=answers, min_votes=2)
    completion.complete(0, 1)
    answers[:] = [[second], [second]]
    result = completion.complete(4, 2)
    assert result.labels == len(SAMPLES[0].objects)
    assert [obj.bins for obj in completion._samples[0].objects if obj.votes is not None] == [second]
    answers[:] = [[], []]
    assert completion.complete(8, 3).added == 0
    assert completion._samples == [SAMPLES[0]]


def test_the_requests_of_a_completion_are_numbered_over_all_samples_and_ranks(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R11, D21: each answer has its own seed, that of its sample's place among all samples, on any number of ranks and
    however many samples are asked about at once."""
    monkeypatch.setattr(completing, "_AT_ONCE", 3)
    by_ranks = []
    for world_size in (1, 2):
        folder = f"ranks{world_size}"
        seen = train("sft", COMPLETE, folder, world_size, max_steps=1, per_device_train_batch_size=4 // world_size)
        calls = [call for one in seen for call in one.calls if call.temperature is not None]
        assert {call.micro_step_idx for call in calls} == {COMPLETES_LABELS}
        places = [(call.first_req_idx + i, name) for call in calls for i, name in enumerate(call.sample_ids)]
        assert len({place for place, _ in places}) == len(places) == 2 * 8
        by_ranks.append(sorted(places))
    assert by_ranks[0] == by_ranks[1] == [(2 * i + n, f"s{i}") for i in range(8) for n in range(2)]


def test_labels_that_cannot_be_read_name_their_file(tmp_path: Path) -> None:
    completion = completion_of(list(SAMPLES), answers=[[], []], folder=tmp_path)
    path = tmp_path / "labels" / "step_000002.json"
    path.parent.mkdir()
    path.write_text('{"global_step": 2, "samples": {"nobody": {}}}')
    completion.restore(1, tmp_path)  # the file of a later step goes
    assert not path.exists()
    path.write_text('{"global_step": 2, "samples": {"nobody": {}}}')
    with pytest.raises(CheckpointError) as error:
        completion.restore(2, tmp_path)
    assert str(path) in str(error.value)


def test_a_run_that_goes_on_elsewhere_takes_the_newest_labels_along(tmp_path: Path) -> None:
    """They are kept under their own step, so that a resume of the new run finds them too."""
    first = completion_of(list(SAMPLES), answers=[[(0, 750, 50, 800)], [(0, 750, 50, 800)]], folder=tmp_path / "first")
    first.complete(0, 1)
    first.complete(4, 2)
    second = completion_of(list(SAMPLES), answers=[[], []], folder=tmp_path / "second")
    second.restore(5, tmp_path / "first")
    assert second._samples == first._samples
    (copied,) = (tmp_path / "second" / "labels").iterdir()
    assert copied.name == "step_000004.json"
    assert json.loads(copied.read_text())["global_step"] == 4


@pytest.mark.parametrize("wrong", [{"min_votes": 0}, {"min_votes": 5}, {"refresh": 0}, {"rollouts": 1}])
def test_keys_out_of_range_are_refused(tiny_text: Path, tmp_path: Path, wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigErrors) as error:
        config_for(tiny_text, tmp_path, "sft", wrong)
    (mistake,) = error.value.mistakes
    assert mistake.path == f"labels.complete.{next(iter(wrong))}"


def completion_of(
    samples: list[Sample], *, answers: list[list[tuple[int, int, int, int]]], folder: Path | None = None, **options: Any
) -> Any:
    """Complete the labels of samples that all get these answers."""
    too_long, tell = options.pop("too_long", lambda _: None), options.pop("tell", lambda _: None)
    name = samples[0].objects[0].desc

    class Same:
        def generate_window(self, window: Sequence[MicroStep], **_: Any) -> list[list[Rollout]]:
            return [[answer(i, one) for i, one in enumerate(step.samples)] for step in window]

    def answer(i: int, sample: Sample) -> Rollout:
        objects = [DetectionObject(name, "bbox_2d", bins) for bins in answers[i % len(answers)]]
        ids = TOKENIZER.encode(TASK.serialize(objects, after=None).text)
        return Rollout(
            sample=sample,
            prompt_token_ids=(1,),
            response_token_ids=tuple(ids),
            finish_reason="stop",
            ver=1,
            seed=0,
        )

    return LabelCompletion(
        samples,
        settings=CompleteConfig(rollouts=len(answers), **options),
        backend=Same(),  # type: ignore[arg-type]
        task=TASK,  # type: ignore[arg-type]
        ranks=Ranks(),
        run_dir=folder or Path("/nonexistent"),
        open_image=lambda _: Image.new("RGB", (100, 100)),
        too_long=too_long,
        tell=tell,
    )


@pytest.mark.parametrize("image", [None, 2])
def test_what_a_run_writes_of_a_completed_label_reads_back(image: int | None) -> None:
    """It has its votes, and its image if the sample has several."""
    completed = DetectionObject("cell", "bbox_2d", (1, 2, 30, 40), Votes(3, 4), image=image)
    annotated = completed._replace(votes=None)
    sample = Sample(sample_id="s", messages=(), images=(), objects=(annotated, completed), width=9, height=9)
    written = json.loads(json.dumps(_added(sample)))
    assert list(map(read_label, written["objects"])) == [completed]
    assert len(written["objects"][0]) == (4 if image is None else 5)
    written["objects"][0][3].append(1.0)  # a weight, which earlier versions wrote
    assert list(map(read_label, written["objects"])) == [completed]


@pytest.mark.parametrize("missing", [None, 0.25])
def test_a_completion_says_what_it_added_and_what_it_takes_to_be_missing(missing: float | None) -> None:
    """And how much of what it added is right."""
    precision, free = (0.1, 0.2, 0.6, 0.8), (90, 40, 5, 15)
    known = CompletionEstimate(min_votes=3, why="", missing=missing, recall=(), precision=precision, free=free)
    result = Completion(
        global_step=7,
        ver=2,
        rollouts=4,
        accept="votes",
        right=0.75,
        min_votes=3,
        why="",
        added=5,
        labels=40,
        samples=2,
        left_out=1,
        estimate=known,
    )
    assert str(result).startswith("labels: 5 added to 40, which at least 3 of 4 answers have")
    assert ("25%" in str(result)) == (missing is not None)
    assert ("75% of these are right" in str(result)) == (missing is not None)
    assert result.to_json()["estimate"] == known.to_json()
    assert result.to_json()["added"] == 5
