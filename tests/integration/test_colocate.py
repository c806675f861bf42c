"""vLLM inside the learner's process, real, on one rank: what a sync changes, what nothing may change, what is refused.

One engine for the module. That all backends answer alike: test_backends.py; whole runs: test_colocate_run.py.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from bench.engines import colocate_sync, colocated_engine
from bench.tiny_models import build_qwen3_vl
from learner.config.sections.model import LoraConfig, ModelConfig
from learner.config.sections.rollout_matching import RolloutMatchingConfig
from learner.policy.load import Policy, load_policy
from learner.policy.parallel import Ranks
from learner.records import Rollout, Sample
from learner.rollout.colocate import ColocateBackend
from learner.rollout.colocated_engine import ColocatedEngine
from learner.rollout.hf import HfBackend
from learner.sync.canary import CanaryItem
from shared.canary import cached_positions
from shared.engine_images import EngineImages
from shared.errors import CanaryError, ConfigError, CoverageError, SyncError
from shared.seeds import offset_seed, request_seed

pytestmark = pytest.mark.integration

CPU = torch.device("cpu")
RUN_SEED = 3
DECODE_BATCH_SIZE = 3
VLLM = {"compile": False, "max_model_len": 512}


def config(temperature: float = 0.0, **vllm: Any) -> RolloutMatchingConfig:
    decoding = {"max_new_tokens": 12, "repetition_penalty": 1.2, "temperature": temperature}
    keys = {"decode_batch_size": DECODE_BATCH_SIZE, "decoding": decoding, "vllm": {**VLLM, **vllm}}
    return RolloutMatchingConfig.model_validate(keys)


def random_state() -> tuple[Any, ...]:
    return random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()


@dataclass(frozen=True)
class World:
    folder: Path
    policy: Policy
    samples: list[Sample]
    engine: ColocatedEngine
    generators_at_start: tuple[Any, Any]  # read before and after the engine started

    def backend(self, temperature: float = 0.0) -> ColocateBackend:
        return ColocateBackend(config(temperature), self.engine, self.policy.encoder, run_seed=RUN_SEED, ranks=Ranks())

    def canary(self, policy: Policy) -> CanaryItem:
        prompt = policy.encoder.encode(self.samples[0])
        return CanaryItem(sample=self.samples[0], prompt=prompt, response_token_ids=tuple(range(20, 40)))

    def sync(self, policy: Policy | None = None) -> float:
        """Sync the engine; return the canary's gap."""
        policy = policy or self.policy
        return colocate_sync(self.engine, policy, self.canary(policy), config()).sync().canary_gap

    def generate(self, temperature: float = 0.0, first: int = 0) -> list[Rollout]:
        return rolled_out(self.backend(temperature), self.samples[first:], first)

    def by_hf(self) -> list[tuple[int, ...]]:
        return answers(rolled_out(HfBackend(config(), self.policy, run_seed=RUN_SEED), self.samples))


def rolled_out(backend: Any, samples: list[Sample], first_req_idx: int = 0) -> list[Rollout]:
    return backend.generate(samples, global_step=1, micro_step_idx=0, first_req_idx=first_req_idx)


def answers(rollouts: list[Rollout]) -> list[tuple[int, ...]]:
    return [rollout.response_token_ids for rollout in rollouts]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("colocate")
    build_qwen3_vl(folder / "model")
    policy = load_policy(ModelConfig(path=str(folder / "model")), device=CPU)
    samples = [sample(folder, i) for i in range(5)]
    before = random_state()
    with closing(colocated_engine(config(), folder / "model")) as engine:
        yield World(folder, policy, samples, engine, (before, random_state()))


def sample(folder: Path, number: int) -> Sample:
    pixels = np.random.default_rng(number).integers(0, 256, (64 + 16 * number, 96, 3), np.uint8)
    Image.fromarray(pixels).save(folder / f"{number}.png")
    turn = {"role": "user", "content": "<image>" + "name every digit " * (number + 1)}
    images = (str(folder / f"{number}.png"),)
    return Sample(sample_id=f"s{number}", messages=(turn,), images=images, objects=(), width=96, height=64)


