"""Adapter syncs to a real server that takes adapters: vLLM, HTTP, gloo, prefix cache on (R08, R09, R10)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bench.demo_model import build
from deploy.demo import build_data
from learner.config.sections.model import LoraConfig, ModelConfig
from learner.config.sections.rollout_matching import RolloutMatchingConfig
from learner.policy.load import Policy, load_policy
from learner.records import Sample
from learner.rollout.server_backend import ServerBackend
from learner.sync.canary import CanaryItem, score_items
from learner.sync.sync import Sync
from shared.addresses import free_port
from shared.errors import CoverageError, ServerPoisonedError
from shared.sync.adapter_loading import AdapterLoad
from shared.wire import ScoreCall
from tests.integration.test_training import ROLLOUTS, World, learn
from tests.servers import running_server
from tests.syncs import Incomplete, server_sync

pytestmark = [pytest.mark.integration, pytest.mark.slow]

Connect = Callable[..., ServerBackend]
StartSync = Callable[..., Sync]
MakePolicy = Callable[..., Policy]
RANK = 8
LANGUAGE = r".*language_model.*\.(q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj)"
NUM_LAYERS = 14  # the tiny model's: 7 in each of its two


@dataclass(frozen=True)
class Place:
    """A server that takes adapters, started on the model of `folder`."""

    folder: Path
    base_url: str
    group_port: int


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    folder = tmp_path_factory.mktemp("adapters")
    build(folder / "model", "tiny", seed=0)
    build_data.build(build_data.Build(train=24, val=0, test=8), folder)
    config = {"model": str(folder / "model"), "allowed_image_roots": [str(folder)]}
    with running_server({**config, "enable_lora": True, "max_lora_rank": RANK}, folder) as server:
        yield Place(folder, server.base_url, free_port())


@pytest.fixture
def policy_of(place: Place) -> MakePolicy:
    def make(target_modules: str = LANGUAGE, freeze: list[str] | None = None, kind: str = "lora") -> Policy:
        lora = LoraConfig(type=kind, r=4, alpha=32, target_modules=target_modules)
        config = ModelConfig(path=str(place.folder / "model"), lora=lora, freeze=freeze or [])
        return load_policy(config, device=torch.device("cpu"))

    return make


@pytest.fixture
def sample() -> Sample:
    """Return a prompt of several cache blocks (128 tokens each on CPU), so that a second request finds its beginning
    cached."""
    messages = ({"role": "user", "content": "Detect every digit. " * 60},)
    return Sample(sample_id="long", messages=messages, images=(), objects=(), width=64, height=64)


@pytest.fixture
def connect(place: Place) -> Iterator[Connect]:
    made: list[ServerBackend] = []

    def make(**sync: Any) -> ServerBackend:
        server = {"servers": [{"base_url": place.base_url, "group_port": place.group_port}], "timeout_s": 60.0}
        vllm = {"mode": "server", "enable_lora": True, "server": server, "sync": {"mode": "adapter", **sync}}
        decoding = {"temperature": 0.0, "max_new_tokens": 12}
        config = RolloutMatchingConfig.model_validate({"decode_batch_size": 8, "decoding": decoding, "vllm": vllm})
        made.append(ServerBackend(config, run_seed=3))
        made[-1].connect()
        return made[-1]

    yield make
    for backend in made:
        backend.close()


@pytest.fixture
def start(sample: Sample) -> Iterator[StartSync]:
    made: list[Sync] = []

    def make(backend: ServerBackend, policy: Policy, weights: Any = None, **changes: Any) -> Sync:
        canary = CanaryItem(
            sample=sample, prompt=policy.encoder.encode(sample), response_token_ids=tuple(range(20, 60))
        )

        def learner_logprobs() -> list[list[float]]:
            return policy.logprobs([(canary.prompt, canary.response_token_ids)])

        arguments = {"adapter": policy.adapter_weights()} | changes
        made.append(server_sync(backend, weights or policy, [canary], learner_logprobs, **arguments))
        return made[-1]

    yield make
    for sync in made:
        sync.close()


def train(policy: Policy, seed: int) -> None:
    """Make it clearly another adapter, of clearly another effect."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, parameter in policy.trainable:
            parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))


def answer(backend: ServerBackend, sample: Sample) -> tuple[int, ...]:
    (rollout,) = backend.generate([sample], global_step=1, micro_step_idx=0, first_req_idx=0)
    return rollout.response_token_ids


