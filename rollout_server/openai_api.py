"""`/v1/models`, `/v1/chat/completions` and `/v1/completions`, answered by vLLM's own OpenAI layer.

In: `ChatCall` and `CompletionCall`: only the fields of OpenAI's API that control decoding. Out: vLLM's answers, as JSON
or as server-sent events. Weights, adapters and settings cannot be changed here.

Invariants:
- vLLM's layer fetches no URL and opens no file: it gets decoded images, read by the server's own rules
  (`shared/images.py`), and no video or audio;
- fields of vLLM that are not listed here are refused, such as a client's own chat template or processor settings;
- requests are answered with the adapter that the learner has sent, whatever `model` says;
- each choice reports its weights' versions as in `/infer/`; in a stream, the event that ends the choice reports them;
- a log-probability that is not finite fails the call, although vLLM's layer would return an answer;
- a request that the engine gives back, because vLLM's cache has lost an image (`was_given_back`), is made again, unless
  a part of the answer was sent.
"""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, FiniteFloat

from rollout_server.prompts import text_in
from shared.errors import NotFiniteError, RequestError, ServerBusyError, ServerError
from shared.generation import TRIES, check_logprobs, was_given_back
from shared.wire import (
    MAX_ANSWERS,
    MAX_PARTS,
    ClientModel,
    Items,
    Message,
    Name,
    NoItems,
    TemplateValue,
    WeightVersionSpan,
    WireModel,
)

if TYPE_CHECKING:
    from PIL import Image
    from pydantic import BaseModel
    from vllm import RequestOutput
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest
    from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
    from vllm.entrypoints.openai.models.serving import OpenAIServingModels
    from vllm.lora.request import LoRARequest
    from vllm.v1.engine.async_llm import AsyncLLM

    from rollout_server.prompts import Renderer

MOST_LOGPROBS = 20  # max log-probabilities per token that a client may ask for; vLLM's own limit
_TokenId = Annotated[int, Field(ge=0, lt=2**31)]
_Stop = Annotated[str, Field(min_length=1, max_length=256)]


class StreamOptions(ClientModel):
    include_usage: bool = False


class OpenAICall(ClientModel):
    """The fields that chat and completion calls share. If a field is left out, vLLM takes its value from the
    checkpoint's generation settings."""

    model: Name | None = Field(default=None, description="the served model's name, or nothing")
    n: int = Field(default=1, ge=1, le=MAX_ANSWERS)
    temperature: FiniteFloat | None = Field(default=None, ge=0.0, le=2.0)
    top_p: FiniteFloat | None = Field(default=None, gt=0.0, le=1.0)
    top_k: int | None = Field(default=None, ge=-1, lt=2**31)
    min_p: FiniteFloat | None = Field(default=None, ge=0.0, le=1.0)
    repetition_penalty: FiniteFloat | None = Field(default=None, gt=0.0, le=100.0)
    presence_penalty: FiniteFloat | None = Field(default=None, ge=-2.0, le=2.0)
    frequency_penalty: FiniteFloat | None = Field(default=None, ge=-2.0, le=2.0)
    max_tokens: int | None = Field(default=None, ge=1, lt=2**31)
    min_tokens: int = Field(default=0, ge=0, lt=2**31)
    seed: int | None = Field(default=None, ge=0, lt=2**63)
    stop: _Stop | Annotated[Items[_Stop], Field(max_length=64)] | None = None
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    return_token_ids: bool = Field(default=False, description="token ids of prompt and answer, too")
    stream: bool = False
    stream_options: StreamOptions | None = None
    user: Name | None = Field(default=None, description="no effect")

    @property
    def num_prompts(self) -> int:
        return 1


class ChatCall(OpenAICall):
    """`messages` may hold `image_url` parts. Images follow the same rules as in `/infer/`."""

    messages: Items[Message] = Field(min_length=1, max_length=MAX_PARTS)
    max_completion_tokens: int | None = Field(default=None, ge=1, lt=2**31)
    logprobs: bool = False
    top_logprobs: int = Field(default=0, ge=0, le=MOST_LOGPROBS)
    chat_template_kwargs: dict[Name, TemplateValue] = {}
    tools: NoItems = []
    tool_choice: Literal["none"] = "none"


