"""The canary's graph on CUDA (R09): what a forward pass of its own would give, under the weights as they are now."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from deploy.demo.model import build
from learner.config.sections.model import ModelConfig
from learner.policy.canary_scores import RepeatedLogprobs
from learner.policy.load import Policy, load_policy
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
    for moves in (False, True):
        change(policy)
        if moves:  # as weights do that were offloaded
            for parameter in policy.model.parameters():
                parameter.data = parameter.data.clone()
        found.append(repeated())
        expected = policy.logprobs(answers)
        for one, other in zip(found[-1], expected, strict=True):
            assert one == pytest.approx(other, abs=1e-4)
    assert found[0] != found[1] != found[2]
