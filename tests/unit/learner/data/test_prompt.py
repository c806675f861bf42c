"""Prompts as the model sees them."""

from __future__ import annotations

import base64
import functools
import io
import pickle
import threading
from dataclasses import replace
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from learner.data.prompt import PromptCheck, PromptEncoder, check_prompt_prefix
from learner.records import EncodedPrompt, Rollout, Sample
from shared.errors import ConfigError, DataError, PromptMismatchError, ServerMismatchError
from shared.images import ImageRules
from shared.pixels import ImageProcessing
from shared.wire import ProcessedImages
from tests.unit.learner.policy.rows import image, sample


@pytest.fixture(scope="module")
def encoder(tiny_vlm: Path) -> PromptEncoder:
    return PromptEncoder.load(str(tiny_vlm))


def test_ids_are_those_of_the_processors_own_tokenization(encoder: PromptEncoder) -> None:
    """R03: `apply_chat_template(tokenize=True)`, which is what a server does."""
    images = [Image.open(io.BytesIO(base64.b64decode(image(*size)))).convert("RGB") for size in ((128, 128), (64, 96))]
    content = [*({"type": "image", "image": one} for one in images), {"type": "text", "text": "Detect every digit."}]
    expected = encoder.processor.apply_chat_template(  # type: ignore[union-attr]
        [{"role": "user", "content": content}],
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
    )
    found = encoder.encode(sample([image(128, 128), image(64, 96)]))
    assert list(found.token_ids) == expected["input_ids"][0].tolist()
    assert found.vision is not None
    assert torch.equal(found.vision.pixel_values, expected["pixel_values"])
    assert found.vision.image_grid_thw.tolist() == [[1, 16, 16], [1, 12, 8]]


def test_a_prompt_for_an_engine_leaves_the_images_to_it(encoder: PromptEncoder) -> None:
    """R03: one placeholder each where `encode` has as many as the image takes; everything else is the same."""
    one = sample([image(128, 128), image(64, 96)])
    placeholder = encoder.tokenizer.convert_tokens_to_ids("<|image_pad|>")
    widened, asked = encoder.encode(one).token_ids, encoder.for_engine(one)
    assert asked.token_ids.count(placeholder) == 2
    assert [t for t in asked.token_ids if t != placeholder] == [t for t in widened if t != placeholder]
    assert [picture.size for picture in asked.images] == [(128, 128), (64, 96)]


def test_paths_base64_and_data_urls_give_the_same_pixels(encoder: PromptEncoder, tmp_path: Path) -> None:
    """R13: images are strings."""
    encoded = image(64, 64)
    (tmp_path / "i.png").write_bytes(base64.b64decode(encoded))
    forms = [encoded, f"data:image/png;base64,{encoded}", str(tmp_path / "i.png")]
    found = [encoder.encode(sample([form])) for form in forms]
    for one in found:
        assert one.token_ids == found[0].token_ids
        assert torch.equal(one.vision.pixel_values, found[0].vision.pixel_values)  # type: ignore[union-attr]


def test_grey_and_transparent_images_become_rgb(encoder: PromptEncoder, tmp_path: Path) -> None:
    grey = np.random.default_rng(0).integers(0, 256, (64, 64), dtype=np.uint8)
    Image.fromarray(grey).save(tmp_path / "grey.png")
    Image.fromarray(grey).convert("RGBA").save(tmp_path / "rgba.png")
    one, two = (encoder.encode(sample([str(tmp_path / name)])) for name in ("grey.png", "rgba.png"))
    assert torch.equal(one.vision.pixel_values, two.vision.pixel_values)  # type: ignore[union-attr]


def test_text_only_models_use_their_chat_template(tiny_text: Path) -> None:
    encoder = PromptEncoder.load(str(tiny_text))
    found = encoder.encode(sample(text="Hello"))
    assert found.vision is None
    assert encoder.tokenizer.decode(found.token_ids) == "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    with pytest.raises(DataError, match="text-only"):
        encoder.encode(sample([image(64, 64)]))


