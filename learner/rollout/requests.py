"""Turns samples into a rollout server's requests, and the server's answers into rollouts (R03, R10, R11, R13).

Every request gets a random uuid when it is built. A retry has the same uuid. So a server that has answered the request
already gives the same answer again.
"""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from pydantic import ValidationError

from learner.config.sections.decoding import DecodingConfig
from learner.data.views import sent_images
from learner.records import Rollout, Sample
from learner.rollout.backend import drawn_at
from shared.errors import ConfigError, DataError, MediaError, RolloutError, ServerMismatchError
from shared.images import Images
from shared.validation import first_wrong
from shared.wire import Choice, Message, RequestConfig, RolloutInferRequest, RolloutInfos, RolloutOutput, ServedWeights

_THREADS = 8  # number of threads that make augmented pictures
DECODING = "custom.extra.rollout_matching.decoding"


def sent_pictures(samples: Sequence[Sample], images: Images) -> dict[int, list[str]]:
    """Return the altered images of augmented samples, encoded as strings for servers, by `id(sample)`. Each sample's
    images are made once, on several threads. Raises DataError for a photograph that can't be read."""
    augmented = {id(sample): sample for sample in samples if sample.view is not None}
    with ThreadPoolExecutor(_THREADS) as pool:
        return dict(zip(augmented, pool.map(lambda one: _sent(one, images), augmented.values()), strict=True))


def _sent(sample: Sample, images: Images) -> list[str]:
    try:
        return sent_images(sample, images)
    except MediaError as error:
        remedy = f"{error.remedy}, or remove sample {sample.sample_id!r} from the dataset"
        what = f"sample {sample.sample_id!r}: {error.what}"
        raise DataError(what, found=error.found, wanted=error.wanted, remedy=remedy) from error


def infer_request(
    sample: Sample, images: Sequence[str] | None = None, *, seed: int | None = None, pixels: bool = False
) -> RolloutInferRequest:
    """Return the sample as ms-swift's `RolloutInferRequest`: its messages without the answer, images as strings.
    `images` come from `sent_pictures`; None: the sample's own. `pixels`: the answer must have digests of the processed
    images.

    Raises DataError if a message is no `Message` of shared/wire.py.
    """
    assert images is not None or sample.view is None, "sent_pictures makes them"
    try:
        messages = [Message.model_validate(dict(message)) for message in sample.messages]
    except ValidationError as error:
        raise DataError(
            f"sample {sample.sample_id}: a message cannot be sent to a rollout server",
            **first_wrong(error, "the message")._asdict(),
            remedy="correct the dataset row",
        ) from error
    sent = sample.images if images is None else images
    return RolloutInferRequest(messages=messages, images=list(sent), uuid=uuid.uuid4().hex, seed=seed, pixels=pixels)


def asks_pixels(share: float, sample: Sample, *, global_step: int) -> bool:
    """Return True if the sample's requests of this step ask for digests of the processed images. `share`: fraction of
    the samples with images for which the result is True. A hash of step and sample chooses them, so the choice changes
    at every step."""
    # Ids may come from file names that are not UTF-8. Python holds such bytes as surrogates.
    digest = hashlib.blake2b(f"{global_step} {sample.sample_id}".encode(errors="surrogatepass"), digest_size=8).digest()
    return bool(sample.images) and int.from_bytes(digest, "little") < share * 2**64


def request_config(decoding: DecodingConfig, *, greedy: bool = False, logprobs: bool = False) -> RequestConfig:
    """Return `decoding` as the settings of a request, without a seed. `greedy`: decode greedily, even if `decoding`
    samples (for evaluations). `logprobs`: ask for the log-probabilities of the answer's tokens.

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
            max_tokens=decoding.max_new_tokens,
            temperature=0.0,
            repetition_penalty=decoding.repetition_penalty,
            stop_repetitions=decoding.stop_repetitions,
            logprobs=logprobs,
        )
    return RequestConfig(
        max_tokens=decoding.max_new_tokens,
        temperature=decoding.temperature,
        top_p=decoding.top_p,
        top_k=decoding.top_k,
        repetition_penalty=decoding.repetition_penalty,
        stop_repetitions=decoding.stop_repetitions,
        logprobs=logprobs,
    )


class Decodings:
    """The decoding settings of a run's requests: as configured, greedy, or sampled at another temperature. `logprobs`:
    requests with the configured settings ask for log-probabilities. Requests with other settings always ask for them.

    Raises ConfigError if vLLM does not have the configured mode."""

    def __init__(self, decoding: DecodingConfig, *, logprobs: bool = False) -> None:
        self._decoding = decoding
        self._known = {
            False: request_config(decoding, logprobs=logprobs),
            # The scores of an evaluation's boxes are computed from log-probabilities.
            True: request_config(decoding, greedy=True, logprobs=True),
        }

    def of(self, *, greedy: bool = False, temperature: float | None = None) -> RequestConfig:
        """Return the settings for `greedy` or `temperature`, as `RolloutBackend.generate_window` explains them."""
        if temperature is None:
            return self._known[greedy]
        return request_config(drawn_at(temperature, self._decoding), logprobs=True)


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
    """Return one request's rollout. `seed`: the request's seed. `served`: the weights that must have made the answer;
    None: any weights. `logprobs`: the request asked for log-probabilities.

    Raises RolloutError if the answer's uuid, seed or content is wrong, ServerMismatchError if other weights than
    `served` have answered (R10).
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
        pixels=infos.pixels,
    )


def _logprobs(output: RolloutOutput, choice: Choice, base_url: str) -> tuple[float, ...]:
    """Return the log-probabilities of the response's tokens, and of the stop token if there is one. Raises RolloutError
    if the number of log-probabilities is wrong."""
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
