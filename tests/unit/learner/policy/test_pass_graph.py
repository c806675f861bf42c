"""A pass that is captured whole gives what an eager pass gives (R09). `Tape` stands for CUDA's graphs."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from bench import tiny_models
from learner.policy.canary_scores import RepeatedLogprobs, SideStream
from learner.policy.load import Policy
from learner.policy.pass_graph import INDEXING, Notes, OtherPassError, PassGraph, Work, is_mask, reads
from learner.policy.weights import as_sent, checksum, replaced_modules
from tests.tiers import slow
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


class Strict(Tape):
    """A tape that, as CUDA's graphs do, refuses what reads on the host."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert not reads(func, args, kwargs or {}), func
        assert func not in INDEXING or not any(map(is_mask, args[1])), func
        return super().__torch_dispatch__(func, types, args, kwargs)


def strict(work: Callable[[], None]) -> Callable[[], None]:
    with Strict() as tape:
        work()
    return tape.replay


@pytest.mark.parametrize("options", [slow({}), {"bf16": True, "dtype": "bfloat16"}])
def test_a_replay_gives_the_scores_and_checksums_of_now(tiny_vlm: Path, options: dict[str, Any]) -> None:
    """The row has an image, whose sizes are read on the host. Merging is in the graph."""
    policy = with_trained_adapter(tiny_vlm, "lora", **options)
    asked = answers(policy)

    def within() -> Any:
        replaced = list(replaced_modules(policy.model, torch.bfloat16, merged=True))
        return as_sent(policy.model, torch.bfloat16, merged=True, replaced=replaced)

    repeated = RepeatedLogprobs(policy, asked, within, record=strict)
    seen = []
    for i in range(5):
        if i == 2:  # from here on no module is called
            policy.model.register_forward_pre_hook(lambda *_: pytest.fail("called"))
            policy.model.base_model.register_forward_pre_hook(lambda *_: pytest.fail("called"))
        found = repeated()
        if i < 2:
            with as_sent(policy.model, torch.bfloat16, merged=True):
                assert found == policy.logprobs(asked)
        assert_scored_what_is_sent(repeated, policy)
        seen.append(found)
        change(policy)
    assert all(one != other for one, other in itertools.pairwise(seen))


@pytest.mark.slow
@pytest.mark.parametrize("build", [tiny_models.build_qwen2_vl, tiny_models.build_qwen2_5_vl])
def test_other_families_are_captured_whole(build: Callable[[Path], None], tmp_path: Path) -> None:
    """Vision towers with windows, and with other positions. Two images."""
    build(tmp_path / "model")
    policy = with_trained_adapter(tmp_path / "model", "lora")
    pictures = [image(64, 64), image(96, 64)]
    asked = [(policy.encoder.encode(sample([picture])), range(20, 30 + i)) for i, picture in enumerate(pictures)]

    def within() -> Any:
        return as_sent(policy.model, torch.bfloat16, merged=True)

    repeated = RepeatedLogprobs(policy, asked, within, record=strict)
    for _ in range(4):
        found = repeated()
        with as_sent(policy.model, torch.bfloat16, merged=True):
            assert found == policy.logprobs(asked)
        change(policy)
    assert repeated.is_captured


def test_weights_of_later_count(tiny_vlm: Path) -> None:
    policy = policy_of(tiny_vlm)
    asked = answers(policy)
    repeated = RepeatedLogprobs(policy, asked, record=strict)
    for _ in range(4):
        assert repeated() == policy.logprobs(asked)
        change(policy)
    assert repeated.is_captured
    for parameter in policy.model.parameters():  # weights that were offloaded move
        parameter.data = parameter.data.clone()
    change(policy)
    assert repeated() == policy.logprobs(asked)


class Side(SideStream):
    """Records when a replay is launched on it, and when it is joined."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.told: list[str] = []

    @contextmanager
    def entered(self) -> Iterator[None]:
        self.told.append("entered")
        yield

    def join(self) -> None:
        self.told.append("joined")


def test_only_replays_run_beside_and_whoever_reads_joins_them(tiny_vlm: Path) -> None:
    """An eager pass would keep memory that the current stream cannot use. A capture warms up and checks by eager
    passes, too."""
    policy = policy_of(tiny_vlm)
    asked, side, during = answers(policy), Side(), []
    policy.model.base_model.register_forward_pre_hook(lambda *_: during.append(list(side.told)) or None)
    repeated = RepeatedLogprobs(policy, asked, record=strict, side=side)
    repeated()
    assert side.told == ["joined"]
    read = repeated.begin()
    assert side.told == ["joined", "entered"], "captured, and replayed beside"
    assert all("entered" not in told for told in during)
    read()
    assert side.told == ["joined", "entered", "joined"]
    read()
    assert side.told == ["joined", "entered", "joined"], "read once"
    repeated.begin()
    repeated.join()
    assert side.told[3:] == ["entered", "joined"]


def test_a_graph_is_not_replayed_once_a_buffer_has_moved(tiny_vlm: Path) -> None:
    """Offloaded weights may come back to where they were, and buffers elsewhere, because gradients come and go. A CUDA
    graph would read what lies there now; `Strict` reads tensors, wherever they lie."""
    policy = policy_of(tiny_vlm)
    asked = answers(policy)
    repeated = RepeatedLogprobs(policy, asked, record=strict)
    for _ in range(3):
        repeated()
    passes: list[object] = []
    policy.model.base_model.register_forward_pre_hook(lambda *called: passes.append(called))
    repeated()
    assert not passes, "replayed"
    buffer = next(policy.model.buffers())
    buffer.data = buffer.data.clone()
    assert repeated() == policy.logprobs(asked)
    assert len(passes) == 2


def test_what_depends_on_weights_is_not_captured(tiny_vlm: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The routes of a mixture of experts do."""
    policy = policy_of(tiny_vlm)
    caplog.set_level(logging.INFO, logger="learner.policy")

    def read(_: Any, args: tuple[torch.Tensor]) -> None:
        args[0].sum().item()

    policy.model.base_model.language_model.layers[1].mlp.register_forward_pre_hook(read)

    def refuse(work: Any) -> Any:
        raise AssertionError("must not be captured")

    asked = answers(policy)
    repeated = RepeatedLogprobs(policy, asked, record=refuse)
    assert repeated() == repeated() == repeated() == policy.logprobs(asked)
    assert "depends on weights" in caplog.text


