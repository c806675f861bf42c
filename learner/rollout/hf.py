"""Rollouts by the training model itself: `rollout_backend: hf` (R02, R03, R11, R21, R29).

In: samples of this rank. Out: one rollout per sample, in order, by the present weights. There is no server, no sync and
no collective, so every rank generates for itself. A rollout's `ver` is the number of optimizer steps before it.

Invariants: prompts are the encoder's token ids; at most `decode_batch_size` sequences are decoded at once (a beam
search decodes `num_beams` sequences for each sample); a rollout depends on its prompt and its seed, not on the other
samples of its batch. After a generation, even a failed one, the model has its old attention, training modes and
generation settings. Weights, `requires_grad` and random generators are not touched. Rollouts must not be made while
another thread runs a forward pass of the model.

The logits processors here make a sequence depend on its own prompt and seed only. The processors have vLLM's order:
repetition penalty, temperature, top-k, top-p, sampling.

Shapes: B prompts, P tokens of the longest prompt, V entries of the vocabulary.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager

import torch
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteria,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from learner.config.modes import ROLLOUT
from learner.config.sections.decoding import DecodingConfig
from learner.config.sections.rollout_matching import RolloutMatchingConfig
from learner.policy.compiled import uncompiled
from learner.policy.load import Policy
from learner.policy.loss import is_out_of_memory
from learner.policy.packed import image_token_id
from learner.records import EncodedPrompt, Rollout, RolloutCallLog, Sample
from learner.rollout.backend import (
    TELL_S,
    MicroStep,
    Requests,
    RolloutBackend,
    begin_record,
    drawn_at,
    local_call,
    recorded,
    split_window,
)
from shared.errors import ConfigError, PromptTooLongError, RolloutError
from shared.generation import FEWEST_REPEATED, MOST_REPEATED

log = logging.getLogger("learner.rollout")
NAME = "hf"  # the `base_url` of this backend's call records, because there is no server


def logits_processors(
    decoding: DecodingConfig, *, mode: str, attention_mask: torch.Tensor, seeds: Sequence[int]
) -> LogitsProcessorList:
    """Return the processors that change the logits as `decoding` says. `mode`: "greedy", "sample" or "beam".
    `attention_mask` `[B, P]` is 0 at padding."""
    processors = LogitsProcessorList()
    if decoding.repetition_penalty != 1.0:
        # transformers' own penalty would count padding as repeated tokens.
        processors.append(RepetitionPenalty(decoding.repetition_penalty, attention_mask))
    if mode != "sample":
        return processors
    processors.append(TemperatureLogitsWarper(decoding.temperature))
    if decoding.top_k > 0:
        processors.append(TopKLogitsWarper(decoding.top_k))
    if decoding.top_p < 1.0:
        processors.append(TopPLogitsWarper(decoding.top_p))
    # transformers would sample the tokens of all sequences from one global generator.
    processors.append(SeededChoice(seeds, attention_mask.shape[1], decoding.max_new_tokens))
    return processors


class RepetitionPenalty(LogitsProcessor):
    """Makes tokens less likely if the sequence's prompt or answer already contains them (CTRL, arXiv:1909.05858).
    Padding does not count as a token of the prompt."""

    def __init__(self, penalty: float, attention_mask: torch.Tensor) -> None:
        self._penalty, self._is_prompt = penalty, attention_mask.bool()

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        num_prompts, prompt_length = self._is_prompt.shape
        occurs = torch.ones_like(input_ids)
        occurs[:, :prompt_length] = self._is_prompt.repeat_interleave(len(input_ids) // num_prompts, dim=0)
        occurred = torch.zeros_like(scores, dtype=occurs.dtype).scatter_add_(1, input_ids, occurs) > 0
        penalized = torch.where(scores < 0, scores * self._penalty, scores / self._penalty)
        return torch.where(occurred, penalized, scores)


class SeededChoice(LogitsProcessor):
    """Samples the next token of each sequence, and gives all other tokens the score -inf, so that greedy search takes
    the sampled token.

    The random number for token i depends only on the sequence's seed and i, not on the device. The sampled token is the
    first one whose cumulative probability exceeds this number.
    """

    def __init__(self, seeds: Sequence[int], prompt_length: int, max_new_tokens: int) -> None:
        draws = [torch.rand(max_new_tokens, generator=torch.Generator().manual_seed(seed)) for seed in seeds]
        self._draws, self._prompt_length = torch.stack(draws), prompt_length  # [B, max_new_tokens] from [0, 1)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Return scores that are 0 for the sampled token and -inf for all others. Raises RolloutError if the model's
        logits are not finite."""
        self._draws = self._draws.to(scores.device, torch.float64)  # moved to the device at the first token only
        draw = self._draws[:, input_ids.shape[1] - self._prompt_length, None]
        # [B, V], in float64: rounding errors of a float32 sum would exceed the probability of a rare token.
        cumulative = scores.double().softmax(-1).cumsum(-1)
        total = cumulative[:, -1:]
        if not total.isfinite().all():
            raise RolloutError(
                "the model's logits are not finite, so no token can be drawn",
                found="NaN among the probabilities",
                wanted="finite weights",
                remedy="lower training.learning_rate, and resume from a checkpoint before the loss went wrong",
            )
        # Rounded probabilities do not add up to exactly 1, so the random number is multiplied by their sum.
        chosen = torch.searchsorted(cumulative, draw * total, right=True)
        return torch.full_like(scores, -torch.inf).scatter_(1, chosen, 0.0)


