"""A whole learner in this process: everything real but the rollout servers, and ranks that are threads.

`run(config, world_size)` builds by `learner.wiring.build`, trains, and gives one `Seen` per rank: what was asked of the
backend, when it was synced, which samples each row held, and the step's gradients.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from deploy.demo.scenes import DIGIT_WORDS
from learner.config.load import config_of
from learner.config.plan import resolve
from learner.config.schema import RunConfig
from learner.data import prompt
from learner.policy.load import Policy
from learner.policy.loss import RowLoss
from learner.policy.parallel import Ranks
from learner.records import PackedRow, Rollout, Sample, SyncReceipt
from learner.rollout.backend import MicroStep, RolloutStream
from learner.run import checkpoint
from learner.tasks.detection.task import DetectionTask
from learner.trainer import Trainer
from learner.wiring import build
from shared.seeds import request_seed
from tests import garbage

WAIT_S = 60.0


# ---- ranks as threads ----------------------------------------------------------------------------------------------


class Meeting:
    """A place where threads exchange values: all at once, or all fail. An exchange to which all have come succeeds."""

    def __init__(self, world_size: int) -> None:
        self._rounds: list[int] = [0] * world_size  # each rank's
        self._values: dict[int, dict[int, Any]] = {}
        self._changed, self._failed = threading.Condition(), False

    def exchange(self, rank: int, value: Any) -> list[Any]:
        world_size, at = len(self._rounds), self._rounds[rank]
        with self._changed:
            self._rounds[rank] += 1
            values = self._values.setdefault(at, {})
            values[rank] = value
            self._changed.notify_all()
            self._changed.wait_for(lambda: len(values) == world_size or self._failed, WAIT_S)
            if len(values) < world_size:
                raise threading.BrokenBarrierError
            self._values.pop(at - 1, None)
            return [values[i] for i in range(world_size)]

    def fail(self) -> None:
        """A rank will not come any more."""
        with self._changed:
            self._failed = True
            self._changed.notify_all()


@dataclass(frozen=True, kw_only=True)
class ThreadRanks(Ranks):
    meeting: Meeting

    def all_gather_object(self, value: Any) -> list[Any]:
        return self.meeting.exchange(self.rank, value)

    def broadcast_object(self, value: Any) -> Any:
        return self.meeting.exchange(self.rank, value)[0]

    def all_reduce_tensor(self, tensor: torch.Tensor) -> None:
        tensor.copy_(torch.stack(self.meeting.exchange(self.rank, tensor.clone())).sum(0))

    def broadcast_tensor(self, tensor: torch.Tensor) -> None:
        tensor.copy_(self.meeting.exchange(self.rank, tensor.clone())[0])

    def all_reduce_max(self, value: float) -> float:
        return float(max(self.meeting.exchange(self.rank, value)))


# ---- the boundary to the servers -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Generate:
    """One call of the backend."""

    sample_ids: tuple[str, ...]
    global_step: int
    micro_step_idx: int
    first_req_idx: int
    greedy: bool
    temperature: float | None = None


@dataclass
class Seen:
    """The record of what one rank did, in order: `Generate` calls, "sync", and each learned row as a tuple of sample
    ids."""

    events: list[Any] = field(default_factory=list)
    versions: list[tuple[int | None, ...]] = field(default_factory=list)  # versions of each learned row's segments
    gradients: list[dict[str, torch.Tensor]] = field(default_factory=list)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)  # those at the end
    prepared: list[int] = field(default_factory=list)  # rows learned when each sync was prepared

    @property
    def calls(self) -> list[Generate]:
        return [event for event in self.events if isinstance(event, Generate)]

    @property
    def rows(self) -> list[tuple[str, ...]]:
        return [event for event in self.events if isinstance(event, tuple)]

    @property
    def learned(self) -> list[str]:
        return [sample_id for row in self.rows for sample_id in row]


class FakeBackend:
    """Answers with the first few objects of the ground truth, as the seed says, or with nothing usable; refuses to
    answer while the policy is not the one that was synced (R10)."""

    chunk = 2  # places that it decodes at once

    def __init__(self, config: RunConfig, policy: Policy, seen: Seen) -> None:
        self._run_seed, self._task = config.training.seed, DetectionTask(config.task, policy.tokenizer)
        self.policy, self.seen = policy, seen
        self.synced: dict[str, torch.Tensor] = {}
        self.ver = 0

    def close(self) -> None: ...

    def generate(
        self,
        samples: Sequence[Sample],
        *,
        global_step: int,
        micro_step_idx: int,
        first_req_idx: int,
        greedy: bool = False,
        temperature: float | None = None,
    ) -> list[Rollout]:
        for name, tensor in snapshot(self.policy).items():
            assert torch.equal(self.synced[name], tensor), f"rollouts on stale weights: {name}"
        ids = tuple(sample.sample_id for sample in samples)
        self.seen.events.append(Generate(ids, global_step, micro_step_idx, first_req_idx, greedy, temperature))
        place = {"run_seed": self._run_seed, "global_step": global_step, "micro_step_idx": micro_step_idx}
        return [self._answer(s, request_seed(**place, req_idx=first_req_idx + i)) for i, s in enumerate(samples)]

    def generate_window(
        self,
        window: Sequence[MicroStep],
        *,
        global_step: int,
        greedy: bool = False,
        temperature: float | None = None,
    ) -> list[list[Rollout]]:
        return [
            self.generate(
                step.samples,
                global_step=global_step,
                micro_step_idx=step.micro_step_idx,
                first_req_idx=step.first_req_idx,
                greedy=greedy,
                temperature=temperature,
            )
            for step in window
        ]

    def stream(self, window: Sequence[MicroStep], *, global_step: int, greedy: bool = False) -> RolloutStream:
        """Stream rollouts as they end: the last ones first."""
        (rollouts,) = self.generate_window(window, global_step=global_step, greedy=greedy)
        return Backwards(rollouts)

    def _answer(self, sample: Sample, seed: int) -> Rollout:
        num_objects = seed % (len(sample.objects) + 2) - 1
        text = "no idea" if num_objects < 0 else self._task.serialize(sample.objects[:num_objects], after=None).text
        return self.rollout(sample, text, seed)

    def rollout(self, sample: Sample, text: str, seed: int) -> Rollout:
        """Return `text` as an answer."""
        return Rollout(
            sample=sample,
            prompt_token_ids=self.policy.encoder.encode(sample).token_ids,
            response_token_ids=tuple(self.policy.tokenizer.encode(text, add_special_tokens=False)),
            finish_reason="stop",
            ver=self.ver,
            seed=seed,
        )


class Backwards:
    """Rollouts that end in reversed order."""

    def __init__(self, rollouts: Sequence[Rollout]) -> None:
        self._rollouts = rollouts

    def __iter__(self) -> Iterator[tuple[int, Rollout]]:
        return iter(reversed(list(enumerate(self._rollouts))))

    def close(self) -> None: ...


class FakeSync:
    """Remembers the weights that the "servers" have."""

    def __init__(self, backend: FakeBackend) -> None:
        self._backend = backend
        self._prepared: dict[str, torch.Tensor] = {}
        self.ver = 0

    def close(self) -> None: ...

    def agree(self) -> tuple[()]:
        return ()

    def prepare(self) -> None:
        self._prepared = snapshot(self._backend.policy)
        self._backend.seen.prepared.append(len(self._backend.seen.rows))

    def sync(self) -> SyncReceipt:
        for name, tensor in self._prepared.items():
            assert torch.equal(tensor, dict(self._backend.policy.trainable)[name]), (
                f"prepared for other weights: {name}"
            )
        self._prepared = {}
        self.ver += 1
        self._backend.ver, self._backend.synced = self.ver, snapshot(self._backend.policy)
        self._backend.seen.events.append("sync")
        return SyncReceipt(
            ver=self.ver, mode="full", seconds=0.0, num_bytes=1, num_tensors=1, canary_gap=0.0, canary_gap_max=0.0
        )


def snapshot(policy: Policy) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in policy.trainable}


# ---- a run ---------------------------------------------------------------------------------------------------------


def write_data(path: Path, count: int, prefix: str = "s") -> Path:
    """`count` text-only samples with 1 to 4 objects."""
    rng = np.random.default_rng(count)
    lines = []
    for i in range(count):
        corners = rng.integers(0, 50, (1 + i % 4, 2))
        objects = [
            {"desc": DIGIT_WORDS[rng.integers(10)], "bbox_2d": [int(x), int(y), int(x) + 20, int(y) + 30]}
            for x, y in corners
        ]
        turn = {"role": "user", "content": f"Detect every digit of scene {i}."}
        row = {"id": f"{prefix}{i}", "messages": [turn], "objects": objects, "width": 100, "height": 100}
        lines.append(json.dumps(row) + "\n")
    path.write_text("".join(lines))
    return path


def make_config(model: Path, folder: Path, *, variant: str = "sft", num_samples: int = 8, **training: Any) -> RunConfig:
    """A run on `num_samples` text samples; `training` are keys of that section (and `global_max_length`, `m_steps`)."""
    length = training.pop("global_max_length", 512)
    rollouts: dict[str, Any] = {"decoding": {"max_new_tokens": 16}}
    if "m_steps" in training:
        rollouts["rollout_buffer"] = {"enabled": True, "m_steps": training.pop("m_steps")}
    data = {"train": str(write_data(folder / f"train{num_samples}.jsonl", num_samples))}
    data["test"] = str(write_data(folder / "test.jsonl", 5, "t"))
    settings = {"output_dir": str(folder / "run"), "seed": 3, "learning_rate": 1e-3, "save_on_end": False, **training}
    vllm = {"mode": "server", "server": {"servers": [{"base_url": "http://127.0.0.1:1", "group_port": 2}]}}
    return config_of(
        {
            "model": {"path": str(model)},
            "data": data,
            "training": settings,
            "logging": {"trackers": []},
            "custom": {
                "trainer_variant": variant,
                "extra": {"rollout_matching": {"vllm": vllm, **rollouts}},
            },
            "global_max_length": length,
        }
    )


@contextmanager
def trainer(config: RunConfig, ranks: Ranks, monkeypatch: pytest.MonkeyPatch, seen: Seen) -> Iterator[Trainer]:
    """A trainer as `learner.wiring.build` makes it, but for the servers, if there are any. It tells `seen` what it
    does."""

    def connect_backend(_: RunConfig, policy: Policy, **__: Any) -> FakeBackend:
        return FakeBackend(config, policy, seen)

    def connect_sync(_: RunConfig, __: Policy, backend: FakeBackend, *___: Any, **____: Any) -> FakeSync:
        return FakeSync(backend)

    garbage.set_aside()
    with ExitStack() as stack:
        with _BUILDING:  # one thread at a time: transformers loads models under global settings, so no broadcast either
            if config.rollout_matching.rollout_backend == "vllm":
                monkeypatch.setattr(build, "connect_backend", connect_backend)
            monkeypatch.setattr(build, "connect_sync", connect_sync)
            monkeypatch.setattr(checkpoint, "load_weights", _load_alone)
            monkeypatch.setattr(Policy, "broadcast", lambda *_: None)
            monkeypatch.setattr(build, "log_to_file", lambda *_: None)  # a process' logging is not a test's to change
            monkeypatch.setattr(
                prompt, "AutoTokenizer", SimpleNamespace(from_pretrained=partial(_tokenizer, ranks.rank))
            )
            made = build.build(config, resolve(config, ranks.world_size), ranks, token=None, stack=stack)
        made.policy.backward = _told(made, seen)  # type: ignore[method-assign]
        _tell_gradients(made, seen)
        try:
            yield made
        finally:
            seen.weights = snapshot(made.policy)


def run(config: RunConfig, monkeypatch: pytest.MonkeyPatch, world_size: int = 1) -> list[Seen]:
    """Train to the end on `world_size` threads; what each rank did."""
    meeting = Meeting(world_size)
    seen = [Seen() for _ in range(world_size)]

    def rank_main(rank: int) -> None:
        ranks = ThreadRanks(rank=rank, world_size=world_size, meeting=meeting) if world_size > 1 else Ranks()
        try:
            with trainer(config, ranks, monkeypatch, seen[rank]) as made:
                made.run()
        except BaseException:
            meeting.fail()
            raise

    with ThreadPoolExecutor(world_size) as pool:
        failures = [future.exception() for future in [pool.submit(rank_main, rank) for rank in range(world_size)]]
    causes = [failure for failure in failures if failure and not isinstance(failure, threading.BrokenBarrierError)]
    if causes or any(failures):
        raise next(iter(causes or [failure for failure in failures if failure]))
    return seen


@lru_cache(maxsize=8)
def _tokenizer(rank: int, path: str) -> Any:
    """Ranks work at the same time, so each has its own; runs come one after the other."""
    return AutoTokenizer.from_pretrained(path)


_BUILDING = threading.Lock()
_load_weights = checkpoint.load_weights


def _load_alone(path: Path, policy: Policy) -> None:
    """Load weights one thread at a time: two that load at once may leave transformers without `tie_weights` for the
    rest of the process."""
    with _BUILDING:
        _load_weights(path, policy)


def _told(made: Trainer, seen: Seen) -> Callable[[PackedRow], RowLoss]:
    backward = made.policy.backward

    def told(row: PackedRow) -> RowLoss:
        seen.events.append(tuple(segment.sample_id for segment in row.segments))
        seen.versions.append(tuple(segment.ver for segment in row.segments))
        return backward(row)

    return told


def _tell_gradients(made: Trainer, seen: Seen) -> None:
    update = made.optimizer.update

    def told(step: int, *, share: float = 1.0) -> tuple[float, float]:
        seen.gradients.append({name: p.grad.clone() for name, p in made.policy.trainable if p.grad is not None})
        return update(step, share=share)

    made.optimizer.update = told  # type: ignore[method-assign]
