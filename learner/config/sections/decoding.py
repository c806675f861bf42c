"""The section `decoding` of the rollouts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from learner.config.modes import ROLLOUT, Rule
from shared.config.model import Mistake, Section, given, key

if TYPE_CHECKING:
    from learner.config.schema import RunConfig


class DecodingConfig(Section):
    """The decoding of rollouts. Evaluations always decode greedily."""

    temperature: float = key("0: greedy decoding; above 0: sampling", 0.0, req="D7 R29", ge=0.0)
    top_p: float = key(
        "sample from the most likely tokens, up to this total probability",
        1.0,
        unit="probability",
        req="R29",
        gt=0.0,
        le=1.0,
    )
    top_k: int = key(
        "sample from this number of most likely tokens; -1 or 0: from all", -1, unit="tokens", req="R29", ge=-1
    )
    max_new_tokens: int = key("longest answer", 512, unit="tokens", req="D7", ge=1)
    repetition_penalty: float = key("above 1: tokens that already occurred become less likely", 1.0, req="D7", gt=0.0)
    stop_repetitions: int | None = key(
        "end an answer that has written the same 8 to 128 tokens so often in a row, and count it as cut off; null: it "
        "goes on to `max_new_tokens`. Not with `decode_mode: beam`",
        None,
        unit="times",
        ge=2,
        le=64,
    )
    decode_mode: Literal["greedy", "sample", "beam"] | None = key(
        "null: `greedy` at temperature 0, `sample` above; `beam` needs `rollout_backend: hf`", None, req="D7"
    )
    num_beams: int = key("`decode_mode: beam` only: number of beams; the best one is the rollout", 1, req="D7", ge=1)

    @property
    def mode(self) -> Literal["greedy", "sample", "beam"]:
        """The decode mode. If `decode_mode` is null, it is `sample` for a temperature above 0, else `greedy`."""
        return self.decode_mode or ("sample" if self.temperature > 0 else "greedy")


def decode_mode_fits(config: RunConfig) -> Iterator[Mistake]:
    """`decode_mode` must agree with `temperature`: `sample` needs a temperature above 0, `greedy` and `beam` need 0.
    `beam` also needs `num_beams` of at least 2 (D7)."""
    decoding, path = config.rollout_matching.decoding, f"{ROLLOUT}.decoding"
    mode, temperature = decoding.decode_mode, decoding.temperature
    if mode in ("greedy", "beam") and temperature > 0:
        wanted, remedy = f"temperature 0 with decode_mode: {mode}", "set temperature: 0, or decode_mode: sample"
        yield Mistake(path=f"{path}.temperature", found=f"{temperature:g}", wanted=wanted, remedy=remedy)
    if mode == "sample" and temperature == 0:
        found, wanted = given(decoding, "temperature"), "above 0 with decode_mode: sample"
        yield Mistake(
            path=f"{path}.temperature", found=found, wanted=wanted, remedy="raise it, or set decode_mode: greedy"
        )
    if mode == "beam" and decoding.num_beams == 1:
        found, wanted = given(decoding, "num_beams"), "at least 2 with decode_mode: beam"
        yield Mistake(
            path=f"{path}.num_beams", found=found, wanted=wanted, remedy="raise it, or set decode_mode: greedy"
        )
    if mode == "beam" and decoding.stop_repetitions is not None:
        found, wanted = given(decoding, "stop_repetitions"), "null with decode_mode: beam"
        yield Mistake(path=f"{path}.stop_repetitions", found=found, wanted=wanted, remedy="remove it")
    if mode != "beam" and decoding.num_beams > 1:
        wanted, remedy = "1 without decode_mode: beam", "set decode_mode: beam, or remove it"
        yield Mistake(path=f"{path}.num_beams", found=str(decoding.num_beams), wanted=wanted, remedy=remedy)


def sampling_samples(config: RunConfig) -> Iterator[Mistake]:
    """`top_p` below 1 and `top_k` above 0 need a `temperature` above 0: greedy decoding and beam search ignore them
    (R29)."""
    decoding, path = config.rollout_matching.decoding, f"{ROLLOUT}.decoding"
    if decoding.temperature > 0:
        return
    found = f"with temperature 0 ({decoding.decode_mode or 'greedy'})"
    remedy = "remove it, or set temperature above 0"
    if decoding.top_p < 1.0:
        wanted = "1.0, as nothing is sampled"
        yield Mistake(path=f"{path}.top_p", found=f"{decoding.top_p:g} {found}", wanted=wanted, remedy=remedy)
    if decoding.top_k > 0:
        wanted = "-1 or 0, as nothing is sampled"
        yield Mistake(path=f"{path}.top_k", found=f"{decoding.top_k} {found}", wanted=wanted, remedy=remedy)


def beam_needs_hf(config: RunConfig) -> Iterator[Mistake]:
    """`decode_mode: beam` needs `rollout_backend: hf`."""
    if config.rollout_matching.decoding.decode_mode == "beam" and config.rollout_matching.rollout_backend == "vllm":
        found = f"beam with rollout_backend: vllm (vllm.mode: {config.rollout_matching.vllm.mode})"
        remedy = f"set {ROLLOUT}.rollout_backend: hf, or decode_mode: greedy"
        path = f"{ROLLOUT}.decoding.decode_mode"
        yield Mistake(path=path, found=found, wanted="greedy or sample", remedy=remedy)


def rollout_fits(config: RunConfig) -> Iterator[Mistake]:
    """`max_new_tokens` is below `global_max_length` and below a colocated engine's `max_model_len`, because both limits
    include the prompt."""
    decoding = config.rollout_matching.decoding
    longest, found = decoding.max_new_tokens, given(decoding, "max_new_tokens")
    path = f"{ROLLOUT}.decoding.max_new_tokens"
    if config.custom.trainer_variant != "sft" and longest >= config.global_max_length:
        wanted = f"less than global_max_length ({config.global_max_length}), which holds prompt and answer"
        yield Mistake(path=path, found=found, wanted=wanted, remedy="lower it, or raise global_max_length")
    vllm = config.rollout_matching.vllm
    colocated = config.rollout_matching.rollout_backend == "vllm" and vllm.mode == "colocate"
    if colocated and vllm.max_model_len is not None and longest >= vllm.max_model_len:
        wanted = f"less than vllm.max_model_len ({vllm.max_model_len}), which holds prompt and answer"
        yield Mistake(path=path, found=found, wanted=wanted, remedy="lower it, or raise vllm.max_model_len")


RULES: tuple[Rule, ...] = (
    decode_mode_fits,
    sampling_samples,
    beam_needs_hf,
    rollout_fits,
)
