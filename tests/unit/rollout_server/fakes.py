"""An engine without vLLM: echoes what it was asked, holds calls back when told to, and has one worker to script."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from rollout_server.engine import WorkerReply
from rollout_server.openai_api import ChatCall, OpenAICall
from shared.errors import ProjectError, PromptTooLongError
from shared.generation import Generation, Scores, checked_scores
from shared.wire import RequestConfig, RolloutInferRequest, ScoreItem


class FakeEngine:
    architecture = {"model_type": "fake"}
    gpus = ["GPU-fake"]
    weights = "of the checkpoint"
    model, dtype, vocab_size, max_model_len = "fake", "float32", 1000, 100

    def __init__(self) -> None:
        self.dead = False
        self.generated: list[str] = []  # texts, in the order of arrival
        self.cancelled: list[str] = []
        self.go = asyncio.Event()
        self.go.set()
        self.holds: dict[str, asyncio.Event] = {}  # a text's answer waits for it, besides `go`
        self.calls: list[tuple[Any, ...]] = []
        self.replies: dict[str, Callable[[], WorkerReply]] = {}  # keys are worker methods
        self.num_resets = 0
        self.held: list[int] = []  # numbers of items that shared a step
        self.scored: list[list[int]] = []
        self.logprob = -0.5
        self.adapter: str | None = None

    async def generate(self, request: RolloutInferRequest, config: RequestConfig, seed: int | None) -> list[Generation]:
        text = str(request.messages[0].content)
        self.generated.append(text)
        try:
            await self.go.wait()
            if text in self.holds:
                await self.holds[text].wait()
        except asyncio.CancelledError:
            self.cancelled.append(text)
            raise
        self._check(text)
        if text.startswith("fail"):
            raise ProjectError(text)
        return [
            Generation(
                prompt_token_ids=[1, 2],
                response_token_ids=[len(self.generated), (seed or 0) + j],
                text=text,
                finish_reason="stop",
                logprobs=[self.logprob] * 2 if config.logprobs else None,
                stop_token_id=7,
                stop_logprob=self.logprob if config.logprobs else None,
            )
            for j in range(config.n)
        ]

    def text_of(self, token_ids: list[int]) -> str:
        return " ".join(map(str, token_ids))

    async def models(self) -> bytes:
        return json.dumps({"object": "list", "data": [{"id": self.model, "object": "model"}]}).encode()

    async def complete(self, call: OpenAICall, ver: int) -> bytes | AsyncGenerator[str]:
        text = str(call.messages[0].content if isinstance(call, ChatCall) else getattr(call, "prompt", ""))
        if call.stream:
            return self._events(text)
        request = RolloutInferRequest.model_validate({"messages": [{"role": "user", "content": text}]})
        (generation, *_) = await self.generate(request, RequestConfig(), call.seed)
        return json.dumps({"choices": [{"text": generation.text}], "ver": ver}).encode()

    async def _events(self, text: str) -> AsyncGenerator[str]:
        self.generated.append(text)
        try:
            for word in text.split(" "):
                await self.go.wait()
                if word in self.holds:
                    await self.holds[word].wait()
                if word == "fail":
                    raise ProjectError(word)
                yield f"data: {json.dumps(word)}\n\n"
        except asyncio.CancelledError:
            self.cancelled.append(text)
            raise
        yield "data: [DONE]\n\n"

    async def score(
        self, request: RolloutInferRequest, response_token_ids: list[int], *, through_cache: bool = False
    ) -> Scores:
        self._check(str(request.messages[0].content))
        self.scored.append(response_token_ids)
        return checked_scores([1, 2], [self.logprob] * len(response_token_ids))

    @staticmethod
    def _check(text: str) -> None:
        if text == "refuse":
            raise PromptTooLongError("the request is longer than the model's context")

    async def on_workers(self, method: str, *args: object) -> list[WorkerReply]:
        self.calls.append((method, *args))
        await asyncio.sleep(0)
        reply = self.replies.get(method)
        return [reply() if reply else WorkerReply(runs_meanwhile=True)]

    async def reset_caches(self) -> None:
        self.num_resets += 1

    @asynccontextmanager
    async def together(self, items: Sequence[ScoreItem]) -> AsyncIterator[None]:
        self.held.append(len(items))
        yield

    def serve_adapter(self, name: str | None) -> None:
        self.adapter = name

    def check_answers(self) -> None:
        pass

    async def watch(self) -> None:
        pass

    def shutdown(self) -> None:
        self.dead = True

    def called(self) -> list[str]:
        return [call[0] for call in self.calls]
