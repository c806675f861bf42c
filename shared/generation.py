"""Prompts and requests to a vLLM engine, and how its outputs are read (R03, R09, R11). Learner and server use this
module.

`render_messages`. In: turns whose text may hold `<image>` placeholders, and the number of images. Out: the content-part
form that chat templates of Hugging Face processors take. Learner and server both render prompts with `render_messages`,
so their prompts have equal tokens. A turn's placeholders become image parts in place. If a request has images but no
placeholder, the images go before the text of the first user turn (as in ms-swift).

Other functions. In: decoding settings, seeds, vLLM's `RequestOutput`. Out: `SamplingParams`, generations, scores. The
rollout server has an engine, and so does a learner with colocated vLLM. Invariants: a response's tokens do not include
the stop token; a request has a seed if and only if it samples.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from shared.canary import cached_positions
from shared.errors import ConfigError, NotFiniteError, RequestError
from shared.wire import ProcessedImages, RequestConfig

if TYPE_CHECKING:
    from PIL import Image
    from transformers import PreTrainedTokenizerBase
    from vllm import RequestOutput, SamplingParams
    from vllm.config import ModelConfig
    from vllm.outputs import CompletionOutput

Content = str | Sequence[Mapping[str, object]]  # a chat turn's text, or its parts as chat templates take them
Turn = Mapping[str, Content]  # a chat turn as plain data: its "role" and its "content"

# Every vLLM engine on CPU needs this. A prefill in two chunks takes one random number too many, which vLLM undoes on
# CUDA only. On CPU a seeded prompt in chunks ends the engine ("CPU Generator does not use offset").
CPU_ENGINE_ARGS = {"enable_chunked_prefill": False}

IMAGE_PLACEHOLDER = "<image>"
# Min and max length, in tokens, of a part whose repetition ends an answer. An object's text is at least 8 tokens long.
# Shorter parts, such as digits, may repeat.
FEWEST_REPEATED, MOST_REPEATED = 8, 128


def engine_args(
    *, model: str, dtype: str, max_model_len: int | None, max_lora_rank: int, on_cpu: bool, **others: object
) -> dict[str, object]:
    """Return the arguments of every vLLM engine of this project. `max_lora_rank` 0: the engine takes no adapters."""
    # `seed` is never used: each request that samples has its own.
    args = {"model": model, "dtype": dtype, "seed": 0, "disable_log_stats": True, **others}
    if max_model_len is not None:
        args["max_model_len"] = max_model_len
    if max_lora_rank:
        args |= {"enable_lora": True, "max_lora_rank": max_lora_rank, "max_loras": 1}
    return args | CPU_ENGINE_ARGS if on_cpu else args


def render_messages(messages: Sequence[Turn], num_images: int) -> list[Turn]:
    """Return turns as `{"role", "content": [{"type": "image"} | {"type": "text", "text"}]}`. Without images, the
    content stays a plain string, for text-only templates.

    Raises RequestError if the numbers of placeholders and images differ.
    """
    texts = [m["content"] for m in messages if isinstance(m["content"], str)]
    if num_images == 0 and len(texts) == len(messages):
        if any(IMAGE_PLACEHOLDER in text for text in texts):
            raise _count_error(messages, num_images)
        return [{"role": m["role"], "content": m["content"]} for m in messages]
    contents = [_parts(m["content"]) for m in messages]
    if num_images and not _num_places(contents):
        first_user = next((index for index, m in enumerate(messages) if m["role"] == "user"), None)
        if first_user is not None:
            images: list[dict[str, object]] = [{"type": "image"} for _ in range(num_images)]
            # Images without a placeholder go to the beginning of the first user turn, as in ms-swift.
            contents[first_user] = images + contents[first_user]
    if _num_places(contents) != num_images:
        raise _count_error(messages, num_images)
    return [{"role": m["role"], "content": parts} for m, parts in zip(messages, contents, strict=True)]


def places_images(messages: Sequence[Turn]) -> bool:
    """Return True if the turns have image placeholders (`<image>`) or image parts."""
    return _num_places([_parts(m["content"]) for m in messages]) > 0


def _num_places(contents: Sequence[Sequence[Mapping[str, object]]]) -> int:
    return sum(part["type"] == "image" for parts in contents for part in parts)


def _parts(content: Content) -> list[dict[str, object]]:
    if not isinstance(content, str):
        return [
            {"type": "text", "text": part["text"]} if part["type"] == "text" else {"type": "image"} for part in content
        ]
    parts: list[dict[str, object]] = []
    for i, text in enumerate(content.split(IMAGE_PLACEHOLDER)):
        if i:
            parts.append({"type": "image"})
        if text:
            parts.append({"type": "text", "text": text})
    return parts


def _count_error(messages: Sequence[Turn], num_images: int) -> RequestError:
    return RequestError(
        "image placeholders and images differ in number",
        found=f"{num_images} images for {len(messages)} turns: {[m['content'] for m in messages]!r}"[:300],
        wanted=f"one {IMAGE_PLACEHOLDER} per image, or none at all",
        remedy="fix the sample's messages or images",
    )


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """A prompt: token ids with one placeholder per image, and the images (RGB). vLLM repeats each placeholder as often
    as its image's size requires. `pixels`: limits of an image's size that replace the checkpoint's limits (a result of
    `limit_pixels`). `image_ids`: digests of the images' content, by which vLLM finds processed images; (): vLLM
    computes its own for each request."""

    token_ids: list[int]
    images: list[Image.Image]
    pixels: Mapping[str, int] | None = None
    image_ids: tuple[str, ...] = ()

    def for_engine(self) -> dict[str, object]:
        """Return the dict that vLLM takes as a prompt: token ids, images, and limits of the images' sizes."""
        asked: dict[str, object] = {"prompt_token_ids": self.token_ids}
        if self.images:
            asked["multi_modal_data"] = {"image": self.images}
            if self.image_ids:
                asked["multi_modal_uuids"] = {"image": list(self.image_ids)}
            if self.pixels:
                asked["mm_processor_kwargs"] = {"size": dict(self.pixels)}
        return asked


