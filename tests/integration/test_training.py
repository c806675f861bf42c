"""Whole runs of the learner against one real server: rollouts, syncs, evaluation, resume, ranks, LoRA. The ranks
are forked (`bench.forked`); those of torchrun: test_ranks.py.

Every run is another learner incarnation on the same running server, which is never restarted.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import peft
import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText, AutoProcessor

from bench.demo_model import build
from deploy.demo import build_data
from learner.data.sampler import DistributedSampler
from shared.addresses import free_port
from shared.seeds import request_seed
from tests.ranks import learner
from tests.runs import events
from tests.servers import running_server

pytestmark = pytest.mark.integration
ROOT = Path(__file__).parents[2]
SEED = 11
TIMEOUT_S = 240.0
ROLLOUTS = "rollout_matching_sft"


@dataclass(frozen=True)
class Run:
    """A learner that has ended: what it left behind."""

    folder: Path
    exit_code: int
    out: str
    err: str
    seconds: float

    def events(self, event: str) -> list[dict[str, Any]]:
        return events(self.folder, event)

    def evaluation(self, step: int) -> list[dict[str, Any]]:
        lines = (self.folder / "eval" / f"step_{step:06d}.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]


@dataclass(frozen=True)
class World:
    """One server, its model, and 24 + 8 scenes."""

    folder: Path
    base_url: str
    group_port: int

    def config(
        self,
        name: str,
        variant: str,
        *,
        model: dict[str, Any] | None = None,
        rollouts: dict[str, Any] | None = None,
        **training: Any,
    ) -> Path:
        """A run of four samples per step into the folder `name`."""
        server = {"servers": [{"base_url": self.base_url, "group_port": self.group_port}], "timeout_s": 60.0}
        settings = {"seed": SEED, "effective_batch_size": 4, "learning_rate": 1e-2, "lr_scheduler_type": "constant"}
        config = {
            "model": {"path": str(self.folder / "model"), **(model or {})},
            "data": {"train": str(self.folder / "train.jsonl"), "test": str(self.folder / "test.jsonl")},
            "training": {"output_dir": str(self.folder / name), "save_on_end": False, **settings, **training},
            "logging": {"trackers": []},
            "custom": {
                "trainer_variant": variant,
                "extra": {
                    "rollout_matching": {
                        "decode_batch_size": 8,
                        "decoding": {"temperature": 1.0, "max_new_tokens": 24},
                        "vllm": {"mode": "server", "server": server},
                        **(rollouts or {}),
                    }
                },
            },
            "global_max_length": 1024,
        }
        path = self.folder / f"{name}-{time.monotonic_ns()}.yaml"
        path.write_text(yaml.safe_dump(config))
        return path

    def run(self, name: str, variant: str, *, nproc: int = 1, **changes: Any) -> Run:
        """The run must succeed."""
        run = learn(self.config(name, variant, **changes), nproc=nproc)
        assert run.exit_code == 0, run.err[-3000:] + run.out[-2000:]
        return run


def learn(config: Path, *, nproc: int = 1) -> Run:
    began = time.monotonic()
    done = learner(config, nproc=nproc, timeout_s=TIMEOUT_S)
    folder = Path(yaml.safe_load(config.read_text())["training"]["output_dir"])
    return Run(folder, done.returncode, done.stdout, done.stderr, time.monotonic() - began)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("training")
    build(folder / "model", "tiny", seed=0)
    build_data.build(build_data.Build(train=24, val=0, test=8), folder)
    config = {"model": str(folder / "model"), "allowed_image_roots": [str(folder)]}
    with running_server(config, folder) as server:
        yield World(folder, server.base_url, free_port())


@pytest.fixture(scope="module")
def matched(world: World) -> Run:
    """Three steps of rollout matching on one rank, with everything on."""
    settings = {"per_device_train_batch_size": 4, "eval_on_start": True, "eval_on_end": True, "save_on_end": True}
    return world.run("matched", ROLLOUTS, max_steps=3, **settings)


def in_order(num_ranks: int, samples_per_rank: int, position: int, rank: int) -> tuple[int, ...]:
    """Return the training samples that a rank gets at a micro-step."""
    sampler = DistributedSampler(24, num_ranks=num_ranks, rank=rank, samples_per_rank=samples_per_rank, seed=SEED)
    return sampler.share(position).indices


def test_every_sync_raises_the_version_and_is_checked(matched: Run) -> None:
    """R09, R10: a sync before each step and before the last evaluation; every gap between the two models is small."""
    syncs = matched.events("sync")
    assert [sync["global_step"] for sync in syncs] == [0, 1, 2, 3]
    first = syncs[0]["ver"]
    assert [sync["ver"] for sync in syncs] == [first, first + 1, first + 2, first + 3]
    assert all(0 <= sync["canary_gap"] < 0.05 for sync in syncs), syncs
    assert [step["ver"] for step in matched.events("step")] == [first, first + 1, first + 2]
    assert {call["ver"] for call in matched.events("rollout_call")[-1:]} == {first + 3}


def test_the_log_says_what_was_asked_of_whom(matched: Run, world: World) -> None:
    """R15: servers, sync mode, chunk sizes, and the seed of every call."""
    plan = matched.events("plan")[0]
    assert plan["servers"] == [{"base_url": world.base_url, "group_port": world.group_port}]
    assert plan["sync_mode"] == "full"
    assert {sync["mode"] for sync in matched.events("sync")} == {"full"}
    trained = [call for call in matched.events("rollout_call") if call["num_requests"] == 4]
    assert [(call["global_step"], call["micro_step_idx"], call["chunk"]) for call in trained] == [
        (step, 0, 8) for step in range(3)
    ]
    for call in trained:
        place = {"run_seed": SEED, "global_step": call["global_step"], "micro_step_idx": 0}
        for part in call["calls"]:
            assert part["seed"] == request_seed(**place, req_idx=part["first_req_idx"])


def test_evaluations_and_the_resolved_configuration_are_kept(matched: Run, world: World) -> None:
    truth = [json.loads(line) for line in (world.folder / "test.jsonl").read_text().splitlines()]
    for step in (0, 3):
        scenes = matched.evaluation(step)
        assert [scene["id"] for scene in scenes] == [row["id"] for row in truth]
        assert [len(scene["truth"]) for scene in scenes] == [len(row["objects"]) for row in truth]
    assert [line["global_step"] for line in matched.events("eval")] == [0, 3]
    resolved = yaml.safe_load((matched.folder / "config.yaml").read_text())
    assert resolved["training"]["max_steps"] == 3
    assert resolved["custom"]["extra"]["rollout_matching"]["vllm"]["sync"]["mode"] == "full"
    assert matched.out.count("step ") >= 3


def test_the_checkpoint_is_a_model_and_a_place_to_go_on_from(matched: Run, world: World) -> None:
    """Loads in transformers; a resumed run continues steps and data, and the server's versions. It learns its rollouts
    twice, with no sync and no call in between (R18)."""
    checkpoint = matched.folder / "checkpoint-3"
    model = AutoModelForImageTextToText.from_pretrained(checkpoint, dtype=torch.float32)
    assert AutoProcessor.from_pretrained(checkpoint).tokenizer.eos_token_id in model.generation_config.eos_token_id
    first_ver = matched.events("sync")[-1]["ver"]
    buffer = {"rollout_buffer": {"enabled": True, "m_steps": 2}}
    settings = {"per_device_train_batch_size": 4, "resume_from_checkpoint": "latest"}
    resumed = world.run("matched", ROLLOUTS, rollouts=buffer, max_steps=5, **settings)
    steps, syncs = resumed.events("step"), resumed.events("sync")
    assert [step["global_step"] for step in steps] == [1, 2, 3, 4, 5]
    assert syncs[-1]["ver"] > first_ver
    assert syncs[-1]["global_step"] == resumed.events("rollout_call")[-1]["global_step"] == 3
    assert [step["metrics"]["rollout_buffer/rollout_age"] for step in steps[3:]] == [0, 1]
    assert [step["ver"] for step in steps[3:]] == [syncs[-1]["ver"]] * 2
    assert "resumed at step 3" in resumed.out


@pytest.mark.slow
def test_two_ranks_are_one_learner(world: World) -> None:
    """R24, R11: rank 0 alone syncs; both ranks infer, on the shares and seeds that their place in the data gives. A
    step's two micro-steps are rolled out together, each request with the seed that it would have alone."""
    settings = {"per_device_train_batch_size": 2, "effective_batch_size": 8, "max_steps": 2, "save_on_end": True}
    run = world.run("ranks", ROLLOUTS, nproc=2, **settings)
    assert [step["num_segments"] for step in run.events("step")] == [8, 8]
    assert [sync["global_step"] for sync in run.events("sync")] == [0, 1]
    logs = [(run.folder / f"learner_rank{rank}.log").read_text() for rank in (0, 1)]
    assert ["weights synced" in log for log in logs] == [True, False]
    calls = [
        (c["first_req_idx"], c["num_requests"], c["num_micro_steps"], c["chunk"]) for c in run.events("rollout_call")
    ]
    assert calls == [(0, 4, 2, 4)] * 2
    seeds = [request_seed(run_seed=SEED, global_step=step, micro_step_idx=0, req_idx=2) for step in (0, 1)]
    told = re.findall(r"CallRecord\(.*?seed=(\d+), micro_step_idx=\d, first_req_idx=2", logs[1])
    assert sorted(map(int, told)) == sorted(seeds)
    state = json.loads((run.folder / "checkpoint-2" / "trainer_state.json").read_text())
    assert state["world_size"] == 2