class CompletionCall(OpenAICall):
    """`prompt`: one prompt or several, as text or as token ids."""

    prompt: str | Items[str] | Items[_TokenId] | Items[Items[_TokenId]]
    logprobs: int | None = Field(default=None, ge=0, le=MOST_LOGPROBS)
    echo: bool = False

    @property
    def num_prompts(self) -> int:
        is_one = isinstance(self.prompt, str) or (self.prompt and isinstance(self.prompt[0], int))
        return 1 if is_one else len(self.prompt)


class OpenAIErrorDetail(WireModel):
    message: str
    type: str = Field(description="a class of `shared.errors`")
    param: str | None = None
    code: int = Field(description="the HTTP status")


class OpenAIError(WireModel):
    """An error in OpenAI's form."""

    error: OpenAIErrorDetail


class OpenAILayer:
    """vLLM's serving classes over an `AsyncLLM`. `adapter` returns the adapter that requests get now."""

    def __init__(
        self, llm: AsyncLLM, *, model: str, renderer: Renderer, adapter: Callable[[], LoRARequest | None]
    ) -> None:
        self._client = _Client(llm, adapter)
        self._model = model
        self._renderer = renderer
        self._serving: _Serving | None = None

    async def models(self) -> bytes:
        return _json(await self._started().models.show_available_models())

    async def complete(self, call: OpenAICall, images: Sequence[Image.Image], ver: int) -> bytes | AsyncGenerator[str]:
        """Return the answer, or with `call.stream` its events, as they come. `images`: the images of the call's
        messages, in order. `ver`: the version of the weights. Raises RequestError, NotFiniteError, and vLLM's
        errors."""
        for _ in range(TRIES):
            with contextlib.suppress(_GivenBackError):
                answer = await self._answer(call, images, ver)
                return self._events(call, images, ver, answer) if isinstance(answer, AsyncGenerator) else answer
        raise given_back()

    async def _answer(self, call: OpenAICall, images: Sequence[Image.Image], ver: int) -> bytes | AsyncGenerator[str]:
        """Give the call to vLLM once, and return the answer. Raises _GivenBackError if the engine gives the request
        back. With `call.stream` the error is raised when the answer is iterated, before its first event."""
        serving = self._started()
        watch = _Watch(ver=ver, n=call.n)
        # vLLM's layer calls `_Client.generate` in this context, so `generate` finds the watch of this call.
        _watch.set(watch)
        if isinstance(call, ChatCall):
            answer = await serving.chat.create_chat_completion(self._chat_request(call, images))
        else:
            answer = await serving.completion.create_completion(_completion_request(call))
        # vLLM's layer returns its errors instead of raising them.
        if hasattr(answer, "error"):
            error = answer.error
            raise RequestError("vLLM refuses the request", found=str(error.message)[:500]).as_status(int(error.code))
        if isinstance(answer, AsyncGenerator):
            return _checked(answer, watch)
        # vLLM's class of replies accepts fields that it does not define.
        answer.ver = ver
        for choice in answer.choices:
            choice.weight_versions = watch.versions(choice.index)
        return _json(answer)

    async def _events(
        self, call: OpenAICall, images: Sequence[Image.Image], ver: int, events: AsyncGenerator[str]
    ) -> AsyncGenerator[str]:
        for _ in range(TRIES):
            try:
                async with contextlib.aclosing(events):
                    async for event in events:
                        yield event
                return
            except _GivenBackError:
                again = await self._answer(call, images, ver)
                assert isinstance(again, AsyncGenerator), "a call with `stream` gets events"
                events = again
        await events.aclose()
        raise given_back()

    def _chat_request(self, call: ChatCall, images: Sequence[Image.Image]) -> ChatCompletionRequest:
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

        self._renderer.check_template_kwargs(call.chat_template_kwargs)
        request = ChatCompletionRequest(**_fields(call, without={"messages", "tools"}), messages=[])
        left = iter(images)
        # The messages are set after validation, because decoded images are no JSON.
        request.messages = [{"role": message.role, "content": _content(message, left)} for message in call.messages]
        if images and self._renderer.pixels:
            request.mm_processor_kwargs = {"size": dict(self._renderer.pixels)}
        return request

    def _started(self) -> _Serving:
        """Return vLLM's serving classes, made at the first call because most servers never need them. Raises
        ServerError if the classes differ in this version of vLLM."""
        if self._serving is None:
            with _other_versions():
                self._serving = _Serving.of(self._client, self._model)
        return self._serving