def limit_pixels(
    processor: object, *, min_pixels: int | None, max_pixels: int | None, keys: str
) -> Mapping[str, int] | None:
    """Make a Hugging Face processor resize images to these limits (width x height). Returns the value of
    `Prompt.pixels`, or None if both limits are the checkpoint's own. `keys` is the prefix of configuration keys in
    messages.

    Raises ConfigError if the processor has no such limits.
    """
    if min_pixels is None and max_pixels is None:
        return None
    images = getattr(processor, "image_processor", None)
    if images is None or "min_pixels" not in getattr(getattr(images, "valid_kwargs", None), "__annotations__", {}):
        raise ConfigError(
            f"{keys}min_pixels, {keys}max_pixels: this model has no such limits",
            found=f"a {type(images or processor).__name__}",
            wanted="a model whose processor resizes images by their number of pixels, such as Qwen-VL's",
            remedy="remove both keys",
        )
    if min_pixels and max_pixels and min_pixels > max_pixels:
        raise ConfigError(
            f"{keys}min_pixels is above {keys}max_pixels",
            found=f"{min_pixels} and {max_pixels}",
            wanted="min_pixels <= max_pixels",
            remedy="correct one of them",
        )
    # In spite of their names, the "edges" in `size` are numbers of pixels. If only one limit is given, the other limit
    # is adjusted.
    own = images.size
    least = min_pixels or min(own["shortest_edge"], max_pixels or own["shortest_edge"])
    size = {"shortest_edge": least, "longest_edge": max_pixels or max(own["longest_edge"], least)}
    images.size = type(own)(**size)
    return size


@dataclass(frozen=True, kw_only=True)
class Generation:
    prompt_token_ids: list[int]
    response_token_ids: list[int]  # the stop token is left out
    text: str
    finish_reason: str  # "stop": ended by a stop token or stop string; "length": cut off
    logprobs: list[float] | None = None  # natural log-probability of each response token; None: not requested
    stop_token_id: int | None = None  # token that ended the response; None: cut off, or ended by a stop string
    stop_logprob: float | None = None  # natural log-probability of the stop token
    pixels: ProcessedImages | None = None  # the vision tower's input; None: not requested

    @property
    def sampled_logprobs(self) -> tuple[float, ...] | None:
        """Natural log-probabilities of the response's tokens and of the stop token; None: not requested."""
        if self.logprobs is None:
            return None
        return (*self.logprobs, *(() if self.stop_logprob is None else (self.stop_logprob,)))


