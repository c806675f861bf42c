"""unsloth's side of `bench.race`, at the settings of its notebooks: vLLM shares the learner's weights, 16 bits.

Adapters are on the language model alone, because unsloth refuses any others beside its engine: less work than that of
the other sides.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import unsloth  # before all others, which it patches

from bench.race_trl import ACCUMULATED, start, train


def main(settings: dict[str, Any]) -> None:
    clock, lora = start(settings), settings["lora"]
    model, _ = unsloth.FastVisionModel.from_pretrained(
        settings["model"],
        max_seq_length=settings["context"],
        load_in_4bit=False,
        fast_inference=settings["on_gpu"],
        max_lora_rank=lora["r"],
        gpu_memory_utilization=settings["share"],
    )
    model = unsloth.FastVisionModel.get_peft_model(
        model,
        finetune_vision_layers=False,
        r=lora["r"],
        lora_alpha=lora["alpha"],
        lora_dropout=0,
        use_gradient_checkpointing="unsloth",
    )
    train(clock, settings, model, ACCUMULATED, vllm_importance_sampling_correction=False)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
