"""The learner's end of one server's control path: the sync's HTTP calls.

In: a client, the server's group port and number of workers. Out: futures; nothing here blocks. Invariants: each future
ends by its own deadline; every error that leaves this module names the server. The bytes go another way, by `group.py`.
Called by `fleet.py`, `group.py` and the doctor, from one thread.
"""

from __future__ import annotations

from concurrent.futures import Future

from learner.rollout.client import ServerClient
from learner.rollout.loop import LoopThread
from shared.communicator import Backend
from shared.wire import CloseCommunicatorCall, InitCommunicatorCall, UpdateWeightsCall, UpdateWeightsReply


class ServerLink:
    """`world_size`: the server's workers. `group_port`: its own; a group meets at that of its first server."""

    def __init__(self, client: ServerClient, *, loop: LoopThread, group_port: int, world_size: int) -> None:
        self.base_url, self.host = client.base_url, client.host
        self.group_port, self.world_size = group_port, world_size
        self._client, self._loop = client, loop

    def post_init(
        self, incarnation: str, *, backend: Backend, port: int, first_rank: int, world_size: int, timeout_s: float
    ) -> Future[None]:
        """Ask the server to take ranks `first_rank`.. of the group of `world_size` that meets at `port` of its host;
        done when all have joined, this side included."""
        call = InitCommunicatorCall(
            incarnation=incarnation,
            group_port=port,
            first_rank=first_rank,
            world_size=world_size,
            backend=backend,
            timeout_s=timeout_s,
        )
        return self._loop.submit(self._client.init_communicator(call))

    def post_update(self, call: UpdateWeightsCall) -> Future[UpdateWeightsReply]:
        """Announce the buckets; done when the server serves and has checked them."""
        return self._loop.submit(self._client.update_weights(call))

    def post_close(self, incarnation: str) -> Future[None]:
        """Tell the server that this learner leaves the group."""
        return self._loop.submit(self._client.close_communicator(CloseCommunicatorCall(incarnation=incarnation)))
