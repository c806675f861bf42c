"""Loading from memory (R09): the same bytes in the same places, or the loader again."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from shared.errors import CoverageError
from shared.sync import buckets as weights
from shared.sync.loading import CopyMemory, Named, WeightLoad


class Fused:
    """A model with a fused and a padded parameter, and a loader that takes them apart as vLLM's do."""

    def __init__(self, rank: int = 1) -> None:
        self.rank = rank
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
                self.half.copy_(source.narrow(1, 2 * self.rank, 2))
                yield "half"


def bucket(seed: int) -> list[tuple[str, torch.Tensor]]:
    """Return a bucket as it comes over the wire: views into one buffer."""
    torch.manual_seed(seed)
    tensors = {"q": torch.randn(4, 4), "k": torch.randn(2, 4), "embed": torch.randn(5, 4), "wide": torch.randn(4, 4)}
    specs = [weights.spec_of(name, tensor) for name, tensor in tensors.items()]
    return list(weights.unpack(weights.pack(specs, tensors, "cpu"), specs))


def update(memory: CopyMemory, model: Fused, seed: int) -> list[torch.Tensor]:
    """Return what the model then is, after a comparison with what its own loader would have made it."""
    tensors = bucket(seed)
    memory.begin(model.parameters())
    assert memory.load(tensors, model.load) == {"qk", "embed", "half"}
    alone = Fused(model.rank)
    list(alone.load(tensors))
    for found, wanted in zip(model.parameters(), alone.parameters(), strict=True):
        assert found.equal(wanted)
    return [parameter.clone() for parameter in model.parameters()]


@pytest.mark.parametrize("rank", [0, 1])
def test_the_second_update_needs_no_loader(rank: int) -> None:
    memory, model = CopyMemory(), Fused(rank)
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


def test_a_tensor_in_another_layout_is_another_recording() -> None:
    """The recorded copies are places in memory, and these are others now."""
    memory, model = CopyMemory(), Fused()
    for seed in (1, 2, 3):
        torch.manual_seed(seed)
        whole, part = (torch.randn(4, 4).t() if seed == 1 else torch.randn(4, 4) for _ in range(2))
        memory.begin(model.parameters())
        memory.load([("q", whole), ("wide", part)], model.load)
        assert model.qk[:4].equal(whole)
        assert model.half.equal(part[:, 2:])
    assert model.num_loads == 2


def test_a_square_tensor_that_its_loader_transposes_is_transposed_from_memory_too() -> None:
    memory, target = CopyMemory(), torch.zeros(4, 4)
    calls: list[int] = []

    def loader(tensors: Named) -> Iterable[str]:
        calls.append(len(tensors))
        target.copy_(tensors[0][1].t())
        return ["target"]

    for seed in (1, 2):
        torch.manual_seed(seed)
        tensor = torch.randn(4, 4)
        memory.begin([target])
        memory.load([("square", tensor)], loader)
        assert target.equal(tensor.t())
    assert calls == [1]


def test_tensors_of_one_number_lie_side_by_side() -> None:
    """Each is told from its neighbour in the same buffer."""
    memory, targets = CopyMemory(), [torch.zeros(1) for _ in range(3)]
    calls: list[int] = []

    def loader(tensors: Named) -> Iterable[str]:
        calls.append(len(tensors))
        for target, (name, tensor) in zip(targets, tensors, strict=True):
            target.copy_(tensor)
            yield name

    for seed in (1, 2):
        numbers = torch.arange(3.0) + seed
        memory.begin(targets)
        memory.load([(name, numbers[i : i + 1]) for i, name in enumerate("abc")], loader)
        assert [target.item() for target in targets] == numbers.tolist()
    assert calls == [3]


# ---- does an update cover the served model? --------------------------------------------------------------------------


class Served(torch.nn.Module):
    """Two parameters and a head, tied or not, with vLLM's loader: a generator of the names that it wrote."""

    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.embed, self.norm = torch.nn.Linear(2, 3, bias=False), torch.nn.Linear(2, 2, bias=False)
        self.lm_head = self.embed if tied else torch.nn.Linear(2, 3, bias=False)
        self.ignored: set[str] = set()
        self.told: list[str] = []

    def load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterable[str]:
        for name, tensor in tensors:
            if name not in self.ignored:
                self.get_parameter(name).data.copy_(tensor)
                yield name


