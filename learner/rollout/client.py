"""The async HTTP client of ONE rollout server.

In: bodies of `shared/wire.py`. Out: their replies, or an error of the project's tree that names the server. Invariants:
- every wait has a deadline; `/infer/` may run as long as it likes only while the server's `/health/` keeps answering;
- a call is sent again only on a 503 that says "busy" (it was not executed), and never `/update_weights/` or
  `/init_communicator/`; repeating a lost `/infer/` is the caller's choice, its uuids make that safe;
- the server's own error text reaches the caller.
Lives on one event loop. Called by `server.py` and `learner/sync/`.

What a rollout server's HTTP answer means: a typed reply, or an error of the project's tree that names the server.

Pure. Called by `client.py`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import urlsplit

import httpx
from pydantic import BaseModel, TypeAdapter, ValidationError

from shared.addresses import is_loopback
from shared.errors import (
    DeadlineError,
    ProjectError,
    RolloutError,
    ServerBusyError,
    ServerError,
    ServerMismatchError,
    ServerUnreachableError,
    UnauthorizedError,
)
from shared.wire import (
    TOKEN_VARIABLE,
    CloseCommunicatorCall,
    ErrorBody,
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


def read_reply(response: httpx.Response, adapter: TypeAdapter[T], base_url: str) -> T:
    """The body as its wire model. Raises RolloutError with the server and the first wrong field."""
    try:
        return adapter.validate_json(response.content)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join(str(part) for part in first["loc"]) or "the body"
        raise RolloutError(
            f"{base_url}: malformed answer at {response.url.path}",
            found=f"{field}: {first['input']!r:.200}",
            wanted=first["msg"],
            remedy="run the same version of this project on both sides, and look at the server's log",
        ) from error


def error_of(response: httpx.Response, base_url: str) -> ProjectError:
    """The server's own error, with its URL put in front; by HTTP status where the body is not an `ErrorBody`."""
    try:
        error = ErrorBody.model_validate_json(response.content).to_exception()
    except ValidationError:
        return _error_by_status(response, base_url)
    return type(error)(f"{base_url}: {error.what}", found=error.found, wanted=error.wanted, remedy=error.remedy)


def retry_after_s(response: httpx.Response) -> float:
    """Seconds that the server asks to wait (`Retry-After`); one second where it does not say it in seconds."""
    try:
        return max(0.01, float(response.headers.get("Retry-After", "1")))
    except ValueError:
        return 1.0


def _error_by_status(response: httpx.Response, base_url: str) -> ProjectError:
    status = response.status_code
    cls: type[ProjectError] = ServerError if status >= 500 else ServerMismatchError
    remedy = "check that base_url is the prefix of a rollout server (make serve) of the same version"
    if status == 401:
        cls, remedy = UnauthorizedError, f"set {TOKEN_VARIABLE} to the server's token"
    elif status == 503:
        cls, remedy = ServerBusyError, "look at the server's log"
    return cls(
        f"{base_url}: {response.request.method} {response.url.path} failed",
        found=f"HTTP {status}: {response.text[:200]!r}",
        wanted="a 2xx answer",
        remedy=remedy,
    )


log = logging.getLogger("learner.rollout")

HEALTH_TIMEOUT_S = 5.0  # one look at /health/
REPLY_GRACE_S = 10.0  # beyond a deadline that the server itself keeps, so that its own error arrives first
# Below uvicorn's 5 s: an idle connection is dropped here before the server closes it under a new request.
KEEPALIVE_S = 2.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Timeouts:
    """Seconds. `infer_s` None: `/infer/` may take any time while the server is alive; it is gone after `gone_s`."""

    connect_s: float
    read_s: float
    write_s: float
    pool_s: float
    infer_s: float | None
    gone_s: float
    poll_s: float = 5.0  # between two looks at /health/

    @classmethod
    def of(cls, timeout_s: float, infer_timeout_s: float | None) -> Timeouts:
        """From the two numbers of the configuration (R05)."""
        return cls(
            connect_s=min(10.0, timeout_s),
            read_s=timeout_s,
            write_s=timeout_s,
            pool_s=timeout_s,
            infer_s=infer_timeout_s if infer_timeout_s is not None and infer_timeout_s > 0 else None,
            gone_s=timeout_s,
            poll_s=min(5.0, timeout_s / 4),
        )


