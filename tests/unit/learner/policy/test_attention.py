"""Segment attention against one plain softmax per segment."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from learner.policy.attention import SegmentLayout, segment_attention, share_calls
from shared.errors import ConfigError

lengths_lists = st.lists(st.integers(1, 40), min_size=1, max_size=6)


def reference(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: list[int], causal: bool) -> torch.Tensor:
    outputs = []
    start = 0
    for length in lengths:
        here = slice(start, start + length)
        for head in range(q.shape[1]):
            kv = head * k.shape[1] // q.shape[1]
            scores = q[0, head, here].double() @ k[0, kv, here].double().T * q.shape[-1] ** -0.5
            if causal:
                scores += torch.full((length, length), float("-inf"), dtype=torch.double).triu(1)
            outputs.append(scores.softmax(-1) @ v[0, kv, here].double())
        start += length
    heads = [outputs[i :: q.shape[1]] for i in range(q.shape[1])]
    return torch.stack([torch.cat(h) for h in heads], dim=1)[None]


@given(lengths=lengths_lists, causal=st.booleans(), dtype=st.sampled_from([torch.float32, torch.bfloat16]))
@settings(max_examples=30, deadline=None)
def test_each_token_attends_to_its_own_segment(lengths: list[int], causal: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, heads, sum(lengths), 8, dtype=dtype) for heads in (4, 2, 2))
    layout = SegmentLayout.of(lengths, torch.device("cpu"))
    vision = {"cu_seq_lens_q": layout.cu_seqlens, "max_length_q": max(lengths), "is_causal": False}
    where = {"segments": layout} if causal else vision
    found, _ = segment_attention(torch.nn.Identity(), q, k, v, None, **where)  # type: ignore[arg-type]
    expected = reference(q, k, v, lengths, causal)
    tolerance = 1e-5 if dtype == torch.float32 else 3e-2
    torch.testing.assert_close(found.double(), expected, atol=tolerance, rtol=0)


@given(lengths=lengths_lists, max_padding=st.sampled_from([1.0, 1.25, 3.0]))
def test_shared_calls_cover_all_segments_within_the_padding(lengths: list[int], max_padding: float) -> None:
    groups = share_calls(lengths, max_padding)
    assert [i for start, end in groups for i in range(start, end)] == list(range(len(lengths)))
    for start, end in groups:
        part = lengths[start:end]
        assert len(part) * max(part) <= max_padding * sum(part)


def test_a_window_shorter_than_a_segment_is_refused() -> None:
    q = torch.randn(1, 1, 9, 8)
    layout = SegmentLayout.of([9], torch.device("cpu"))
    with pytest.raises(ConfigError, match="sliding_window=4"):
        segment_attention(torch.nn.Identity(), q, q, q, None, segments=layout, sliding_window=4)
    segment_attention(torch.nn.Identity(), q, q, q, None, segments=layout, sliding_window=9)