def _load(folder: Path, model: Served, monkeypatch: pytest.MonkeyPatch, **config: object) -> WeightLoad:
    """Begin a load as on a GPU, where weights are overwritten in place. The checkpoint is two files."""
    names = list(model.state_dict())
    for i, part in enumerate((names[:1], names[1:])):
        tensors = {name: model.get_parameter(name).data.clone() for name in part if name != "lm_head.weight"}
        save_file(tensors, folder / f"model-{i}.safetensors", metadata={"format": "pt"})
    if "lm_head.weight" in names and model.lm_head is not model.embed:
        save_file({"lm_head.weight": model.lm_head.weight.data.clone()}, folder / "model-2.safetensors")
    monkeypatch.setattr(WeightLoad, "_context", lambda self: contextlib.nullcontext())  # keeps this from importing vLLM
    reload = SimpleNamespace(
        initialize_layerwise_reload=lambda model: model.told.append("open"),
        finalize_layerwise_reload=lambda model, config: model.told.append("close"),
    )
    monkeypatch.setitem(sys.modules, "vllm.model_executor.model_loader.reload", reload)
    model_config = SimpleNamespace(model=str(folder), quantization=None, hf_text_config=SimpleNamespace())
    model_config.__dict__.update(config)
    return WeightLoad(model, SimpleNamespace(model_config=model_config), torch.device("cuda"), CopyMemory())


def _send(load: WeightLoad, names: Iterable[str]) -> int:
    shapes = {"embed.weight": (3, 2), "norm.weight": (2, 2), "lm_head.weight": (3, 2)}
    load.open()
    for name in names:
        load.add([(name, torch.full(shapes[name], 2.0))])
    return load.finish()


def test_an_update_of_every_tensor_is_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Served(tied=False)
    load = _load(tmp_path, model, monkeypatch)
    assert load.runs_meanwhile
    assert _send(load, ["embed.weight", "norm.weight", "lm_head.weight"]) == 3
    assert model.told == [], "nothing is taken apart"
    assert all((parameter == 2.0).all() for parameter in model.parameters())


@pytest.mark.parametrize("missing", ["embed.weight", "norm.weight", "lm_head.weight"])
def test_a_tensor_of_any_file_that_did_not_come_is_named(
    missing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = _load(tmp_path, Served(tied=False), monkeypatch)
    with pytest.raises(CoverageError, match=f"1 tensors of the checkpoint did not come: {missing}"):
        _send(load, {"embed.weight", "norm.weight", "lm_head.weight"} - {missing})


def test_a_tied_head_need_not_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tied = SimpleNamespace(tie_word_embeddings=True)
    load = _load(tmp_path, Served(tied=True), monkeypatch, hf_text_config=tied)
    assert _send(load, ["embed.weight", "norm.weight"]) == 2


def test_a_tied_parameter_may_be_written_under_any_of_its_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Served(tied=True)
    model.ignored = {"embed.weight"}
    load = _load(tmp_path, model, monkeypatch)
    assert _send(load, ["embed.weight", "norm.weight", "lm_head.weight"]) == 3


@dataclass(frozen=True)
class Mapper:
    """vLLM's mapping from a checkpoint's names, as far as it is used here."""

    orig_to_new_stacked: dict[str, str] = field(default_factory=lambda: {"q_proj": "qkv_proj"})

    def apply_list(self, names: list[str]) -> list[str]:
        found = []
        for name in names:
            for old, new in self.orig_to_new_stacked.items():
                name = name.replace(old, new)
            if not name.startswith("unused."):
                found.append(f"language_model.{name}")
        return found


def test_a_parameter_that_the_loader_left_alone_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Served(tied=False)
    model.ignored = {"norm.weight"}
    load = _load(tmp_path, model, monkeypatch)
    with pytest.raises(CoverageError, match=r"norm\.weight"):
        _send(load, ["embed.weight", "norm.weight", "lm_head.weight"])


def test_layers_that_are_repacked_are_not_overwritten_in_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class FusedMoE(torch.nn.Identity):
        pass

    assert not _load(tmp_path, Served(tied=False), monkeypatch, quantization="fp8").in_place
    model = Served(tied=False)
    model.norm.add_module("experts", FusedMoE())
    assert not _load(tmp_path, model, monkeypatch).in_place


@pytest.mark.parametrize("names", [True, False])
def test_without_a_layout_of_the_checkpoint_vllm_reloads_layer_by_layer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, names: bool
) -> None:
    """This is so on CPU. Tensors that a loader does not name count as not written."""
    heads = SimpleNamespace(ParallelLMHead=torch.nn.Bilinear)  # this model has none of these
    monkeypatch.setitem(sys.modules, "vllm.model_executor.layers.vocab_parallel_embedding", heads)
    model = Served(tied=False)
    load = _load(tmp_path, model, monkeypatch)
    load.in_place = False
    if not names:
        write = model.load_weights
        monkeypatch.setattr(model, "load_weights", lambda tensors: list(write(tensors)) and None)
    sent = ["embed.weight", "norm.weight", "lm_head.weight"]
    if names:
        assert _send(load, sent) == 3
    else:
        with pytest.raises(CoverageError, match="3 served parameters were not written"):
            _send(load, sent)
    assert all((parameter == 2.0).all() for parameter in model.parameters())
    load.close()
    assert model.told == ["open", "close"]