class Repetitions(StoppingCriteria):
    """Ends each sequence whose answer ends with `count` repetitions of the same tokens (see `repeats`)."""

    def __init__(self, count: int, prompt_length: int) -> None:
        self.count, self._prompt_length = count, prompt_length

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **_: object) -> torch.Tensor:
        # All tokens are copied at once: each read of a single value would wait for the device.
        answers = input_ids[:, self._prompt_length :].tolist()
        return torch.tensor([repeats(answer, self.count) for answer in answers], device=input_ids.device)


class Pulse(StoppingCriteria):
    """Reports every TELL_S how many tokens the answers have, because answers take minutes on a CPU. `Pulse` never ends
    a sequence."""

    def __init__(self, tell: Callable[[str], None], prompt_length: int, about: str) -> None:
        self._tell, self._prompt_length, self._about = tell, prompt_length, about
        self._told_s = time.monotonic()

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **_: object) -> torch.Tensor:
        if time.monotonic() - self._told_s > TELL_S:
            self._told_s = time.monotonic()
            self._tell(self._about.format(input_ids.shape[1] - self._prompt_length))
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


def repeats(token_ids: Sequence[int], count: int) -> bool:
    """Return True if an answer ends with the same tokens `count` times in a row, as vLLM's `check_sequence_repetition`
    does. The repeated part has FEWEST_REPEATED to MOST_REPEATED tokens."""
    for size in range(FEWEST_REPEATED, min(MOST_REPEATED, len(token_ids) // count) + 1):
        tail = token_ids[-size * count :]
        if tail[size:] == tail[:-size]:
            return True
    return False


class ChosenLogprobs:
    """Collects the log-probabilities (nats) of the tokens that greedy search chooses, under the model's own logits. The
    processor `raw` must run before all others: it keeps the logits. `chosen` must run after all others. `chosen` reads
    the final scores: greedy search chooses the token with the largest score."""

    def __init__(self) -> None:
        self._now = torch.empty(0)
        self._steps: list[torch.Tensor] = []  # log-probabilities of the chosen tokens: a tensor [B] per position

    def raw(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self._now = scores.float().log_softmax(-1)
        return scores

    def chosen(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self._steps.append(self._now.gather(1, scores.argmax(-1, keepdim=True))[:, 0])
        return scores

    def of(self, lengths: Sequence[int]) -> list[tuple[float, ...]]:
        """Return for each sequence b the log-probabilities of its first `lengths[b]` tokens."""
        # All values are copied from the device at once: for each single value the host would wait for the device.
        of_steps = torch.stack(self._steps, dim=1).tolist()  # [B, steps]
        return [tuple(row[:length]) for row, length in zip(of_steps, lengths, strict=True)]


def pad_left(
    prompts: Sequence[EncodedPrompt], *, pad_token_id: int, image_token_id: int | None, device: torch.device
) -> dict[str, torch.Tensor]:
    """Return the inputs of `model.generate` for prompts padded on the left: `input_ids` and `attention_mask` `[B, P]`.
    With images, also return the pixels of all prompts, concatenated, their grids, and `mm_token_type_ids` `[B, P]`,
    which is 1 at image tokens. The model computes multimodal positions from these types."""
    length = max(len(prompt.token_ids) for prompt in prompts)
    input_ids = torch.full((len(prompts), length), pad_token_id)
    attention_mask = torch.zeros_like(input_ids)
    for row, prompt in enumerate(prompts):
        start = length - len(prompt.token_ids)
        input_ids[row, start:] = torch.tensor(prompt.token_ids)
        attention_mask[row, start:] = 1
    inputs = {"input_ids": input_ids, "attention_mask": attention_mask}
    vision = [prompt.vision for prompt in prompts if prompt.vision is not None]
    if vision:
        inputs["mm_token_type_ids"] = ((input_ids == image_token_id) & (attention_mask == 1)).int()
        inputs["pixel_values"] = torch.cat([images.pixel_values for images in vision])
        inputs["image_grid_thw"] = torch.cat([images.image_grid_thw for images in vision])
    return {name: tensor.to(device) for name, tensor in inputs.items()}


def read_answer(token_ids: Sequence[int], stop_token_ids: Collection[int]) -> tuple[tuple[int, ...], int | None]:
    """Return the tokens before the first stop token, and that stop token (None if there is none)."""
    end = next((i for i, token_id in enumerate(token_ids) if token_id in stop_token_ids), None)
    if end is None:
        return tuple(token_ids), None
    return tuple(token_ids[:end]), token_ids[end]


def stop_token_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Return the ids of the tokens that end an answer, from the checkpoint's generation settings and from the
    tokenizer. A rollout server uses the same ids."""
    listed = model.generation_config.eos_token_id
    ids = {listed} if isinstance(listed, int) else set(listed or ())
    return tuple(sorted(ids | {tokenizer.eos_token_id}))


@contextmanager
def generating(model: PreTrainedModel) -> Iterator[None]:
    """Let `model.generate` take left-padded batches inside the `with` block, with a key-value cache, without dropout
    and gradients, and with only the settings of its caller. Outside the block the language model takes packed rows
    only."""
    settings = model.config.get_text_config()  # the vision tower's attention need not change
    attention, defaults = settings._attn_implementation, model.generation_config
    modes = [(module, module.training) for module in model.modules()]
    try:
        settings._attn_implementation = "sdpa"
        # The checkpoint's generation settings are replaced. With the checkpoint's settings `generate` would use the
        # checkpoint's value for each setting that its caller leaves out, such as the temperature.
        model.generation_config = GenerationConfig()
        model.eval()  # this switches off dropout, and gradient checkpointing too
        with torch.no_grad(), uncompiled():
            yield
    finally:
        settings._attn_implementation = attention
        model.generation_config = defaults
        for module, mode in modes:
            module.training = mode


def samples_at_once(config: RolloutMatchingConfig, mode: str) -> int:
    """Return how many samples can be answered at once with `decode_batch_size` sequences: a beam search needs
    `num_beams` sequences per sample. Raises ConfigError if the number is 0."""
    num_beams = config.decoding.num_beams if mode == "beam" else 1
    if config.decode_batch_size < num_beams:
        raise ConfigError(
            f"{ROLLOUT}.decode_batch_size: too few sequences for one beam search",
            found=f"{config.decode_batch_size}, with num_beams {num_beams}",
            wanted=f"at least {num_beams}",
            remedy="raise decode_batch_size, or lower decoding.num_beams",
        )
    return config.decode_batch_size // num_beams


class HfBackend(RolloutBackend):
    """Makes rollouts with the policy's own model, by transformers' `generate`. `on_call` gets the record of every
    `generate_window`, also if it failed."""

    def __init__(
        self,
        config: RolloutMatchingConfig,
        policy: Policy,
        *,
        run_seed: int,
        logprobs: bool = False,
        on_call: Callable[[RolloutCallLog], None] | None = None,
        tell: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Raises ConfigError if the model cannot generate, or has no room for a prompt. `logprobs`: rollouts have
        log-probabilities, except after beam search. Greedy rollouts always have log-probabilities, because an
        evaluation computes the scores of its boxes from them. `tell` gets a line every TELL_S while answers are
        written."""
        self.config, self.chunk = config, samples_at_once(config, config.decoding.mode)
        self._policy, self._run_seed, self._on_call, self._logprobs = policy, run_seed, on_call, logprobs
        self.tell = tell
        self._stop_ids = stop_token_ids(policy.model, policy.tokenizer)
        self._max_length = int(policy.model.config.get_text_config().max_position_embeddings)
        self._check_model()
        log.info("rollouts by the training model: at most %d samples at once", self.chunk)

    def generate_window(
        self,
        window: Sequence[MicroStep],
        *,
        global_step: int,
        greedy: bool = False,
        temperature: float | None = None,
    ) -> list[list[Rollout]]:
        """Return the window's rollouts (see `RolloutBackend`). Raises PromptTooLongError before anything is generated,
        RolloutError if memory is too small."""
        asked = Requests.of(window, run_seed=self._run_seed, global_step=global_step)
        if not asked.samples:
            return [[] for _ in window]
        record = begin_record(window, global_step=global_step, chunk=self.chunk, ver=global_step)
        decoding = self.config.decoding if temperature is None else drawn_at(temperature, self.config.decoding)
        mode = "greedy" if greedy else decoding.mode
        with_logprobs = (self._logprobs or greedy) and mode != "beam"
        with recorded(record, self._on_call):
            distinct = {id(sample): sample for sample in asked.samples}  # `grpo` asks for several answers to a sample.
            # Opening a photograph's image takes 5 ms of a core, so each is opened once.
            encoded = {key: self._encode(sample) for key, sample in distinct.items()}
            prompts = [encoded[id(sample)] for sample in asked.samples]
            rollouts: list[Rollout] = []
            with generating(self._policy.model):
                size = samples_at_once(self.config, mode)
                for start in range(0, len(prompts), size):
                    here = slice(start, start + size)
                    batch = Requests(samples=asked.samples[here], indices=asked.indices[here], seeds=asked.seeds[here])
                    about = f"answers {start + 1} to {start + len(batch.samples)} of {len(prompts)}"
                    rollouts += self._generate(batch, prompts[here], decoding, mode, with_logprobs, record, about)
            return split_window(window, rollouts)

    def close(self) -> None:
        """Do nothing: this backend holds no resources."""

    def _generate(
        self,
        batch: Requests,
        prompts: Sequence[EncodedPrompt],
        decoding: DecodingConfig,
        mode: str,
        with_logprobs: bool,
        record: RolloutCallLog,
        about: str,
    ) -> list[Rollout]:
        """Return the rollouts of one batch. `about` describes the batch in reports of progress."""
        assert record.global_step is not None, "the trained model itself never runs ahead"
        with local_call(record, batch, name=NAME):
            answers = self._decode(prompts, batch.seeds, decoding, mode, with_logprobs, about)
        return [
            Rollout(
                sample=sample,
                prompt_token_ids=prompt.token_ids,
                response_token_ids=response,
                finish_reason="length" if stop_token_id is None else "stop",
                ver=record.global_step,
                seed=own_seed,
                stop_token_id=stop_token_id,
                logprobs=logprobs,
            )
            for sample, prompt, own_seed, (response, stop_token_id, logprobs) in zip(
                batch.samples, prompts, batch.seeds, answers, strict=True
            )
        ]

    def _decode(
        self,
        prompts: Sequence[EncodedPrompt],
        seeds: Sequence[int],
        decoding: DecodingConfig,
        mode: str,
        with_logprobs: bool,
        about: str,
    ) -> list[tuple[tuple[int, ...], int | None, tuple[float, ...] | None]]:
        """Return one batch's answers: (response token ids, stop token id or None, log-probabilities in nats or None).
        Raises RolloutError if memory is too small."""
        policy = self._policy
        pad_token_id = self._stop_ids[0]  # fills the positions after an answer's end, which nothing reads
        try:
            inputs = pad_left(
                prompts, pad_token_id=pad_token_id, image_token_id=image_token_id(policy.model), device=policy.device
            )
            settings = GenerationConfig(
                max_new_tokens=decoding.max_new_tokens,
                do_sample=False,
                num_beams=decoding.num_beams if mode == "beam" else 1,
                use_cache=True,
                eos_token_id=list(self._stop_ids),
                pad_token_id=pad_token_id,
            )
            processors = logits_processors(decoding, mode=mode, attention_mask=inputs["attention_mask"], seeds=seeds)
            count = None if mode == "beam" else decoding.stop_repetitions
            stops = Repetitions(count, inputs["input_ids"].shape[1]) if count is not None else None
            said = f"{about}, token {{}} of at most {decoding.max_new_tokens}"
            pulse = Pulse(self.tell, inputs["input_ids"].shape[1], said)
            chosen = ChosenLogprobs() if with_logprobs else None
            if chosen is not None:
                processors = LogitsProcessorList([chosen.raw, *processors, chosen.chosen])
            with torch.autocast(policy.device.type, torch.bfloat16, enabled=policy.bf16):
                output = policy.model.generate(
                    **inputs,
                    generation_config=settings,
                    logits_processor=processors,
                    stopping_criteria=StoppingCriteriaList([*([] if stops is None else [stops]), pulse]),
                )
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            raise self._out_of_memory(len(prompts), error) from error
        new = output[:, inputs["input_ids"].shape[1] :].tolist()
        answers = [read_answer(token_ids, self._stop_ids) for token_ids in new]
        if stops is not None:  # the padding after an answer that was ended for repetition looks like a stop token
            answers = [(ids, None if repeats(ids, stops.count) else stop) for ids, stop in answers]
        lengths = [len(response) + (stop is not None) for response, stop in answers]
        logprobs = chosen.of(lengths) if chosen is not None else [None] * len(answers)
        return [(*answer, own) for answer, own in zip(answers, logprobs, strict=True)]

    def _encode(self, sample: Sample) -> EncodedPrompt:
        prompt = self._policy.encoder.encode(sample)
        num_prompt, num_new = len(prompt.token_ids), self.config.decoding.max_new_tokens
        if num_prompt + num_new > self._max_length:
            raise PromptTooLongError(
                f"sample {sample.sample_id!r}: the request is longer than the model's context",
                found=f"{num_prompt} prompt tokens and {num_new} for the answer",
                wanted=f"at most {self._max_length} tokens together",
                remedy=f"lower {ROLLOUT}.decoding.max_new_tokens or the images' size",
            )
        return prompt

    def _check_model(self) -> None:
        model, num_new = self._policy.model, self.config.decoding.max_new_tokens
        if not model.can_generate():
            raise ConfigError(
                f"{ROLLOUT}.rollout_backend: hf: the model cannot generate",
                found=f"model.path: a {type(model).__name__}",
                wanted="a model with an output head",
                remedy="correct model.path",
            )
        if num_new >= self._max_length:
            raise ConfigError(
                f"{ROLLOUT}.decoding.max_new_tokens: no room for a prompt",
                found=f"{num_new} of the model's {self._max_length} tokens",
                wanted="fewer new tokens than max_position_embeddings of model.path",
                remedy="lower max_new_tokens",
            )

    def _out_of_memory(self, num_samples: int, error: RuntimeError) -> RolloutError:
        return RolloutError(
            "out of memory while generating rollouts beside the training state",
            found=f"{num_samples} samples at once; {str(error).splitlines()[0]}",
            wanted=f"memory for {ROLLOUT}.decode_batch_size = {self.config.decode_batch_size} sequences of up to "
            f"{self.config.decoding.max_new_tokens} new tokens",
            remedy=f"lower {ROLLOUT}.decode_batch_size (or decoding.max_new_tokens, num_beams), or make rollouts on "
            f"devices of their own: rollout_backend: vllm, vllm.mode: server",
        )
