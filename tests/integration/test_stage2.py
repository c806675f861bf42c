"""Runs of `stage2_ab_training` and `grpo` on two ranks against one real server, whose rollouts run within steps and
ahead of them.

One server and a few learner runs of a few seconds; every test looks at another side of what they left behind.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from bench.demo_model import build
from deploy.demo import build_data
from learner.report.page import render
from learner.report.read import read_run, read_runs
from shared.addresses import free_port
from shared.seeds import request_seed
from tests.ranks import learner
from tests.runs import events
from tests.servers import running_server

pytestmark = [pytest.mark.integration, pytest.mark.slow]
ROOT = Path(__file__).parents[2]
SEED = 5
NUM_STEPS = 4
STEPS_AHEAD = 8
ROLLOUTS_PER_STEP = 8


@dataclass(frozen=True)
class Run:
    folder: Path
    out: str

    def events(self, event: str) -> list[dict[str, Any]]:
        return events(self.folder, event)


def config_of(folder: Path, base_url: str, group_port: int) -> dict[str, Any]:
    server = {"servers": [{"base_url": base_url, "group_port": group_port}], "timeout_s": 60.0}
    rollouts = {
        "decode_batch_size": 8,
        "decoding": {"temperature": 1.0, "max_new_tokens": 24},
        "vllm": {"mode": "server", "server": server},
    }
    return {
        "model": {"path": str(folder / "model")},
        "data": {"train": str(folder / "train.jsonl")},
        "training": {
            "output_dir": str(folder / "run"),
            "seed": SEED,
            "max_steps": NUM_STEPS,
            "effective_batch_size": ROLLOUTS_PER_STEP,
            "learning_rate": 1e-2,
            "collective_timeout_s": 60.0,
        },
        "logging": {"trackers": []},
        "custom": {"trainer_variant": "stage2_ab_training", "extra": {"rollout_matching": rollouts}},
        "stage2_ab": {"schedule": {"b_ratio": 0.5}},
        "global_max_length": 512,
    }


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """Return the runs by name, made one after the other. `within`: rollouts within the step; `sharded`: so too, with
    half a model per rank; `ahead`: the asynchronous actor-learner; `grpo`: policy gradients; `grpo_ahead`: with
    rollouts ahead."""
    folder = tmp_path_factory.mktemp("stage2")
    build(folder / "model", "tiny", seed=0)
    build_data.build(build_data.Build(train=NUM_STEPS * ROLLOUTS_PER_STEP, val=0, test=1), folder)
    settings = {"model": str(folder / "model"), "allowed_image_roots": [str(folder)]}
    with running_server(settings, folder) as server:
        within = config_of(folder, server.base_url, free_port())
        ahead = copy.deepcopy(within)
        # Packs of two samples, so two per rank and step; and steps enough for a producer on a busy machine.
        ahead["training"] |= {"output_dir": str(folder / "ahead"), "per_device_train_batch_size": 2}
        ahead["training"] |= {"max_steps": STEPS_AHEAD}
        ahead["stage2_ab"] |= {"async_actor_learner": {"enabled": True}}
        sharded = copy.deepcopy(within)
        sharded["training"] |= {"output_dir": str(folder / "sharded")}
        sharded["model"] |= {"sharding": "fsdp"}
        grpo, grpo_ahead = copy.deepcopy(within), copy.deepcopy(ahead)
        for name, config in (("grpo", grpo), ("grpo_ahead", grpo_ahead)):
            config["custom"]["trainer_variant"] = "grpo"
            config["grpo"] = {"num_generations": 2, "credit": "object"}
            config["reward"] = {"weights": {"format": 1.0, "count": 1.0}}
            config["training"] |= {"output_dir": str(folder / name), "per_device_train_batch_size": 2}
            config["training"] |= {"max_steps": 3, "learning_rate": 1e-3}
        del grpo["stage2_ab"]
        grpo_ahead["stage2_ab"]["schedule"] = {"b_ratio": 1.0}
        configs = {"within": within, "sharded": sharded, "ahead": ahead, "grpo": grpo, "grpo_ahead": grpo_ahead}
        return {name: learn(folder, name, config) for name, config in configs.items()}


def learn(folder: Path, name: str, config: dict[str, Any]) -> Run:
    """One learner on two ranks, to its end."""
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(config))
    done = learner(path, nproc=2, timeout_s=240.0)
    assert done.returncode == 0, done.stderr[-3000:] + done.stdout[-2000:]
    return Run(Path(config["training"]["output_dir"]), done.stdout)


@pytest.fixture(scope="module")
def finished(runs: dict[str, Run]) -> Run:
    return runs["within"]


@pytest.fixture(scope="module")
def ahead(runs: dict[str, Run]) -> Run:
    return runs["ahead"]


def test_the_channels_are_those_of_the_schedule(finished: Run) -> None:
    """R26, R31: each step is one update over all of its samples, on both ranks."""
    steps = finished.events("step")
    assert [step["channel"] for step in steps] == ["A", "B", "A", "B"]
    assert [step["num_segments"] for step in steps] == [ROLLOUTS_PER_STEP] * NUM_STEPS
    assert [step["metrics"]["stage2_ab/executed_b_share"] for step in steps] == [0.0, 0.5, pytest.approx(1 / 3), 0.5]
    assert all("matched" not in step["metrics"] for step in steps[::2])
    assert all("matched" in step["metrics"] for step in steps[1::2])


def test_weights_are_synced_before_each_step_with_rollouts_and_only_then(finished: Run) -> None:
    """R10, R24: two syncs, each checked, and the rollouts of a step are of its own version."""
    syncs = finished.events("sync")
    assert [sync["global_step"] for sync in syncs] == [1, 3]
    assert all(sync["canary_gap"] < 0.05 for sync in syncs), syncs
    served = {sync["global_step"]: sync["ver"] for sync in syncs}
    calls = finished.events("rollout_call")
    assert calls
    assert all(call["ver"] == served[call["global_step"]] for call in calls)
    logs = [(finished.folder / f"learner_rank{rank}.log").read_text() for rank in (0, 1)]
    assert ["weights synced" in log for log in logs] == [True, False]


def test_rollouts_are_asked_for_at_once_and_learned_as_they_end(finished: Run) -> None:
    """R31, R32, R11, D9: rank 0's half of a step fits its quota, so it is one call, with the seeds of its places."""
    for global_step in (1, 3):
        calls = [call for call in finished.events("rollout_call") if call["global_step"] == global_step]
        assert [(call["first_req_idx"], call["num_requests"]) for call in calls] == [(0, 4)]
        for call in calls[0]["calls"]:
            place = {"run_seed": SEED, "global_step": global_step, "micro_step_idx": 0}
            assert call["seed"] == request_seed(**place, req_idx=call["first_req_idx"])
    for step in finished.events("step")[1::2]:
        metrics = step["metrics"]
        assert metrics["stage2_ab/calls"] == 1.0
        assert metrics["stage2_ab/rollout_s"] > 0.0
        assert "wait_s" in metrics
        assert "rollout_s" not in metrics, "the thread that learns waited for a whole call"


