"""A request, rendered for the engine. (Which images a request may name: `tests/unit/shared/test_images.py`.)"""

from __future__ import annotations

import base64
import io
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from bench.tiny_models import build_qwen3, build_qwen3_vl
from rollout_server.config import ServerConfig
from rollout_server.openai_api import CompletionCall, texts
from rollout_server.prompts import Renderer
from shared.errors import ConfigError, MediaError, PromptTooLongError, RequestError
from shared.generation import Prompt
from shared.wire import ContentPart, Message, RolloutInferRequest


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("model")
    build_qwen3_vl(path)
    return str(path)


def png(size: tuple[int, int] = (64, 32)) -> str:
    out = io.BytesIO()
    Image.new("RGB", size, (255, 0, 0)).save(out, "PNG")
    return base64.b64encode(out.getvalue()).decode()


def rendered(model: str, request: RolloutInferRequest, **settings: Any) -> Prompt:
    renderer = Renderer(model, ServerConfig(model=model, **settings))
    try:
        return renderer.render(request, renderer.decoders.share())
    finally:
        renderer.decoders.close()


def asking(*images: str) -> RolloutInferRequest:
    return RolloutInferRequest(messages=[Message(role="user", content="Detect.")], images=list(images))


def test_images_of_the_request_and_of_its_messages_are_read(model: str) -> None:
    inline = [ContentPart(type="image", image=png((16, 8))), ContentPart(type="text", text="Detect.")]
    found = rendered(model, RolloutInferRequest(messages=[Message(role="user", content=inline)]))
    assert [image.size for image in found.images] == [(16, 8)]
    assert [image.size for image in rendered(model, asking(png(), png((8, 8)))).images] == [(64, 32), (8, 8)]


def test_images_come_in_the_order_of_their_places(model: str) -> None:
    """R13: a part's own image, in any of the ways that clients write it, or the next one of the list."""
    parts = [
        {"type": "image_url", "image_url": {"url": "data:image/png;base64," + png((8, 8))}},
        {"type": "image"},
        {"type": "image_url", "image_url": png((16, 8))},
        {"type": "text", "text": "Detect."},
    ]
    messages = [Message(role="user", content="<image>a"), Message.model_validate({"role": "user", "content": parts})]
    request = RolloutInferRequest(messages=messages, images=[png((24, 8)), png((32, 8))])
    assert [image.width for image in rendered(model, request).images] == [24, 8, 32, 16]


def test_template_variables_reach_the_template_and_nothing_else_does(tmp_path: Path) -> None:
    """R13: a template is never the client's."""
    build_qwen3(tmp_path)
    settings = tmp_path / "tokenizer_config.json"
    template = tmp_path / "chat_template.jinja"
    assert settings.exists()
    template.write_text("{% if enable_thinking %}think {% endif %}{{ messages[0].content }}")
    renderer = Renderer(str(tmp_path), ServerConfig(model=str(tmp_path)))
    share = renderer.decoders.share()
    request = RolloutInferRequest(messages=[Message(role="user", content="a")])
    thinking = request.model_copy(update={"chat_template_kwargs": {"enable_thinking": True}})
    assert renderer.text_of(renderer.render(request, share).token_ids) == "a"
    assert renderer.text_of(renderer.render(thinking, share).token_ids) == "think a"
    # CVE-2026-115918: a template in the request; CVE-2025-62426: arguments of what renders it
    for name in ("chat_template", "tokenize", "return_tensors", "tools", "conversation"):
        with pytest.raises(RequestError, match=name):
            renderer.render(request.model_copy(update={"chat_template_kwargs": {name: "x"}}), share)


def test_the_servers_own_rules_hold(model: str, tmp_path: Path) -> None:
    """R13: its keys are named, its limits are used."""
    (tmp_path / "a.png").write_bytes(base64.b64decode(png()))
    path = str(tmp_path / "a.png")
    with pytest.raises(MediaError, match=r"the server's allowed_image_roots"):
        rendered(model, asking(path))
    assert rendered(model, asking(path), allowed_image_roots=[tmp_path]).images[0].size == (64, 32)
    with pytest.raises(MediaError, match=r"at most 100.*the server's max_image_pixels"):
        rendered(model, asking(png()), max_image_pixels=100)
    with pytest.raises(MediaError, match=r"host 'elsewhere'.*one of: here"):
        rendered(model, asking("http://elsewhere/a.png"), allowed_image_hosts=["here"])