def test_only_the_adapter_travels_and_it_is_what_is_served(
    connect: Connect, start: StartSync, policy_of: MakePolicy, sample: Sample
) -> None:
    """R08, R09, R10: one adapter after the other under the same name, the prompt cached in between; answers change
    with each, and the served probabilities are the learner's."""
    policy, backend = policy_of(), connect()
    sync, answers, receipts = start(backend, policy), [], []
    for seed in range(3):
        train(policy, seed)
        receipts.append(receipt := sync.sync())
        assert (receipt.mode, receipt.num_tensors, receipt.fallback) == ("adapter", 2 * NUM_LAYERS, "")
        assert receipt.canary_gap < 1e-3
        answers += [answer(backend, sample), answer(backend, sample)]
    assert answers[0::2] == answers[1::2]
    assert len(set(answers)) == 3
    assert [receipt.ver - receipts[0].ver for receipt in receipts] == [0, 1, 2]
    full = sum(weight.numel() for _, weight in policy.named_weights()) * 4
    assert receipts[0].num_bytes < full / 4


def test_a_full_sync_takes_the_adapter_off_and_the_other_way_round(
    connect: Connect, start: StartSync, policy_of: MakePolicy, sample: Sample
) -> None:
    """R08, R09: merged weights are not adapted once more, and an adapter is not put on merged weights: the same
    answers either way."""
    policy = policy_of()
    train(policy, 5)
    backend = connect()
    start(backend, policy).sync()
    adapted = answer(backend, sample)
    merged = start(backend, policy, adapter=None).sync()
    assert (merged.mode, merged.canary_gap < 1e-3) == ("full", True)
    assert answer(backend, sample) == adapted
    again = start(backend, policy).sync()
    assert (again.mode, again.canary_gap < 1e-3) == ("adapter", True)
    assert answer(backend, sample) == adapted


def test_several_answers_are_scored_at_once(
    connect: Connect, start: StartSync, policy_of: MakePolicy, sample: Sample
) -> None:
    """The learner scores each alike, under an adapter; vLLM's adapted output head can't do that."""
    policy, backend = policy_of(), connect()
    train(policy, 4)
    start(backend, policy).sync()
    prompt = policy.encoder.encode(sample)
    items = [
        CanaryItem(sample=sample, prompt=prompt, response_token_ids=tuple(range(20 + i, 60 + i))) for i in range(4)
    ]
    reply = backend.loop.run(backend.clients[0].score(ScoreCall(items=score_items(items))))
    own = policy.logprobs([(item.prompt, item.response_token_ids) for item in items])
    for mine, served in zip(own, reply.logprobs, strict=True):
        assert served == pytest.approx(mine, abs=1e-3)


def test_what_the_server_can_t_adapt_is_named_and_poisons(
    connect: Connect, start: StartSync, policy_of: MakePolicy, sample: Sample
) -> None:
    """R08: an adapter on the vision tower, without falling back: the run stops, and nothing is served."""
    policy, backend = policy_of("all-linear"), connect(fallback_to_full=False)
    with pytest.raises(CoverageError, match="does not cover") as caught:
        start(backend, policy).sync()
    assert "visual" in caught.value.found
    assert "target_modules" in caught.value.wanted
    with pytest.raises(ServerPoisonedError):
        answer(backend, sample)


def test_layers_take_adapters_again_after_a_full_sync_that_failed(
    connect: Connect, start: StartSync, policy_of: MakePolicy
) -> None:
    policy, backend = policy_of(), connect(fallback_to_full=False)
    train(policy, 6)
    incomplete = start(backend, policy, Incomplete(policy), adapter=None)
    with pytest.raises(CoverageError, match="does not cover"):
        incomplete.sync()
    receipt = start(backend, policy).sync()
    assert (receipt.mode, receipt.canary_gap < 1e-3) == ("adapter", True)


def test_falling_back_heals_at_once_and_stays(
    connect: Connect, start: StartSync, policy_of: MakePolicy, sample: Sample
) -> None:
    """R08: the same adapter; the first sync ends as a full one, which says why, and so do all after it."""
    policy, backend = policy_of("all-linear"), connect()
    sync, receipts = start(backend, policy), []
    for seed in range(2):
        train(policy, seed)
        receipts.append(receipt := sync.sync())
        assert (receipt.mode, receipt.canary_gap < 1e-3) == ("full", True)
        assert answer(backend, sample)
    first, second = receipts
    assert "visual" in first.fallback
    assert (second.fallback, second.ver) == ("", first.ver + 1)


