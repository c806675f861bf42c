"""Check that learner and vLLM agree on a family of models: prompts, and the weights of a sync.

    python -m bench.families [--out FILE] [FAMILY ...]

In: names of families of `bench/tiny_models.py`, by default all; each is built with random weights, tiny. Out: a table,
and with `--out` a JSON file that keeps the other families' entries. For every family, on CPU in float32:

- the server's own rendering of prompts with one, two and no images is given to vLLM, and the token ids that vLLM has
  consumed and the pixels that its vision tower was fed are compared with the learner's;
- the learner's weights are changed and synced; the canary compares vLLM's log-probabilities with the learner's;
- vLLM's greedy answers after the sync are compared with those of transformers.

It needs real vLLM, and about half a minute per family on two cores. A family that fails is reported, and the others go
on.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from PIL import Image
from rich.console import Console
from rich.table import Table

from bench.engines import colocate_sync, colocated_engine
from bench.figures import circumstances
from bench.runs import say
from bench.tiny_models import FAMILIES, MORE_FAMILIES
from learner.config.sections.model import ModelConfig
from learner.config.sections.rollout_matching import RolloutMatchingConfig
from learner.data.prompt import PromptCheck
from learner.policy.load import Policy, load_policy
from learner.records import Sample
from learner.rollout.colocated_engine import ColocatedEngine
from learner.rollout.hf import HfBackend
from learner.rollout.requests import infer_request
from learner.sync.canary import CanaryItem
from rollout_server.config import ServerConfig
from rollout_server.prompts import Renderer
from shared.generation import Generation
from shared.wire import RequestConfig

ALL = {**FAMILIES, **MORE_FAMILIES}
CPU = torch.device("cpu")
NUM_NEW = 16
PENALTY = 1.2  # greedy answers of a random model hardly differ without one
SETTINGS = {
    "decode_batch_size": 3,
    "decoding": {"max_new_tokens": NUM_NEW, "repetition_penalty": PENALTY},
    "vllm": {"enforce_eager": True, "max_model_len": 512},
}


def main(
    families: Annotated[list[str] | None, typer.Argument(help="Names of families; none: all.")] = None,
    out: Annotated[Path | None, typer.Option(help="JSON file for the results.")] = None,
) -> None:
    found: dict[str, Any] = json.loads(out.read_text())["families"] if out and out.is_file() else {}
    for name in families or ALL:
        say(f"family {name}")
        with tempfile.TemporaryDirectory() as folder:
            start = time.monotonic()
            try:
                found[name] = {"agrees": True, **compare(name, Path(folder))}
            except Exception as error:
                found[name] = {"agrees": False, "error": f"{type(error).__name__}: {error}"[:500]}
            found[name]["seconds"] = round(time.monotonic() - start, 1)
        if out:
            out.write_text(json.dumps({**circumstances(), "families": found}, indent=1) + "\n")
    show(found)
    raise typer.Exit(0 if all(entry["agrees"] for entry in found.values()) else 1)


def compare(name: str, folder: Path) -> dict[str, Any]:
    """Return what was compared. Raises what differs."""
    model = folder / "model"
    ALL[name](model)
    policy = load_policy(ModelConfig(path=str(model), allow_untested_family=True), device=CPU)
    samples = make_samples(folder, with_images=policy.encoder.processor is not None)
    config = RolloutMatchingConfig.model_validate(SETTINGS)
    with contextlib.closing(colocated_engine(config, model)) as engine:
        encoded = [policy.encoder.encode(sample) for sample in samples]
        change(policy)
        item = CanaryItem(sample=samples[0], prompt=encoded[0], response_token_ids=tuple(range(20, 40)))
        receipt = colocate_sync(engine, policy, item, config).sync()
        answers = served(engine, model, folder, samples)
        check = PromptCheck(image_processing=policy.encoder.image_processing)
        for sample, prompt, answer in zip(samples, encoded, answers, strict=True):
            assert tuple(answer.prompt_token_ids) == prompt.token_ids, f"prompt of {sample.sample_id} differs"
            if prompt.vision is not None:
                assert answer.pixels is not None, f"pixels of {sample.sample_id} were not seen"
                check.pixels(prompt.vision, answer.pixels, sample_id=sample.sample_id, name=name)
    own = HfBackend(config, policy, run_seed=0).generate(samples, global_step=1, micro_step_idx=0, first_req_idx=0)
    equal = [list(a.response_token_ids) == b.response_token_ids for a, b in zip(own, answers, strict=True)]
    return {
        "architecture": type(policy.model).__name__,
        "prompts": len(samples),
        "images": sum(len(sample.images) for sample in samples),
        "canary_gap": receipt.canary_gap,
        "equal_greedy_answers": sum(equal),
    }


def served(engine: ColocatedEngine, model: Path, folder: Path, samples: list[Sample]) -> list[Generation]:
    """The answer to each sample, its prompt made as the server makes it, and the pixels."""
    config = ServerConfig(model=str(model), allowed_image_roots=[folder], allow_untested_family=True)
    renderer = Renderer(str(model), config)
    with contextlib.closing(renderer.decoders.share()) as share:
        prompts = [renderer.render(infer_request(sample), share) for sample in samples]
    renderer.decoders.close()
    greedy = RequestConfig(max_tokens=NUM_NEW, repetition_penalty=PENALTY)
    with engine.awake():
        return engine.generate(prompts, greedy, [0] * len(prompts), looks=[True] * len(prompts))


def change(policy: Policy) -> None:
    """Nothing may answer with what lies on the disk."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter += 0.05 * parameter.abs().mean() * torch.randn(parameter.shape, generator=generator)


def make_samples(folder: Path, *, with_images: bool) -> list[Sample]:
    rng = np.random.default_rng(0)
    sizes: list[list[tuple[int, int]]] = [[(128, 128)], [], [(64, 96), (160, 64)], [(96, 64)], []]
    made = []
    for i, shapes in enumerate(sizes):
        paths = [folder / f"{i}-{j}.png" for j in range(len(shapes) if with_images else 0)]
        for path, (width, height) in zip(paths, shapes, strict=False):
            Image.fromarray(rng.integers(0, 256, (height, width, 3), np.uint8)).save(path)
        turn = {"role": "user", "content": "<image>" * len(paths) + "name every digit " * (i + 1)}
        images = tuple(map(str, paths))
        made.append(Sample(sample_id=f"s{i}", messages=(turn,), images=images, objects=(), width=128, height=128))
    return made


def show(found: dict[str, Any]) -> None:
    table = Table(
        "family", "agrees", "prompts", "canary gap, nats", "equal greedy answers", "seconds", title="families"
    )
    for name, entry in found.items():
        gap = f"{entry['canary_gap']:.6f}" if entry["agrees"] else entry["error"][:60]
        equal = f"{entry['equal_greedy_answers']} of {entry['prompts']}" if entry["agrees"] else ""
        table.add_row(name, str(entry["agrees"]), str(entry.get("prompts", "")), gap, equal, str(entry["seconds"]))
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
