"""Measure what photographs cost the server: 64 of a megapixel in flight at once, new ones against known ones.

In: a size of model. Out: figures. A real server in a process of its own; a learner's client sends all requests in one
call, with answers of 64 tokens and the comparison of pixels (R45) as a learner asks for it. Sides take turns, and the
first round warms up:

- "new": photographs that the server has never seen. They are read, decoded, prepared for the vision tower, encoded.
- "known": the same photographs again. They are read and decoded again. vLLM finds all else in its caches.
- "text": prompts of as many tokens without photographs, none of them seen before.

The seconds of CPU time that each process and each thread of the server used in a turn come from `/proc`. Of vLLM's
threads one alone prepares all photographs. With new ones it is the fullest thread of the server's process beside the
main one, which has the event loop. What it could do alone, if it never waited, is a figure: it limits the server if the
server comes close to that. `--set size=small` on a GPU shows the server's own limit, because the model takes no time.

Photographs are drawn scenes of 1024x1024 pixels, as JPEG files. To try it without a GPU: `--device cpu`, where the
model itself takes most of the time.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image

from bench.figures import Figure, sampled
from bench.infer import Client
from bench.models import PhotographSize, photograph_model
from bench.runs import say, start_server
from deploy.demo.scenes import Style, draw_scene, load_bank
from deploy.launch import supervised
from rollout_server.processes import descendants
from shared.wire import InferCall, RequestConfig, RolloutInferRequest

NUM_PHOTOGRAPHS = MAX_TOKENS = 64
PHOTOGRAPH = Style(canvas=1024, min_height=60, max_height=300, max_digits=12, max_iou=0.1)
# The text is longer than a block of the prefix cache. A block that is not full is not cached: if the last one held
# tokens of the photograph, the vision tower would compute it again.
PROMPT = "<image>" + "Detect every digit. " * 8
CPU_CACHE_BLOCK = 32  # tokens; vLLM's default is 128
KV_CACHE_BYTES: Mapping[PhotographSize, int] = {"4B": 24 << 30, "small": 1 << 30}  # for all rounds' prompts
_JPEG_QUALITY = 90
_FULLEST = 3
_TIMEOUT_S = 600.0
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")  # the kernel counts CPU time in these


def measure(
    folder: Path,
    *,
    size: PhotographSize = "4B",
    photographs: int = NUM_PHOTOGRAPHS,
    max_tokens: int = MAX_TOKENS,
    rounds: int = 4,
    pixels: bool = True,
) -> list[Figure]:
    """Return medians over `rounds`. `pixels`: whether answers say what the vision tower was fed."""
    model = photograph_model(folder, size)
    on_gpu = torch.cuda.is_available()
    images = folder / "photographs"
    images.mkdir()
    turns: dict[str, list[Turn]] = {"new": [], "known": [], "text": []}
    with supervised() as processes:
        config = server_config(model, images, size=size, on_gpu=on_gpu, num_requests=photographs)
        server = start_server(processes, folder, "in-flight", config, devices=[0] if on_gpu else ())
        sets = [draw(images, photographs, seed=i) for i in range(1 + rounds)]  # while it starts
        server.wait_ready()
        with Client(server.url, _TIMEOUT_S) as client:
            for i, files in enumerate(sets):
                asked = [_request(PROMPT, [str(file)], pixels=pixels) for file in files]
                turns["new"].append(turn := _turn(client, server.pid, asked, f"new-{i}", max_tokens))
                turns["known"].append(_turn(client, server.pid, asked, f"known-{i}", max_tokens))
                texts = [_request(_text(f"{i}-{n}", turn.prompt_tokens), []) for n in range(photographs)]
                turns["text"].append(_turn(client, server.pid, texts, f"text-{i}", max_tokens))
    return _figures({name: found[1:] for name, found in turns.items()}, photographs)


def server_config(
    model: Path, images: Path, *, size: PhotographSize, on_gpu: bool, num_requests: int
) -> dict[str, Any]:
    engine_args: dict[str, Any] = {"kv_cache_memory_bytes": KV_CACHE_BYTES[size]}
    config: dict[str, Any] = {
        "model": str(model),
        "allowed_image_roots": [str(images.resolve())],
        "max_model_len": 2048,
        "max_num_seqs": num_requests,
    }
    if not on_gpu:
        engine_args["block_size"] = CPU_CACHE_BLOCK
        return {**config, "enforce_eager": True, "cpu_threads": 1, "engine_args": engine_args}
    graphs = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 8, 16, 32, 48, 64]}
    engine_args["compilation_config"] = graphs
    return {**config, "gpu_memory_utilization": 0.8, "engine_args": engine_args}


def draw(folder: Path, number: int, *, seed: int) -> list[Path]:
    """Write photographs of a megapixel that no other seed draws; returns their paths."""
    bank = load_bank("train")
    files = [folder / f"{seed}-{n}.jpg" for n in range(number)]
    for n, file in enumerate(files):
        scene = draw_scene(np.random.default_rng([seed, n]), bank, PHOTOGRAPH)
        Image.fromarray(scene.pixels).save(file, quality=_JPEG_QUALITY)
    return files


def _request(text: str, images: Sequence[str], *, pixels: bool = False) -> RolloutInferRequest:
    return RolloutInferRequest(messages=[{"role": "user", "content": text}], images=list(images), pixels=pixels)


def _text(name: str, num_tokens: int) -> str:
    """Return a text of about `num_tokens` tokens: the demo's tokenizer has one for `digit`."""
    return name + "digit" * (num_tokens - len(name) - 8)  # 8: those of the chat template