class ServerClient:
    """`base_url` is a URL prefix (R06); `token` is the bearer token, if the server wants one."""

    def __init__(self, base_url: str, *, timeouts: Timeouts, token: str | None = None) -> None:
        self.base_url = base_url.rstrip("/")
        self.host = urlsplit(self.base_url).hostname or ""
        self.timeouts = timeouts
        self._http = httpx.AsyncClient(
            headers={"Authorization": f"Bearer {token}"} if token else {},
            limits=httpx.Limits(max_connections=64, keepalive_expiry=KEEPALIVE_S),
            # A proxy named in the environment must not catch calls to this machine.
            trust_env=not is_loopback(self.host),
        )

    async def health(self) -> None:
        """One look at `/health/`; raises where it does not answer 200."""
        response = await self._send("GET", "/health/", read_s=min(HEALTH_TIMEOUT_S, self.timeouts.read_s))
        if not response.is_success:
            raise error_of(response, self.base_url)

    async def wait_healthy(self) -> None:
        """Poll `/health/` for at most `gone_s`. Raises ServerUnreachableError; at once where the answer is final
        (4xx)."""
        deadline = _now() + self.timeouts.gone_s
        while True:
            try:
                return await self.health()
            except ProjectError as error:
                if not isinstance(error, ServerUnreachableError | DeadlineError) and error.http_status < 500:
                    raise
                if _now() >= deadline:
                    raise self._gone(_last_seen_of(error)) from error
            await asyncio.sleep(min(self.timeouts.poll_s, max(0.01, deadline - _now())))

    async def status(self) -> ServerStatus:
        return await self._get("/status/", ServerStatus)

    async def world_size(self) -> int:
        """Tensor-parallel size x data-parallel size."""
        return (await self._get("/get_world_size/", WorldSizeReply)).world_size

    async def infer(self, call: InferCall) -> list[RolloutOutput]:
        """The answers as they came; the caller checks count, order and version.

        Raises DeadlineError after `infer_s`, ServerUnreachableError where the server is gone for `gone_s`, ServerError
        where the connection broke and the server lives, RolloutError where the answer is malformed.
        """
        response = await self._while_alive(self._send_infer(call))
        return read_reply(response, TypeAdapter(list[RolloutOutput]), self.base_url)

    async def _send_infer(self, call: InferCall) -> httpx.Response:
        try:
            return await self._send_patiently("/infer/", call, read_s=self.timeouts.infer_s)
        except ServerUnreachableError as error:
            await self.wait_healthy()
            raise ServerError(
                f"{self.base_url}: the connection broke during /infer/, the server is alive",
                found=error.found,
                wanted="an answer",
                remedy="the requests can be sent again",
            ) from error

    async def score(self, call: ScoreCall) -> ScoreReply:
        response = await self._send_patiently("/score/", call, read_s=self.timeouts.read_s)
        return read_reply(response, TypeAdapter(ScoreReply), self.base_url)

    async def init_communicator(self, call: InitCommunicatorCall) -> None:
        """Returns when the server's workers and the learner have joined the group."""
        await self._send_once("/init_communicator/", call, read_s=call.timeout_s + REPLY_GRACE_S)

    async def update_weights(self, call: UpdateWeightsCall) -> UpdateWeightsReply:
        """Stays open while the buckets are broadcast; returns when the server has checked what it serves."""
        response = await self._send_once("/update_weights/", call, read_s=call.timeout_s + REPLY_GRACE_S)
        return read_reply(response, TypeAdapter(UpdateWeightsReply), self.base_url)

    async def close_communicator(self, call: CloseCommunicatorCall) -> None:
        await self._send_once("/close_communicator/", call, read_s=self.timeouts.read_s)

    async def aclose(self) -> None:
        await self._http.aclose()

    async def _get(self, path: str, reply: type[T]) -> T:
        response = await self._send("GET", path, read_s=self.timeouts.read_s)
        if not response.is_success:
            raise error_of(response, self.base_url)
        return read_reply(response, TypeAdapter(reply), self.base_url)

    async def _send_once(self, path: str, body: BaseModel | None, *, read_s: float | None) -> httpx.Response:
        response = await self._send("POST", path, body, read_s=read_s)
        if not response.is_success:
            raise error_of(response, self.base_url)
        return response

    async def _send_patiently(self, path: str, body: BaseModel | None, *, read_s: float | None) -> httpx.Response:
        deadline = _now() + self.timeouts.gone_s
        while True:
            response = await self._send("POST", path, body, read_s=read_s)
            if response.is_success:
                return response
            error = error_of(response, self.base_url)
            if not isinstance(error, ServerBusyError) or _now() >= deadline:
                raise error
            wait_s = min(retry_after_s(response), max(0.0, deadline - _now()))
            log.info("%s is busy, %s again in %.1f s: %s", self.base_url, path, wait_s, error.what)
            await asyncio.sleep(wait_s)

    async def _send(
        self, method: str, path: str, body: BaseModel | None = None, *, read_s: float | None
    ) -> httpx.Response:
        """One exchange, whatever its status. Raises DeadlineError or ServerUnreachableError."""
        t = self.timeouts
        try:
            return await self._http.request(
                method,
                self.base_url + path,
                content=body.model_dump_json() if body is not None else None,
                headers={"Content-Type": "application/json"} if body is not None else None,
                timeout=httpx.Timeout(connect=t.connect_s, read=read_s, write=t.write_s, pool=t.pool_s),
            )
        except (httpx.ReadTimeout, httpx.WriteTimeout, httpx.PoolTimeout) as error:
            raise DeadlineError(
                f"{self.base_url}: {path} did not answer in time",
                found=f"{type(error).__name__} (read {read_s} s, write {t.write_s} s, pool {t.pool_s} s)",
                wanted="an answer within the deadline",
                remedy="raise custom.extra.rollout_matching.vllm.server.infer_timeout_s (or timeout_s), or look at the "
                "server's log",
            ) from error
        except httpx.TransportError as error:
            raise self._gone(f"{type(error).__name__}: {error} at {path}") from error

    async def _while_alive(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`; gives it up when `/health/` has been silent for `gone_s`."""
        task = asyncio.create_task(work)
        last_seen = _now()
        try:
            while True:
                done, _ = await asyncio.wait({task}, timeout=self.timeouts.poll_s)
                if done:
                    return task.result()
                try:
                    await self.health()
                    last_seen = _now()
                except ProjectError as error:
                    if _now() - last_seen > self.timeouts.gone_s:
                        raise self._gone(_last_seen_of(error)) from error
        finally:
            task.cancel()
            await asyncio.wait({task})

    def _gone(self, found: str) -> ServerUnreachableError:
        return ServerUnreachableError(
            f"{self.base_url}: the rollout server does not answer",
            found=found,
            wanted=f"an answer within {self.timeouts.gone_s:g} s (vllm.server.timeout_s)",
            remedy="start it (make serve) or correct custom.extra.rollout_matching.vllm.server; to train without a "
            "server set vllm.mode: colocate or rollout_backend: hf",
        )


def _last_seen_of(error: ProjectError) -> str:
    """What a look at the server found, without saying twice that it does not answer."""
    return error.found if isinstance(error, ServerUnreachableError) else str(error)


def _now() -> float:
    return asyncio.get_running_loop().time()
