"""How `generate` chooses the next token, where transformers' own way depends on what else is in the batch.

In: the logits of every running sequence. Out: logits for a greedy or beam search, as logits processors. transformers
samples all sequences from one global generator and lets padding count as repeated tokens; here a sequence depends on
its prompt and its seed only (R11, R29). Order as in vLLM: repetition penalty, temperature, top-k, top-p, draw.

Shapes: B prompts, P tokens with padding, R running sequences (B, or B x beams), V entries of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from learner.config.schema import DecodingConfig
from shared.errors import RolloutError


def logits_processors(
    decoding: DecodingConfig, *, mode: str, attention_mask: torch.Tensor, seeds: Sequence[int]
) -> LogitsProcessorList:
    """What `decoding` does to logits in `mode` (greedy, sample, beam). `attention_mask` `[B, P]`: 0 at padding."""
    processors = LogitsProcessorList()
    if decoding.repetition_penalty != 1.0:
        processors.append(RepetitionPenalty(decoding.repetition_penalty, attention_mask))
    if mode != "sample":
        return processors
    processors.append(TemperatureLogitsWarper(decoding.temperature))
    if decoding.top_k > 0:
        processors.append(TopKLogitsWarper(decoding.top_k))
    if decoding.top_p < 1.0:
        processors.append(TopPLogitsWarper(decoding.top_p))
    processors.append(SeededChoice(seeds, attention_mask.shape[1], decoding.max_new_tokens))
    return processors


class RepetitionPenalty(LogitsProcessor):
    """Tokens of a sequence's own prompt and answer become less likely (CTRL, arXiv:1909.05858); padding counts for
    nothing."""

    def __init__(self, penalty: float, attention_mask: torch.Tensor) -> None:
        self._penalty, self._is_prompt = penalty, attention_mask.bool()

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        num_prompts, prompt_length = self._is_prompt.shape
        occurs = torch.ones_like(input_ids)
        occurs[:, :prompt_length] = self._is_prompt.repeat_interleave(len(input_ids) // num_prompts, dim=0)
        occurred = torch.zeros_like(scores, dtype=occurs.dtype).scatter_add_(1, input_ids, occurs) > 0
        penalized = torch.where(scores < 0, scores * self._penalty, scores / self._penalty)
        return torch.where(occurred, penalized, scores)


class SeededChoice(LogitsProcessor):
    """Draws each sequence's token by a number of its own, and leaves only that token to the greedy search.

    Number i of a sequence follows from its seed and i, on any device; it picks the token where the cumulative
    distribution exceeds it.
    """

    def __init__(self, seeds: Sequence[int], prompt_length: int, max_new_tokens: int) -> None:
        draws = [torch.rand(max_new_tokens, generator=torch.Generator().manual_seed(seed)) for seed in seeds]
        self._draws, self._prompt_length = torch.stack(draws), prompt_length  # [B, max_new_tokens], in [0, 1)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Raises RolloutError where the model gives no distribution (weights that are not finite)."""
        draw = self._draws[:, input_ids.shape[1] - self._prompt_length, None].to(scores.device, torch.float64)
        cumulative = scores.double().softmax(-1).cumsum(-1)  # [B, V]; float64: a float32 sum is off by whole tokens
        total = cumulative[:, -1:]
        if not total.isfinite().all():
            raise RolloutError(
                "the model's logits are not finite, so no token can be drawn",
                found="not a number among the probabilities",
                wanted="finite weights",
                remedy="lower training.learning_rate, and go on from a checkpoint before the loss went wrong",
            )
        chosen = torch.searchsorted(cumulative, draw * total, right=True)
        return torch.full_like(scores, -torch.inf).scatter_(1, chosen, 0.0)