WEIGHT = torch.nn.Parameter(torch.arange(6.0), requires_grad=False)
MASK = torch.tensor([True, False, True, True, False, False])
SIZES = torch.tensor([1, 2, 3])


@pytest.mark.parametrize(
    "run",
    [
        lambda: WEIGHT[MASK] * 2,
        lambda: WEIGHT * int(SIZES.sum()),
        lambda: WEIGHT[: len(SIZES.repeat_interleave(SIZES))],
        lambda: WEIGHT.clone().index_put_((MASK,), WEIGHT[3:]),
        lambda: WEIGHT.view(2, 3)[MASK.view(2, 3)],
        lambda: WEIGHT.view(2, 3)[:, MASK[:3]],
        lambda: WEIGHT + torch.tensor([1.0, 2, 3, 4, 5, 6]),
        lambda: WEIGHT.new_tensor([2.0]) * WEIGHT,
    ],
)
def test_a_repeated_pass_reads_nothing_and_sees_later_weights(run: Callable[[], torch.Tensor]) -> None:
    graph = PassGraph.of(run, [WEIGHT], strict)
    assert graph is not None
    WEIGHT.data += 1
    assert torch.equal(graph(), run())
    WEIGHT.data -= 1
    assert torch.equal(graph(), run())


@pytest.mark.parametrize(
    "run",
    [
        lambda: WEIGHT[WEIGHT > 2],
        lambda: WEIGHT * (WEIGHT.view(2, 3) + 1).sum().item(),
        lambda: WEIGHT[torch.zeros(6).copy_(WEIGHT).nonzero()],
        lambda: WEIGHT * torch.zeros(1).add_(WEIGHT[3]).item(),
        lambda: WEIGHT * torch.as_tensor(WEIGHT[2]),
    ],
)
def test_a_read_that_depends_on_weights_is_found(run: Callable[[], torch.Tensor]) -> None:
    """Views, copies and sums do not hide it."""
    assert PassGraph.of(run, [WEIGHT], strict) is None


def test_a_pass_that_goes_another_way_is_not_captured(caplog: pytest.LogCaptureFixture) -> None:
    calls = itertools.count()
    caplog.set_level(logging.INFO, logger="learner.policy")

    def run() -> torch.Tensor:
        return WEIGHT[MASK] if next(calls) else WEIGHT * int(SIZES.sum())

    assert PassGraph.of(run, [WEIGHT], strict) is None
    assert "came before" in caplog.text
    notes = Notes([WEIGHT])
    with notes.noting():
        int(SIZES.sum())
    with pytest.raises(OtherPassError), notes.repeating():
        pass


def test_values_that_differ_are_not_captured() -> None:
    draws = itertools.count()
    assert PassGraph.of(lambda: WEIGHT + next(draws), [WEIGHT], strict) is None


def test_a_pass_without_memory_for_its_graph_is_not_captured(caplog: pytest.LogCaptureFixture) -> None:
    def fail(work: Callable[[], None]) -> Callable[[], None]:
        raise torch.OutOfMemoryError("CUDA out of memory")

    assert PassGraph.of(lambda: WEIGHT * 2, [WEIGHT], fail) is None
    assert "the canary's pass is not captured" in caplog.text


def test_a_canary_without_memory_for_its_graph_is_scored_without(
    tiny_vlm: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The allocator fails in the middle of the capture, and is not asked again."""
    policy = policy_of(tiny_vlm)
    asked = answers(policy)

    def no_memory(work: Work) -> Work:
        work()
        raise torch.OutOfMemoryError("CUDA out of memory")

    def within() -> Any:
        replaced = list(replaced_modules(policy.model, torch.bfloat16, merged=True))
        return as_sent(policy.model, torch.bfloat16, merged=True, replaced=replaced)

    repeated = RepeatedLogprobs(policy, asked, within, record=no_memory)
    for _ in range(3):
        change(policy)
        with as_sent(policy.model, torch.bfloat16, merged=True):
            expected = policy.logprobs(asked)
        assert repeated() == expected
        assert_scored_what_is_sent(repeated, policy)
    assert not repeated.is_captured
    assert caplog.text.count("the canary's pass is not captured") == 1
