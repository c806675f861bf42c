"""What the wire alone does: a broadcast of packed buckets from the first GPU to the second, nothing else.

In: bytes and a bucket size. Out: gigabytes per second, one number per pass, through the product's own communicator. The
receiver is a process of its own. What the whole sync keeps of it is told beside it. Called by `sync.py`.
"""

from __future__ import annotations

import multiprocessing
import time
from multiprocessing.connection import Connection

import torch

from shared.addresses import free_port
from shared.sync.group import Communicator, start_join

_TIMEOUT_S = 120.0


def raw_rates(num_bytes: int, bucket_bytes: int, *, passes: int = 6) -> list[float]:
    """GB/s of each pass after the first, which warms up."""
    port = free_port()
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    num_buckets = -(-num_bytes // bucket_bytes)
    peer = context.Process(target=_receive, args=(port, num_buckets, bucket_bytes, passes, there), daemon=True)
    peer.start()
    group = start_join("nccl", "127.0.0.1", port, 1, 2, _TIMEOUT_S, "cuda:0", group="raw").result()
    seconds = []
    for _ in range(passes):
        assert here.recv() == "ready"
        begin = time.perf_counter()
        _pass(group, num_buckets, bucket_bytes)
        seconds.append(time.perf_counter() - begin)
    group.close()
    peer.join(_TIMEOUT_S)
    return [num_buckets * bucket_bytes / s / 1e9 for s in seconds[1:]]


def _receive(port: int, num_buckets: int, bucket_bytes: int, passes: int, parent: Connection) -> None:
    group = start_join("nccl", "127.0.0.1", port, 0, 2, _TIMEOUT_S, "cuda:1", group="raw").result()
    for _ in range(passes):
        parent.send("ready")
        _pass(group, num_buckets, bucket_bytes)
    group.close()


def _pass(group: Communicator, num_buckets: int, bucket_bytes: int) -> None:
    buffers = [torch.empty(bucket_bytes, dtype=torch.uint8, device=group.device) for _ in range(3)]
    sent = [group.start_broadcast(buffers[i % len(buffers)], src=1) for i in range(num_buckets)]
    for operation in sent:
        operation.result()
