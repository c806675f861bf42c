"""A load that is repeated by a graph writes what a load writes, under the weights of now (R09).

A tape stands for CUDA's graphs, and a model of transformers for vLLM's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForImageTextToText

from learner.policy.load import Policy
from learner.rollout import load_graph
from learner.rollout.colocated_engine import _in_pieces
from learner.rollout.load_graph import LoadGraph
from shared.errors import CoverageError
from shared.sync.loading import CopyMemory, WeightLoad
from tests.unit.learner.policy.test_layer_graphs import change
from tests.unit.learner.policy.test_pass_graph import strict
from tests.unit.learner.policy.test_weights import with_trained_adapter


class Served:
    """An engine's model, overwritten in place, and what its loads count."""

    def __init__(self, path: Path, policy: Policy) -> None:
        self.model: Any = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32)
        self.model.load_weights = self.load_weights
        self._config = SimpleNamespace(
            model_config=SimpleNamespace(model=str(path), quantization=None, hf_text_config=policy.model.config)
        )
        self._policy, self._memory = policy, CopyMemory()
        self.num_loaded = self.num_walked = self.num_captured = 0
        self.graph = LoadGraph(policy.model.parameters(), policy.device, self.capture)

    def load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterable[str]:
        for name, tensor in tensors:
            self.num_loaded += 1
            self.model.get_parameter(name).data.copy_(tensor)
            yield name

    def capture(self, work: Any) -> Any:
        self.num_captured += 1
        return strict(work)

    def load(self) -> int:
        load = WeightLoad(self.model, self._config, torch.device("cuda"), self._memory)

        def add_all() -> None:
            self.num_walked += 1
            for piece in _in_pieces(self._policy.named_weights(torch.float32)):
                load.add(piece)

        load.open()
        self.graph.load(load, add_all)
        return load.finish()

    def is_the_policy(self) -> bool:
        sent = dict(self._policy.named_weights(torch.float32))
        return all(torch.equal(self.model.get_parameter(name), tensor) for name, tensor in sent.items())


@pytest.fixture
def policy(tiny_vlm: Path) -> Policy:
    return with_trained_adapter(tiny_vlm, "lora")


@pytest.fixture
def served(tiny_vlm: Path, policy: Policy, monkeypatch: pytest.MonkeyPatch) -> Served:
    monkeypatch.setattr(WeightLoad, "_context", lambda self: contextlib.nullcontext())  # keeps this from importing vLLM
    return Served(tiny_vlm, policy)


def test_every_load_writes_the_weights_of_now(served: Served, policy: Policy) -> None:
    """The first load is by the loader, the next from memory, the next twice: tried, and captured. The others are by the
    graph alone."""
    assert policy.merges_plainly
    for i in range(5):
        count = served.load()
        assert count == len(policy.weight_specs())
        assert served.is_the_policy()
        assert served.num_walked == (1, 2, 4, 4, 4)[i]
        change(policy)
        assert not served.is_the_policy()
    assert served.num_captured == 1
    assert served.num_loaded == len(policy.weight_specs())


def test_a_load_that_cannot_be_captured_is_loaded_without(served: Served, policy: Policy) -> None:
    """The device may be short of memory for a graph. The run goes on, and it is not tried again until weights move."""
    tries: list[Any] = []

    def fail(work: Any) -> Any:
        tries.append(work)
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB\nmore")

    served.graph = LoadGraph(policy.model.parameters(), policy.device, fail)
    for _ in range(5):
        assert served.load() == len(policy.weight_specs())
        assert served.is_the_policy()
        change(policy)
    assert len(tries) == 1
    assert not served.graph.is_captured
    for parameter in policy.model.parameters():
        parameter.data = parameter.data.clone()
    for _ in range(3):
        served.load()
        assert served.is_the_policy()
    assert len(tries) == 2


def test_a_load_that_waits_is_never_captured(
    served: Served, policy: Policy, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A capture that fails at a wait leaves torch's generators unusable. What is half loaded then is loaded again."""

    @contextlib.contextmanager
    def refusing(device: torch.device) -> Any:
        monkeypatch.setattr(WeightLoad, "add", refused)
        try:
            yield
        finally:
            monkeypatch.setattr(WeightLoad, "add", add)

    def refused(load: WeightLoad, piece: Any) -> None:
        add(load, piece[:1])
        raise RuntimeError("called a synchronizing CUDA operation")

    add = WeightLoad.add
    monkeypatch.setattr(load_graph, "no_waits", refusing)
    for _ in range(5):
        assert served.load() == len(policy.weight_specs())
        assert served.is_the_policy()
        change(policy)
    assert served.num_captured == 0
    assert caplog.text.count("synchronizing") == 1


@pytest.mark.parametrize("side", ["policy", "engine"])
def test_what_moved_is_not_replayed(served: Served, policy: Policy, side: str) -> None:
    """Offloaded weights move, and those of an engine that started anew."""
    for _ in range(4):
        served.load()
    for parameter in (policy if side == "policy" else served).model.parameters():
        parameter.data = parameter.data.clone()
    change(policy)
    served.load()
    assert served.is_the_policy()
    assert served.num_captured == 1
    for _ in range(3):
        change(policy)
        served.load()
        assert served.is_the_policy()
    assert served.num_captured == 2


def test_weights_on_the_host_are_not_captured(served: Served, policy: Policy) -> None:
    """An offloaded model is there while the engine is awake. Its copies to the device are no work of a graph."""
    served.graph = LoadGraph(policy.model.parameters(), torch.device("cuda", 0), served.capture)
    for _ in range(4):
        served.load()
        assert served.is_the_policy()
        change(policy)
    assert served.num_captured == 0


def test_a_loader_that_converts_is_never_captured(served: Served, policy: Policy) -> None:
    plain = served.load_weights
    served.model.load_weights = lambda tensors: plain((name, tensor * 1.0) for name, tensor in tensors)
    for _ in range(4):
        served.load()
        assert served.is_the_policy()
        change(policy)
    assert served.num_captured == 0


def test_a_replay_is_checked_for_coverage(served: Served) -> None:
    """The account of the capture, against the model of now."""
    for _ in range(4):
        served.load()
    served.model.register_parameter("another", torch.nn.Parameter(torch.zeros(3)))
    for _ in range(4):
        with pytest.raises(CoverageError, match="another"):
            served.load()


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_only_plain_merges_are_plain(tiny_vlm: Path, kind: str) -> None:
    """Merges by peft may read on the host."""
    assert with_trained_adapter(tiny_vlm, kind).merges_plainly == (kind == "lora")