def texts(call: OpenAICall) -> list[str]:
    """Return the call's texts that have to be tokenized."""
    if isinstance(call, ChatCall):
        return [text_in(call.messages)]
    prompt = getattr(call, "prompt", "")
    return [text for text in ([prompt] if isinstance(prompt, str) else prompt) if isinstance(text, str)]


def image_parts(call: OpenAICall) -> list[str]:
    """Return the call's images in order. Raises RequestError for an image part without an image."""
    sources = []
    for message in call.messages if isinstance(call, ChatCall) else ():
        for part in message.content if not isinstance(message.content, str) else ():
            if part.type != "text":
                sources.append(part.source)
    named = [source for source in sources if source is not None]
    if len(named) < len(sources):
        raise RequestError(
            "an image part without an image",
            found='{"type": "image_url"} alone',
            wanted='{"type": "image_url", "image_url": {"url": "..."}}',
            remedy="name the image in the part itself",
        )
    return named


def _content(message: Message, images: Iterator[Image.Image]) -> str | list[dict[str, object]]:
    if isinstance(message.content, str):
        return message.content
    return [
        {"type": "text", "text": part.text or ""}
        if part.type == "text"
        else {"type": "image_pil", "image_pil": next(images)}
        for part in message.content
    ]


def _completion_request(call: OpenAICall) -> CompletionRequest:
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest

    # No special tokens are added, as for chats: clients expect the prompt to be exactly what they sent.
    return CompletionRequest(**_fields(call), add_special_tokens=False)


def _fields(call: OpenAICall, without: set[str] | None = None) -> dict[str, object]:
    """Return the fields that the client has set, except `without`."""
    # If a field is not passed, vLLM takes its default from the checkpoint's generation settings.
    return call.model_dump(exclude_unset=True, exclude_none=True, exclude=without)


def _json(answer: BaseModel) -> bytes:
    return answer.model_dump_json().encode()


class _GivenBackError(Exception):
    """The engine gave the request back (`was_given_back`)."""


def given_back() -> ServerBusyError:
    return ServerBusyError(
        "the engine gave a request back each time",
        found=f"{TRIES} tries, each ended by a missing image in vLLM's cache",
        wanted="a request that the engine takes",
        remedy="send it again; if it stays so, set engine_args.mm_processor_cache_gb to 0",
    )


@dataclass
class _Watch:
    """Token counts and errors of the engine's outputs during one try. vLLM's layer hides both: it turns errors in a
    stream into events, and does not report an answer's number of tokens."""

    ver: int
    n: int  # number of answers to each prompt
    num_prompts: int = 0
    num_tokens: Counter[int] = field(default_factory=Counter)  # number of tokens by the choice's index
    faults: list[Exception] = field(default_factory=list)

    def versions(self, choice: int) -> list[dict[str, object]]:
        return [WeightVersionSpan(version=str(self.ver), start=0, end=self.num_tokens[choice]).model_dump()]

    def said(self, event: str) -> str:
        """Return the event. If the event ends choices, add the versions of the choices' weights."""
        if _ENDS not in event:
            return event
        value = json.loads(event.removeprefix(_DATA))
        for choice in value["choices"]:
            if choice.get("finish_reason"):
                choice["weight_versions"] = self.versions(choice["index"])
        return f"{_DATA}{json.dumps(value | {'ver': self.ver}, ensure_ascii=False)}\n\n"


_DATA = "data: "
_ENDS = '"finish_reason":"'  # occurs only in events that end a choice: inside a text its quotes would be escaped
_watch: ContextVar[_Watch] = ContextVar("watch")


