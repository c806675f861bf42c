"""Sizes of public models, and the memory that some of them were measured to take (bench/results)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from learner.config.memory import GIB, Use, estimate, shape_of

ROW_TOKENS = 16_384
RANK = 64


def _model(
    hidden: int, layers: int, heads: int, kv_heads: int, inner: int, *, tied: bool, large: bool, experts: int = 0
) -> dict[str, Any]:
    """Return the `config.json` of a Qwen3-VL, as far as memory depends on it. `large`: the larger of the two vision
    towers."""
    depth, width, wide = (27, 1152, 4304) if large else (24, 1024, 4096)
    text: dict[str, Any] = {
        "vocab_size": 151_936,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": 128,
    }
    if experts:
        text |= {"num_experts": experts, "num_experts_per_tok": 8, "moe_intermediate_size": inner}
    vision: dict[str, Any] = {"depth": depth, "hidden_size": width, "intermediate_size": wide, "spatial_merge_size": 2}
    vision["deepstack_visual_indexes"] = [5, 11, 17]
    return {"text_config": text, "vision_config": vision, "tie_word_embeddings": tied}


TEXT_4B: Mapping[str, Any] = {**_model(2560, 36, 32, 8, 9728, tied=True, large=False), "vision_config": None}
MODELS: Mapping[str, Mapping[str, Any]] = {
    "2B": _model(2048, 28, 16, 8, 6144, tied=True, large=False),
    "4B": _model(2560, 36, 32, 8, 9728, tied=True, large=False),
    "8B": _model(4096, 36, 32, 8, 12_288, tied=False, large=True),
    "30B-A3B": _model(2048, 48, 32, 4, 768, tied=False, large=True, experts=128),
    "32B": _model(5120, 64, 64, 8, 25_600, tied=False, large=True),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """A figure of bench/results, and the run that it was measured in. `engine_gib`: what vLLM held beside it."""

    what: str
    model: Mapping[str, Any]
    use: Use
    gib: float
    engine_gib: float = 0.0
    allocated: bool = False  # True: torch's count, so without CUDA's context

    @property
    def estimated(self) -> float:
        """GiB."""
        found = estimate(shape_of(self.model), self.use)
        return (found.total - (found.other if self.allocated else 0)) / GIB + self.engine_gib

    @property
    def error(self) -> float:
        """A share of what was measured: positive if the estimate is too large."""
        return self.estimated / self.gib - 1


_WHOLE = Use(row_tokens=ROW_TOKENS, autocast=False)
_LORA = replace(_WHOLE, lora_rank=RANK)
MEASURED = (
    Measured(
        what="4B text, whole, compiled", model=TEXT_4B, use=replace(_WHOLE, checkpointing=False), gib=92, allocated=True
    ),
    Measured(
        what="the same, eager",
        model=TEXT_4B,
        use=replace(_WHOLE, checkpointing=False, compiled=False),
        gib=126,
        allocated=True,
    ),
    Measured(what="4B text, whole, compiled, checkpointing", model=TEXT_4B, use=_WHOLE, gib=36, allocated=True),
    Measured(what="the same, eager", model=TEXT_4B, use=replace(_WHOLE, compiled=False), gib=37, allocated=True),
    Measured(what="4B, whole, checkpointing", model=MODELS["4B"], use=_WHOLE, gib=41_803 / 1024),
    Measured(what="4B, LoRA, checkpointing", model=MODELS["4B"], use=_LORA, gib=17_749 / 1024),
    Measured(
        what="4B, LoRA, checkpointing, rows of 19,360 tokens, vLLM's 0.3 of 79.6 GiB beside it",
        model=MODELS["4B"],
        use=replace(_LORA, row_tokens=19_360),
        gib=48_805 / 1024,
        engine_gib=0.3 * 79.6,
    ),
)
