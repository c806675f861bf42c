"""Estimates the memory that learning takes on one GPU, from a model's `config.json`. Imports neither torch nor numpy.

In: the configuration of a checkpoint, and how it is trained. Out: a `MemoryEstimate`, with bytes for each kind of use.

The backward pass of a layer needs the inputs of every matrix product and of every norm. For each token these inputs are
4 x hidden, 3 x (query + key + value width) and 3 x intermediate values. With gradient checkpointing only the input of
each layer is kept. The backward pass then computes the layers again, one at a time, which also needs memory for this
layer's gradients. Attention stores no matrix of tokens x tokens. The output head takes LOGITS_CHUNK tokens at a time.
The vision tower computes `merge ** 2` patches for each image token.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from learner.config.modes import colocates
from learner.config.plan import shards
from learner.config.schema import RunConfig
from shared.reading import json_in

GIB = 2**30
LOGITS_CHUNK = 1024  # supervised tokens whose logits exist at once; a test compares it with learner/policy/loss.py
IMAGE_SHARE = 0.5  # assumed fraction of image tokens among the tokens of a row
OTHER_BYTES = GIB  # memory of CUDA's context, and memory that the allocator cannot reuse.
# Activations of a layer that is not compiled take this many times the memory of a compiled layer's; measured on a model
# of 4B parameters.
EAGER = 1.55
COMPILED_FROM = 5e8  # min number of parameters of a model that `model.compile: auto` compiles.
# Bytes per logit. A compiled loss keeps the logit and its gradient in bfloat16. A loss that is not compiled keeps a
# value in bfloat16 and three in float32.
COMPILED_LOGITS, EAGER_LOGITS = 4, 14
# Estimates were up to 12% off.
FILLED = 0.9  # an estimate above this fraction of a GPU's memory may not fit


@dataclass(frozen=True, kw_only=True, slots=True)
class Tower:
    """The sizes of a stack of equal layers: the decoder, or the vision tower."""

    layers: int  # number of layers
    hidden: int  # width of the hidden states between layers
    inner: int  # values per token between a layer's up and down projections
    attention: int  # width of query, key and value together
    layer_parameters: int  # number of parameters of one layer
    adapted: int  # widths of a layer's linear modules, added up; LoRA of rank r adds r times this number

    @property
    def values(self) -> int:
        """The number of values per token that the backward pass of a layer needs."""
        return 4 * self.hidden + 3 * self.attention + 3 * self.inner


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """The sizes of a model that the estimate needs."""

    text: Tower
    vision: Tower | None
    patches_per_token: int  # patches of the vision tower per image token; 0 without vision tower
    vocab_size: int
    embedding_parameters: int  # parameters of the embedding, and of the output head if it has weights of its own
    merger_parameters: int  # number of parameters of the modules between vision tower and decoder
    merger_adapted: int  # `Tower.adapted` for the modules between vision tower and decoder

    @property
    def vision_parameters(self) -> int:
        return 0 if self.vision is None else self.vision.layers * self.vision.layer_parameters + self.merger_parameters

    @property
    def num_parameters(self) -> int:
        return self.text.layers * self.text.layer_parameters + self.embedding_parameters + self.vision_parameters


@dataclass(frozen=True, kw_only=True, slots=True)
class Use:
    """The settings of training that decide how much memory it takes."""

    row_tokens: int  # number of tokens of a packed row
    weight_bytes: int = 2  # bytes per weight
    autocast: bool = True  # True: activations are in bfloat16 (`training.bf16`)
    lora_rank: int | None = None  # None: no adapter, all weights are trained
    checkpointing: bool = True  # gradient checkpointing
    compiled: bool = True
    vision_trained: bool = True
    parts: int = 1  # number of ranks over which the model is sharded; 1: every rank has all weights


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryEstimate:
    """Bytes on one GPU while the model learns. The engine of colocated rollouts is not counted."""

    weights: int
    adapter: int  # weights of LoRA
    gradients: int
    moments: int
    activations: int
    logits: int
    other: int

    @property
    def total(self) -> int:
        return sum(getattr(self, field.name) for field in fields(self))

    def to_json(self) -> dict[str, float]:
        """Return the numbers by name in GiB, and their sum as `total`."""
        named = {field.name: getattr(self, field.name) for field in fields(self)} | {"total": self.total}
        return {name: round(value / GIB, 1) for name, value in named.items()}


def shape_of(config: Mapping[str, Any]) -> ModelShape:
    """Return the sizes of the model that this content of a `config.json` describes. Raises KeyError, TypeError or
    ValueError if a size is missing or no number."""
    text = config.get("text_config") or config
    hidden, vocab_size = int(text["hidden_size"]), int(text["vocab_size"])
    tied = bool(config.get("tie_word_embeddings", text.get("tie_word_embeddings", False)))
    vision = config.get("vision_config")
    merged = int(vision.get("spatial_merge_size", 2)) ** 2 if vision else 0
    mergers = 1 + len(vision.get("deepstack_visual_indexes") or ()) if vision else 0
    joined = merged * int(vision["hidden_size"] if "depth" in vision else hidden) if vision else 0
    return ModelShape(
        text=_text_tower(text),
        vision=_vision_tower(vision) if vision else None,
        patches_per_token=merged,
        vocab_size=vocab_size,
        embedding_parameters=vocab_size * hidden * (1 if tied else 2),
        merger_parameters=mergers * joined * (joined + hidden),
        merger_adapted=mergers * (3 * joined + hidden),
    )


def _text_tower(text: Mapping[str, Any]) -> Tower:
    hidden, heads = int(text["hidden_size"]), int(text["num_attention_heads"])
    head = int(text.get("head_dim") or hidden // heads)
    query, key_value = heads * head, int(text.get("num_key_value_heads") or heads) * head
    attention = 2 * hidden * (query + key_value)
    adapted = (hidden + query) * 2 + (hidden + key_value) * 2
    experts = int(text.get("num_experts") or text.get("num_local_experts") or 0)
    if experts:
        width = int(text["moe_intermediate_size"])
        inner = width * int(text["num_experts_per_tok"])
        # LoRA does not adapt experts, so their parameters are not in `adapted`.
        wide = experts * (3 * hidden * width + hidden)
    else:
        inner = int(text["intermediate_size"])
        wide = 3 * hidden * inner
        adapted += 3 * (hidden + inner)
    return Tower(
        layers=int(text["num_hidden_layers"]),
        hidden=hidden,
        inner=inner,
        attention=query + 2 * key_value,
        layer_parameters=attention + wide,
        adapted=adapted,
    )


def _vision_tower(vision: Mapping[str, Any]) -> Tower:
    hidden, inner = int(vision.get("embed_dim") or vision["hidden_size"]), int(vision.get("intermediate_size") or 0)
    inner = inner or int(hidden * float(vision.get("mlp_ratio", 4)))
    gated = 3 if vision.get("hidden_act") == "silu" else 2  # Qwen2.5-VL's vision tower has a gate (SwiGLU)
    return Tower(
        layers=int(vision["depth"]),
        hidden=hidden,
        inner=inner,
        attention=3 * hidden,
        layer_parameters=4 * hidden * hidden + gated * hidden * inner,
        adapted=6 * hidden + gated * (hidden + inner),
    )


def estimate(shape: ModelShape, use: Use) -> MemoryEstimate:
    """Return the estimated bytes of each kind of use, at the moment of a step when most memory is used."""
    adapter = _adapter_parameters(shape, use.lora_rank) if use.lora_rank else 0
    if adapter:
        trained, value_bytes = adapter, 4  # peft keeps an adapter's weights in float32 (4 bytes)
    else:
        trained = shape.num_parameters - (0 if use.vision_trained else shape.vision_parameters)
        value_bytes = use.weight_bytes
    activations, logits = _of_a_row(shape, use)
    other = OTHER_BYTES
    if use.parts > 1:  # every rank gathers two layers and the embedding at a time
        other += use.weight_bytes * (2 * shape.text.layer_parameters + shape.embedding_parameters)
    return MemoryEstimate(
        weights=use.weight_bytes * shape.num_parameters // use.parts,
        adapter=4 * adapter // use.parts,
        gradients=value_bytes * trained // use.parts,
        # AdamW keeps two moments for each trained value.
        moments=2 * value_bytes * trained // use.parts,
        activations=activations,
        logits=logits,
        other=other,
    )


def _adapter_parameters(shape: ModelShape, rank: int) -> int:
    adapted = shape.text.layers * shape.text.adapted
    if shape.vision is not None:
        adapted += shape.vision.layers * shape.vision.adapted + shape.merger_adapted
    return rank * adapted


def _of_a_row(shape: ModelShape, use: Use) -> tuple[int, int]:
    """Return the bytes of a row's activations and of its logits. With checkpointing, the logits are freed before a
    layer is computed again, so the activations count only what a layer needs beyond the logits' bytes."""
    stream = use.weight_bytes  # bytes of a value between two layers
    inside = 2 if use.autocast else use.weight_bytes  # bytes of a value inside a layer
    eager = 1.0 if use.compiled else EAGER
    towers = [(shape.text, use.row_tokens)]
    if shape.vision is not None:
        towers.append((shape.vision, int(use.row_tokens * IMAGE_SHARE) * shape.patches_per_token))
    kept, largest = 0, 0
    for tower, tokens in towers:
        layer = tokens * (4 * tower.hidden * stream + (tower.values - 4 * tower.hidden) * inside)
        if use.checkpointing:
            kept += tower.layers * tokens * tower.hidden * stream
            largest = max(largest, int(layer * (1 + eager)))
        else:
            kept += int(tower.layers * layer * eager)
    if use.autocast and use.weight_bytes > 2:
        kept += 2 * shape.num_parameters  # autocast keeps a bfloat16 copy of all weights while a row is learned
    a_logit = COMPILED_LOGITS if use.compiled else EAGER_LOGITS
    logits = a_logit * min(use.row_tokens, LOGITS_CHUNK) * shape.vocab_size
    return (kept + max(0, largest - logits), logits) if use.checkpointing else (kept, logits)


