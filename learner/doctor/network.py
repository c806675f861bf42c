"""Checks of what lies between the two programs on this machine: devices, ports, and a broadcast."""

from __future__ import annotations

import socket
from typing import Any

import httpx
import torch

from learner.config.rules import uses_servers
from learner.doctor.finding import Finding, Situation, fail, failed, ok, skipped, warn
from learner.rollout.client import is_loopback
from learner.sync.waiting import in_thread
from shared import communicator
from shared.config_io import load_yaml
from shared.errors import ProjectError
from shared.ports import free_port

BROADCAST_BYTES = 1 << 20
BROADCAST_TIMEOUT_S = 10.0


def devices(situation: Situation) -> Finding:
    """Servers and learner of a launch file on devices of their own."""
    if situation.launch_path is None:
        return skipped("which devices servers and learner get is in launch.yaml: give it by --launch")
    try:
        launch = load_yaml(situation.launch_path)
    except ProjectError as error:
        return failed(error)
    owners: dict[Any, str] = {}
    for owner, section in _sections(launch):
        for device in section.get("devices") or []:
            if device in owners:
                return fail(f"device {device}: {owners[device]} and {owner}", f"give {owner} other devices")
            owners[device] = owner
    return ok(f"{len(owners)} devices, each in one process" if owners else "no devices named: everything on CPU")


def group_ports(situation: Situation) -> Finding:
    """The servers listen there when a learner joins; only those of this machine can be tried."""
    if not uses_servers(situation.config):
        return skipped("the run uses no servers")
    mine = [entry for entry in situation.plan.servers if is_loopback(httpx.URL(entry.base_url).host)]
    if not mine:
        return skipped("all servers are on other machines")
    taken = [entry.group_port for entry in mine if not _is_free(entry.group_port)]
    if taken:
        remedy = "end the learner that uses the servers, or change group_port"
        return warn(f"in use: {', '.join(map(str, taken))}", remedy)
    return ok(f"free: {', '.join(str(entry.group_port) for entry in mine)}")


def local_broadcast(situation: Situation) -> Finding:
    """1 MB from one thread to another through the communicator that carries weights on CPU."""
    port = free_port()
    sent = torch.arange(BROADCAST_BYTES, dtype=torch.int64).to(torch.uint8)
    received = torch.zeros_like(sent)

    def take_part(rank: int, tensor: torch.Tensor) -> None:
        group = communicator.join("gloo", "127.0.0.1", port, rank, 2, BROADCAST_TIMEOUT_S, group="doctor")
        try:
            group.broadcast(tensor, 1)
        finally:
            group.close()

    parts = [in_thread(f"broadcast {rank}", _part(take_part, rank, t)) for rank, t in enumerate((received, sent))]
    try:
        for part in parts:
            part.result(3 * BROADCAST_TIMEOUT_S)
    except (ProjectError, TimeoutError) as error:
        remedy = "see whether a firewall or GLOO_SOCKET_IFNAME keeps 127.0.0.1 from itself"
        return fail(f"gloo: {error or 'no end in time'}", remedy)
    if not torch.equal(sent, received):
        return fail("gloo delivered other bytes", "reinstall torch: make setup")
    return ok("1 MB through gloo, every byte right")


def _part(work: Any, rank: int, tensor: torch.Tensor) -> Any:
    return lambda: work(rank, tensor)


def _sections(launch: Any) -> list[tuple[str, dict[str, Any]]]:
    servers = launch.get("servers") or []
    return [*((f"servers[{i}]", server) for i, server in enumerate(servers)), ("learner", launch.get("learner") or {})]


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
