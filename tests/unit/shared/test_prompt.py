"""Chat messages to content parts (R03): the same on both sides, whatever way a client names its images."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.errors import RequestError
from shared.generation import IMAGE_PLACEHOLDER, render_messages

IMAGE = {"type": "image"}


def text(words: str) -> dict[str, str]:
    return {"type": "text", "text": words}


def test_text_only_stays_a_string() -> None:
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]
    assert render_messages(messages, 0) == messages


def test_placeholders_become_images_in_place() -> None:
    messages = [{"role": "user", "content": "a<image>b<image>"}]
    assert render_messages(messages, 2) == [{"role": "user", "content": [text("a"), IMAGE, text("b"), IMAGE]}]


def test_without_placeholders_images_go_before_the_first_user_turn() -> None:
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}, {"role": "user", "content": "v"}]
    rendered = render_messages(messages, 2)
    assert [turn["content"] for turn in rendered] == [[text("s")], [IMAGE, IMAGE, text("u")], [text("v")]]


def test_parts_stay_in_order() -> None:
    content = [{"type": "image", "image": "a.png"}, {"type": "text", "text": "t", "image": None}]
    assert render_messages([{"role": "user", "content": content}], 1)[0]["content"] == [IMAGE, text("t")]


@pytest.mark.parametrize(
    ("messages", "num_images"),
    [
        ([{"role": "user", "content": "<image>"}], 0),
        ([{"role": "user", "content": "<image>"}], 2),
        ([{"role": "system", "content": "no user turn"}], 1),
    ],
)
def test_counts_must_agree(messages: list[dict[str, str]], num_images: int) -> None:
    with pytest.raises(RequestError, match="differ in number"):
        render_messages(messages, num_images)


words = st.text(st.characters(exclude_characters="<>"), min_size=1, max_size=8)
contents = st.lists(st.one_of(words, st.just(IMAGE_PLACEHOLDER)), min_size=1, max_size=6).map("".join)


@given(st.lists(contents, min_size=1, max_size=4))
def test_nothing_is_lost_or_moved(turns: list[str]) -> None:
    messages = [{"role": "user", "content": content} for content in turns]
    rendered = render_messages(messages, sum(content.count(IMAGE_PLACEHOLDER) for content in turns))
    for turn, content in zip(rendered, turns, strict=True):
        parts = turn["content"] if isinstance(turn["content"], list) else [text(turn["content"])]
        assert "".join(part.get("text", IMAGE_PLACEHOLDER) for part in parts) == content