# ---- one turn ------------------------------------------------------------------------------------------------------


class Thread(NamedTuple):
    """A thread of the server, or of a process that it started."""

    process: str
    pid: int
    tid: int

    @property
    def is_main(self) -> bool:
        return self.pid == self.tid

    def __str__(self) -> str:
        return f"{self.process} {self.pid}, {'main thread' if self.is_main else f'thread {self.tid}'}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """All requests of one side, once."""

    seconds: float
    tokens: int  # of all answers
    prompt_tokens: int  # of the first request
    cpu: Mapping[Thread, float]  # seconds

    @property
    def event_loop(self) -> float:
        """Seconds of the main thread of the server's process."""
        return sum(s for thread, s in self.cpu.items() if thread.process == "server" and thread.is_main)

    @property
    def fullest_other(self) -> float:
        """Seconds of the fullest other thread of that process: with new photographs, the one that prepares them."""
        return max(
            (s for thread, s in self.cpu.items() if thread.process == "server" and not thread.is_main), default=0.0
        )

    def seconds_of(self, process: str) -> float:
        return sum(s for thread, s in self.cpu.items() if thread.process == process)


def _turn(client: Client, pid: int, requests: Sequence[RolloutInferRequest], name: str, max_tokens: int) -> Turn:
    named = [request.model_copy(update={"uuid": f"{name}-{n}"}) for n, request in enumerate(requests)]
    config = RequestConfig(max_tokens=max_tokens, temperature=1.0, seed=0)
    before = thread_seconds(pid)
    begin = time.perf_counter()
    outputs = asyncio.run(client.outputs(InferCall(infer_requests=named, request_config=config)))
    seconds = time.perf_counter() - begin
    after = thread_seconds(pid)
    turn = Turn(
        seconds=seconds,
        tokens=sum(len(output.response_token_ids) for output in outputs),
        prompt_tokens=len(outputs[0].prompt_token_ids),
        cpu={thread: used - before.get(thread, 0.0) for thread, used in after.items()},
    )
    fullest = sorted(turn.cpu.items(), key=lambda item: -item[1])[:_FULLEST]
    told = "; ".join(f"{thread}: {used / seconds:.2f} of a core" for thread, used in fullest)
    say(f"{name}: {seconds:.2f} s, prompts of {turn.prompt_tokens} tokens; {told}")
    return turn


def thread_seconds(pid: int) -> dict[Thread, float]:
    """Return the CPU seconds so far of each thread of the process and of all that descended from it."""
    return {thread: used for one in (pid, *sorted(descendants(pid))) for thread, used in _threads(one, pid)}


def _threads(pid: int, server: int) -> Iterator[tuple[Thread, float]]:
    with contextlib.suppress(OSError):  # it has ended
        process = "server" if pid == server else _name(pid)
        for task in sorted(Path(f"/proc/{pid}/task").iterdir(), key=lambda task: int(task.name)):
            with contextlib.suppress(OSError):
                fields = (task / "stat").read_text().rpartition(")")[2].split()
                used = (int(fields[11]) + int(fields[12])) * _TICK_S
                yield Thread(process, pid, int(task.name)), used


def _name(pid: int) -> str:
    return "images" if b"rollout_server.decoding" in Path(f"/proc/{pid}/cmdline").read_bytes() else "engine"


# ---- figures -------------------------------------------------------------------------------------------------------


def _figures(turns: Mapping[str, Sequence[Turn]], number: int) -> list[Figure]:
    figures = []
    for name, found in turns.items():
        what = f"{number} at once, {name}"
        figures += [
            sampled(f"{what}: requests", [number / turn.seconds for turn in found], "requests/s"),
            sampled(f"{what}: tokens", [turn.tokens / turn.seconds for turn in found], "tokens/s"),
            sampled(f"{what}: the event loop's thread", [turn.event_loop / turn.seconds for turn in found], "cores"),
            sampled(f"{what}: the fullest other", [turn.fullest_other / turn.seconds for turn in found], "cores"),
            *(
                sampled(f"{what}: CPU of {process}", [turn.seconds_of(process) for turn in found], "s")
                for process in ("server", "images", "engine")
            ),
        ]
    could = [number / max(turn.fullest_other, _TICK_S) for turn in turns["new"]]
    figures.append(sampled("new: what the preparing thread could do alone", could, "requests/s"))
    for other in ("known", "text"):
        pairs = zip(turns["new"], turns[other], strict=True)
        figures.append(sampled(f"new against {other}", [b.seconds / a.seconds for a, b in pairs], "ratio"))
    return figures