@dataclass(frozen=True, kw_only=True)
class Scores:
    prompt_token_ids: list[int]
    logprobs: list[float]  # natural log-probability of each response token.
    # Natural log-probabilities of some response tokens again, computed through the prefix cache
    cached_logprobs: list[float] = field(default_factory=list)
    pixels: ProcessedImages | None = None  # the vision tower's input; None: not requested


def sampling_params(config: RequestConfig, seed: int | None) -> SamplingParams:
    """Return vLLM's settings for one answer. `seed` is left out if the answer is greedy (temperature 0)."""
    from vllm import SamplingParams
    from vllm.sampling_params import RepetitionDetectionParams, RequestOutputKind

    return SamplingParams(
        max_tokens=config.max_tokens,
        temperature=config.temperature,
        top_p=config.top_p,
        top_k=max(0, config.top_k),
        min_p=config.min_p,
        repetition_penalty=config.repetition_penalty,
        presence_penalty=config.presence_penalty,
        frequency_penalty=config.frequency_penalty,
        repetition_detection=RepetitionDetectionParams(
            min_pattern_size=FEWEST_REPEATED, max_pattern_size=MOST_REPEATED, min_count=config.stop_repetitions
        )
        if config.stop_repetitions
        else None,
        # Greedy decoding needs no seed, and a random generator per request costs time.
        seed=seed if config.temperature > 0 else None,
        stop=list(config.stop),
        logprobs=0 if config.logprobs else None,  # 0: only the sampled token's log-probability.
        # Flat lists: an object and a dict per token would slow down Python's garbage collector.
        flat_logprobs=config.logprobs,
        skip_special_tokens=False,  # the text shows special tokens
        spaces_between_special_tokens=False,
        # Only stop strings need the text token by token. Decoding the text once, at the end, is much cheaper.
        detokenize=bool(config.stop),
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def scoring(prompt: Prompt, response_token_ids: list[int]) -> tuple[Prompt, SamplingParams]:
    """Return the prompt and settings for vLLM to score a response. Read the output with `read_scores`."""
    from vllm import SamplingParams

    whole = replace(prompt, token_ids=prompt.token_ids + response_token_ids)
    return whole, SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False)


def cached_scoring(prompt: Prompt, response_token_ids: list[int]) -> list[tuple[Prompt, SamplingParams]]:
    """Return one request for each of `cached_positions`. Each request reads the prefix cache, and is restricted to the
    token at its position. (Requests with `prompt_logprobs` never read the cache.) Read the outputs with
    `read_cached_score`."""
    from vllm import SamplingParams

    def one(position: int) -> tuple[Prompt, SamplingParams]:
        before = replace(prompt, token_ids=prompt.token_ids + response_token_ids[:position])
        # vLLM returns the log-probabilities from before the restriction to one token.
        only = [response_token_ids[position]]
        return before, SamplingParams(
            max_tokens=1, temperature=0.0, logprobs=0, allowed_token_ids=only, detokenize=False
        )

    return [one(position) for position in cached_positions(len(response_token_ids))]


# Max tries of a request that the engine gives back (`was_given_back`). There is no pause between two tries: the next
# try brings the image that the engine lacked.
TRIES = 5


def was_given_back(output: RequestOutput) -> bool:
    """Return True if vLLM has ended a request without working on it. The request has to be sent again.

    vLLM caches processed images in two processes, and sends only images that the engine's process lacks. A request
    that is cancelled on the way leaves an image in one cache only. The next request that needs the lost
    image ends with the finish reason "error". Then the first process drops the image too, so another try sends it."""
    return any(completion.finish_reason == "error" for completion in output.outputs)


