"""The canary's graph on CUDA (R09): what a forward pass of its own would give, under the weights as they are now."""

from __future__ import annotations

import itertools
from pathlib import Path

import peft
import pytest
import torch
from peft.tuners.lora import LoraLayer

from bench.demo_model import build
from learner.config.sections.model import LoraConfig, ModelConfig
from learner.policy.canary_scores import CanaryScorer, RepeatedLogprobs
from learner.policy.load import Policy, load_policy
from learner.policy.weights import as_sent, merged_weight
from tests.gpu.devices import needs_gpus
from tests.unit.learner.policy.rows import image, sample

pytestmark = [pytest.mark.gpu, needs_gpus(1)]


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Policy:
    path: Path = tmp_path_factory.mktemp("models") / "demo"
    build(path, "demo", seed=0)
    return load_policy(ModelConfig(path=str(path)), device=torch.device("cuda"), bf16=True)


@torch.no_grad()
def change(policy: Policy) -> None:
    for parameter in policy.model.parameters():
        parameter += 0.1 * torch.randn_like(parameter)


@pytest.mark.parametrize("with_image", [False, True])
def test_every_call_sees_the_weights_of_now(policy: Policy, with_image: bool) -> None:
    images = [[image(128, 128)], [image(64, 96)]] if with_image else [[], []]
    answers = [(policy.encoder.encode(sample(i)), tuple(range(20 + n, 50))) for n, i in enumerate(images)]
    repeated = RepeatedLogprobs(policy, answers)
    found = [repeated()]
    for moves in (False, False, True):
        change(policy)
        if moves:  # weights that were offloaded move
            for parameter in policy.model.parameters():
                parameter.data = parameter.data.clone()
        found.append(repeated())
        assert repeated.is_captured == (not moves)
        expected = policy.logprobs(answers)
        for one, other in zip(found[-1], expected, strict=True):
            assert one == pytest.approx(other, abs=1e-4)
    assert all(one != other for one, other in itertools.pairwise(found))


def test_merged_weights_are_scored_by_one_graph(tmp_path: Path) -> None:
    """The pass of a colocated sync: an adapter, images, and nothing left that is launched from Python."""
    build(tmp_path, "demo", seed=0)
    lora = LoraConfig(r=8, alpha=16, target_modules="all-linear")
    config = ModelConfig(path=str(tmp_path), dtype="bfloat16", lora=lora)
    policy = load_policy(config, device=torch.device("cuda"), bf16=True)
    answers = [(policy.encoder.encode(sample([image(128, 128)])), tuple(range(20, 50)))]
    scorer = CanaryScorer(policy, answers, checksums=False)
    for _ in range(4):
        found = scorer(torch.bfloat16, merged=True).logprobs
        with as_sent(policy.model, torch.bfloat16, merged=True):
            expected = policy.logprobs(answers)
        assert found[0] == pytest.approx(expected[0], abs=1e-4)
        with torch.no_grad():
            for _, parameter in policy.trainable:
                parameter += 0.05 * torch.randn_like(parameter)
    (way,) = scorer._sent.values()
    assert way.scorer is not None
    assert way.scorer.is_captured


@pytest.mark.parametrize("alpha", [8, 12, 16])  # scaled by 2, 3 and 4
def test_a_merge_is_to_the_bit_as_peft_adds_and_rounds(alpha: int) -> None:
    """CUDA may fuse an addition with the scaling before it. Scaling by a power of two makes that change nothing."""
    torch.manual_seed(alpha)
    model = torch.nn.Sequential(torch.nn.Linear(1024, 768, device="cuda", dtype=torch.bfloat16))
    adapted = peft.inject_adapter_in_model(peft.LoraConfig(r=4, lora_alpha=alpha, target_modules=["0"]), model)
    layer = adapted[0]
    assert isinstance(layer, LoraLayer)
    for half in (layer.lora_A, layer.lora_B):
        torch.nn.init.normal_(half["default"].float().weight)
    (a, b), weight = (half["default"].weight for half in (layer.lora_A, layer.lora_B)), layer.get_base_layer().weight
    with torch.no_grad():
        expected = ((b @ a) * (alpha / 4) + weight).to(torch.bfloat16)
    assert torch.equal(merged_weight(layer, torch.bfloat16), expected)


def test_nothing_changes_the_policy_while_its_pass_runs_beside(tmp_path: Path) -> None:
    """R09: weights that change right after `join` are not seen by a pass that began before, and what is launched
    meanwhile does not change its scores. Many passes, because a race does not always show."""
    build(tmp_path, "demo", seed=0)
    lora = LoraConfig(r=8, alpha=16, target_modules="all-linear")
    policy = load_policy(
        ModelConfig(path=str(tmp_path), dtype="bfloat16", lora=lora), device=torch.device("cuda"), bf16=True
    )
    answers = [(policy.encoder.encode(sample([image(128, 128)])), tuple(range(20, 50)))]
    scorer = CanaryScorer(policy, answers, checksums=False)
    for _ in range(3):
        scorer(torch.bfloat16, merged=True).read()
    work = torch.randn(2048, 2048, device="cuda")
    before = [(parameter, parameter.detach().clone()) for _, parameter in policy.trainable]
    for _ in range(50):
        with as_sent(policy.model, torch.bfloat16, merged=True):
            expected = policy.logprobs(answers)
        scores = scorer(torch.bfloat16, merged=True)
        for _ in range(10):
            work = torch.nn.functional.normalize(work @ work)
        scores.join()
        with torch.no_grad():
            for parameter, value in before:
                parameter.copy_(value + 0.05 * torch.randn_like(value))
        assert scores.logprobs[0] == pytest.approx(expected[0], abs=1e-3)
        assert policy.logprobs(answers)[0] != pytest.approx(expected[0], abs=1e-2)