def test_half_a_model_per_rank_learns_the_same_steps(runs: dict[str, Run]) -> None:
    """D5, R24: FSDP2. Rows come to the ranks at their own pace, and every pass needs both; what was gathered is what
    the server checks."""
    syncs = runs["sharded"].events("sync")
    assert [sync["global_step"] for sync in syncs] == [1, 3]
    assert all(0 <= sync["canary_gap"] < 0.05 for sync in syncs), syncs
    sharded, whole = (runs[name].events("step") for name in ("sharded", "within"))
    assert [step["channel"] for step in sharded] == [step["channel"] for step in whole]
    assert [step["num_segments"] for step in sharded] == [step["num_segments"] for step in whole]
    assert sharded[0]["channel"] == "A", "on ground truth, so the same tokens"
    for key in ("loss", "grad_norm"):
        assert sharded[0][key] == pytest.approx(whole[0][key], rel=1e-3)


def test_steps_learn_packs_that_were_made_ahead_of_them(ahead: Run) -> None:
    """R25, R26, R27: Channel-B runs where it is scheduled and every rank has its packs, and says so where not; its
    packs are whole and fresh."""
    steps = ahead.events("step")
    wanted = ["A", "B"] * (STEPS_AHEAD // 2)
    skipped = [step["metrics"]["stage2_ab/async/b_step_skipped_due_to_queue"] for step in steps]
    assert [step["channel"] for step in steps] == ["A" if s else w for w, s in zip(wanted, skipped, strict=True)]
    executed = [step for step in steps if step["channel"] == "B"]
    assert executed, "the producers never had two packs ready"
    for step in executed:
        assert step["num_segments"] == ROLLOUTS_PER_STEP
        assert "matched" in step["metrics"]
        assert step["metrics"]["stage2_ab/async/packs_learned"] == 4
        assert 0 <= step["metrics"]["stage2_ab/async/age_versions"] <= 1
        assert step["metrics"]["stage2_ab/async/queue_depth"] >= 2
    assert steps[-1]["metrics"]["stage2_ab/executed_b_share"] == len(executed) / STEPS_AHEAD


def test_weights_move_after_each_step_that_learned_rollouts(ahead: Run) -> None:
    """R24, R25: one sync at the start, and one behind every executed Channel-B step but the last; all checked. No
    rollout was refused for its version, or the run would have ended."""
    learned = [step["global_step"] for step in ahead.events("step") if step["channel"] == "B"]
    syncs = ahead.events("sync")
    assert [sync["global_step"] for sync in syncs] == [0, *(step for step in learned if step < STEPS_AHEAD)]
    assert all(sync["canary_gap"] < 0.05 for sync in syncs), syncs
    assert {call["ver"] for call in ahead.events("rollout_call")} <= {sync["ver"] for sync in syncs} | {None}


def test_calls_ahead_have_the_seeds_of_their_samples_places(ahead: Run) -> None:
    """R11, R15: a seed follows from the share, which stands for the step, and the place in it; on every rank."""
    calls = [call for call in ahead.events("rollout_call") if call["calls"]]
    assert calls
    for call in calls:
        assert call["micro_step_idx"] == -1
        assert call["first_req_idx"] < ROLLOUTS_PER_STEP // 2, "rank 0 has the first half of a share"
        assert call["global_step"] is None
        place = {"run_seed": SEED, "global_step": call["share"], "micro_step_idx": -1}
        assert call["calls"][0]["seed"] == request_seed(**place, req_idx=call["calls"][0]["first_req_idx"])
    assert "micro_step_idx=-1, first_req_idx=4" in (ahead.folder / "learner_rank1.log").read_text()


@pytest.mark.parametrize("name", ["grpo", "grpo_ahead"])
def test_policy_gradients_learn_what_the_server_drew(runs: dict[str, Run], name: str) -> None:
    """R37, R39: whole groups, and each token's probability as the engine had it. Both sides compute in float32."""
    steps = [step for step in runs[name].events("step") if step["channel"] == "B"]
    assert steps
    for step in steps:
        metrics = step["metrics"]
        assert step["num_segments"] == ROLLOUTS_PER_STEP
        assert metrics["grpo/groups"] == ROLLOUTS_PER_STEP / 2
        assert metrics["grpo/drawn_elsewhere"] == metrics["grpo/tokens"] == step["num_supervised"]
        assert metrics["grpo/ratio"] == pytest.approx(1.0, abs=1e-6)
        assert metrics["grpo/entropy"] > 0
        assert set(metrics) >= {"reward", "reward/format", "reward/count", "grpo/reward_std"}
        if metrics.get("stage2_ab/async/age_updates", 0.0) == 0.0:
            assert metrics["grpo/gap"] <= 1e-5, "the weights that drew them are the weights that learn"
    recorded = read_run(runs[name].folder).groups
    assert recorded, "rank 0's rewards, for the report"
    assert all(len(one.rewards) % 2 == 0 for one in recorded)
    if name == "grpo":
        assert [one.global_step for one in recorded] == [step["global_step"] for step in steps]
        assert len(recorded[0].answers) == 2


def test_the_timeline_has_every_rank_and_server(runs: dict[str, Run]) -> None:
    """R25, R32: learning, waits, syncs and rollouts, and the report draws them."""
    for run in (run for name, run in runs.items() if name != "grpo"):  # grpo waits for a step's rollouts as a whole
        events = run.events("timeline")
        assert [event["global_step"] for event in events] == [step["global_step"] for step in run.events("step")]
        seen = {(lane if lane.startswith("rank") else "server", name) for e in events for lane, name, *_ in e["spans"]}
        for rank in ("rank 0", "rank 1"):
            assert {(rank, "learn"), (rank, "wait"), (rank, "sync"), (f"{rank} rollouts", "rollout")} <= seen
        assert ("server", "rollout") in seen
        assert "what ran when" in render(read_runs(run.folder))
