"""Weights straight into the rows of FP8 layers (R09): only where vLLM's own reload was seen to give the same.

`Reloaded` stands for vLLM's model and its reload: a fused layer with a bias, and a plain one. That real vLLM lays its
layers out like this, and follows the rule: `tests/integration/test_fp8.py`, `tests/gpu/test_fp8_cuda.py`.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from shared.errors import CoverageError
from shared.sync.fp8 import quantised
from shared.sync.loading import CopyMemory, WeightLoad
from shared.sync.quantised_rows import RowsProof, load_rows, rows_of

SIZES = {"q_proj": 32, "k_proj": 16, "v_proj": 16}
PACKED = {"qkv_proj": list(SIZES)}
IN = 48
FIRST = {"q_proj": 0, "k_proj": 32, "v_proj": 48}


class Fp8Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        values = torch.zeros(64, IN).to(torch.float8_e4m3fn)
        self.weight = torch.nn.Parameter(values.t(), requires_grad=False)
        self.weight_scale = torch.nn.Parameter(torch.zeros(64, 1), requires_grad=False)
        self.bias = torch.nn.Parameter(torch.zeros(64, dtype=torch.bfloat16), requires_grad=False)
        self.logical_widths, self.input_size_per_partition = list(SIZES.values()), IN


class Attention(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv_proj = Fp8Layer()


class Reloaded(torch.nn.Module):
    """`reversed_rows`: a reload that keeps the rows of each part in another order."""

    packed_modules_mapping = PACKED

    def __init__(self, *, reversed_rows: bool = False) -> None:
        super().__init__()
        self.attn = Attention()
        self.norm = torch.nn.Parameter(torch.zeros(8, dtype=torch.bfloat16), requires_grad=False)
        self.reversed_rows = reversed_rows
        self.asked: list[str] = []

    def load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        written = set()
        layer = self.attn.qkv_proj
        for name, tensor in tensors:
            self.asked.append(name)
            if name == "norm":
                self.norm.data.copy_(tensor)
                written.add(name)
                continue
            _, part, kind = name.split(".")
            rows = slice(FIRST[part], FIRST[part] + SIZES[part])
            if kind == "bias":
                layer.bias.data[rows].copy_(tensor)
            else:
                values, scale = quantised(tensor.bfloat16().flip(0) if self.reversed_rows else tensor.bfloat16())
                layer.weight.data.t()[rows].copy_(values)
                layer.weight_scale.data[rows].copy_(scale)
            written.add(f"attn.qkv_proj.{kind}")
        return written


def weights(seed: int, dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    found = {f"attn.{part}.weight": torch.randn(size, IN) for part, size in SIZES.items()}
    found |= {f"attn.{part}.bias": torch.randn(size) for part, size in SIZES.items()}
    return {name: tensor.to(dtype) for name, tensor in {**found, "norm": torch.randn(8)}.items()}


def state(model: Reloaded) -> list[torch.Tensor]:
    return [p.detach().float().clone() for p in model.parameters()]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The checkpoint's. Nothing of vLLM is imported."""
    save_file(weights(0), tmp_path / "model.safetensors", metadata={"format": "pt"})
    monkeypatch.setattr(WeightLoad, "_context", lambda self: contextlib.nullcontext())
    reload = SimpleNamespace(
        initialize_layerwise_reload=lambda model: None, finalize_layerwise_reload=lambda model, config: None
    )
    monkeypatch.setitem(sys.modules, "vllm.model_executor.model_loader.reload", reload)
    heads = SimpleNamespace(ParallelLMHead=torch.nn.Bilinear)
    monkeypatch.setitem(sys.modules, "vllm.model_executor.layers.vocab_parallel_embedding", heads)
    return tmp_path


