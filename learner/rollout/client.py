"""The async HTTP client of ONE rollout server.

In: request bodies of `shared/wire.py`. Out: the server's replies, or a `ProjectError` that names the server.
Invariants:
- every wait has a deadline. An `/infer/` call also fails at its deadline if the server's `/health/` still answers
  (D16);
- a call is sent again only after a 503 with the error "busy", which means that the server did not execute the call.
  `/update_weights/` and `/init_communicator/` are never sent again. The caller may repeat an `/infer/` call whose
  answer was lost, because the server recognizes requests by their uuids;
- the server's own error text reaches the caller.
A client may be used on one event loop only.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TypeVar
from urllib.parse import urlsplit

import httpx
from pydantic import BaseModel, TypeAdapter

from learner.config.sections.servers import SERVER, WAY_OUT
from learner.rollout.replies import RETRY_AFTER_S, Answers, Pace, error_of, read_reply, retry_after_s
from shared.answers import PLAIN, bounded, is_packed
from shared.errors import (
    DeadlineError,
    ProjectError,
    RolloutError,
    ServerBusyError,
    ServerError,
    ServerUnreachableError,
)
from shared.waits import Retry, awake_s, time_limit
from shared.wire import (
    NDJSON,
    CloseCommunicatorCall,
    ExpectScoresCall,
    InferCall,
    InitCommunicatorCall,
    RolloutOutput,
    ScoreCall,
    ScoreReply,
    ServerStatus,
    UpdateWeightsCall,
    UpdateWeightsReply,
    WorldSizeReply,
)

T = TypeVar("T")
log = logging.getLogger("learner.rollout")

HEALTH_TIMEOUT_S = 5.0  # max seconds of one call of /health/.
# Deadline of the call of /health/ that follows a late answer. Without a reply in this time the server is gone.
LAST_LOOK_S = 3.0
POLL_S = 5.0  # seconds between two calls of one server's /health/
MAX_LOOKS_PER_S = 32.0  # max calls of /health/ per second, to all servers together: each takes 1 ms of CPU.
# If other servers can answer, a server counts as gone when its /health/ has been silent for one of these times:
BROKEN_S = 2.0  # seconds of silence of /health/, after the server broke a connection
SILENT_S = 30.0  # seconds of silence of /health/, if no connection broke
REPLY_GRACE_S = 10.0  # seconds added to the server's own deadline, so that the server's error arrives first.
# Uvicorn closes a connection after 5 idle seconds. The client closes a connection earlier, so that uvicorn never closes
# it just when a new request is sent.
KEEPALIVE_S = 2.0

# The bytes of an answer are bounded: for each token the answer has a text, the id twice, and a log-probability.
# Max bytes of a reply; a longer one raises RolloutError. The limit of `/infer/` depends on its max tokens, see below.
MAX_REPLY_BYTES = 64 << 20
_ANSWER_BYTES, _TOKEN_BYTES = 4 << 20, 256  # max bytes of an `/infer/` answer without its tokens; max bytes per token
_MOST_TOKENS = 1 << 17  # max tokens of an answer, if its request sets no limit
_MOST_BYTES = "most_bytes"  # key in the extensions of an httpx request: the max bytes of its reply


@dataclass(frozen=True, kw_only=True, slots=True)
class Timeouts:
    """A client's deadlines in seconds. `infer_s`: for an `/infer/` call; None: computed from the server's speed."""

    connect_s: float
    infer_s: float | None
    gone_s: float  # max seconds of any other wait, and of silence of `/health/`
    poll_s: float = POLL_S  # seconds between two calls of `/health/`

    @classmethod
    def of(cls, timeout_s: float, infer_timeout_s: float | None, *, num_servers: int = 1) -> Timeouts:
        """Make the timeouts from the configuration's `timeout_s` and `infer_timeout_s` (R05); an `infer_timeout_s` of 0
        or less counts as None. With more than 160 servers, each server's `/health/` is called less often."""
        return cls(
            connect_s=min(10.0, timeout_s),
            infer_s=infer_timeout_s if infer_timeout_s is not None and infer_timeout_s > 0 else None,
            gone_s=timeout_s,
            poll_s=min(max(POLL_S, num_servers / MAX_LOOKS_PER_S), timeout_s / 4),
        )

    def patience(self, *, has_others: bool) -> Patience:
        """Return how long to wait for a failing server: `timeout_s`, or a short time if `has_others` (other servers can
        take its requests)."""
        if not has_others:
            return Patience(silent_s=self.gone_s, broken_s=self.gone_s, has_others=False)
        silent_s = min(self.gone_s, SILENT_S, self.infer_s or SILENT_S)
        return Patience(silent_s=silent_s, broken_s=min(self.gone_s, BROKEN_S), has_others=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class Patience:
    """How long `/health/` may be silent before the server counts as gone. `has_others`: the run can continue without
    this server."""

    silent_s: float  # the limit in seconds, if no connection broke
    broken_s: float  # the limit in seconds, after a connection broke
    has_others: bool


@functools.cache
def _certificates() -> ssl.SSLContext:
    """Return the TLS certificates that clients trust, read once per process."""
    # httpx would read the certificates again for each client, which takes 16 ms: 8 s per rank with 512 servers.
    return httpx.create_ssl_context()


class ServerClient:
    """Calls one rollout server. `base_url` is a URL prefix (R06). `token`: bearer token, if the server wants one."""

    def __init__(self, base_url: str, *, timeouts: Timeouts, token: str | None = None) -> None:
        self.base_url = base_url.rstrip("/")
        self.host = urlsplit(self.base_url).hostname or ""
        self.timeouts = timeouts
        self._pace = Pace()
        self._http = httpx.AsyncClient(
            headers={**PLAIN, **({"Authorization": f"Bearer {token}"} if token else {})},
            event_hooks={"response": [self._check_size]},
            # The number of connections is limited by the quota of requests (`distribution.py`).
            limits=httpx.Limits(max_connections=None, keepalive_expiry=KEEPALIVE_S),
            # A proxy that the environment names would see the token and all photographs.
            trust_env=False,
            verify=_certificates(),
        )

    async def _check_size(self, response: httpx.Response) -> None:
        """Raises RolloutError if the reply is compressed. A reply that is too long raises RolloutError while its body
        is read."""
        if is_packed(response):
            raise RolloutError(
                f"{self.base_url}: the answer is packed",
                found=f"Content-Encoding: {response.headers['content-encoding']:.80}",
                wanted="an answer as it is",
                remedy="check base_url, and switch compression off in proxies before the server",
            )
        # Anything may listen at a wrong base_url, so no reply is read without a limit.
        most_bytes = response.request.extensions.get(_MOST_BYTES, MAX_REPLY_BYTES)
        bounded(response, most_bytes, lambda: self._too_long(response.request.url.path, most_bytes))

    def _too_long(self, path: str, most_bytes: int) -> RolloutError:
        return RolloutError(
            f"{self.base_url}: the answer to {path} is too long",
            found=f"more than {most_bytes} bytes",
            wanted="an answer of a rollout server",
            remedy="check base_url: something else may listen there",
        )

    async def health(self) -> None:
        """Call `/health/` once. Raises an error unless the server answers 200."""
        await self._look("/health/")

    async def wait_healthy(self, limit_s: float | None = None) -> None:
        """Call `/health/` until it answers 200, for at most `limit_s` (None: `gone_s`). Raises ServerUnreachableError
        after that time. An answer 4xx is final: its error is raised at once."""
        limit_s = self.timeouts.gone_s if limit_s is None else limit_s
        retry = Retry(limit_s, min(self.timeouts.poll_s, limit_s / 4))
        while True:
            try:
                return await self.health()
            except ProjectError as error:
                # An answer 4xx, such as a wrong token, does not change by waiting.
                if not isinstance(error, ServerUnreachableError | DeadlineError) and error.http_status < 500:
                    raise
                if (pause_s := retry.next_s()) is None:
                    raise self._gone(_last_seen_of(error), limit_s) from error
            await asyncio.sleep(pause_s)

    async def ready(self) -> None:
        """Call `/ready/` once. Raises an error unless the server answers 200."""
        await self._look("/ready/")

    async def status(self) -> ServerStatus:
        return await self._get("/status/", ServerStatus)

    async def world_size(self) -> int:
        """Return the server's world size: tensor-parallel size x data-parallel size."""
        return (await self._get("/get_world_size/", WorldSizeReply)).world_size

    async def infer(
        self, call: InferCall, on_answer: Callable[[int, RolloutOutput], None], patience: Patience | None = None
    ) -> None:
        """Call `on_answer(i, output)` when request `i` ends; return when all requests have ended. Each request is
        answered once; the caller checks the content. An exception of `on_answer` ends the call.

        Raises DeadlineError if the call takes longer than its deadline, ServerUnreachableError if `/health/` is silent
        for longer than `patience` says, ServerError if the connection broke and the server is alive, RolloutError if an
        answer is malformed or missing, ServerBusyError if the server stayed busy for `gone_s`, or became busy after
        some answers. If the server became busy after some answers, the caller can send the unanswered requests at once.
        """
        patience = patience or self.timeouts.patience(has_others=False)
        deadline_s = self.timeouts.infer_s or self._pace.deadline_s(call.request_config.max_tokens)
        answers = Answers(self.base_url, len(call.infer_requests), on_answer)
        late = functools.partial(self._late, answers, deadline_s, patience)

        async def exchange() -> httpx.Response:
            # The time is set in each try, because the time of waiting for a busy server must not count as decoding
            # time.
            answers.sent_at = awake_s()
            sending = self._send_infer(call, deadline_s, answers, patience)
            return await self._while_alive(sending, patience.silent_s, deadline_s=deadline_s, late=late)

        try:
            await self._patiently("/infer/", exchange)
        except ServerBusyError:
            # The server said "busy" after some answers. The error is a line of a streamed reply, so there is no
            # Retry-After header. The wait here is a fixed time, and the caller then sends the other requests again.
            if answers.num_missing < answers.number:
                await asyncio.sleep(RETRY_AFTER_S)
            raise
        answers.check_complete()
        # Only the longest answer is counted: all requests of a call run at once, so the longest one determines the
        # call's time.
        self._pace.saw(answers.longest, answers.longest_s)

    async def _send_infer(
        self, call: InferCall, deadline_s: float, answers: Answers, patience: Patience
    ) -> httpx.Response:
        """Send an `/infer/` call once and return the response. The body of a successful response was read into
        `answers`."""
        answer_bytes = _ANSWER_BYTES + _TOKEN_BYTES * (call.request_config.max_tokens or _MOST_TOKENS)
        read_s, most_bytes = deadline_s + REPLY_GRACE_S, MAX_REPLY_BYTES + len(call.infer_requests) * answer_bytes
        try:
            sending = self._http.stream(
                "POST",
                f"{self.base_url}/infer/",
                content=call.model_dump_json(),
                headers={"Content-Type": "application/json", "Accept": NDJSON},
                timeout=self._timeout(read_s),
                extensions={_MOST_BYTES: most_bytes},
            )
            async with self._errors("/infer/", read_s), sending as response:
                await (answers.read(response) if response.is_success else response.aread())
                return response
        except ServerUnreachableError as error:
            # If the server still answers, only the connection was lost. In this case its requests are sent again, and
            # the server stays in use.
            await self.wait_healthy(patience.broken_s)
            raise ServerError(
                f"{self.base_url}: the connection broke during /infer/, the server is alive",
                found=error.found,
                wanted="an answer",
                remedy="the requests can be sent again",
            ) from error

    async def score(self, call: ScoreCall) -> ScoreReply:
        response = await self._patiently("/score/", lambda: self._send("/score/", call))
        return read_reply(response.content, TypeAdapter(ScoreReply), self.base_url, "/score/")

    async def init_communicator(self, call: InitCommunicatorCall, patience: Patience | None = None) -> None:
        """Return when the server's workers and the learner have joined the process group. Raises DeadlineError if that
        takes too long, ServerUnreachableError if `/health/` is silent for longer than `patience` says."""
        await self._send_weights_call("/init_communicator/", call, patience)

    async def update_weights(self, call: UpdateWeightsCall, patience: Patience | None = None) -> UpdateWeightsReply:
        """Return the reply when all weights have been broadcast and the server has checked them. Raises the errors of
        `init_communicator`."""
        response = await self._send_weights_call("/update_weights/", call, patience)
        return read_reply(response.content, TypeAdapter(UpdateWeightsReply), self.base_url, "/update_weights/")

    async def _send_weights_call(
        self, path: str, call: InitCommunicatorCall | UpdateWeightsCall, patience: Patience | None
    ) -> httpx.Response:
        # The server's deadline is shorter, so its own error arrives, which says more than a missing answer.
        limit_s = call.timeout_s + REPLY_GRACE_S

        async def late(health_age_s: float) -> None:
            found = f"no answer after {limit_s:g} s; /health/ answered {health_age_s:.1f} s ago"
            raise self._too_late(path, found, f"the {call.timeout_s:g} s that it was given")

        silent_s = (patience or self.timeouts.patience(has_others=False)).silent_s
        sending = self._send_once(path, call, read_s=limit_s)
        return await self._while_alive(sending, silent_s, deadline_s=limit_s, late=late)

    async def expect_scores(self, call: ExpectScoresCall) -> None:
        """Send the learner's log-probabilities on the canary (fixed answers), which the updated server must match."""
        await self._send_once("/expect_scores/", call)

    async def close_communicator(self, call: CloseCommunicatorCall) -> None:
        await self._send_once("/close_communicator/", call)

    async def aclose(self) -> None:
        await self._http.aclose()

    async def _look(self, path: str) -> None:
        await self._send_once(path, read_s=min(HEALTH_TIMEOUT_S, self.timeouts.gone_s))

    async def _get(self, path: str, reply: type[T]) -> T:
        response = await self._send_once(path)
        return read_reply(response.content, TypeAdapter(reply), self.base_url, path)

    async def _send_once(
        self, path: str, body: BaseModel | None = None, *, read_s: float | None = None
    ) -> httpx.Response:
        response = await self._send(path, body, read_s=read_s)
        if not response.is_success:
            raise error_of(response, self.base_url)
        return response

    async def _patiently(self, path: str, exchange: Callable[[], Awaitable[httpx.Response]]) -> httpx.Response:
        """Repeat `exchange` while the server is busy, for at most `gone_s`. Return the first successful response;
        raises the error of any other response."""
        retry: Retry | None = None
        while True:
            response = await exchange()
            if response.is_success:
                return response
            error = error_of(response, self.base_url)
            # `gone_s` counts from the first refusal, because a call that the server accepts may take minutes.
            retry = retry or Retry(self.timeouts.gone_s, RETRY_AFTER_S)
            wait_s = retry.next_s(retry_after_s(response))
            if not isinstance(error, ServerBusyError) or wait_s is None:
                raise error
            log.info("%s is busy, %s again in %.1f s: %s", self.base_url, path, wait_s, error.what)
            await asyncio.sleep(wait_s)

    async def _send(self, path: str, body: BaseModel | None = None, *, read_s: float | None = None) -> httpx.Response:
        """Send one call, a GET without a body, and return the response, whatever its status. `read_s`: deadline for
        reading; None: `timeouts.gone_s`. Raises DeadlineError or ServerUnreachableError."""
        read_s = self.timeouts.gone_s if read_s is None else read_s
        async with self._errors(path, read_s):
            return await self._http.request(
                "GET" if body is None else "POST",
                self.base_url + path,
                content=body.model_dump_json() if body is not None else None,
                headers={"Content-Type": "application/json"} if body is not None else None,
                timeout=self._timeout(read_s),
            )

    def _timeout(self, read_s: float) -> httpx.Timeout:
        return httpx.Timeout(self.timeouts.gone_s, connect=self.timeouts.connect_s, read=read_s)

    @asynccontextmanager
    async def _errors(self, path: str, read_s: float) -> AsyncIterator[None]:
        """Raise DeadlineError or ServerUnreachableError instead of an error of httpx in the `with` block, which calls
        `path`."""
        try:
            yield
        # A `ConnectTimeout` is not listed here, because it means that the server is unreachable.
        except (httpx.ReadTimeout, httpx.WriteTimeout, httpx.PoolTimeout) as error:
            limits = f"read {read_s} s, write {self.timeouts.gone_s} s, pool {self.timeouts.gone_s} s"
            raise self._too_late(path, f"{type(error).__name__} ({limits})", "the deadline") from error
        except httpx.TransportError as error:
            raise self._gone(f"{type(error).__name__}: {error} at {path}", self.timeouts.connect_s) from error

    async def _while_alive(
        self,
        sending: Coroutine[object, None, httpx.Response],
        silent_s: float,
        *,
        deadline_s: float,
        late: Callable[[float], Awaitable[None]],
    ) -> httpx.Response:
        """Return the response of the call `sending`, and call `/health/` from time to time meanwhile. Raises
        ServerUnreachableError when `/health/` has been silent for `silent_s`. After `deadline_s` it calls `late` with
        the seconds since `/health/` last answered; `late` must raise an error."""
        task = asyncio.create_task(sending)
        looking: asyncio.Task[None] | None = None
        # At least two calls of /health/ must fit into the time after which the server counts as gone.
        poll_s = min(self.timeouts.poll_s, silent_s / 2)
        # This clock does not count the time in which this process is stopped, so such a pause does not look like a
        # silent server.
        begin = last_seen = awake_s()
        next_look = begin + poll_s
        try:
            while True:
                wait_s = max(0.0, min(poll_s / 5, begin + deadline_s - awake_s()))
                tasks = {task, looking} if looking else {task}
                await asyncio.wait(tasks, timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
                if task.done():
                    return task.result()
                if awake_s() >= begin + deadline_s:
                    await late(awake_s() - last_seen)
                if looking is None and awake_s() >= next_look:
                    looking = asyncio.create_task(self.health())
                elif looking is not None and (looking.done() or awake_s() >= last_seen + silent_s):
                    last_seen = self._seen(looking, last_seen, silent_s)
                    looking, next_look = None, awake_s() + poll_s
        finally:
            # The cancelled tasks are awaited: otherwise one of them might call `on_answer` after this function's end.
            ended = {task, looking} if looking else {task}
            for one in ended:
                one.cancel()
            await asyncio.wait(ended)

    def _seen(self, looking: asyncio.Task[None], last_seen: float, silent_s: float) -> float:
        """Return the time of the last answer of `/health/`: now if the call `looking` succeeded, `last_seen` if it
        failed. Raises ServerUnreachableError if the call has not ended, or if it failed and the last answer is more
        than `silent_s` ago."""
        if not looking.done():
            raise self._gone(f"silence at /health/ for {awake_s() - last_seen:.1f} s", silent_s)
        try:
            looking.result()
        except ProjectError as error:
            if awake_s() - last_seen > silent_s:
                raise self._gone(_last_seen_of(error), silent_s) from error
            return last_seen
        return awake_s()

    async def _late(self, answers: Answers, deadline_s: float, patience: Patience, health_age_s: float) -> None:
        """Raises the error of an `/infer/` call that has passed its deadline."""
        if patience.has_others:
            try:
                # A last short call of `/health/` tells a slow server from a dead one.
                async with time_limit(LAST_LOOK_S):
                    await self.health()
            except (ProjectError, TimeoutError) as error:  # the server is gone, not only slow
                said = _last_seen_of(error) if isinstance(error, ProjectError) else "silence"
                raise self._gone(f"{said} at /health/, which answered {health_age_s:.1f} s ago", LAST_LOOK_S) from error
        derived = "" if self.timeouts.infer_s else ", which follows from max_new_tokens and the server's pace"
        found = f"{answers.num_missing} of {answers.number} request(s), sent {deadline_s:.1f} s ago and waiting for "
        found += f"the reply; /health/ answered {health_age_s:.1f} s ago"
        remedy = f"look at the server's log; if it is only slow, set {SERVER}.infer_timeout_s higher"
        raise self._too_late("/infer/", found, f"{deadline_s:.1f} s{derived}", remedy)

    def _too_late(self, path: str, found: str, within: str, remedy: str = "") -> DeadlineError:
        remedy = remedy or f"look at the server's log, or raise {SERVER}.timeout_s"
        what = f"{self.base_url}: {path} did not answer in time"
        return DeadlineError(what, found=found, wanted=f"an answer within {within}", remedy=remedy)

    def _gone(self, found: str, limit_s: float) -> ServerUnreachableError:
        key = " (vllm.server.timeout_s)" if limit_s == self.timeouts.gone_s else ""
        return ServerUnreachableError(
            f"{self.base_url}: the rollout server does not answer",
            found=found,
            wanted=f"an answer within {limit_s:g} s{key}",
            remedy=f"start the server (make serve), or correct {SERVER}, {WAY_OUT}",
        )


def _last_seen_of(error: ProjectError) -> str:
    """Return what a failed call of `/health/` found, for the `found` of a ServerUnreachableError."""
    return error.found if isinstance(error, ServerUnreachableError) else str(error)
