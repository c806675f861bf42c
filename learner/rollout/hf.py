"""Rollouts by the training model itself: `rollout_backend: hf` (R02, R03, R11, R21, R29).

In: samples of this rank. Out: one rollout per sample, in order, by the weights as they are: no server, no sync, no
collective, so that every rank generates for itself. A rollout's `ver` is the number of updates behind its weights.

Invariants: prompts are the encoder's token ids; at most `decode_batch_size` samples are decoded at once (a beam search
runs `num_beams` sequences for each); a rollout follows from its prompt and its seed, whatever else is in its batch;
training does not notice: modes, settings, gradients and random generators are as before. Not to be called while a
forward pass runs on another thread. Built by `learner.build`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch
from transformers import GenerationConfig

from learner.config.schema import RolloutMatchingConfig
from learner.policy.generating import generating
from learner.policy.load import Policy
from learner.policy.packed import image_token_id
from learner.records import EncodedPrompt, Rollout, Sample
from learner.rollout.backend import MicroStep, Requests, RolloutBackend, split_window
from learner.rollout.call_log import RolloutCallLog, begin_record, local_call, recorded
from learner.rollout.hf_decoding import logits_processors
from learner.rollout.hf_inputs import pad_left, read_answer, stop_token_ids
from learner.rollout.memory import is_out_of_memory
from shared.errors import ConfigError, PromptTooLongError, RolloutError

log = logging.getLogger("learner.rollout")

ROLLOUT = "custom.extra.rollout_matching"
NAME = "hf"  # in call records, where a server's URL would be


class HfBackend(RolloutBackend):
    """`on_call` hears of every `generate_window`, also of one that failed."""

    def __init__(
        self,
        config: RolloutMatchingConfig,
        policy: Policy,
        *,
        run_seed: int,
        on_call: Callable[[RolloutCallLog], None] | None = None,
    ) -> None:
        """Raises ConfigError where the model can't generate, or has no room for a prompt."""
        self.config, self.chunk = config, config.decode_batch_size
        self._policy, self._run_seed, self._on_call = policy, run_seed, on_call
        self._stop_ids = stop_token_ids(policy.model, policy.tokenizer)
        self._max_length = int(policy.model.config.get_text_config().max_position_embeddings)
        self._check_model()
        log.info("rollouts by the training model: at most %d samples at once", self.chunk)

    def generate_window(
        self, window: Sequence[MicroStep], *, global_step: int, greedy: bool = False
    ) -> list[list[Rollout]]:
        """See `RolloutBackend`. Raises PromptTooLongError before anything is generated, RolloutError where memory does
        not suffice."""
        asked = Requests.of(window, run_seed=self._run_seed, global_step=global_step)
        if not asked.samples:
            return [[] for _ in window]
        record = begin_record(window, global_step=global_step, chunk=self.chunk, ver=global_step)
        mode = "greedy" if greedy else self.config.decoding.mode
        with recorded(record, self._on_call):
            prompts = [self._encode(sample) for sample in asked.samples]
            rollouts: list[Rollout] = []
            with generating(self._policy.model):
                for start in range(0, len(prompts), self.chunk):
                    here = slice(start, start + self.chunk)
                    batch = Requests(samples=asked.samples[here], places=asked.places[here], seeds=asked.seeds[here])
                    rollouts += self._generate(batch, prompts[here], mode, record)
            return split_window(window, rollouts)

    def close(self) -> None:
        """Nothing is held."""

    def _generate(
        self, batch: Requests, prompts: Sequence[EncodedPrompt], mode: str, record: RolloutCallLog
    ) -> list[Rollout]:
        """One batch."""
        with local_call(record, batch, name=NAME):
            answers = self._decode(prompts, batch.seeds, mode)
        return [
            Rollout(
                sample=sample,
                prompt_token_ids=prompt.token_ids,
                response_token_ids=response,
                finish_reason=finish_reason,
                ver=record.global_step,
                seed=own_seed,
            )
            for sample, prompt, own_seed, (response, finish_reason) in zip(
                batch.samples, prompts, batch.seeds, answers, strict=True
            )
        ]

    def _decode(
        self, prompts: Sequence[EncodedPrompt], seeds: Sequence[int], mode: str
    ) -> list[tuple[tuple[int, ...], str]]:
        """Responses and finish reasons of one batch. Raises RolloutError where memory does not suffice."""
        policy, decoding = self._policy, self.config.decoding
        pad_token_id = self._stop_ids[0]  # behind an answer's end, where nothing is read
        try:
            inputs = pad_left(
                prompts,
                pad_token_id=pad_token_id,
                image_token_id=image_token_id(policy.model),
                device=policy.device,
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
            with torch.autocast(policy.device.type, torch.bfloat16, enabled=policy.bf16):
                output = policy.model.generate(**inputs, generation_config=settings, logits_processor=processors)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            raise self._out_of_memory(len(prompts), error) from error
        new = output[:, inputs["input_ids"].shape[1] :].tolist()
        return [read_answer(token_ids, self._stop_ids) for token_ids in new]

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
                f"{ROLLOUT}.rollout_backend: hf: the model can't generate",
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
            wanted=f"memory for {ROLLOUT}.decode_batch_size = {self.chunk} samples of up to "
            f"{self.config.decoding.max_new_tokens} new tokens",
            remedy=f"lower {ROLLOUT}.decode_batch_size (or decoding.max_new_tokens, num_beams), or move rollouts to "
            f"devices of their own: rollout_backend: vllm, vllm.mode: server",
        )
