"""The learner's end of one server's weight path: HTTP for control, a communicator for the bytes.

In: a client, the server's group port and world size. Out: futures; nothing here blocks. Invariants: the learner is the
group's last rank and the source of every broadcast; each future ends by its own deadline; every error that leaves this
module names the server. Called by `fleet.py`, from one thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Protocol, TypeVar

import torch

from learner.rollout.client import ServerClient
from learner.rollout.loop import LoopThread
from shared.communicator import Backend
from shared.errors import CommunicatorError, ProjectError
from shared.operation import Operation
from shared.wire import CloseCommunicatorCall, InitCommunicatorCall, UpdateWeightsCall, UpdateWeightsReply

T = TypeVar("T")


class Group(Protocol):
    """What the sync needs of a `shared.communicator.Communicator`."""

    def start_broadcast(self, tensor: torch.Tensor, src: int) -> Operation[None]: ...

    def abort(self) -> None: ...

    def close(self) -> None: ...


class Join(Protocol):
    """`shared.communicator.join`; tests bring their own."""

    def __call__(
        self,
        backend: Backend,
        host: str,
        port: int,
        rank: int,
        world_size: int,
        timeout_s: float,
        device: torch.device | str = ...,
    ) -> Group: ...


class ServerLink:
    """`world_size` is the server's: its workers are ranks 0..world_size-1, the learner is rank `world_size`."""

    def __init__(
        self,
        client: ServerClient,
        *,
        loop: LoopThread,
        group_port: int,
        world_size: int,
        device: torch.device,
        timeout_s: float,
        join: Join,
    ) -> None:
        self.base_url = client.base_url
        self.client = client
        self._loop, self._join = loop, join
        self._group_port, self._world_size = group_port, world_size
        self._device, self._timeout_s = device, timeout_s
        self._backend: Backend = "nccl" if device.type == "cuda" else "gloo"
        self._communicator: Group | None = None

    def post_init(self, incarnation: str) -> Future[None]:
        """Ask the server to open the group; done when all have joined, this side included."""
        call = InitCommunicatorCall(
            incarnation=incarnation, group_port=self._group_port, backend=self._backend, timeout_s=self._timeout_s
        )
        return self._loop.submit(self.client.init_communicator(call))

    def join(self) -> Future[Group]:
        """Join from this side; the result is only used once it was handed to `adopt`."""
        return in_thread(
            f"join {self.base_url}",
            lambda: self._named(
                lambda: self._join(
                    self._backend,
                    self.client.host,
                    self._group_port,
                    self._world_size,
                    self._world_size + 1,
                    self._timeout_s,
                    self._device,
                )
            ),
        )

    def adopt(self, communicator: Group) -> None:
        self._communicator = communicator

    def post_update(self, call: UpdateWeightsCall) -> Future[UpdateWeightsReply]:
        """Announce the buckets; done when the server serves and has checked them."""
        return self._loop.submit(self.client.update_weights(call))

    def broadcast(self, bucket: torch.Tensor) -> Future[None]:
        """Send one packed bucket to all workers of the server, after those that were given before."""
        operation = self._named(lambda: self._joined().start_broadcast(bucket, self._world_size))
        return in_thread(f"broadcast {self.base_url}", lambda: self._named(operation.result))

    def post_close(self, incarnation: str) -> Future[None]:
        """Tell the server that this learner leaves the group."""
        return self._loop.submit(self.client.close_communicator(CloseCommunicatorCall(incarnation=incarnation)))

    def leave(self, *, abort: bool) -> None:
        """Drop the group; `abort` breaks off what is pending. Harmless when there is none."""
        communicator, self._communicator = self._communicator, None
        if communicator is not None:
            if abort:
                communicator.abort()
            else:
                communicator.close()

    def _joined(self) -> Group:
        if self._communicator is None:
            raise CommunicatorError(
                "the group was left", found="a broadcast", wanted="a joined group", remedy="connect() first"
            )
        return self._communicator

    def _named(self, work: Callable[[], T]) -> T:
        try:
            return work()
        except ProjectError as error:
            what = f"{self.base_url}: {error.what}"
            raise type(error)(what, found=error.found, wanted=error.wanted, remedy=error.remedy) from error


def in_thread(name: str, work: Callable[[], T]) -> Future[T]:
    """Run `work` in a daemon thread: unlike an executor's, it can't keep a failing program from ending."""
    future: Future[T] = Future()

    def run() -> None:
        future.set_running_or_notify_cancel()
        try:
            future.set_result(work())
        except BaseException as error:  # handed to whoever waits for the future
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future
