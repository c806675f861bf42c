"""Loading from memory (R09): the same bytes in the same places, or the loader again."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch

from shared.sync import buckets as weights
from shared.sync.loading import CopyMemory, Named


class Fused:
    """A model with a fused and a padded parameter, and a loader that takes them apart as vLLM's do."""

    def __init__(self) -> None:
        self.qk = torch.zeros(6, 4)
        self.embed = torch.full((8, 4), 7.0)
        self.half = torch.zeros(4, 2)  # one rank's share
        self.num_loads = 0
        self.converts = False

    def parameters(self) -> list[torch.Tensor]:
        return [self.qk, self.embed, self.half]

    def load(self, tensors: Named) -> Iterable[str]:
        self.num_loads += 1
        for name, tensor in tensors:
            source = tensor * 1.0 if self.converts else tensor
            if name in ("q", "k"):
                self.qk.narrow(0, 0 if name == "q" else 4, len(source)).copy_(source)
                yield "qk"
            elif name == "embed":
                self.embed[: len(source)].data.copy_(source)
                self.embed[len(source) :].data.fill_(0)
                yield "embed"
            else:
                self.half.copy_(source.narrow(1, 2, 2))
                yield "half"


def bucket(seed: int) -> list[tuple[str, torch.Tensor]]:
    """As it comes over the wire: views into one buffer."""
    torch.manual_seed(seed)
    tensors = {"q": torch.randn(4, 4), "k": torch.randn(2, 4), "embed": torch.randn(5, 4), "wide": torch.randn(4, 4)}
    specs = [weights.spec_of(name, tensor) for name, tensor in tensors.items()]
    return list(weights.unpack(weights.pack(specs, tensors, "cpu"), specs))


def update(memory: CopyMemory, model: Fused, seed: int) -> list[torch.Tensor]:
    """What the model then is, after what its own loader would have made it was compared."""
    tensors = bucket(seed)
    memory.begin(model.parameters())
    assert memory.load(tensors, model.load) == {"qk", "embed", "half"}
    alone = Fused()
    list(alone.load(tensors))
    for found, wanted in zip(model.parameters(), alone.parameters(), strict=True):
        assert found.equal(wanted)
    return [parameter.clone() for parameter in model.parameters()]


def test_the_second_update_needs_no_loader() -> None:
    memory, model = CopyMemory(), Fused()
    first = update(memory, model, 1)
    second = update(memory, model, 2)
    assert model.num_loads == 1
    assert not any(a.equal(b) for a, b in zip(first, second, strict=True))


def test_a_parameter_that_moved_is_loaded_by_its_loader() -> None:
    memory, model = CopyMemory(), Fused()
    update(memory, model, 1)
    model.qk = model.qk.clone()
    update(memory, model, 2)
    update(memory, model, 3)
    assert model.num_loads == 2


@pytest.mark.parametrize("how", ["converts", "writes otherwise", "skips"])
def test_what_was_not_seen_whole_is_not_repeated(how: str) -> None:
    memory, model = CopyMemory(), Fused()
    model.converts = how == "converts"

    def loader(tensors: Named) -> Iterable[str]:
        yield from model.load([pair for pair in tensors if how != "skips" or pair[0] != "q"])
        if how == "writes otherwise":
            model.qk.add_(1.0)

    for seed in (1, 2):
        memory.begin(model.parameters())
        memory.load(bucket(seed), loader)
    assert model.num_loads == 2


def test_another_bucket_is_another_recording() -> None:
    """The same names in another size: never copied by the old recipe."""
    memory, model = CopyMemory(), Fused()
    update(memory, model, 1)
    memory.begin(model.parameters())
    memory.load([("embed", torch.ones(3, 4))], model.load)
    assert model.num_loads == 2
    assert model.embed.tolist() == [[1.0] * 4] * 3 + [[0.0] * 4] * 5
