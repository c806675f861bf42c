"""Learner's client and weight sync against a real rollout server: vLLM, HTTP, gloo (R03, R07, R09-R11, R13)."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from bench.demo_model import build
from learner.config.sections.model import ModelConfig
from learner.config.sections.rollout_matching import RolloutMatchingConfig
from learner.data.prompt import check_prompt_prefix
from learner.policy.canary_scores import RepeatedLogprobs
from learner.policy.load import Policy, load_policy
from learner.records import Sample
from learner.rollout.server_backend import ServerBackend
from learner.sync.canary import EXACT_TOLERANCE, CanaryItem
from learner.sync.sync import Sync
from shared.addresses import free_port
from shared.errors import CanaryError, CoverageError, MediaError, ServerPoisonedError
from tests.servers import RunningServer, running_server
from tests.syncs import Incomplete, server_sync

pytestmark = pytest.mark.integration

Connect = Callable[..., ServerBackend]
StartSync = Callable[..., Sync]
CPU = torch.device("cpu")
DECODING = {"temperature": 1.0, "max_new_tokens": 12}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sync") / "model"
    build(path, "tiny", seed=0)
    return path


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> list[Sample]:
    """Return noise images of several sizes, so that prompts differ in length."""
    folder = tmp_path_factory.mktemp("images")
    rng = np.random.default_rng(0)
    made = []
    for i in range(6):
        width, height = 64 + 32 * (i % 3), 96
        path = folder / f"{i}.png"
        Image.fromarray(rng.integers(0, 255, (height, width, 3), np.uint8)).save(path)
        made.append(
            Sample(
                sample_id=f"s{i}",
                messages=({"role": "user", "content": f"<image>Find object {i}."},),
                images=(str(path),),
                objects=(),
                width=width,
                height=height,
            )
        )
    return made


@pytest.fixture(scope="module")
def server(model: Path, samples: list[Sample], tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    image_root = Path(samples[0].images[0]).parent
    config = {"model": str(model), "url_prefix": "/fleet/a", "allowed_image_roots": [str(image_root)]}
    with running_server(config, tmp_path_factory.mktemp("server")) as running:
        yield running


@pytest.fixture(scope="module")
def group_port() -> int:
    return free_port()


@pytest.fixture(scope="module")
def policy(model: Path) -> Policy:
    return load_policy(ModelConfig(path=str(model)), device=CPU)


@pytest.fixture
def connect(server: RunningServer, group_port: int, policy: Policy) -> Iterator[Connect]:
    made: list[ServerBackend] = []

    def make(decode_batch_size: int = 8) -> ServerBackend:
        section = {
            "decode_batch_size": decode_batch_size,
            "decoding": DECODING,
            "vllm": {
                "mode": "server",
                "server": {
                    "servers": [{"base_url": server.base_url, "group_port": group_port}],
                    "timeout_s": 60.0,
                },
                "sync": {"bucket_bytes": 300_000},
            },
        }
        config = RolloutMatchingConfig.model_validate(section)
        vocab_size = policy.model.config.get_text_config().vocab_size
        made.append(ServerBackend(config, run_seed=3, vocab_size=vocab_size))
        made[-1].connect()
        return made[-1]

    yield make
    for backend in made:
        backend.close()


@pytest.fixture
def start_sync(connect: Connect, policy: Policy, samples: list[Sample]) -> Iterator[StartSync]:
    made: list[Sync] = []

    def make(backend: ServerBackend, weights: Any = policy, judge: Policy = policy, **sync: Any) -> Sync:
        canary, vllm = canary_of(policy, samples), backend.config.vllm
        config = vllm.model_copy(update={"sync": vllm.sync.model_copy(update=sync)})
        made.append(server_sync(backend, weights, canary, canary_logprobs(judge, canary), config=config))
        return made[-1]

    yield make
    for sync in made:
        sync.close()


def canary_of(policy: Policy, samples: Sequence[Sample]) -> list[CanaryItem]:
    encoded = [(sample, policy.encoder.encode(sample)) for sample in samples[:2]]
    return [CanaryItem(sample=s, prompt=p, response_token_ids=tuple(range(20, 40))) for s, p in encoded]


def canary_logprobs(policy: Policy, items: Sequence[CanaryItem]) -> RepeatedLogprobs:
    return RepeatedLogprobs(policy, [(item.prompt, item.response_token_ids) for item in items])


def perturb(policy: Policy, scale: float = 0.05) -> None:
    """Make it clearly another model: every weight moves by a few percent of its own size."""
    generator = torch.Generator().manual_seed(round(scale * 1000))
    with torch.no_grad():
        for parameter in policy.model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter += scale * parameter.abs().mean() * noise


def generate(backend: ServerBackend, samples: list[Sample], **changes: Any) -> list[Any]:
    return backend.generate(samples, **({"global_step": 1, "micro_step_idx": 0, "first_req_idx": 0} | changes))


def test_rollouts_come_in_order_with_the_learner_s_prompts(
    connect: Connect, policy: Policy, samples: list[Sample]
) -> None:
    """R03, R07, R13: images by path under a URL prefix; the prompt's ids are those of the learner's own processor."""
    rollouts = generate(connect(), samples)
    assert [rollout.sample.sample_id for rollout in rollouts] == [sample.sample_id for sample in samples]
    for rollout in rollouts:
        expected = policy.encoder.encode(rollout.sample).token_ids
        check_prompt_prefix(expected, rollout.prompt_token_ids, rollout.sample.sample_id)
        assert 0 < len(rollout.response_token_ids) <= DECODING["max_new_tokens"]


def test_a_sample_s_rollout_does_not_depend_on_how_calls_are_cut(connect: Connect, samples: list[Sample]) -> None:
    """R11: one call of six, or six calls of one, or the second half alone: same seeds, same sampled tokens."""
    whole = generate(connect(8), samples)
    single = generate(connect(1), samples)
    half = generate(connect(8), samples[3:], first_req_idx=3)
    tokens = [rollout.response_token_ids for rollout in whole]
    assert len(set(tokens)) > 1
    assert [rollout.seed for rollout in single] == [rollout.seed for rollout in whole]
    assert [rollout.response_token_ids for rollout in single] == tokens
    assert [rollout.response_token_ids for rollout in half] == tokens[3:]


def test_the_server_s_words_reach_the_learner(connect: Connect, server: RunningServer, samples: list[Sample]) -> None:
    """A wrong image is the user's mistake: reported once, with the server named, not retried."""
    missing = dataclasses.replace(samples[0], images=("/nowhere/1.png",))
    calls: list[Any] = []
    backend = connect()
    backend._on_call = calls.append
    with pytest.raises(MediaError, match=server.base_url):
        generate(backend, [samples[1], missing])
    assert len(calls[0].calls) == 1


