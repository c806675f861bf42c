"""FP8 engines on CUDA: a colocated one and a server, synced in bfloat16 and checked by the canary (R08, R09)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from learner.config.sections.rollout_matching import RolloutMatchingConfig
from learner.policy.canary_scores import CanaryScorer
from learner.policy.parallel import Ranks
from learner.rollout.server_backend import ServerBackend
from learner.sync.canary import FP8_TOLERANCE, CanaryItem
from shared.addresses import free_port
from shared.errors import CanaryError
from tests import fp8
from tests.fp8 import SPOILS, QuantisedAdapters, QuantisedSyncs, Spoiled, World
from tests.gpu.devices import OTHER, SHARED, needs_fp8, needs_gpus
from tests.gpu.servers import answers, change, load, samples, server_on
from tests.syncs import server_sync

pytest.importorskip("vllm")
pytestmark = [pytest.mark.gpu, needs_gpus(1), needs_fp8()]
CUDA = torch.device("cuda", 0)


@pytest.fixture(scope="module")
def world(model: Path) -> Iterator[World]:
    with fp8.started(model, Ranks(device=CUDA)) as world:
        yield world


class TestSyncs(QuantisedSyncs, QuantisedAdapters):
    """The weights are right to the bit: vLLM's kernel follows the rule that the canary is scored with."""


def test_a_server_in_fp8(model: Path, tmp_path: Path) -> None:
    """R09, R10: it takes syncs one after the other, refuses a wrong layer, and is healed by the next sync."""
    policy = load(model)
    with server_on(str(OTHER), model, tmp_path, quantization="fp8") as running:
        entries = [{"base_url": running.base_url, "group_port": free_port()}]
        section = {
            "decode_batch_size": 8,
            "decoding": {"max_new_tokens": 24},
            "vllm": {
                "mode": "server",
                "quantization": "fp8",
                "server": {"servers": entries, "timeout_s": 60.0, "allow_shared_gpu": SHARED},
                "sync": {"bucket_bytes": 1 << 20},
            },
        }
        backend = ServerBackend(RolloutMatchingConfig.model_validate(section), run_seed=0)
        backend.connect()
        assert [status.quantization for status in backend.statuses()] == ["fp8"]
        canary = [
            CanaryItem(sample=s, prompt=policy.encoder.encode(s), response_token_ids=tuple(range(20, 60)))
            for s in samples(2)
        ]
        scored = [(item.prompt, item.response_token_ids) for item in canary]
        scorer = CanaryScorer(policy, scored, quantization="fp8", checksums=False)
        sync = server_sync(backend, policy, canary, list, scorer=scorer, device=policy.device)
        try:
            said = []
            for seed in range(4):
                change(policy, seed)
                receipt = sync.sync()
                assert receipt.num_tensors == len(policy.weight_specs())
                assert receipt.canary_gap < FP8_TOLERANCE
                said.append(answers(backend))
            assert len({tuple(one) for one in said}) == 4
            sync._weights = Spoiled(policy, SPOILS[0])
            with pytest.raises(CanaryError, match="mean gap"):
                sync.sync()
            sync._weights = policy
            assert sync.sync().canary_gap < FP8_TOLERANCE
        finally:
            sync.close()
            backend.close()
