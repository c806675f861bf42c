"""Samples as the server's requests, and its answers as rollouts (R03, R10, R11, R13).

Pure, except that every request gets a random uuid when it is built. It keeps the uuid through retries: a server that
has answered it once gives the same answer again.
"""

from __future__ import annotations

import uuid

from pydantic import ValidationError

from learner.config.schema import DecodingConfig
from learner.records import Rollout, Sample
from learner.rollout.membership import ServedWeights
from shared.errors import ConfigError, DataError, RolloutError, ServerMismatchError
from shared.wire import Choice, Message, RequestConfig, RolloutInferRequest, RolloutInfos, RolloutOutput

DECODING = "custom.extra.rollout_matching.decoding"


def infer_request(sample: Sample) -> RolloutInferRequest:
    """The sample as ms-swift's `RolloutInferRequest`: its messages without the answer, images as strings.

    Raises DataError if a message has another form.
    """
    try:
        messages = [Message.model_validate(dict(message)) for message in sample.messages]
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise DataError(
            f"sample {sample.sample_id}: a message cannot be sent to a rollout server",
            found=f"{'.'.join(map(str, first['loc']))}: {first['input']!r:.200}",
            wanted=first["msg"],
            remedy="correct the dataset row",
        ) from error
    return RolloutInferRequest(messages=messages, images=list(sample.images), uuid=uuid.uuid4().hex)


def request_config(decoding: DecodingConfig, *, greedy: bool = False, logprobs: bool = False) -> RequestConfig:
    """How to decode, without a seed; `greedy` overrides the configuration (evaluation). `logprobs`: of sampled tokens.

    Raises ConfigError if vLLM does not have the mode.
    """
    mode = decoding.mode
    if mode == "beam" or (mode == "sample" and decoding.temperature == 0):
        raise ConfigError(
            f"{DECODING}.decode_mode: not possible with vLLM",
            found=f"decode_mode {mode!r}, temperature {decoding.temperature}",
            wanted="greedy, or sample with a temperature above 0",
            remedy=f"correct {DECODING}, or set rollout_backend: hf for beam search",
        )
    if greedy or mode == "greedy":
        return RequestConfig(
            max_tokens=decoding.max_new_tokens, temperature=0.0, repetition_penalty=decoding.repetition_penalty
        )
    return RequestConfig(
        max_tokens=decoding.max_new_tokens,
        temperature=decoding.temperature,
        top_p=decoding.top_p,
        top_k=decoding.top_k,
        repetition_penalty=decoding.repetition_penalty,
        logprobs=logprobs,
    )


def read_rollout(
    output: RolloutOutput,
    *,
    sample: Sample,
    request_uuid: str,
    seed: int,
    served: ServedWeights | None,
    base_url: str,
    logprobs: bool = False,
) -> Rollout:
    """The rollout of one request, which had the seed `seed`, and asked for `logprobs` or did not.

    Raises RolloutError if place, seed or content is wrong, ServerMismatchError if other weights answered than those
    last synced (R10).
    """
    infos = output.rollout_infos
    if infos.uuid != request_uuid:
        raise _malformed(base_url, "rollout_infos.uuid", infos.uuid, f"{request_uuid} (answers in request order)")
    if infos.seed not in (None, seed):
        raise _malformed(base_url, "rollout_infos.seed", str(infos.seed), str(seed))
    if served is not None:
        _check_weights(infos, served, base_url)
    if len(output.response.choices) != 1:
        raise _malformed(base_url, "response.choices", f"{len(output.response.choices)} choices", "one")
    choice = output.response.choices[0]
    finish_reason = choice.finish_reason
    if finish_reason not in ("stop", "length"):
        raise _malformed(base_url, "response.choices.0.finish_reason", repr(finish_reason), "'stop' or 'length'")
    if not output.prompt_token_ids:
        raise _malformed(base_url, "prompt_token_ids", "none", "the ids that the engine consumed")
    return Rollout(
        sample=sample,
        prompt_token_ids=tuple(output.prompt_token_ids),
        response_token_ids=tuple(output.response_token_ids),
        finish_reason=finish_reason,
        ver=infos.ver,
        seed=seed,
        server_id=infos.server_id,
        stop_token_id=choice.stop_token_id,
        logprobs=_logprobs(output, choice, base_url) if logprobs else None,
    )


def _logprobs(output: RolloutOutput, choice: Choice, base_url: str) -> tuple[float, ...]:
    """Of the response's tokens and of the stop token. Raises RolloutError."""
    stop = () if choice.stop_logprob is None else (choice.stop_logprob,)
    logprobs = (*(output.rollout_logprobs or [[]])[0], *stop)
    wanted = len(output.response_token_ids) + (choice.stop_token_id is not None)
    if len(logprobs) != wanted:
        raise _malformed(base_url, "rollout_logprobs", f"{len(logprobs)} of them", f"{wanted}, one per sampled token")
    return logprobs


def _check_weights(infos: RolloutInfos, served: ServedWeights, base_url: str) -> None:
    for field in ("ver", "incarnation", "weights"):
        found, wanted = getattr(infos, field), getattr(served, field)
        if found != wanted and wanted != "":
            raise ServerMismatchError(
                f"{base_url}: rollout_infos.{field}: the rollout was made with other weights than those last synced",
                found=f"{field} {found}",
                wanted=f"{field} {wanted}",
                remedy="make sure that no other learner uses this server and that it was not restarted; then start "
                "again",
            )


def _malformed(base_url: str, field: str, found: str, wanted: str) -> RolloutError:
    return RolloutError(
        f"{base_url}: malformed answer at /infer/: {field}",
        found=found,
        wanted=wanted,
        remedy="run the same version of this project on both sides, and look at the server's log",
    )