@pytest.mark.slow
def test_plain_teacher_forcing_needs_the_server_only_to_evaluate(world: World) -> None:
    """R01: a new incarnation, on a server that has served two learners before."""
    run = world.run("sft", "sft", per_device_train_batch_size=4, max_steps=2, eval_on_end=True)
    assert [step["channel"] for step in run.events("step")] == ["A", "A"]
    assert [sync["global_step"] for sync in run.events("sync")] == [2]
    assert {scene["ver"] for scene in run.evaluation(2)} == {run.events("sync")[0]["ver"]}


def test_lora_serves_merged_weights(world: World) -> None:
    """R09: only the adapter is trained, the server gets the merged model, and answers differently for it."""
    lora = {"lora": {"r": 4, "alpha": 64}}
    settings = {"max_steps": 2, "eval_on_start": True, "eval_on_end": True, "save_on_end": True, "learning_rate": 5e-2}
    run = world.run("lora", ROLLOUTS, model=lora, per_device_train_batch_size=4, **settings)
    syncs = run.events("sync")
    assert [sync["global_step"] for sync in syncs] == [0, 1, 2]
    assert all(sync["canary_gap"] < 0.05 for sync in syncs), syncs
    assert syncs[0]["num_tensors"] > len(load_file(run.folder / "checkpoint-2" / "adapter_model.safetensors"))
    base = AutoModelForImageTextToText.from_pretrained(world.folder / "model", dtype=torch.float32)
    processor = AutoProcessor.from_pretrained(world.folder / "model")
    before = greedy(base, processor)
    adapted = peft.PeftModel.from_pretrained(base, run.folder / "checkpoint-2").merge_and_unload()
    assert served(world) == greedy(adapted, processor) != before