def test_too_many_images(model: str) -> None:
    with pytest.raises(MediaError, match=r"at most 2.*max_images_per_request"):
        rendered(model, asking(png(), png(), png()), max_images_per_request=2)


def test_a_model_of_text_takes_no_images(tmp_path: Path) -> None:
    build_qwen3(tmp_path)
    with pytest.raises(RequestError, match="takes no images"):
        rendered(str(tmp_path), asking(png()))
    with pytest.raises(ConfigError, match="min_pixels"):
        rendered(str(tmp_path), asking(), min_pixels=100)


def test_limits_of_pixels_reach_the_engine(model: str) -> None:
    asked = rendered(model, asking(png()), max_pixels=32 * 32).for_engine()
    assert asked["mm_processor_kwargs"]["size"]["longest_edge"] == 32 * 32
    assert "mm_processor_kwargs" not in rendered(model, asking(png())).for_engine()
    with pytest.raises(ConfigError, match=r"min_pixels.*above.*max_pixels"):
        rendered(model, asking(), min_pixels=100, max_pixels=99)


def test_the_engine_knows_images_by_their_pixels(model: str, tmp_path: Path) -> None:
    """So it digests none itself, and processes a picture once, however it came."""
    file = tmp_path / "picture.png"
    file.write_bytes(base64.b64decode(png((16, 8))))
    ways = [png((16, 8)), "data:image/png;base64," + png((16, 8)), str(file)]
    asked = [rendered(model, asking(way), allowed_image_roots=[str(tmp_path)]).for_engine() for way in ways]
    (same,) = {tuple(one["multi_modal_uuids"]["image"]) for one in asked}
    other = rendered(model, asking(png((8, 16)), png((16, 8)))).for_engine()["multi_modal_uuids"]["image"]
    assert other[0] != other[1] == same[0]
    assert "multi_modal_uuids" not in rendered(model, asking()).for_engine()


@pytest.mark.parametrize("kind", ["one turn", "many parts", "openai"])
def test_a_long_text_is_refused_before_it_is_tokenized(model: str, kind: str) -> None:
    """R16: 16 MB took 25 s of a core and 3 GB."""
    renderer = Renderer(model, ServerConfig(model=model))
    renderer.max_model_len = 4096
    num_tokenized = 0
    tokenize = renderer.tokenizer

    class Counting:
        def __getattr__(self, name: str) -> Any:
            return getattr(tokenize, name)

        def __call__(self, text: str, **settings: Any) -> Any:
            nonlocal num_tokenized
            num_tokenized += len(text)
            return tokenize(text, **settings)

    renderer.tokenizer = Counting()
    text = "no end " * 300_000
    share = renderer.decoders.share()
    parts = [ContentPart(type="text", text=text[:1000])] * 2000
    message = Message(role="user", content=parts if kind == "many parts" else text)
    refused: Callable[[], object]
    if kind == "openai":
        refused = partial(renderer.check_length, texts(CompletionCall(prompt=["short", text]))[1], share)
    else:
        refused = partial(renderer.render, RolloutInferRequest(messages=[message]), share)
    with pytest.raises(PromptTooLongError) as raised:
        refused()
    assert "max_model_len" in raised.value.remedy
    assert num_tokenized <= 4 * 4096 * 16


def test_a_text_that_fits_is_never_called_too_long(model: str) -> None:
    renderer = Renderer(model, ServerConfig(model=model))
    text = "digit " * 40_000  # longer than one piece
    request = RolloutInferRequest(messages=[Message(role="user", content=text)])
    whole = renderer.render(request, renderer.decoders.share()).token_ids
    renderer.max_model_len = len(whole)
    assert renderer.render(request, renderer.decoders.share()).token_ids == whole


def test_a_caller_that_goes_ends_the_counting_of_its_text(model: str) -> None:
    renderer = Renderer(model, ServerConfig(model=model))
    renderer.max_model_len = 1 << 20
    share = renderer.decoders.share()
    share.close()
    with pytest.raises(RequestError):
        renderer.check_length("a" * (1 << 17), share)