def update(model: Reloaded, memory: CopyMemory, folder: Path, sent: dict[str, torch.Tensor]) -> WeightLoad:
    config = SimpleNamespace(
        model=str(folder), quantization="fp8_per_channel", hf_text_config=SimpleNamespace(), dtype=torch.bfloat16
    )
    load = WeightLoad(model, SimpleNamespace(model_config=config), torch.device("cuda"), memory)
    model.asked = []
    load.open()
    names = list(sent)
    for bucket in (names[:2], names[2:]):  # the parts of a layer in two buckets
        load.add([(name, sent[name]) for name in bucket])
    load.finish()
    return load


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_after_a_reload_that_proved_it_rows_are_written_in_place(folder: Path, dtype: torch.dtype) -> None:
    """The model is then what the reload would have made of it, weights that travel in float32 too."""
    model, memory = Reloaded(), CopyMemory()
    assert not update(model, memory, folder, weights(1, dtype)).in_place
    for seed in (2, 3):
        sent, other = weights(seed, dtype), Reloaded()
        load = update(model, memory, folder, sent)
        assert load.in_place
        other.load_weights(sent.items())
        assert all(torch.equal(a, b) for a, b in zip(state(model), state(other), strict=True))
    assert model.asked == [], "the plain tensor comes from memory"
    assert load.came_from_memory


def test_a_reload_that_gives_something_else_stays_the_way(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The same values in another order. Somebody who waits for slow syncs is told why."""
    model, memory = Reloaded(reversed_rows=True), CopyMemory()
    for seed in (1, 2):
        assert not update(model, memory, folder, weights(seed)).in_place
        assert len(model.asked) == 7
    assert memory.rows is None
    assert caplog.text.count("FP8") == 1


def test_weights_that_moved_are_reloaded(folder: Path) -> None:
    model, memory = Reloaded(), CopyMemory()
    update(model, memory, folder, weights(1))
    model.attn.qkv_proj.weight_scale.data = model.attn.qkv_proj.weight_scale.data.clone()
    assert not update(model, memory, folder, weights(2)).in_place
    assert update(model, memory, folder, weights(3)).in_place


def test_a_reload_into_other_memory_proves_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first update often brings the weights that are served already, so the memory that was left holds them too."""
    model, memory, sent = Reloaded(), CopyMemory(), weights(1)
    update(model, memory, folder, sent)
    memory.rows = None

    def move(model: Reloaded, config: object) -> None:
        layer = model.attn.qkv_proj
        layer.weight.data = layer.weight.data.t().clone().t()
        layer.weight_scale.data = layer.weight_scale.data.clone()

    reload = sys.modules["vllm.model_executor.model_loader.reload"]
    monkeypatch.setattr(reload, "finalize_layerwise_reload", move)
    update(model, memory, folder, sent)
    later, other = weights(2), Reloaded()
    update(model, memory, folder, later)
    other.load_weights(later.items())
    assert all(torch.equal(a, b) for a, b in zip(state(model), state(other), strict=True))


def test_in_place_a_tensor_that_does_not_come_is_named(folder: Path) -> None:
    model, memory = Reloaded(), CopyMemory()
    update(model, memory, folder, weights(1))
    sent = weights(2)
    del sent["attn.k_proj.weight"]
    with pytest.raises(CoverageError, match="k_proj"):
        update(model, memory, folder, sent)


def test_a_proof_needs_all_rows() -> None:
    model = Reloaded()
    rows = rows_of(model, PACKED)
    assert rows is not None
    sent = weights(1)
    model.load_weights(sent.items())
    proof = RowsProof(rows, torch.bfloat16)
    for name in list(rows)[1:]:
        proof.add(name, sent[name])
    assert not proof.holds()
    proof.add(next(iter(rows)), sent[next(iter(rows))])
    assert proof.holds()
    model.attn.qkv_proj.weight_scale.data[3] *= 2
    assert not proof.holds()


def test_layers_of_another_kind_have_no_rows() -> None:
    """Padded ones, or parts whose names are not known."""
    assert rows_of(torch.nn.Linear(2, 2), PACKED) is None
    assert rows_of(Reloaded(), {}) is None
    padded = Reloaded()
    padded.attn.qkv_proj.input_size_per_partition = IN - 1
    assert rows_of(padded, PACKED) is None


def test_a_part_writes_its_own_rows_only() -> None:
    model = Reloaded()
    rows = rows_of(model, PACKED)
    assert rows is not None
    before = state(model)
    load_rows(rows["attn.k_proj.weight"], weights(1)["attn.k_proj.weight"], torch.bfloat16)
    weight, scale, bias = (after != old for after, old in zip(state(model)[-3:], before[-3:], strict=True))
    inside = torch.zeros(64, dtype=torch.bool)
    inside[32:48] = True
    assert not bias.any()
    assert torch.equal(scale.flatten(), inside)
    assert weight.t()[inside].any()
    assert not weight.t()[~inside].any()