# ---- run -----------------------------------------------------------------------------------------------------------


def of_run(config: RunConfig, world_size: int) -> MemoryEstimate | None:
    """Return the estimated memory that learning takes on each GPU of the run. None if `model.path` has no readable
    `config.json` on this machine."""
    shape = _shape_at(Path(config.model.path))
    if shape is None:
        return None
    model = config.model
    compiled = shape.num_parameters >= COMPILED_FROM if model.compile == "auto" else model.compile
    return estimate(
        shape,
        Use(
            row_tokens=config.global_max_length,
            weight_bytes=2 if model.dtype == "bfloat16" else 4,
            autocast=config.training.bf16,
            lora_rank=model.lora.r if model.lora else None,
            checkpointing=model.gradient_checkpointing,
            compiled=compiled and not shards(config, world_size),
            vision_trained="model.visual." not in model.freeze,
            parts=world_size if shards(config, world_size) else 1,
        ),
    )


def _shape_at(folder: Path) -> ModelShape | None:
    try:
        adapter = folder / "adapter_config.json"
        if adapter.is_file():
            folder = Path(str(json_in(adapter)["base_model_name_or_path"]))
        return shape_of(json_in(folder / "config.json"))
    # If the model's files are damaged, an error is raised later, when the model is loaded.
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def engine_share(config: RunConfig) -> float:
    """Return the fraction of each GPU's memory that colocated vLLM takes; 0 if the run has no colocated vLLM."""
    return config.rollout_matching.vllm.gpu_memory_utilization if colocates(config) else 0.0