async def _checked(events: AsyncGenerator[str], watch: _Watch) -> AsyncGenerator[str]:
    """Yield the events. Raises the first fault that `watch` has seen. After the first event a ServerBusyError replaces
    _GivenBackError: a part of the answer was sent, so the call cannot be made again."""
    began = False
    async with contextlib.aclosing(events):
        async for event in events:
            for fault in watch.faults:
                raise given_back() if began and isinstance(fault, _GivenBackError) else fault
            yield watch.said(event)
            began = True


class _Client:
    """The engine as vLLM's layer sees it: an `AsyncLLM` whose `generate` adds the served adapter and watches
    outputs."""

    def __init__(self, llm: AsyncLLM, adapter: Callable[[], LoRARequest | None]) -> None:
        self._llm, self._served_adapter = llm, adapter

    def __getattr__(self, name: str) -> object:
        return getattr(self._llm, name)

    def generate(self, *args: object, **kwargs: object) -> AsyncGenerator[RequestOutput]:
        """Yield one prompt's outputs, with the served adapter. vLLM's layer calls this method for each prompt, in
        order. The iteration raises NotFiniteError or _GivenBackError."""
        watch = _watch.get()
        first = watch.num_prompts * watch.n
        watch.num_prompts += 1
        # vLLM's layer would choose an adapter by the name in `model`.
        outputs = self._llm.generate(*args, **{**kwargs, "lora_request": self._served_adapter()})
        return self._watched(outputs, watch, first)

    async def _watched(
        self, outputs: AsyncGenerator[RequestOutput], watch: _Watch, first: int
    ) -> AsyncGenerator[RequestOutput]:
        """Yield one prompt's outputs and count their tokens. `first`: the index of the choice that the prompt's first
        answer becomes."""
        async with contextlib.aclosing(outputs):
            async for output in outputs:
                try:
                    if was_given_back(output):
                        raise _GivenBackError
                    check_logprobs(output)
                except (NotFiniteError, _GivenBackError) as error:
                    watch.faults.append(error)
                    raise
                # In a stream each output has only its new tokens, so the numbers are added up.
                for completion in output.outputs:
                    watch.num_tokens[first + completion.index] += len(completion.token_ids)
                yield output


@dataclass(frozen=True, kw_only=True)
class _Serving:
    """vLLM's objects that answer OpenAI's calls."""

    models: OpenAIServingModels
    chat: OpenAIServingChat
    completion: OpenAIServingCompletion

    @classmethod
    def of(cls, client: _Client, model: str) -> _Serving:
        from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
        from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
        from vllm.entrypoints.openai.models.protocol import BaseModelPath
        from vllm.entrypoints.openai.models.serving import OpenAIServingModels
        from vllm.renderers.online_renderer import OnlineRenderer

        template: dict[str, str | None] = {"chat_template": None, "chat_template_content_format": "auto"}
        models = OpenAIServingModels(client, [BaseModelPath(name=model, model_path=model)])
        renderer = OnlineRenderer(client.model_config, client.renderer, request_logger=None, **template)
        # Without this setting vLLM 0.30 refuses requests with `mm_processor_kwargs`. Trusting `mm_processor_kwargs` is
        # safe: clients cannot send this field, only this module sets it.
        renderer.trust_request_mm_kwargs = True
        common: dict[str, object] = {"online_renderer": renderer, "request_logger": None}
        return cls(
            models=models,
            chat=OpenAIServingChat(client, models, "assistant", **common, **template),
            completion=OpenAIServingCompletion(client, models, **common),
        )


@contextlib.contextmanager
def _other_versions() -> Iterator[None]:
    try:
        yield
    except (ImportError, AttributeError, TypeError) as error:
        import vllm

        raise ServerError(
            "/v1/ is not available with this version of vLLM",
            found=f"vLLM {vllm.__version__}: {type(error).__name__}: {error}",
            wanted="vLLM's OpenAI layer as in 0.26 or 0.32",
            remedy="use /infer/, or install that version",
        ).as_status(501) from error
