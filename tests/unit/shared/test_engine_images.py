"""Tests of how many times a prompt's images are processed for an engine in this process; a renderer stands for
vLLM's."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from PIL import Image

from shared.engine_images import EngineImages
from shared.generation import Prompt

IMAGE, NUM_PATCHES = 9, 4  # a token, and how many of it an image becomes


@dataclass(frozen=True)
class Place:
    offset: int
    length: int


class Renderer:
    """Every image token of a prompt becomes NUM_PATCHES."""

    def __init__(self) -> None:
        self.rendered = 0

    def process_for_engine(self, asked: Any, arrival_time: float, **_: Any) -> dict[str, Any]:
        self.rendered += 1
        token_ids: list[int] = []
        places: list[Place] = []
        for token in asked["prompt_token_ids"]:
            if token == IMAGE:
                places.append(Place(len(token_ids), NUM_PATCHES))
            token_ids += [token] * (NUM_PATCHES if token == IMAGE else 1)
        return {"prompt_token_ids": token_ids, "mm_placeholders": {"image": places}, "arrival_time": arrival_time}


def prompt(token_ids: list[int], images: list[Image.Image], pixels: dict[str, int] | None = None) -> Prompt:
    return Prompt(token_ids=token_ids, images=images, pixels=pixels)


def rendered(prompts: list[Prompt]) -> tuple[list[dict[str, Any]], int]:
    """Return what the engine gets, and how many prompts were rendered."""
    renderer = Renderer()
    images = EngineImages(renderer, ThreadPoolExecutor(1))
    with images.looking(prompts, [False] * len(prompts)) as seen:
        found = [renderer.process_for_engine(one.for_engine(), float(i)) for i, one in enumerate(prompts)]
    assert seen == [[]] * len(prompts)
    assert renderer.process_for_engine.__func__ is Renderer.process_for_engine  # type: ignore[attr-defined]
    return found, renderer.rendered


def alone(prompts: list[Prompt]) -> list[dict[str, Any]]:
    return [Renderer().process_for_engine(one.for_engine(), float(i)) for i, one in enumerate(prompts)]


def picture() -> list[Image.Image]:
    return [Image.new("RGB", (4, 4))]


def test_a_group_is_rendered_once() -> None:
    one, other = prompt([1, IMAGE, 2], picture()), prompt([1, IMAGE, 2], picture())
    prompts = [one, one, one, other, other]
    found, number = rendered(prompts)
    assert found == alone(prompts)
    assert number == 2


def test_beginnings_of_an_answer_are_cut_from_the_whole() -> None:
    pictures = picture()
    prompts = [prompt([1, IMAGE, 2, *range(20, 20 + n)], pictures) for n in (6, 0, 3, 6)]
    found, number = rendered(prompts)
    assert found == alone(prompts)
    assert number == 1


def test_another_prompt_is_rendered_by_itself() -> None:
    """Other tokens, more of them, other limits of pixels, no images, or fewer images than before."""
    pictures = picture()
    prompts = [
        prompt([1, IMAGE, 2], pictures),
        prompt([3, IMAGE, 2], pictures),
        prompt([3, IMAGE, 2, 4], pictures),
        prompt([3, IMAGE, 2], pictures, pixels={"longest_edge": 4}),
        prompt([5], []),
        prompt([5], []),
        prompt([1, IMAGE, 2, IMAGE], two := [*picture(), *picture()]),
        prompt([1, IMAGE, 2], two),
    ]
    found, number = rendered(prompts)
    assert found == alone(prompts)
    assert number == len(prompts)
