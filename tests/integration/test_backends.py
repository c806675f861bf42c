"""One contract for all rollout backends, over three families of models (R02, R03, R09).

The same samples, weights and greedy decoding give the same prompt and response tokens wherever they are generated, in
float32. What can go wrong is reported alike, which the first family shows. A backend joins by an entry in BACKENDS, and
one in each table of faults. One server and one colocated engine per family for the module.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from bench.engines import colocate_sync, colocated_engine
from bench.tiny_models import FAMILIES
from learner.config.sections.model import ModelConfig
from learner.config.sections.rollout_matching import RolloutMatchingConfig
from learner.policy.canary_scores import RepeatedLogprobs
from learner.policy.load import Policy, load_policy
from learner.policy.parallel import Ranks
from learner.records import Rollout, Sample
from learner.rollout.backend import RolloutBackend
from learner.rollout.colocate import ColocateBackend
from learner.rollout.colocated_engine import ColocatedEngine
from learner.rollout.hf import HfBackend
from learner.rollout.server_backend import ServerBackend
from learner.sync.canary import CanaryItem
from shared.addresses import free_port
from shared.errors import ConfigError, ProjectError, PromptTooLongError
from shared.processes import descendants
from tests.servers import RunningServer, running_server
from tests.syncs import server_sync

pytestmark = [pytest.mark.integration, pytest.mark.slow]

CPU = torch.device("cpu")
COLOCATED = RolloutMatchingConfig.model_validate(
    {"decode_batch_size": 3, "vllm": {"enforce_eager": True, "max_model_len": 512}}
)
LONG = "name every digit " * 400  # more tokens than any of the models takes


@dataclass(frozen=True)
class World:
    """A family's model on disk and as a policy with other weights, samples for it, and two engines that have it."""

    family: str
    policy: Policy
    samples: list[Sample]
    server: RunningServer
    group_port: int
    engine: ColocatedEngine

    @property
    def canary(self) -> CanaryItem:
        item = self.samples[0]
        return CanaryItem(sample=item, prompt=self.policy.encoder.encode(item), response_token_ids=tuple(range(20, 40)))

    def config(self, *, max_new_tokens: int = 16, timeout_s: float = 120.0) -> RolloutMatchingConfig:
        server = {
            "servers": [{"base_url": self.server.base_url, "group_port": self.group_port}],
            "timeout_s": timeout_s,
        }
        # A penalty, since greedy answers of a random model hardly differ without one.
        decoding = {"max_new_tokens": max_new_tokens, "repetition_penalty": 1.2}
        keys = {"decode_batch_size": 3, "decoding": decoding, "vllm": {"mode": "server", "server": server}}
        return RolloutMatchingConfig.model_validate(keys)


@pytest.fixture(scope="module", params=FAMILIES)
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp(request.param)
    FAMILIES[request.param](folder / "model")
    policy = load_policy(ModelConfig(path=str(folder / "model")), device=CPU)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():  # no backend may answer with what lies on the disk
        for parameter in policy.model.parameters():
            parameter += 0.05 * parameter.abs().mean() * torch.randn(parameter.shape, generator=generator)
    samples = make_samples(folder / "images", with_images=policy.encoder.processor is not None)
    config = {"model": str(folder / "model"), "max_model_len": 512, "allowed_image_roots": [str(folder)]}
    with running_server(config, folder) as server, closing(colocated_engine(COLOCATED, folder / "model")) as engine:
        yield World(request.param, policy, samples, server, free_port(), engine)


def make_samples(folder: Path, *, with_images: bool) -> list[Sample]:
    """Return prompts of different lengths: one, two and no images, of several shapes."""
    folder.mkdir()
    rng = np.random.default_rng(0)
    made = []
    for i, sizes in enumerate([[(128, 128)], [], [(64, 96), (160, 64)], [(96, 64)], []]):
        paths = [folder / f"{i}-{j}.png" for j in range(len(sizes))] if with_images else []
        for path, (width, height) in zip(paths, sizes, strict=bool(paths)):
            Image.fromarray(rng.integers(0, 256, (height, width, 3), np.uint8)).save(path)
        made.append(sample("<image>" * len(paths) + "name every digit " * (i + 1), [str(path) for path in paths], i))
    return made


def sample(text: str, images: list[str], number: int) -> Sample:
    turn = {"role": "user", "content": text}
    return Sample(sample_id=f"s{number}", messages=(turn,), images=tuple(images), objects=(), width=128, height=128)


def generate(backend: RolloutBackend, samples: list[Sample]) -> list[Rollout]:
    return backend.generate(samples, global_step=1, micro_step_idx=0, first_req_idx=0)


# ---- the backends, each with the policy's present weights ------------------------------------------------------------


@contextmanager
def hf(world: World, config: RolloutMatchingConfig) -> Iterator[RolloutBackend]:
    backend = HfBackend(config, world.policy, run_seed=3)
    yield backend
    backend.close()


@contextmanager
def server(world: World, config: RolloutMatchingConfig) -> Iterator[RolloutBackend]:
    backend = ServerBackend(config, run_seed=3)
    backend.connect()
    policy = world.policy
    answers = RepeatedLogprobs(policy, [(world.canary.prompt, world.canary.response_token_ids)])
    sync = server_sync(backend, policy, [world.canary], answers)
    try:
        sync.connect()
        sync.sync()
        yield backend
    finally:
        sync.close()
        backend.close()