PROMPT = {"role": "user", "content": "Detect every digit."}
NUM_TOKENS = 12


def served(world: World) -> list[int]:
    """Return what the server answers now, greedily."""
    call = {
        "infer_requests": [{"messages": [PROMPT]}],
        "request_config": {"max_tokens": NUM_TOKENS, "temperature": 0.0},
    }
    return httpx.post(f"{world.base_url}/infer/", json=call, timeout=60.0).json()[0]["response_token_ids"]


def greedy(model: Any, processor: Any) -> list[int]:
    """Return what transformers answers to the same, without the stop token."""
    text = processor.apply_chat_template([PROMPT], add_generation_prompt=True, tokenize=False)
    prompt = processor(text=[text], return_tensors="pt")["input_ids"]
    with torch.no_grad():
        answer = model.generate(prompt, max_new_tokens=NUM_TOKENS, do_sample=False)[0, prompt.shape[1] :].tolist()
    stops = model.generation_config.eos_token_id
    return answer[:-1] if answer[-1] in stops else answer


# ---- what the user did wrong ---------------------------------------------------------------------------------------


def told(run: Run, *words: str) -> None:
    """Assert that the run ended with exit code 2 and a message that has these words, without a traceback."""
    assert run.exit_code == 2, run.err
    assert "Traceback" not in run.err + run.out
    for word in words:
        assert re.search(word, run.err), run.err


def test_a_wrong_configuration_is_a_message(tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text("model: {pth: x}\ntraining: {output_dir: out, max_steps: many}\n")
    told(learn(path), r"model\.pth", r"max_steps", "many")


@pytest.mark.slow
def test_a_server_that_is_down_is_a_message_in_time(world: World) -> None:
    """R16: the address, the key and the ways out."""
    nobody = free_port()
    path = world.config("down", ROLLOUTS, max_steps=1, per_device_train_batch_size=4)
    text = path.read_text().replace(world.base_url, f"http://127.0.0.1:{nobody}").replace("60.0", "3.0")
    path.write_text(text)
    run = learn(path)
    told(run, f"127.0.0.1:{nobody}", r"vllm\.server", "colocate")
    assert run.seconds < TIMEOUT_S