def needed_bytes(config: RunConfig, learning: MemoryEstimate, gpu_bytes: int) -> int:
    """Return how many bytes of a GPU with `gpu_bytes` the run needs at the same time. The needed memory is the memory
    of learning, or, if that is more, the memory of colocated vLLM together with the weights, adapter and moments that
    stay on the GPU while vLLM generates. During learning vLLM sleeps if there is not enough memory for both."""
    offload = config.rollout_matching.offload
    stays = learning.other
    if not (offload.enabled and offload.offload_model):
        stays += learning.weights + learning.adapter
    if not (offload.enabled and offload.offload_optimizer):
        stays += learning.moments
    # The sum was within 8% of the memory of each of 11 measured runs. If vLLM is not counted, the estimate is off by up
    # to 43%.
    return max(learning.total, int(engine_share(config) * gpu_bytes) + stays if colocates(config) else 0)


def memory_report(config: RunConfig, world_size: int) -> dict[str, Any]:
    """Return the entries `memory_gib` and `engine_share` of the output of `--json`; {} if the model is not on this
    machine."""
    found = of_run(config, world_size)
    return {} if found is None else {"memory_gib": found.to_json(), "engine_share": engine_share(config)}


def memory_in_words(report: Mapping[str, Any], row_tokens: int) -> str:
    """Return the result of `memory_report` as one line of text. `row_tokens`: tokens of a packed row."""
    gib = report.get("memory_gib")
    if gib is None:
        return "memory: not known, because model.path has no config.json on this machine"
    parts = ", ".join(f"{name} {value:g}" for name, value in gib.items() if name != "total" and value)
    line = f"memory: learning rows of {row_tokens} tokens takes about {gib['total']:g} GiB of each GPU ({parts})"
    if share := report.get("engine_share"):
        line += f"; vLLM takes {share:.0%} of the GPU beside it, or in turn with it if both do not fit"
    return line