def test_a_prompt_without_images_has_no_vision(encoder: PromptEncoder) -> None:
    found = encoder.encode(sample(text="Hello"))
    assert found.vision is None
    assert encoder.tokenizer.decode(found.token_ids).endswith("Hello<|im_end|>\n<|im_start|>assistant\n")


def test_limits_of_pixels_change_the_number_of_tokens(tiny_vlm: Path) -> None:
    """`model.min_pixels`, `model.max_pixels`; the engine is told the same."""

    def grid(size: tuple[int, int], **limits: int) -> list[int]:
        encoder = PromptEncoder.load(str(tiny_vlm), **limits)
        one = sample([image(*size)])
        assert encoder.for_engine(one).pixels == encoder.pixels
        vision = encoder.encode(one).vision
        assert vision is not None
        return vision.image_grid_thw[0].tolist()

    assert grid((128, 128)) == [1, 16, 16]
    assert grid((128, 128), max_pixels=64 * 64) == [1, 8, 8]
    assert grid((16, 16), min_pixels=96 * 96) == [1, 12, 12]
    assert grid((16, 16), max_pixels=32 * 32)[1:] == [4, 4]  # lies below the checkpoint's smallest, which makes way
    with pytest.raises(ConfigError, match=r"model\.min_pixels"):
        PromptEncoder.load(str(tiny_vlm), min_pixels=200, max_pixels=100)