def test_a_dora_goes_in_full_from_the_start(connect: Connect, start: StartSync, policy_of: MakePolicy) -> None:
    """R08, R09: no adapter is tried, no server poisoned; what is served is the merged DoRA."""
    policy = policy_of(kind="dora")
    train(policy, 2)
    sync = start(connect(), policy)
    sync.connect()
    receipt = sync.sync()
    assert (receipt.mode, receipt.canary_gap < 1e-3) == ("full", True)
    assert "DoRA" in receipt.fallback


def test_a_frozen_vision_tower_needs_no_adapter(connect: Connect, start: StartSync, policy_of: MakePolicy) -> None:
    """`target_modules: all-linear` with `freeze: [model.visual.]`: the idle adapters there are not sent."""
    policy = policy_of("all-linear", freeze=["model.visual."])
    train(policy, 1)
    receipt = start(connect(fallback_to_full=False), policy).sync()
    assert (receipt.mode, receipt.num_tensors) == ("adapter", 2 * NUM_LAYERS)


@pytest.mark.parametrize(
    ("family", "module", "served"),
    [
        ("Qwen3ForCausalLM", "model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.q_proj"),
        (
            "Qwen3VLForConditionalGeneration",
            "model.language_model.layers.0.mlp.up_proj",
            "language_model.model.layers.0.mlp.up_proj",
        ),
    ],
)
def test_layers_that_vllm_fuses_keep_the_names_of_their_parts(family: str, module: str, served: str) -> None:
    """vLLM's own mappings are used: they rename, and would also make one name of q, k and v."""
    from vllm import ModelRegistry

    model = ModelRegistry._try_load_model_cls(family)
    manager = SimpleNamespace(model=model)
    settings = SimpleNamespace(lora_dtype=None, max_lora_rank=8)
    load = AdapterLoad(SimpleNamespace(_adapter_manager=manager, lora_config=settings))
    assert load._served_names([module]) == [served]


def configured(place: Place, name: str, targets: str, *, fallback_to_full: bool = True, **training: Any) -> Path:
    """Return a run that syncs its adapter where it can."""
    server = {"servers": [{"base_url": place.base_url, "group_port": place.group_port}], "timeout_s": 60.0}
    sync = {"mode": "auto", "fallback_to_full": fallback_to_full}
    return World(place.folder, place.base_url, place.group_port).config(
        name,
        ROLLOUTS,
        model={"lora": {"r": 4, "alpha": 64, "target_modules": targets}},
        rollouts={"vllm": {"mode": "server", "enable_lora": True, "server": server, "sync": sync}},
        **training,
    )


@pytest.mark.parametrize("nproc", [1, 2])
def test_a_run_on_adapters(place: Place, nproc: int) -> None:
    """R08, R24: `sync.mode: auto` on one rank and on two; each step's rollouts are of its own version."""
    config = configured(place, f"run{nproc}", LANGUAGE, per_device_train_batch_size=2, max_steps=3, eval_on_end=True)
    run = learn(config, nproc=nproc)
    assert run.exit_code == 0, run.err[-3000:] + run.out[-2000:]
    syncs = run.events("sync")
    first = syncs[0]["ver"]
    assert [(sync["mode"], sync["fallback"], sync["ver"]) for sync in syncs] == [
        ("adapter", "", first + i) for i in range(4)
    ]
    assert all(sync["canary_gap"] < 0.01 for sync in syncs), syncs
    assert [step["ver"] for step in run.events("step")] == [first, first + 1, first + 2]
    assert run.events("plan")[0]["sync_mode"] == "adapter"


def test_a_run_that_falls_back_says_so_once(place: Place) -> None:
    """R08, R15: a warning, the reason in the first sync's event, full syncs to the end."""
    run = learn(configured(place, "fallen", "all-linear", max_steps=2, per_device_train_batch_size=4))
    assert run.exit_code == 0, run.err
    first, second = run.events("sync")
    assert [(sync["mode"], "visual" in sync["fallback"]) for sync in (first, second)] == [
        ("full", True),
        ("full", False),
    ]
    assert run.out.replace("\n", " ").count("full weight syncs from here on") == 1
    log = (run.folder / "learner_rank0.log").read_text()
    assert log.count("WARNING learner.sync: adapter sync failed, full syncs from here on") == 1


def test_a_run_that_may_not_fall_back_stops_before_its_first_step(place: Place) -> None:
    """R08: with what is wrong and what to do, on the console."""
    run = learn(configured(place, "stopped", "all-linear", fallback_to_full=False, max_steps=2))
    assert run.exit_code == 1
    assert "CoverageError" in run.err
    assert "model.lora.target_modules" in run.err
    assert "Traceback" not in run.err
    assert run.events("step") == []
