"""The loop, with the real tiny policy and everything else real but the servers: who is trained when, on what."""

from __future__ import annotations

import gc
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from learner.config.inference import CALIBRATION_NAME
from learner.config.load import config_of
from learner.config.plan import resolve
from learner.data.sampler import DistributedSampler
from learner.policy.load import Policy
from learner.policy.loss import RowLoss
from learner.policy.parallel import Ranks
from learner.records import LearnedRow, PackedRow, Rollout, Sample, StepResult
from learner.report.page import render
from learner.report.read import read_runs
from learner.steps.source import FreshSteps
from learner.steps.totals import StepTotals
from learner.tasks.detection.scores import read_calibration
from learner.tasks.detection.task import DetectionTask
from learner.trainer import Trainer
from shared.errors import OutOfMemoryError, PromptMismatchError
from tests.runs import events
from tests.tiers import slow
from tests.unit.learner.trainer_log import all_learned, carried_at_end, events_of, everyone
from tests.unit.learner.trainer_world import FakeBackend, Generate, Seen, make_config, run, trainer, write_data

CARRY = {"per_device_train_batch_size": 3, "gradient_accumulation_steps": 2, "global_max_length": 192}


pytestmark = pytest.mark.usefixtures("one_thread")


# ---- every sample once (R12) ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [slow(1), 2])
@pytest.mark.parametrize("variant", [slow("sft"), "rollout_matching_sft"])
def test_every_sample_is_learned_once_per_epoch(
    tiny_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, world_size: int, variant: str
) -> None:
    """R12: 7 samples do not divide by the batch, and the second epoch is another order."""
    settings = {"per_device_train_batch_size": 2, "num_train_epochs": 2, "packing": False}
    config = make_config(tiny_text, tmp_path, variant=variant, num_samples=7, **settings)
    seen = run(config, monkeypatch, world_size)
    assert all_learned(seen) == everyone(7, times=2)