def read_cached_score(output: RequestOutput) -> float:
    """Return the natural log-probability of the output's only token. Raises NotFiniteError."""
    completion = output.outputs[0]
    logprob = float(completion.logprobs[0][completion.token_ids[0]].logprob)
    _check_finite([logprob])
    return logprob


def read_generation(
    output: RequestOutput, stop_token_ids: Collection[int], text_of: Callable[[list[int]], str] = lambda _: ""
) -> Generation:
    """Return the generation in vLLM's output. `text_of` decodes the tokens; without `text_of` the text is "", unless
    there were stop strings. Raises NotFiniteError if a log-probability is not finite."""
    completion = output.outputs[0]
    token_ids, logprobs = list(completion.token_ids), _sampled_logprobs(completion)
    stop_token_id = stop_logprob = None
    if completion.finish_reason == "stop" and token_ids and token_ids[-1] in stop_token_ids:
        stop_token_id = token_ids.pop()
        stop_logprob = logprobs.pop() if logprobs else None
    return Generation(
        prompt_token_ids=list(output.prompt_token_ids),
        response_token_ids=token_ids,
        text=completion.text or text_of(token_ids),
        # vLLM's "repetition" also means that the answer was cut off.
        finish_reason="length" if completion.finish_reason == "repetition" else str(completion.finish_reason),
        logprobs=logprobs,
        stop_token_id=stop_token_id,
        stop_logprob=stop_logprob,
    )


def check_logprobs(output: RequestOutput) -> None:
    """Raises NotFiniteError if vLLM's output has log-probabilities of sampled tokens, and one is not finite."""
    for completion in output.outputs:
        # A streamed output without new tokens may repeat earlier rows, so the lengths may differ.
        rows = zip(getattr(completion, "logprobs", None) or (), completion.token_ids, strict=False)
        _check_finite([float(row[i].logprob) for row, i in rows])


def _sampled_logprobs(completion: CompletionOutput) -> list[float] | None:
    """Return one log-probability per token, or None if they were not requested. Raises NotFiniteError."""
    rows = getattr(completion, "logprobs", None)
    if rows is None:
        return None
    firsts = getattr(rows, "start_indices", None)
    if firsts is None:
        logprobs = [float(row[i].logprob) for row, i in zip(rows, completion.token_ids, strict=True)]
    else:  # vLLM's FlatLogprobs
        assert [rows.token_ids[i] for i in firsts] == list(completion.token_ids), "a position begins with its token"
        logprobs = [float(rows.logprobs[i]) for i in firsts]
    _check_finite(logprobs)
    return logprobs


def read_scores(output: RequestOutput, num_scored: int) -> Scores:
    """Return the natural log-probabilities of the last `num_scored` tokens. Raises NotFiniteError."""
    token_ids = list(output.prompt_token_ids)
    rows = output.prompt_logprobs[-num_scored:]
    logprobs = [float(row[i].logprob) for row, i in zip(rows, token_ids[-num_scored:], strict=True)]
    return checked_scores(token_ids[:-num_scored], logprobs)


def checked_scores(prompt_token_ids: list[int], logprobs: list[float]) -> Scores:
    """Return the scores. Raises NotFiniteError if a log-probability is not finite."""
    _check_finite(logprobs)
    return Scores(prompt_token_ids=prompt_token_ids, logprobs=logprobs)


def _check_finite(logprobs: list[float]) -> None:
    if not all(math.isfinite(value) for value in logprobs):
        raise NotFiniteError(
            "the model gives log-probabilities that are not finite",
            found=f"{logprobs[:8]}",
            wanted="finite weights",
            remedy="lower training.learning_rate, and resume from a checkpoint from before the loss diverged",
        )


def stop_token_ids(model_config: ModelConfig, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Return the tokens that end an answer, from the checkpoint's generation settings and the tokenizer."""
    eos = model_config.try_get_generation_config().get("eos_token_id", [])
    ids = {eos} if isinstance(eos, int) else set(eos)
    return frozenset(ids | {tokenizer.eos_token_id})


def says_too_long(error: Exception) -> bool:
    """Return True if vLLM refuses a request because of its length. vLLM has no error type for this."""
    return any(words in str(error) for words in ("model length", "max_model_len", "context length"))