@contextmanager
def colocate(world: World, config: RolloutMatchingConfig) -> Iterator[RolloutBackend]:
    backend = ColocateBackend(config, world.engine, world.policy.encoder, run_seed=3, ranks=Ranks())
    colocate_sync(world.engine, world.policy, world.canary, config).sync()
    yield backend


Backend = Callable[[World, RolloutMatchingConfig], AbstractContextManager[RolloutBackend]]
BACKENDS: dict[str, Backend] = {"hf": hf, "colocate": colocate, "server": server}


# ---- tokens ----------------------------------------------------------------------------------------------------------


def test_all_backends_answer_alike(world: World) -> None:
    """R03, R09: with the trained weights, which are not those on disk; prompts are the encoder's."""
    answers: dict[str, list[Any]] = {}
    for name, backend in BACKENDS.items():
        with backend(world, world.config()) as made:
            rollouts = generate(made, world.samples)
        assert [r.prompt_token_ids for r in rollouts] == [
            world.policy.encoder.encode(s).token_ids for s in world.samples
        ]
        assert [r.sample for r in rollouts] == world.samples
        answers[name] = [(r.response_token_ids, r.finish_reason, r.seed) for r in rollouts]
    for name, found in answers.items():
        assert found == answers["hf"], name
    assert len({token for response, *_ in answers["hf"] for token in response}) > 20, "too little to compare"


# ---- faults ----------------------------------------------------------------------------------------------------------


def start_hf_without_weights(folder: Path) -> None:
    FAMILIES["qwen3"](folder)
    (folder / "model.safetensors").unlink()
    load_policy(ModelConfig(path=str(folder)), device=CPU)


def start_an_engine_without_weights(folder: Path) -> None:
    FAMILIES["qwen3"](folder)
    (folder / "model.safetensors").unlink()
    colocated_engine(COLOCATED, folder, reads_weights=True)


def start_on_a_dead_server(folder: Path) -> None:
    server = {"servers": [{"base_url": f"http://127.0.0.1:{free_port()}", "group_port": free_port()}], "timeout_s": 1.0}
    config = RolloutMatchingConfig.model_validate({"vllm": {"mode": "server", "server": server}})
    backend = ServerBackend(config, run_seed=3)
    try:
        backend.connect()
    finally:
        backend.close()


FAILING_STARTS: dict[str, Callable[[Path], None]] = {
    "hf": start_hf_without_weights,
    "colocate": start_an_engine_without_weights,
    "server": start_on_a_dead_server,
}


@pytest.mark.parametrize("name", BACKENDS)
def test_an_engine_that_fails_at_start(name: str, tmp_path: Path) -> None:
    """R16: a user's error, with what to do."""
    with pytest.raises(ProjectError) as caught:
        FAILING_STARTS[name](tmp_path / "model")
    assert caught.value.exit_code == 2
    assert caught.value.found
    assert caught.value.remedy


FIRST_FAMILY = pytest.mark.parametrize("world", list(FAMILIES)[:1], indirect=True)


@FIRST_FAMILY
@pytest.mark.parametrize("name", BACKENDS)
def test_no_room_for_a_prompt(name: str, world: World) -> None:
    """R16: reported before anything is generated."""
    with (
        pytest.raises(ConfigError, match=r"max_new_tokens: no room"),
        BACKENDS[name](world, world.config(max_new_tokens=4096)),
    ):
        pass


@FIRST_FAMILY
@pytest.mark.parametrize("name", BACKENDS)
def test_a_request_that_is_too_long(name: str, world: World) -> None:
    """Refused with the lengths, and the backend goes on."""
    with BACKENDS[name](world, world.config()) as backend:
        with pytest.raises(PromptTooLongError) as caught:
            generate(backend, [world.samples[0], sample(LONG, [], 9)])
        assert "tokens together" in caught.value.wanted
        assert "max_new_tokens" in caught.value.remedy
        assert len(generate(backend, world.samples[:1])) == 1


def exhaust_memory_of_hf(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("Tried to allocate 20.00 GiB.")

    monkeypatch.setattr(world.policy.model.get_output_embeddings(), "forward", fail)


def exhaust_memory_of_the_engine(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("Tried to allocate 20.00 GiB.")

    monkeypatch.setattr(world.engine.model, "compute_logits", fail)


def exhaust_memory_of_the_server(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kill the server's processes, as the kernel does with one that is too large."""
    for pid in descendants(world.server.process.pid):
        os.kill(pid, signal.SIGKILL)


EXHAUST = {
    "hf": exhaust_memory_of_hf,
    "colocate": exhaust_memory_of_the_engine,
    "server": exhaust_memory_of_the_server,
}


@FIRST_FAMILY
@pytest.mark.parametrize("name", BACKENDS)
def test_out_of_memory(name: str, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error that says what to do, in bounded time. Last, for it leaves the first family without its server."""
    with BACKENDS[name](world, world.config(timeout_s=20.0)) as backend:
        EXHAUST[name](world, monkeypatch)
        with pytest.raises(ProjectError) as caught:
            generate(backend, world.samples)
        assert caught.value.remedy
