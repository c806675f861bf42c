"""A sharded model is synced as a whole one (R08, R09, R24): two real processes, the server's half in one of them."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import respx
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from bench.demo_model import build
from learner.config.sections.model import LoraConfig, ModelConfig
from learner.policy.load import load_policy
from learner.policy.parallel import Ranks, init_ranks
from learner.policy.sharding import shard, whole
from learner.policy.weights import CheckpointWeights
from learner.rollout.server_backend import ServerBackend
from learner.sync.canary import CanaryItem
from learner.sync.source import ShardedAdapter, ShardedRanks, ShardedSource
from shared.errors import ConfigError, CoverageError
from tests.integration.test_fsdp import learn, make
from tests.ranks import launch
from tests.syncs import server_sync
from tests.unit.learner.policy.rows import CPU, image, sample
from tests.unit.learner.rollout import fakes
from tests.unit.learner.sync.fakes import FakeServer, joiner

pytestmark = [pytest.mark.integration, pytest.mark.slow]
TIMEOUT_S = 20.0
URL, PORT = "http://server.test", 51216


class PolicyServer(FakeServer):
    """Scores the canary by a whole model of the weights that it was sent."""

    def serve(self, model: Path, canary: list[CanaryItem]) -> None:
        self.canary, self.policy = canary, load_policy(ModelConfig(path=str(model)), device=CPU)

    def _scores(self, answers: Any) -> dict[str, Any]:
        self.policy.model.load_state_dict(self.tensors, strict=False)
        assert len(answers) == len(self.canary)
        logprobs = self.policy.logprobs([(item.prompt, item.response_token_ids) for item in self.canary])
        prompts = [item.prompt.token_ids for item in self.canary]
        return {"ver": self.ver, "logprobs": logprobs, "prompt_token_ids": prompts}


def sync_twice(model: Path, ranks: Ranks) -> None:
    """Check R09 and R24: a sync that fails on the way fails on all ranks; the next one gives the server what each rank
    has."""
    policy, optimizer = make(model, ranks, sharded=True)
    scene = sample([image(64, 64)])
    canary = [CanaryItem(sample=scene, prompt=policy.encoder.encode(scene), response_token_ids=(5, 6, 7))]
    sharded = ShardedRanks(ranks, bucket_bytes=200_000)
    with respx.mock(assert_all_called=False) as router:
        wire = "nccl" if ranks.device.type == "cuda" else "tcp"
        server = PolicyServer(router, URL, PORT, world_size=1, backend=wire)
        server.serve(model, canary)
        backend = ServerBackend(fakes.config([URL], first_port=PORT), run_seed=0)
        backend.connect()
        vllm = backend.config.vllm
        sync = server_sync(
            backend,
            ShardedSource(policy, sharded),
            canary,
            sharded.shared(lambda: policy.logprobs([(item.prompt, item.response_token_ids) for item in canary])),
            config=vllm.model_copy(update={"sync": vllm.sync.model_copy(update={"bucket_bytes": 200_000})}),
            ranks=sharded,
            device=ranks.device,
            start_join=joiner([server]),
        )
        sync.connect()
        learn(policy, optimizer, ranks, 0)
        server.fails_after_bucket = (2, CoverageError("a layer was not written"))
        with pytest.raises(CoverageError, match="a layer was not written"):
            sync.sync()
        server.fails_after_bucket = None
        receipt = sync.sync()
        assert receipt.canary_gap_max < 1e-3
        own = dict(policy.named_weights())
        assert receipt.num_tensors == len(own)
        if ranks.is_main:
            assert len(server.updates[-1].buckets) > 3
            assert server.tensors.keys() == own.keys()
            assert all(torch.equal(server.tensors[name], tensor) for name, tensor in own.items())
        else:
            assert server.updates == [], "only rank 0 talks to servers"
        sync.close()
        backend.close()


def adapter_alone(model: Path, ranks: Ranks) -> None:
    """R08: an adapter's own tensors, and those below it, are those of a whole model, bit for bit."""
    settings = {"lora": LoraConfig(r=3, alpha=6), "freeze": ["model.visual."]}
    policy, optimizer = make(model, ranks, sharded=True, **settings)
    learn(policy, optimizer, ranks, 0)
    plain, _ = make(model, Ranks(), sharded=False, **settings)
    plain.model.load_state_dict({name: whole(t) for name, t in policy.model.state_dict().items()})
    adapter, wanted = policy.adapter_weights(), plain.adapter_weights()
    assert adapter is not None
    assert wanted is not None
    assert adapter.obstacle == ""
    sharded = ShardedRanks(ranks, bucket_bytes=100_000)
    shared = ShardedAdapter(adapter, sharded)
    if ranks.is_main:
        for source, reference in ((shared, wanted), (shared.base, wanted.base)):
            found = dict(source.named_weights(torch.bfloat16))
            expected = dict(reference.named_weights(torch.bfloat16))
            assert found.keys() == expected.keys()
            assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert sharded.broadcast_object("done") == "done"


def fused_experts(model: Path, ranks: Ranks) -> None:
    """Send a model of fused experts: its checkpoints store each expert by itself, so no tensor can be sent before all
    are gathered."""
    config = Qwen3MoeConfig(
        vocab_size=64,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        mlp_only_layers=[],
        decoder_sparse_step=1,
    )
    experts = Qwen3MoeForCausalLM(config)
    assert len(list(CheckpointWeights(experts).named_weights())) > len(experts.state_dict())
    shard(experts, ranks)
    with pytest.raises(ConfigError, match="can't be gathered one by one"):
        CheckpointWeights(experts)


CASES = {case.__name__: case for case in (sync_twice, adapter_alone, fused_experts)}


@pytest.mark.parametrize("case", CASES)
def test_on_two_ranks(tmp_path: Path, case: str) -> None:
    """See the function of that name."""
    build(tmp_path / "model", "tiny", seed=0)
    for process in launch("tests.integration.test_fsdp_sync", 2, case, str(tmp_path / "model")):
        assert process.returncode == 0, process.stderr[-3000:]


if __name__ == "__main__":
    CASES[sys.argv[1]](Path(sys.argv[2]), init_ranks(os.environ, timeout_s=TIMEOUT_S))