def test_every_rank_draws_with_the_seeds_of_its_own_places(
    tiny_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R11: of the micro-step's four places rank 0 has the first two and rank 1 the others."""
    settings = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_steps": 2}
    config = make_config(tiny_text, tmp_path, variant="rollout_matching_sft", **settings)
    for rank, seen in enumerate(run(config, monkeypatch, 2)):
        places = [
            (call.global_step, call.micro_step_idx, call.first_req_idx, len(call.sample_ids)) for call in seen.calls
        ]
        assert places == [(step, micro_step, 2 * rank, 2) for step in (0, 1) for micro_step in (0, 1)]


def test_the_log_begins_with_the_plan(tiny_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """R15: the sizes that the run has, as `check` prints them."""
    config = make_config(tiny_text, tmp_path, per_device_train_batch_size=2, max_steps=1)
    run(config, monkeypatch)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert lines[0]["event"] == "plan"
    assert lines[0].items() >= json.loads(json.dumps(resolve(config, 1).to_json())).items()


def test_what_a_run_s_start_made_is_left_out_of_later_collections(
    tiny_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    frozen: list[int] = []
    step = Trainer.step

    def watched(self: Trainer) -> tuple[StepResult, Sequence[LearnedRow]]:
        frozen.append(gc.get_freeze_count())
        return step(self)

    monkeypatch.setattr(Trainer, "step", watched)
    run(make_config(tiny_text, tmp_path, per_device_train_batch_size=2, max_steps=3), monkeypatch)
    assert min(frozen[1:]) > frozen[0] + 100
    assert gc.get_freeze_count() == 0


def test_the_most_memory_of_a_gpu_is_in_its_step_and_on_cpu_nothing_is(
    tiny_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a GPU nothing measures it, so the policy says what one would; `tests/gpu` measures."""
    run(make_config(tiny_text, tmp_path, max_steps=1, output_dir=str(tmp_path / "cpu")), monkeypatch)
    peaks = iter((1.5, 2.5))
    monkeypatch.setattr(Policy, "peak_gib", lambda _: next(peaks))
    run(make_config(tiny_text, tmp_path, max_steps=2), monkeypatch)
    found = [event["metrics"].get("gpu_peak_gib") for event in events(tmp_path / "run", "step")]
    assert found == [1.5, 2.5]
    assert all("gpu_peak_gib" not in event["metrics"] for event in events(tmp_path / "cpu", "step"))


@pytest.mark.parametrize(("packing", "ratio", "wanted"), [(True, 1.0, 1.0), (True, 0.01, 0.0), (False, 1.0, None)])
def test_rows_below_the_configured_fill_are_counted(
    tiny_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, packing: bool, ratio: float, wanted: float | None
) -> None:
    """D6: `packing_min_fill_ratio` of the configuration, where rows are packed."""
    settings = {"packing": packing, "packing_min_fill_ratio": ratio, "global_max_length": 400}
    run(make_config(tiny_text, tmp_path, per_device_train_batch_size=2, max_steps=1, **settings), monkeypatch)
    (step,) = events_of(tmp_path, "step")
    assert step["metrics"].get("underfilled") == wanted


@pytest.mark.parametrize("world_size", [slow(1), 2])
def test_what_is_carried_is_learned_later_or_told(
    tiny_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, world_size: int
) -> None:
    """R12, D6: rows are too short for a micro-step's segments, so some wait; none is lost, none is learned twice."""
    config = make_config(
        tiny_text, tmp_path, variant="rollout_matching_sft", num_samples=24, num_train_epochs=1, **CARRY
    )
    seen = run(config, monkeypatch, world_size)
    left = carried_at_end(tmp_path)
    assert left, "nothing was carried: the test shows nothing"
    assert all_learned(seen) + Counter(left) == everyone(24)


@pytest.mark.parametrize("world_size", [slow(1), 2])
def test_the_last_step_learns_what_is_carried_where_nothing_may_be_dropped(
    tiny_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, world_size: int
) -> None:
    """D6, R12, D5: `packing_drop_last: false`. Its rows come after the last micro-batch's, as one micro-step more."""
    settings = {"num_samples": 24, "num_train_epochs": 1, "packing_drop_last": False, **CARRY}
    config = make_config(tiny_text, tmp_path, variant="rollout_matching_sft", **settings)
    seen = run(config, monkeypatch, world_size)
    assert carried_at_end(tmp_path) == []
    assert all_learned(seen) == everyone(24)
    assert len({len(one.rows) for one in seen}) == 1
    *steps, last = events_of(tmp_path, "step")
    assert {step["num_rows"] for step in steps} == {2 * world_size}
    assert last["num_rows"] > 2 * world_size


@pytest.mark.parametrize(("before", "after"), [slow(1, 1), slow(2, 2), (2, 1)])
def test_carried_segments_survive_a_resume(
    tiny_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: int, after: int
) -> None:
    """R12: what waits in the buffer when a checkpoint is written comes again, also on another number of ranks."""

    def config(world_size: int, **changes: Any) -> Any:
        settings = CARRY | {"per_device_train_batch_size": 6 // world_size, "global_max_length": 384 // world_size}
        return make_config(tiny_text, tmp_path, variant="rollout_matching_sft", num_samples=24, **(settings | changes))

    first = run(config(before, max_steps=1, save_on_end=True), monkeypatch, before)
    waiting = carried_at_end(tmp_path)
    assert waiting
    second = run(config(after, max_steps=2, resume_from_checkpoint="latest"), monkeypatch, after)
    left = carried_at_end(tmp_path)[len(waiting) :]
    assert all_learned(first) + all_learned(second) + Counter(left) == everyone(24)
    places = Counter(
        (call.global_step, call.micro_step_idx, call.first_req_idx + i)
        for one in second
        for call in one.calls
        for i in range(len(call.sample_ids))
    )
    assert set(places.values()) == {1}, "R11: two requests share a seed"


def test_an_epoch_s_short_step_makes_a_part_of_an_update(
    tiny_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """D11: five samples in steps of four. The second step's gradient and learning rate are a quarter of what a whole
    step's would be."""
    settings: dict[str, Any] = {"per_device_train_batch_size": 4, "max_steps": 2, "lr_scheduler_type": "constant"}
    found = []
    for name in ("weighted", "whole"):
        (tmp_path / name).mkdir()
        (seen,) = run(make_config(tiny_text, tmp_path / name, num_samples=5, **settings), monkeypatch)
        found.append((seen.gradients[1], events_of(tmp_path / name, "step")[1]))
        monkeypatch.setattr(StepTotals, "share_of", lambda *_: 1.0)
    (gradient, step), (whole_gradient, whole_step) = found
    assert step["metrics"]["batch_share"] == 0.25
    assert step["learning_rate"] == pytest.approx(whole_step["learning_rate"] / 4)
    for name, tensor in whole_gradient.items():
        torch.testing.assert_close(gradient[name], tensor / 4)


def test_a_save_before_the_first_resumed_step_keeps_what_was_carried(
    tiny_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R12: a resumed run that has nothing left to do writes its checkpoint again; nobody gets lost in that."""
    settings = {**CARRY, "global_max_length": 128, "max_steps": 1, "save_on_end": True, "num_samples": 24}
    run(make_config(tiny_text, tmp_path, variant="rollout_matching_sft", **settings), monkeypatch)
    stored = tmp_path / "run" / "checkpoint-1" / "trainer_state.json"
    before = json.loads(stored.read_text())["cursor"]
    settings["resume_from_checkpoint"] = "latest"
    run(make_config(tiny_text, tmp_path, variant="rollout_matching_sft", **settings), monkeypatch)
    assert before["carried"][0]
    assert json.loads(stored.read_text())["cursor"] == before


@pytest.mark.parametrize("variant", [slow("sft"), "rollout_matching_sft"])
def test_a_resumed_run_ends_with_the_uninterrupted_run_s_weights(
    tiny_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variant: str
) -> None:
    """Bit for bit: order of the data, seeds, moments and schedule all go on."""
    settings = {"per_device_train_batch_size": 2, "max_steps": 5, "packing": False, "lr_scheduler_type": "constant"}
    whole = run(make_config(tiny_text, tmp_path, variant=variant, num_samples=7, **settings), monkeypatch)[0]
    (tmp_path / "again").mkdir()
    settings["save_on_end"] = True

    def part(**changes: Any) -> Seen:
        folder = tmp_path / "again"
        config = make_config(tiny_text, folder, variant=variant, num_samples=7, **(settings | changes))
        return run(config, monkeypatch)[0]

    first, second = part(max_steps=3), part(resume_from_checkpoint="latest")
    assert first.learned + second.learned == whole.learned
    assert first.calls + second.calls == whole.calls
    for name, tensor in whole.weights.items():
        assert torch.equal(second.weights[name], tensor), name


# ---- what rollouts are made of (R10, R11, R03) ---------------------------------------------------------------------


def test_rollouts_only_after_the_sync_of_the_present_weights(
    tiny_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R10: one sync before each step's rollouts and one before the last evaluation, none twice for the same weights.
    (The fake backend compares weights at every call, too.)"""
    settings = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "max_steps": 2}
    settings |= {"eval_on_start": True, "eval_on_end": True}
    seen = run(make_config(tiny_text, tmp_path, variant="rollout_matching_sft", **settings), monkeypatch)[0]

    def name(event: Any) -> str:
        if isinstance(event, Generate):
            return f"{'eval' if event.greedy else 'rollout'}@{event.global_step}"
        return event if event == "sync" else "row"

    assert [name(event) for event in seen.events] == [
        *("sync", "eval@0"),
        *("rollout@0", "rollout@0", "row", "row"),
        *("sync", "rollout@1", "rollout@1", "row", "row"),
        *("sync", "eval@2"),
    ]
    assert [line["ver"] for line in events_of(tmp_path, "sync")] == [1, 2, 3]
    assert [line["ver"] for line in events_of(tmp_path, "step")] == [1, 2]


@pytest.mark.parametrize("world_size", [slow(1), 2])
@pytest.mark.parametrize("quiet_after", [1, slow(3), slow(99)])
def test_a_sync_that_waits_for_rollouts_comes_between_two_rows(
    tiny_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quiet_after: int, world_size: int
) -> None:
    """R10, R24: at the latest before the update, at the same place on all ranks, one of which has fewer rows of its
    own. The step learns what it learns without it."""
    settings = {"per_device_train_batch_size": 4, "num_train_epochs": 1, "packing": False, "eval_on_start": True}
    config = make_config(tiny_text, tmp_path, num_samples=8 * world_size - 1, **settings)
    plain = run(config, monkeypatch, world_size)
    asked: Counter[int] = Counter()

    def is_quiet(source: FreshSteps) -> bool:
        asked[id(source)] += 1
        return asked[id(source)] >= quiet_after

    monkeypatch.setattr(FreshSteps, "wants_sync", lambda *_: True)
    monkeypatch.setattr(FreshSteps, "postpones_sync", lambda _, step: step > 0)
    monkeypatch.setattr(FreshSteps, "is_quiet", is_quiet)
    waited = run(config, monkeypatch, world_size)
    place = 1 + 4 + min(quiet_after, len(plain[0].rows) - 4)
    for before, seen in zip(plain, waited, strict=True):
        told = [event for event in seen.events if not isinstance(event, Generate)]
        assert [i for i, event in enumerate(told) if event == "sync"] == [0, place]
        assert seen.prepared == [4], "before the step's rows, while its rollouts are made"
        assert seen.rows == before.rows
        for name, tensor in seen.weights.items():
            assert torch.equal(before.weights[name], tensor), name


@pytest.mark.parametrize("world_size", [slow(1), 2])
def test_seeds_follow_from_the_place_in_the_data(
    tiny_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, world_size: int
) -> None:
    """R11: step, micro-step and place over all ranks are those of the data's order, whatever the number of ranks."""
    settings = {"per_device_train_batch_size": 4 // world_size, "gradient_accumulation_steps": 2, "max_steps": 3}
    config = make_config(tiny_text, tmp_path, variant="rollout_matching_sft", num_samples=10, **settings)
    seen = run(config, monkeypatch, world_size)
    found = {
        (call.global_step, call.micro_step_idx, call.first_req_idx + i): sample_id
        for one in seen
        for call in one.calls
        for i, sample_id in enumerate(call.sample_ids)
    }
    sampler = DistributedSampler(10, num_ranks=1, rank=0, samples_per_rank=4, seed=config.training.seed)
    # Three micro-batches (4, 4, 2) an epoch: step 1 is the epoch's short window, step 2 begins the next one.
    windows = [(0, 0, 0), (0, 1, 1), (1, 0, 2), (2, 0, 3), (2, 1, 4)]
    assert found == {
        (step, micro_step, i): f"s{index}"
        for step, micro_step, position in windows
        for i, index in enumerate(sampler.share(position).indices)
    }


def test_a_backend_with_other_prompt_ids_stops_the_run(
    tiny_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R03: the first difference is named, and nothing is learned."""
    honest = FakeBackend.generate

    def other_prompt(self: FakeBackend, *args: Any, **kwargs: Any) -> list[Rollout]:
        first, *rest = honest(self, *args, **kwargs)
        ids = first.prompt_token_ids
        return [replace(first, prompt_token_ids=(*ids[:5], ids[5] + 1, *ids[6:])), *rest]

    monkeypatch.setattr(FakeBackend, "generate", other_prompt)
    seen = Seen()
    config = make_config(tiny_text, tmp_path, variant="rollout_matching_sft", max_steps=1)
    with (
        trainer(config, Ranks(), monkeypatch, seen) as made,
        pytest.raises(PromptMismatchError, match=r"token 5\b"),
    ):
        made.run()
    assert seen.rows == []


# ---- rows and passes (D5, D6) --------------------------------------------------------------------------------------


def test_rollout_matching_learns_one_packed_row_per_micro_step(
    tiny_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """D6."""
    settings = {**CARRY, "num_train_epochs": 1, "num_samples": 24}
    seen = run(make_config(tiny_text, tmp_path, variant="rollout_matching_sft", **settings), monkeypatch)[0]
    assert len(seen.rows) == len(seen.calls) == 8
    assert max(map(len, seen.rows)) > 1
    steps = events_of(tmp_path, "step")
    assert [line["num_rows"] for line in steps] == [2, 2, 2, 2]
    assert all(0 <= line["metrics"]["underfilled"] <= 2 for line in steps)


def test_ranks_run_the_same_number_of_passes(tiny_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """D5: in the epoch's last micro-batch rank 0 has one sample and rank 1 two; rank 0 runs a zero-weight pass too."""
    settings = {"per_device_train_batch_size": 3, "num_train_epochs": 1, "packing": False}
    seen = run(make_config(tiny_text, tmp_path, num_samples=9, **settings), monkeypatch, 2)
    assert [len(one.rows) for one in seen] == [5, 5]
    assert [one.rows.count(()) for one in seen] == [1, 0]
    assert all_learned(seen) == everyone(9)
    for name, tensor in seen[0].weights.items():
        assert torch.equal(seen[1].weights[name], tensor), f"ranks differ in {name}"


def test_an_epoch_s_last_window_is_shorter(tiny_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No window reaches over an epoch's end, so no sample waits for the next epoch's and none is repeated."""
    settings = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 2, "num_train_epochs": 2}
    run(make_config(tiny_text, tmp_path, num_samples=5, **settings), monkeypatch)
    assert [line["num_segments"] for line in events_of(tmp_path, "step")] == [2, 2, 1, 2, 2, 1]


# ---- the gradient --------------------------------------------------------------------------------------------------

WHOLE = {"per_device_train_batch_size": 8, "packing": False}
CUTS = {
    "packed": (1, {"per_device_train_batch_size": 8}),
    "accumulated": (1, {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 8}),
    "packed-accumulated": (1, {"per_device_train_batch_size": 2, "effective_batch_size": 8}),
    "ranks": (2, {"per_device_train_batch_size": 2, "effective_batch_size": 8, "packing": False}),
    "packed-ranks": (2, {"per_device_train_batch_size": 4}),
}


@pytest.mark.parametrize(
    "cut", [slow("packed"), slow("accumulated"), "packed-accumulated", slow("ranks"), "packed-ranks"]
)
def test_the_step_s_gradient_does_not_depend_on_how_it_is_cut(
    tiny_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cut: str
) -> None:
    """R24, D5: the weighted mean over all supervised tokens of the step, in however many micro-steps, rows, ranks."""
    world_size, settings = CUTS[cut]
    reference = run(make_config(tiny_text, tmp_path, max_steps=1, **WHOLE), monkeypatch)[0]
    other = run(make_config(tiny_text, tmp_path, max_steps=1, **settings), monkeypatch, world_size)[0]
    losses = [line["loss"] for line in events_of(tmp_path, "step")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert [len(reference.gradients), len(other.gradients)] == [1, 1]
    for name, gradient in reference.gradients[0].items():
        torch.testing.assert_close(other.gradients[0][name], gradient, atol=1e-6, rtol=1e-3)


# ---- evaluation and checkpoints ------------------------------------------------------------------------------------


def test_a_step_is_evaluated_once(tiny_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run evaluates at the start, every two steps, and at the end, which is one of these; `sft` asks servers for
    nothing else."""
    settings = {"per_device_train_batch_size": 4, "max_steps": 4, "eval_steps": 2}
    settings |= {"eval_on_start": True, "eval_on_end": True, "eval_samples": 4}
    seen = run(make_config(tiny_text, tmp_path, **settings), monkeypatch, 2)
    assert [line["global_step"] for line in events_of(tmp_path, "eval")] == [0, 2, 4]
    assert [(call.global_step, call.sample_ids) for call in seen[0].calls] == [(s, ("t0", "t1")) for s in (0, 2, 4)]
    assert [call.first_req_idx for call in seen[1].calls] == [2, 2, 2]
    assert all(call.greedy for one in seen for call in one.calls)
    assert seen[0].events.count("sync") == 3
    files = sorted((tmp_path / "run" / "eval").glob("*.jsonl"))
    assert [file.name for file in files] == [f"step_{step:06d}.jsonl" for step in (0, 2, 4)]
    assert all(file.with_suffix(".coco.json").is_file() for file in files)
    assert [json.loads(line)["id"] for line in files[0].read_text().splitlines()] == ["t0", "t1", "t2", "t3"]


def test_what_is_retained_is_scored_beside_each_evaluation(
    tiny_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """R44: other annotations, with a task of their own, in metrics, console and report."""
    other = str(write_data(tmp_path / "other.jsonl", 2, "o"))
    retain = [{"name": "old", "val": other, "task": {"iou_threshold": 0.3}}]
    config = make_config(
        tiny_text, tmp_path, per_device_train_batch_size=4, max_steps=2, eval_steps=2, eval_on_start=True
    )
    config = config_of(
        config.model_dump(exclude_unset=True)
        | {"data": {**config.data.model_dump(exclude_unset=True), "retain": retain}}
    )
    (seen,) = run(config, monkeypatch)
    asked = [call.sample_ids for call in seen.calls]
    assert asked == 2 * [("t0", "t1", "t2", "t3", "t4"), ("o0", "o1")]
    first, last = (event["metrics"] for event in events_of(tmp_path, "eval"))
    assert {"f1@0.5", "retain/old/f1@0.5", "retain/old/parse_rate"} <= last.keys()
    told = capsys.readouterr().out
    assert f"old {first['retain/old/f1@0.5']:.3f} -> {last['retain/old/f1@0.5']:.3f}" in told
    page = render(read_runs(tmp_path / "run"))
    assert "Gained and forgotten" in page
    assert (tmp_path / "run" / "eval" / "retain_old_000002.jsonl").is_file()


@pytest.mark.parametrize("world_size", [slow(1), 2])
def test_scores_are_calibrated_on_val_and_saved_with_the_checkpoint(
    tiny_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, world_size: int
) -> None:
    """R43: beside every checkpoint whose weights were evaluated, whichever came first. `data.test` is scored by the
    calibration of `data.val`, and val by fits that leave out its own images."""
    monkeypatch.setattr(FakeBackend, "_answer", _every_third_box_is_wrong)
    asked: list[str | None] = []
    calibrated = DetectionTask.calibrated

    def told(self: DetectionTask, assignments: Any, calibration: str | None = None) -> Any:
        asked.append(calibration)
        return calibrated(self, assignments, calibration)

    monkeypatch.setattr(DetectionTask, "calibrated", told)
    settings = {"per_device_train_batch_size": 2, "effective_batch_size": 4, "max_steps": 4, "save_steps": 3}
    settings |= {"eval_steps": 2, "eval_on_end": True, "save_on_end": True, "keep_best": "f1@0.5"}
    config = make_config(tiny_text, tmp_path, **settings)
    val = str(write_data(tmp_path / "val.jsonl", 24, "v"))
    config = config_of(
        config.model_dump(exclude_unset=True) | {"data": {**config.data.model_dump(exclude_unset=True), "val": val}}
    )
    run(config, monkeypatch, world_size)
    found = {step: tmp_path / "run" / f"checkpoint-{step}" / CALIBRATION_NAME for step in (2, 3, 4)}
    assert {step: file.is_file() for step, file in found.items()} == {2: True, 3: False, 4: True}
    assert found[3].parent.is_dir(), "saved, but not evaluated"
    assert set(asked) == {None, found[4].read_text()}
    known = read_calibration(found[4].parent, samples=0)
    assert known is not None
    assert known.num_images == 24
    scored = [*events_of(tmp_path, "eval"), *events_of(tmp_path, "test")]
    assert [event["metrics"]["coco/calibrated"] for event in scored] == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("keep_best", ["f1@0.5", None])
def test_d17_a_run_says_first_that_the_test_annotations_choose(
    tiny_text: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    keep_best: str | None,
) -> None:
    config = make_config(tiny_text, tmp_path, max_steps=1, eval_steps=1, keep_best=keep_best)
    run(config, monkeypatch)
    told = " ".join(capsys.readouterr().out.split())
    at = told.find("data.test")
    assert (0 <= at < told.index("step 1/1")) if keep_best else at == -1


def _every_third_box_is_wrong(self: FakeBackend, sample: Sample, seed: int) -> Rollout:
    wrong = [obj._replace(bins=(900, 900, 950, 950)) for obj in sample.objects]
    objects = [wrong[i] if (i + int(sample.sample_id[1:])) % 3 == 0 else obj for i, obj in enumerate(sample.objects)]
    return self.rollout(sample, self._task.serialize(objects, after=None).text, seed)


def test_without_validation_annotations_nothing_is_calibrated(
    tiny_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R43: `data.test` alone is scored, never fitted."""
    monkeypatch.setattr(FakeBackend, "_answer", _every_third_box_is_wrong)
    settings = {"per_device_train_batch_size": 4, "max_steps": 2, "eval_steps": 2, "save_on_end": True}
    config = make_config(tiny_text, tmp_path, **settings)
    write_data(Path(config.data.test or ""), 24, "t")
    run(config, monkeypatch)
    (event,) = events_of(tmp_path, "eval")
    assert event["metrics"]["coco/calibrated"] == 0.0
    assert not list((tmp_path / "run").glob(f"*/{CALIBRATION_NAME}"))


def test_a_step_is_saved_once(tiny_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"per_device_train_batch_size": 4, "max_steps": 3, "save_steps": 2, "save_on_end": True}
    with trainer(make_config(tiny_text, tmp_path, **settings), Ranks(), monkeypatch, Seen()) as made:
        saved: list[int] = []
        save = made.checkpoints.save
        store = replace(made.checkpoints)
        object.__setattr__(store, "save", lambda *args: (saved.append(args[2].global_step), save(*args))[1])
        made.checkpoints = store
        made.run()
        made.save()
    assert saved == [2, 3]


def allocate_too_much(row: PackedRow) -> RowLoss:
    """Raise what the allocator itself raises."""
    torch.empty(2**60)
    raise AssertionError("an exbibyte was allocated")


def divide_by_zero(row: PackedRow) -> RowLoss:
    raise ZeroDivisionError


@pytest.mark.parametrize(
    ("failing", "error"), [slow(allocate_too_much, OutOfMemoryError), (divide_by_zero, ZeroDivisionError)]
)
def test_whatever_ends_learning_the_last_whole_step_is_saved(
    tiny_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: Any, error: type[Exception]
) -> None:
    """Out of memory, or a defect: a resume goes on with the same samples and ends with the uninterrupted run's
    weights."""
    settings = {"per_device_train_batch_size": 2, "max_steps": 4, "num_samples": 8, "lr_scheduler_type": "constant"}
    (whole,) = run(make_config(tiny_text, tmp_path, **settings), monkeypatch)
    folder = tmp_path / "again"
    folder.mkdir()
    config = make_config(tiny_text, folder, **settings)
    with trainer(config, Ranks(), monkeypatch, seen := Seen()) as made:
        backward = made.policy.backward

        def third(row: PackedRow) -> RowLoss:
            return failing(row) if len(seen.gradients) == 2 else backward(row)

        made.policy.backward = third  # type: ignore[method-assign]
        with pytest.raises(error):
            made.run()
    (second,) = run(make_config(tiny_text, folder, resume_from_checkpoint="latest", **settings), monkeypatch)
    assert [line["global_step"] for line in events_of(folder, "step")] == [1, 2, 3, 4]
    assert seen.learned + second.learned == whole.learned
    for name, tensor in whole.weights.items():
        assert torch.equal(second.weights[name], tensor), name


def test_a_row_that_memory_does_not_hold_is_named(
    tiny_vlm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which row, how long, how many images, and the keys that make rows smaller."""
    config = make_config(tiny_vlm, tmp_path, max_steps=1, per_device_train_batch_size=2, num_samples=2)
    with trainer(config, Ranks(), monkeypatch, Seen()) as made:
        made.policy.backward = allocate_too_much  # type: ignore[method-assign]
        with pytest.raises(OutOfMemoryError) as raised:
            made.run()
    assert "s0" in raised.value.found
    assert "s1" in raised.value.found
    assert "0 images" in raised.value.found
    assert "512" in raised.value.wanted
    assert "global_max_length" in raised.value.remedy


def test_a_vision_model_goes_through_the_same_loop(
    tiny_vlm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The processor's path: prompts by the VLM's template, loss falls on four scenes learned again and again."""
    settings = {"per_device_train_batch_size": 4, "max_steps": 6, "learning_rate": 3e-3}
    run(make_config(tiny_vlm, tmp_path, num_samples=4, lr_scheduler_type="constant", **settings), monkeypatch)
    losses = [line["loss"] for line in events_of(tmp_path, "step")]
    assert losses[-1] < 0.8 * losses[0]


# ---- what the run writes of itself ---------------------------------------------------------------------------------


def test_a_run_says_when_it_begins_and_that_it_finished(
    tiny_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(make_config(tiny_text, tmp_path, max_steps=1, save_on_end=True), monkeypatch)
    run(make_config(tiny_text, tmp_path, max_steps=3, resume_from_checkpoint="latest"), monkeypatch)
    assert [(e["global_step"], e["total_steps"]) for e in events_of(tmp_path, "begin")] == [(0, 1), (1, 3)]
    assert [(e["global_step"], e["how"], e["because"]) for e in events_of(tmp_path, "end")] == [
        (1, "finished", ""),
        (3, "finished", ""),
    ]
    status = read_runs(tmp_path / "run").runs[0].status
    assert (status.total_steps, status.ended) == (3, "finished")


def test_a_run_that_fails_says_why(tiny_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = Seen()
    with trainer(make_config(tiny_text, tmp_path, max_steps=3), Ranks(), monkeypatch, seen) as made:
        update = made.optimizer.update

        def fails(step: int, *, share: float = 1.0) -> tuple[float, float]:
            if step == 1:
                raise OutOfMemoryError("no memory", found="a row", wanted="a smaller one", remedy="lower it")
            return update(step, share=share)

        made.optimizer.update = fails  # type: ignore[method-assign]
        with pytest.raises(OutOfMemoryError):
            made.run()
    (end,) = events_of(tmp_path, "end")
    assert (end["global_step"], end["how"]) == (1, "failed")
    assert "OutOfMemoryError: no memory" in end["because"]


@pytest.mark.parametrize("world_size", [slow(1), 2])
def test_a_spike_is_written_with_the_samples_of_its_step(
    tiny_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, world_size: int
) -> None:
    """Samples of all ranks are there. What the first rank's only row cost at step 11 is made up; all else is real."""
    settings = {"per_device_train_batch_size": 2, "max_steps": 11, "global_max_length": 400, "learning_rate": 1e-5}
    config = make_config(tiny_text, tmp_path, num_samples=16, **settings)
    add = StepTotals.add

    def leaps(self: StepTotals, row: PackedRow, loss: RowLoss) -> None:
        counted.append(row)
        last = (
            len(counted) > 10 * world_size
            and row.segments[0].sample_id == counted[10 * world_size].segments[0].sample_id
        )
        add(self, row, replace(loss, loss_sum=loss.loss_sum * 100) if last else loss)

    counted: list[PackedRow] = []
    monkeypatch.setattr(StepTotals, "add", leaps)
    seen = run(config, monkeypatch, world_size)
    (spike,) = [event for event in events_of(tmp_path, "spike") if event["metric"] == "loss"]
    assert (spike["global_step"], spike["value"] > 5 * spike["usual"]) == (11, True)
    learned = {sample_id for one in seen for sample_id in one.rows[-1]}
    assert {one["id"] for one in spike["samples"]} == learned
    assert spike["samples"][0]["row_loss"] == max(one["row_loss"] for one in spike["samples"])
    assert all(one["truth"] for one in spike["samples"])
    (point,) = [p for p in read_runs(tmp_path / "run").runs[0].spikes if p.metric == "loss"]
    assert {one.sample_id for one in point.samples} == learned