@pytest.fixture
def trained(world: World) -> Callable[[], None]:
    """Return what updates all weights."""

    def train() -> None:
        with torch.no_grad():
            for parameter in world.policy.model.parameters():
                parameter += 0.05 * parameter.abs().mean() * torch.randn_like(parameter)

    return train


def test_the_engine_of_this_module_is_not_compiled(world: World) -> None:
    """`vllm.compile: false`; it is not eager either."""
    vllm_config = world.engine._llm.llm_engine.vllm_config
    assert vllm_config.compilation_config.mode == 0
    assert not world.engine._config.vllm.enforce_eager


def test_no_rollout_before_the_first_sync(world: World) -> None:
    """R10. First in the file, while the engine has no weights: it has read none, the first sync brings all. What its
    model made for itself is there."""
    served = world.engine.model
    assert not any(parameter.any() for parameter in served.parameters())
    assert all(buffer.isfinite().all() for buffer in served.buffers())
    assert any(buffer.any() for name, buffer in served.named_buffers() if "cos_sin_cache" in name)
    with pytest.raises(SyncError, match="not known to be right"):
        world.generate()


def test_rollouts_are_made_by_the_weights_last_synced(world: World, trained: Callable[[], None]) -> None:
    """R09, R10: training after a sync does not reach the engine (nothing is shared); after the next sync it does, past
    prompts and images whose caches the old weights had filled."""
    assert world.sync() < 1e-5
    first, ver = answers(world.generate()), world.engine.ver
    assert first == world.by_hf()
    trained()
    assert answers(world.generate()) == first != world.by_hf()
    assert world.sync() < 1e-5
    rollouts = world.generate()
    assert answers(rollouts) == world.by_hf() != first
    assert ver == 1
    assert {rollout.server_id for rollout in rollouts} == {"colocate"}


