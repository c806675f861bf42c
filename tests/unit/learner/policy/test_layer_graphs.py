"""Layers that are captured one by one give what an eager pass gives (R09). `Tape` stands for CUDA's graphs."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from learner.policy import layer_graphs
from learner.policy.canary_scores import Modules, RepeatedLogprobs
from learner.policy.layer_graphs import LayerGraphs, Work
from learner.policy.load import Policy
from learner.policy.weights import as_sent, checksum, replaced_modules
from tests.unit.learner.policy.rows import image, policy_of, sample
from tests.unit.learner.policy.test_weights import with_trained_adapter


class Tape(TorchDispatchMode):
    """A graph on CPU: each operation is run again on the tensors of the first time, and writes where it wrote then."""

    def __init__(self) -> None:
        super().__init__()
        self._operations: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        returned = func(*args, **(kwargs or {}))
        self._operations.append((func, args, kwargs or {}, returned))
        return returned

    def replay(self) -> None:
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            for func, args, kwargs, returned in self._operations:
                for old, new in zip(tree_iter(returned), tree_iter(func(*args, **kwargs)), strict=True):
                    if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                        old.copy_(new)


def record(work: Work) -> Work:
    with Tape() as tape:
        work()
    return tape.replay


@torch.no_grad()
def change(policy: Policy) -> None:
    for _, parameter in policy.trainable:
        parameter += 0.1 * torch.randn_like(parameter)


def answers(policy: Policy, *, images: bool = True) -> list[Any]:
    pictures = [image(64, 64)] if images else []
    return [(policy.encoder.encode(sample(pictures)), range(20, 40)), (policy.encoder.encode(sample()), range(9, 16))]


def assert_scored_what_is_sent(repeated: RepeatedLogprobs, policy: Policy) -> None:
    """The checksums of the scored weights are those of the weights that a sync sends."""
    sent = dict(policy.named_weights(torch.bfloat16))
    for name, value in repeated.checksums.items():
        assert name not in sent or int(value) == int(checksum(sent[name])), name


@pytest.mark.parametrize("options", [{}, {"bf16": True, "dtype": "bfloat16"}])
def test_replayed_layers_give_the_scores_and_checksums_of_now(
    tiny_vlm: Path, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Merging is in the graphs. On CPU attention reads lengths on the host, which does no harm here."""
    monkeypatch.setattr(layer_graphs, "_reads", lambda *_: False)
    policy = with_trained_adapter(tiny_vlm, "lora", **options)
    graphs, asked = LayerGraphs(policy.model, record), answers(policy)

    def within(without: Modules) -> Any:
        replaced = replaced_modules(policy.model, torch.bfloat16, merged=True)
        called = [(name, module) for name, module in replaced if module not in without]
        return as_sent(policy.model, torch.bfloat16, merged=True, replaced=called)

    repeated = RepeatedLogprobs(policy, asked, within, layers=graphs)
    seen = []
    for _ in range(5):
        found = repeated()
        with as_sent(policy.model, torch.bfloat16, merged=True):
            assert found == policy.logprobs(asked)
        assert_scored_what_is_sent(repeated, policy)
        seen.append(found)
        change(policy)
    assert all(one != other for one, other in itertools.pairwise(seen))
    assert not any("forward" in vars(layer) for layer in graphs.inside if type(layer).__name__.endswith("Layer"))


def test_layers_do_not_run_in_a_replay(tiny_vlm: Path) -> None:
    policy = policy_of(tiny_vlm)
    repeated = RepeatedLogprobs(policy, answers(policy, images=False), layers=LayerGraphs(policy.model, record))
    expected = repeated()
    assert repeated() == expected
    policy.model.base_model.language_model.layers[0].mlp.register_forward_pre_hook(lambda *_: pytest.fail("called"))
    assert repeated() == expected
    with pytest.raises(pytest.fail.Exception):
        policy.logprobs(answers(policy, images=False))


def test_layers_that_read_on_the_host_are_not_captured(tiny_vlm: Path) -> None:
    """A mixture of experts does that. A failed capture on CUDA could not be undone."""
    policy = policy_of(tiny_vlm)

    def read(_: Any, args: tuple[torch.Tensor]) -> None:
        args[0].sum().item()

    policy.model.base_model.language_model.layers[1].mlp.register_forward_pre_hook(read)

    def refuse(work: Work) -> Work:
        raise AssertionError("must not be captured")

    asked = answers(policy, images=False)
    repeated = RepeatedLogprobs(policy, asked, layers=LayerGraphs(policy.model, refuse))
    assert repeated() == repeated() == policy.logprobs(asked)


def test_layers_without_memory_for_their_graphs_run_without(
    tiny_vlm: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Where there is none for the whole pass, there may be none for a layer, be it the first or a later one."""
    monkeypatch.setattr(layer_graphs, "_reads", lambda *_: False)
    policy = policy_of(tiny_vlm)
    captured: list[Work] = []

    def fail(work: Work) -> Work:
        captured.append(work)
        if len(captured) > 1:
            raise torch.OutOfMemoryError("CUDA out of memory\nmore")
        return record(work)

    asked = answers(policy)
    repeated = RepeatedLogprobs(policy, asked, layers=LayerGraphs(policy.model, fail))
    for _ in range(4):
        assert repeated() == policy.logprobs(asked)
        change(policy)
    assert len(captured) == 2
    assert "canary's layers are not captured" in caplog.text


@pytest.mark.parametrize(
    "work",
    [
        lambda x: x[x > 0],
        lambda x: x.nonzero(),
        lambda x: x.sum().item(),
        lambda x: x.masked_select(x > 0),
        lambda x: x.repeat_interleave(torch.ones(3, dtype=torch.int64)),
        lambda x: x.index_put_((x > 0,), torch.ones(())),
    ],
)
def test_reads_on_the_host_are_seen(work: Any) -> None:
    with layer_graphs._HostReads() as reads:
        work(torch.arange(3.0))
    assert reads.found


def test_ordinary_work_reads_nothing() -> None:
    with layer_graphs._HostReads() as reads:
        x = torch.randn(3, 4)
        torch.nn.functional.softmax(x @ x.T * 2, -1)[torch.tensor([0, 2])].to(torch.bfloat16).clone()
    assert not reads.found


def test_weights_that_moved_are_not_replayed(tiny_vlm: Path) -> None:
    policy = policy_of(tiny_vlm)
    asked = answers(policy, images=False)
    repeated = RepeatedLogprobs(policy, asked, layers=LayerGraphs(policy.model, record))
    for _ in range(3):
        repeated()
    for parameter in policy.model.parameters():
        parameter.data = parameter.data.clone()
    change(policy)
    assert repeated() == policy.logprobs(asked)