def test_syncs_change_what_is_served_and_are_checked(
    connect: Connect, start_sync: StartSync, policy: Policy, samples: list[Sample]
) -> None:
    """R09, R10: after each sync the served probabilities are the learner's, and rollouts carry its version."""
    backend = connect()
    sync = start_sync(backend)
    before = generate(backend, samples, greedy=True)
    perturb(policy)
    first = sync.sync()
    after = generate(backend, samples, greedy=True)
    assert {rollout.ver for rollout in after} == {first.ver}
    assert [r.response_token_ids for r in after] != [r.response_token_ids for r in before]
    perturb(policy, 0.08)
    second = sync.sync()
    assert second.ver == first.ver + 1
    for receipt in (first, second):
        assert receipt.canary_gap_max < EXACT_TOLERANCE
        assert receipt.num_tensors == len(policy.weight_specs())
    assert {rollout.ver for rollout in generate(backend, samples)} == {second.ver}


def test_the_canary_tells_a_model_that_is_not_the_learner_s(
    connect: Connect, start_sync: StartSync, policy: Policy, samples: list[Sample]
) -> None:
    """R09: the check can fail: the same sync, compared with a policy that has moved on, is refused and never served."""

    other, backend = copy.deepcopy(policy), connect()
    perturb(other, 0.5)
    with pytest.raises(CanaryError, match="not the learner's"):
        start_sync(backend, judge=other).sync()
    with pytest.raises(ServerPoisonedError):
        generate(backend, samples)
    assert start_sync(connect()).sync().ver


@pytest.mark.slow
def test_an_incomplete_sync_poisons_and_a_new_learner_heals(
    connect: Connect, start_sync: StartSync, policy: Policy, samples: list[Sample]
) -> None:
    """A tensor is missing: named; nothing is served until a complete sync, here by another incarnation."""
    backend = connect()
    with pytest.raises(CoverageError):
        start_sync(backend, weights=Incomplete(policy)).sync()
    with pytest.raises(ServerPoisonedError):
        generate(backend, samples)
    newcomer = connect()
    receipt = start_sync(newcomer).sync()
    assert {rollout.ver for rollout in generate(newcomer, samples)} == {receipt.ver}
