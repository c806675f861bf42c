"""Slow references for rollouts by the training model: one token at a time, by the learning forward."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from learner.policy.load import Policy
from learner.policy.packed import hidden_states, pack_inputs
from learner.records import EncodedPrompt, PackedRow, Sample, Segment
from tests.unit.learner.policy.rows import CPU

NUM_NEW = 10
SAMPLE = {"temperature": 0.9, "top_k": 200, "top_p": 0.95, "repetition_penalty": 1.2}


@torch.no_grad()
def next_logits(policy: Policy, prompt: EncodedPrompt, response: Sequence[int]) -> np.ndarray:
    """Return the logits, `[V]` in float64, by the forward that learns."""
    ids = np.array([*prompt.token_ids, *response], np.int64)
    one = Segment(
        sample_id="",
        input_ids=ids,
        labels=np.full(len(ids), -100),
        loss_weights=np.zeros(len(ids), np.float32),
        prompt_length=len(prompt.token_ids),
        vision=prompt.vision,
    )
    policy.model.eval()
    hidden = hidden_states(policy.model, pack_inputs(PackedRow(segments=(one,), capacity=len(one)), policy.model, CPU))
    return policy.model.get_output_embeddings()(hidden[-1]).double().numpy()


def penalized(logits: np.ndarray, seen: Sequence[int], penalty: float) -> np.ndarray:
    found = logits.copy()
    for token in set(seen):
        found[token] = found[token] * penalty if found[token] < 0 else found[token] / penalty
    return found


def distribution(logits: np.ndarray, temperature: float, top_k: int, top_p: float) -> np.ndarray:
    """Cut the distribution token by token in order of likelihood: at most `top_k` of them, until their total reaches
    `top_p`."""
    scaled = logits / temperature
    order = sorted(range(len(scaled)), key=lambda token: -scaled[token])[: top_k if top_k > 0 else None]
    kept = np.zeros_like(scaled)
    for token in order:
        kept[token] = np.exp(scaled[token] - scaled.max())
    kept /= kept.sum()
    total = 0.0
    for token in order:
        if total >= top_p:
            kept[token] = 0.0
        total += kept[token]
    return kept / kept.sum()


def reference_greedy(policy: Policy, one: Sample, penalty: float = 1.0) -> tuple[int, ...]:
    prompt, response = policy.encoder.encode(one), []
    for _ in range(NUM_NEW):
        logits = penalized(next_logits(policy, prompt, response), [*prompt.token_ids, *response], penalty)
        response.append(int(logits.argmax()))
    return tuple(response)


def reference_sample(policy: Policy, one: Sample, seed: int) -> tuple[int, ...]:
    prompt, response = policy.encoder.encode(one), []
    draws = torch.rand(NUM_NEW, generator=torch.Generator().manual_seed(seed))
    for draw in draws.tolist():
        seen = [*prompt.token_ids, *response]
        logits = penalized(next_logits(policy, prompt, response), seen, SAMPLE["repetition_penalty"])
        probabilities = distribution(logits, SAMPLE["temperature"], int(SAMPLE["top_k"]), SAMPLE["top_p"])
        token, total = -1, 0.0
        while total <= draw:
            token += 1
            total += probabilities[token]
        response.append(token)
    return tuple(response)


def reference_beam(policy: Policy, one: Sample, num_beams: int) -> tuple[int, ...]:
    """Search without answers that end: keep the `num_beams` likeliest prefixes of every length."""
    prompt = policy.encoder.encode(one)
    beams: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    for _ in range(NUM_NEW):
        grown = []
        for total, prefix in beams:
            logits = next_logits(policy, prompt, prefix)
            logprobs = logits - np.logaddexp.reduce(logits)
            grown += [(total + logprobs[t], (*prefix, int(t))) for t in np.argsort(-logprobs)[:num_beams]]
        beams = sorted(grown, reverse=True)[:num_beams]
    return beams[0][1]


# ---- tokens --------------------------------------------------------------------------------------------------------
