"""Memory of a rollout server over many requests, and of a learner over many photographs, none of them seen before.

`measure`, the server. In: how many requests. Out: memory of the server and all its children (proportional set size) at
equal distances, and how far it moves after the first fifth. The model is tiny and answers one token, so that the time
goes into what is kept per request: images, prompts, answers. Images have up to 25,000 sizes.

What is kept on purpose has a limit, and grows up to it: vLLM's processed images (`mm_processor_cache_gb`, 4 GiB). They
are few here, so that the limit is reached within the first fifth. The KV cache, which has its size from the start, is
small, so that it hides nothing.

`learner`: memory of a learner and its children, loader processes included, at equal distances over one epoch of `sft`
on photographs (JPEG) of many sizes, and how far it moves after the first fifth. The model is tiny.
"""

from __future__ import annotations

import asyncio
import base64
import io
import json
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from PIL import Image

from bench.figures import Figure, sampled
from bench.models import vision_model
from bench.runs import learner_config, read_events, say, serve, start_learner, steps_of
from bench.watch import resident_bytes
from deploy.launch import supervised

WANTED_DRIFT = 0.05
NUM_LOOKS = 50  # looks at the server's memory
SMALL_CACHES = {"mm_processor_cache_gb": 0.05, "kv_cache_memory_bytes": 64 << 20}
_WARM_UP_SHARE = 0.2
_AT_ONCE, _PER_CALL = 4, 16
_SIDES = (40, 200)  # pixels
_TIMEOUT_S = 120.0


def measure(folder: Path, *, num_requests: int = 20_000, max_s: float = 720.0) -> Iterator[Figure]:
    """Ends after `max_s` if the requests have not; the figures then say how many were sent."""
    config: dict[str, Any] = {"model": str(vision_model(folder, "tiny")), "max_model_len": 1024, "cpu_threads": 1}
    config |= {"max_num_seqs": 64, "enforce_eager": True, "engine_args": SMALL_CACHES}
    with supervised() as processes:
        server = serve(processes, folder, "server", config)
        looks = asyncio.run(_load(server.url, server.pid, num_requests, max_s))
    yield from figures(looks, "requests, each with a new image", "the server")


def learner(
    folder: Path, *, num_photographs: int = 10_000, batch_size: int = 20, num_workers: int = 2, max_s: float = 1500.0
) -> Iterator[Figure]:
    """Raises DeadlineError after `max_s`, ServerError if the run fails."""
    model, data = vision_model(folder, "tiny"), _photographs(folder / "photographs", num_photographs)
    config = learner_config(
        model,
        data,
        folder / "run",
        steps=num_photographs // batch_size,
        batch_size=batch_size,
        variant="sft",
        data={"num_workers": num_workers},
        logging={"trackers": []},
    )
    looks: dict[int, float] = {}
    with supervised() as processes:
        run = start_learner(processes, folder, "run", config)
        every = max(1, num_photographs // NUM_LOOKS)

        def look() -> bool:
            num = batch_size * len(steps_of(read_events(folder / "run")))
            if num >= max(looks, default=0) + every:
                looks[num] = resident_bytes(run.pid) / 2**20
                say(f"{num} photographs: {looks[num]:.0f} MiB")
            return False

        run.wait(max_s, until=look)
    yield from figures(looks, "photographs, each new", "the learner")


def figures(looks: Mapping[int, float], what: str, whose: str) -> list[Figure]:
    """`looks`: MiB by the number of `what` that are done."""
    most = max(looks)
    warm = [mib for num, mib in looks.items() if num >= _WARM_UP_SHARE * most]
    drift = max(abs(mib / warm[0] - 1) for mib in warm)
    return [
        Figure(name=what, value=float(most), unit=what.partition(",")[0]),
        sampled(f"memory of {whose}, children included", list(looks.values()), "MiB"),
        Figure(name="memory after the first fifth", value=warm[0], unit="MiB"),
        Figure(name="memory at the end", value=warm[-1], unit="MiB"),
        Figure(name="drift after the first fifth", value=drift, unit="share", wanted=WANTED_DRIFT, at_least=False),
    ]


async def _load(url: str, pid: int, num_requests: int, max_s: float) -> dict[int, float]:
    """Return MiB by the number of answered requests."""
    until, looks, num_answered = time.monotonic() + max_s, {0: resident_bytes(pid) / 2**20}, 0
    every = max(1, num_requests // NUM_LOOKS)
    limits = httpx.Limits(max_connections=_AT_ONCE)
    async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=_TIMEOUT_S, limits=limits) as http:
        async for num_answered in _answered(http, num_requests, until):
            if num_answered >= max(looks) + every:
                looks[num_answered] = resident_bytes(pid) / 2**20
                say(f"{num_answered} requests: {looks[num_answered]:.0f} MiB")
    return looks


async def _answered(http: httpx.AsyncClient, num_requests: int, until: float) -> AsyncIterator[int]:
    """Yield the number of requests that have been answered, after every call."""
    rng, running, num_answered = np.random.default_rng(0), set[asyncio.Task[None]](), 0
    for begin in range(0, num_requests, _PER_CALL):
        num = min(_PER_CALL, num_requests - begin)
        running.add(asyncio.create_task(_call(http, [_image(rng) for _ in range(num)])))
        if len(running) == _AT_ONCE:
            done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
                num_answered += _PER_CALL
            yield num_answered
        if time.monotonic() > until:
            break
    for task in running:
        await task
        num_answered += _PER_CALL
    yield min(num_answered, num_requests)


async def _call(http: httpx.AsyncClient, images: list[str]) -> None:
    messages = [{"role": "user", "content": "<image>Detect every digit."}]
    requests = [{"messages": messages, "images": [image]} for image in images]
    body = {"infer_requests": requests, "request_config": {"max_tokens": 1}}
    (await http.post("/infer/", json=body)).raise_for_status()


def _image(rng: np.random.Generator) -> str:
    width, height = rng.integers(*_SIDES, 2)
    out = io.BytesIO()
    Image.fromarray(rng.integers(0, 256, (height, width, 3), np.uint8)).save(out, "BMP")
    return base64.b64encode(out.getvalue()).decode()


def _photographs(folder: Path, number: int) -> Path:
    """Write JPEGs of random blots, each with one object; return the annotations' file."""
    folder.mkdir()
    rng, rows = np.random.default_rng(0), []
    for i in range(number):
        width, height = (int(side) for side in rng.integers(*_SIDES, 2))
        blots = Image.fromarray(rng.integers(0, 256, (8, 8, 3), np.uint8)).resize((width, height))
        blots.save(folder / f"{i:05d}.jpg")
        box = [width // 4, height // 4, width // 2, height // 2]
        turn = {"role": "user", "content": "<image>Detect every blot."}
        row = {"id": str(i), "images": [f"{i:05d}.jpg"], "width": width, "height": height, "messages": [turn]}
        rows.append(row | {"objects": [{"bbox_2d": box, "desc": "blot"}]})
    path = folder / "train.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path