def test_a_model_of_text_has_no_limits_of_pixels(tiny_text: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.max_pixels"):
        PromptEncoder.load(str(tiny_text), max_pixels=100)


def test_a_turned_photograph_is_seen_upright(encoder: PromptEncoder, tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.new("RGB", (96, 64)).save(tmp_path / "turned.jpg", exif=exif)
    found = encoder.encode(sample([str(tmp_path / "turned.jpg")])).vision
    assert found is not None
    assert found.image_grid_thw.tolist() == [[1, 12, 8]]


def test_urls_are_fetched_where_their_host_is_allowed(tiny_vlm: Path, tmp_path: Path) -> None:
    """D13: the learner follows the rules that the server has."""
    (tmp_path / "a.png").write_bytes(base64.b64decode(image(64, 64)))
    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(QuietHandler, directory=str(tmp_path)))
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    try:
        one = sample([f"http://127.0.0.1:{server.server_port}/a.png"])
        allowed = PromptEncoder.load(str(tiny_vlm), rules=ImageRules(hosts=("127.0.0.1",)))
        assert allowed.encode(one).token_ids == allowed.encode(sample([image(64, 64)])).token_ids
        with pytest.raises(DataError, match=r"sample 's'.*data\.allowed_image_hosts"):
            PromptEncoder.load(str(tiny_vlm)).encode(one)
    finally:
        server.shutdown()
        server.server_close()


class QuietHandler(SimpleHTTPRequestHandler):
    def log_message(self, *args: object) -> None:
        pass


@pytest.mark.parametrize("how", ["missing", "broken", "truncated", "url"])
def test_a_bad_image_names_sample_and_image(encoder: PromptEncoder, tmp_path: Path, how: str) -> None:
    """R12: no sample is skipped in silence."""
    path = tmp_path / f"{how}.png"
    if how == "broken":
        path.write_bytes(b"no image")
    if how == "truncated":
        path.write_bytes(base64.b64decode(image(64, 64))[:-2000])
    name = "http://host/url.png" if how == "url" else str(path)
    with pytest.raises(DataError, match=rf"sample 'cow'.*{how}\.png"):
        encoder.encode(replace(sample([name]), sample_id="cow"))


def test_wrong_placeholders_name_the_sample(encoder: PromptEncoder) -> None:
    wrong: Sample = replace(sample([image(64, 64)]), messages=({"role": "user", "content": "<image><image>"},))
    with pytest.raises(DataError, match="sample 's'"):
        encoder.encode(wrong)


def test_the_encoder_crosses_to_dataloader_workers(encoder: PromptEncoder) -> None:
    one = sample([image(64, 64)])
    assert pickle.loads(pickle.dumps(encoder)).encode(one).token_ids == encoder.encode(one).token_ids


def test_a_folder_without_a_tokenizer_is_refused(tiny_text: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((tiny_text / "config.json").read_text())
    with pytest.raises(ConfigError, match=r"model\.path"):
        PromptEncoder.load(str(tmp_path))


def test_equal_prompts_pass() -> None:
    check_prompt_prefix([1, 2, 3], (1, 2, 3), "s")


@pytest.mark.parametrize(
    ("expected", "served", "index", "found", "wanted"),
    [
        ([5, 6, 7, 8], [5, 6, 9, 8], 2, "served 9 in", "learner has it: 7 in"),
        ([5, 6, 7], [5, 6], 2, "served nothing in", "learner has it: 7 in"),
        ([5, 6], [5, 6, 7], 2, "served 7 in", "learner has it: nothing in"),
    ],
)
def test_the_first_difference_is_shown(
    expected: list[int], served: list[int], index: int, found: str, wanted: str
) -> None:
    """R03: token ids are compared, and the first difference raises."""
    with pytest.raises(PromptMismatchError) as raised:
        check_prompt_prefix(expected, served, "cow", decode=lambda ids: "".join(chr(96 + i) for i in ids))
    assert f"sample 'cow' differently, starting at token {index}" in raised.value.what
    assert found in raised.value.found
    assert wanted in raised.value.wanted
    assert "'efih'" in raised.value.found or served != [5, 6, 9, 8]


def test_digests_of_a_groups_images_are_made_once(encoder: PromptEncoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """R45: a group's rollouts share their prompt, and the check afterwards makes none."""
    samples = [sample([image(128, 128)]), sample([image(64, 96)]), sample([])]
    prompts = [prompt for one in samples for prompt in [encoder.encode(one)] * 4]
    processing, made = encoder.image_processing, list[object]()
    assert processing is not None
    real = type(processing).processed

    def counted(self: ImageProcessing, pixels: torch.Tensor, grids: torch.Tensor, dtype: str) -> ProcessedImages:
        made.append(pixels)
        return real(self, pixels, grids, dtype)

    def seen(prompt: EncodedPrompt) -> ProcessedImages | None:
        vision = prompt.vision
        return vision and real(processing, vision.pixel_values, vision.image_grid_thw, "bfloat16")

    rollouts = [
        Rollout(
            sample=samples[i // 4],
            prompt_token_ids=prompt.token_ids,
            response_token_ids=(),
            finish_reason="stop",
            ver=1,
            seed=0,
            pixels=seen(prompt),
        )
        for i, prompt in enumerate(prompts)
    ]
    monkeypatch.setattr(type(processing), "processed", counted)
    check = PromptCheck(image_processing=processing)
    check.prepare(prompts, rollouts)
    assert len(made) == 2
    for prompt, rollout in zip(prompts, rollouts, strict=True):
        check(prompt, rollout)
    assert len(made) == 2
    with pytest.raises(ServerMismatchError):
        check(prompts[0], replace(rollouts[0], pixels=rollouts[4].pixels))
    PromptCheck().prepare(prompts, rollouts)
    assert len(made) == 2, "no images are compared"


@pytest.mark.parametrize("method", ["encode", "num_tokens"])
def test_an_image_whose_shape_the_processor_refuses_is_a_bad_image(encoder: PromptEncoder, method: str) -> None:
    """Qwen's processors take no image that is more than 200 times as wide as it is high."""
    with pytest.raises(DataError) as error:
        getattr(encoder, method)(replace(sample([image(2000, 4)]), width=2000, height=4))
    assert "2000 x 4" in error.value.found
    assert error.value.remedy