def test_both_sides_score_after_the_load(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """R09: nothing is moved for an engine that is awake, so the learner's pass begins when the weights are on their
    way. What it gives is read when the engine has scored."""
    called: list[str] = []
    sync = colocate_sync(world.engine, world.policy, world.canary(world.policy), config())
    told = [(world.engine, "load"), (world.engine, "score"), (world.policy, "answer_logprobs")]
    told += [(world.policy, "split"), (world.engine, "_rest")]

    def telling(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def tell(*args: Any, **kwargs: Any) -> Any:
            called.append(name)
            return method(*args, **kwargs)

        return tell

    for owner, name in told:
        monkeypatch.setattr(owner, name, telling(name, getattr(owner, name)))
    receipt = sync.sync()
    assert called == ["load", "answer_logprobs", "score", "split", "_rest"]
    assert sum(receipt.parts.values()) == pytest.approx(receipt.seconds, rel=0.2)
    monkeypatch.setattr(sync._delivery, "_scores_beside", lambda: False)
    called.clear()
    sync.sync()
    assert called == ["answer_logprobs", "load", "score", "split", "_rest"]


def test_training_does_not_notice(world: World) -> None:
    """Weights bit for bit, gradients and random generators, through a start, a sync and rollouts."""
    before_start, after_start = world.generators_at_start
    assert before_start == after_start
    parameters = dict(world.policy.model.named_parameters())
    for parameter in parameters.values():
        parameter.grad = torch.ones_like(parameter)
    weights = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    generators = random_state()
    world.sync()
    world.generate(temperature=1.0)
    assert random_state() == generators
    for name, parameter in parameters.items():
        assert torch.equal(parameter, weights[name])
        assert parameter.grad is not None
        assert bool((parameter.grad == 1).all())
        parameter.grad = None


def test_sampling_follows_the_seeds(world: World) -> None:
    """R11, R29: request i draws by base + i, whoever is beside it."""
    world.sync()
    rollouts = world.generate(temperature=1.0)
    place = {"run_seed": RUN_SEED, "global_step": 1, "micro_step_idx": 0}
    assert [r.seed for r in rollouts] == [request_seed(**place, req_idx=i) for i in range(5)]
    assert offset_seed(rollouts[0].seed or 0, 4) == rollouts[4].seed
    assert answers(rollouts) == answers(world.generate(temperature=1.0))
    assert answers(rollouts)[3:] == answers(world.generate(temperature=1.0, first=3))
    assert answers(rollouts) != answers(world.generate())


def test_the_engine_gets_what_each_prompt_is_by_itself(world: World) -> None:
    """Prompts of a group, and the beginnings of an answer, are not rendered again."""
    from vllm.renderers.inputs.preprocess import parse_model_prompt

    images = world.engine._images
    renderer = images.renderer
    prompts = []
    for one in map(world.policy.encoder.for_engine, world.samples[:2]):
        answered = replace(one, token_ids=[*one.token_ids, *range(20, 40)])
        prompts += [one, one, answered, replace(one, token_ids=answered.token_ids[:-7]), one]

    def render() -> list[Any]:
        asked = [parse_model_prompt(renderer.model_config, prompt.for_engine()) for prompt in prompts]
        return [renderer.render_cmpl([one])[0] for one in asked]

    def told(rendered: list[Any]) -> list[Any]:
        return [(r["prompt_token_ids"], r["mm_hashes"], r["mm_placeholders"], set(r)) for r in rendered]

    with images.looking(prompts, [True] * len(prompts)) as seen:
        together = told(render())
    assert together == told(render())
    assert all(images.result(prompt, one) for prompt, one in zip(prompts, seen, strict=True))


def test_each_response_gets_its_own_scores(world: World) -> None:
    """R09: several of one prompt and of others, whole and through the prefix cache."""
    world.sync()
    pairs = [(0, (20, 21, 22)), (1, (23,)), (0, (24, 25)), (2, (26, 27, 28, 29))]
    encoder = world.policy.encoder
    scores = world.engine.score([encoder.for_engine(world.samples[i]) for i, _ in pairs], [ids for _, ids in pairs])
    own = world.policy.logprobs([(encoder.encode(world.samples[i]), ids) for i, ids in pairs])
    for score, mine in zip(scores, own, strict=True):
        assert score.logprobs == pytest.approx(mine, abs=1e-4)
        cached = [mine[i] for i in cached_positions(len(mine))]
        assert score.cached_logprobs == pytest.approx(cached, abs=1e-4)


def test_the_settings_of_the_processor_are_those_of_the_one_that_vllm_has(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To read a processor again takes seconds for a large vocabulary, and a run's first sync waited for it."""
    from vllm.transformers_utils.processor import cached_get_processor

    world.sync()
    prompt = world.policy.encoder.for_engine(world.samples[4])
    (known,) = world.engine.score([prompt], [[20, 21]])
    renderer = world.engine._images.renderer
    monkeypatch.setattr(world.engine, "_images", EngineImages(renderer, world.engine._threads))
    cached_get_processor.cache_clear()
    renderer.get_mm_processor().info.get_hf_processor()  # the model's own code does so for each image
    before = cached_get_processor.cache_info().misses
    (first,) = world.engine.score([prompt], [[20, 21]])  # the image was sent before: it is processed again
    assert first.pixels is not None
    assert first.pixels == known.pixels
    assert cached_get_processor.cache_info().misses == before > 0


def test_decode_batch_size_bounds_what_is_decoded_at_once(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """R21: five requests, three at a time."""
    world.sync()
    core = world.engine._llm.llm_engine.engine_core.engine_core
    step, running = core.scheduler.schedule, []

    def counted(*args: Any, **kwargs: Any) -> Any:
        scheduled = step(*args, **kwargs)
        running.append(len(core.scheduler.running))
        return scheduled

    monkeypatch.setattr(core.scheduler, "schedule", counted)
    assert len(world.generate()) == 5
    assert max(running) == DECODE_BATCH_SIZE


def test_lora_is_served_merged(world: World) -> None:
    """R09: the learner scores with its adapter, the engine with merged weights; the trained base stays as it was."""
    lora = LoraConfig(r=4, alpha=64, dropout=0.0)
    policy = load_policy(ModelConfig(path=str(world.folder / "model"), lora=lora), device=CPU)
    with torch.no_grad():
        for name, parameter in policy.trainable:
            if "lora_B" in name:
                parameter.normal_(std=0.05)
    before = {name: parameter.detach().clone() for name, parameter in policy.model.named_parameters()}
    plain = load_policy(ModelConfig(path=str(world.folder / "model")), device=CPU)
    item = world.canary(policy)
    moved = np.abs(np.subtract(*(p.logprobs([(item.prompt, item.response_token_ids)]) for p in (policy, plain))))
    assert moved.mean() > 0.01, "the adapter changes nothing"
    assert world.sync(policy) < 1e-4
    assert all(torch.equal(parameter, before[name]) for name, parameter in policy.model.named_parameters())


# ---- faults ----------------------------------------------------------------------------------------------------------


def refused_then_mended(world: World) -> None:
    """Check R09 and R10: there is no rollout by weights that were not checked, until a complete sync."""
    with pytest.raises(SyncError, match="not known to be right"):
        world.generate()
    world.sync()
    assert answers(world.generate()) == world.by_hf()


def test_a_canary_that_fails_stops_rollouts(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The learner's model gives other probabilities than the weights that it handed over."""
    honest = world.policy.answer_logprobs
    monkeypatch.setattr(world.policy, "answer_logprobs", lambda inputs: honest(inputs) - 0.5)
    with pytest.raises(CanaryError, match="the colocated engine") as caught:
        world.sync()
    assert "mean gap 0.5" in caught.value.found
    monkeypatch.undo()
    refused_then_mended(world)


def test_a_tensor_that_does_not_come_stops_rollouts(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    named = world.policy.named_weights
    monkeypatch.setattr(
        world.policy, "named_weights", lambda dtype: (pair for pair in named(dtype) if "layers.1.mlp" not in pair[0])
    )
    with pytest.raises(CoverageError, match="does not cover") as caught:
        world.sync()
    assert "layers.1.mlp" in caught.value.found
    monkeypatch.undo()
    refused_then_mended(world)


def test_old_prefixes_that_stay_stop_rollouts(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """They hold what other weights computed."""
    monkeypatch.setattr(world.engine._llm.llm_engine, "reset_prefix_cache", lambda: False)
    with pytest.raises(SyncError, match="prefix cache cannot be reset"):
        world.sync()
    monkeypatch.undo()
    refused_then_mended(world)


def test_what_vllms_loader_raises_is_an_error_of_the_sync(world: World) -> None:
    with pytest.raises(SyncError, match="loading weights into the colocated engine failed") as caught:
        world.engine.load([("no.such.layer.weight", torch.zeros(1))])
    assert "no.such.layer" in caught.value.found or "no module" in caught.value.found
    refused_then_mended(world)


@pytest.mark.slow
def test_an_engine_without_enough_memory(world: World) -> None:
    """R16, R20: reported at the start, with the keys that help."""
    with pytest.raises(ConfigError, match="does not start") as caught:
        colocated_engine(config(cpu_kv_cache_gib=1_000_000), world.folder / "model")
    assert "GiB" in caught.value.found
    for way_out in ("gpu_memory_utilization", "cpu_kv_cache_gib", "offload.enabled", "rollout_backend: hf"):
        assert way_out in caught.value.remedy
