"""Helpers that the tests of `deploy/` share: its files, the configurations in them, and the endpoints that probes
ask."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import yaml

from learner.config.load import load_config
from learner.config.schema import RunConfig
from rollout_server.app import create_app
from rollout_server.config import ServerConfig, load_server_config
from rollout_server.service import RolloutService
from tests.unit.rollout_server.fakes import FakeEngine

ROOT = Path(__file__).parents[3]
DEPLOY = ROOT / "deploy"
WORKDIR = "/app"  # the images' folder of the repository, where relative paths begin


def documents(path: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(path.read_text()))


def server_config(text: str, folder: Path, name: str = "server.yaml") -> ServerConfig:
    """Return a server's configuration as the image would read it. The working directory must have the data."""
    return load_server_config(_as_in_image(text, folder / name), has_token=True)


def learner_config(text: str, folder: Path, *, world_size: int) -> RunConfig:
    """Return a learner's configuration as the image would read it."""
    return load_config(_as_in_image(text, folder / "learner.yaml"), world_size=world_size)


def _as_in_image(text: str, path: Path) -> Path:
    path.write_text(text.replace(f"{WORKDIR}/deploy/", f"{DEPLOY}/"))
    return path


def probe(path: str) -> int:
    """Return the status of a ready server's answer to a probe, which brings no token."""
    app = create_app(RolloutService(FakeEngine(), ServerConfig(model="fake")), "token")

    async def ask() -> int:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server") as http:
            return (await http.get(path)).status_code

    return asyncio.run(ask())


def server_urls(config: RunConfig) -> list[httpx.URL]:
    return [httpx.URL(entry.base_url) for entry in config.rollout_matching.vllm.server.servers or ()]


def group_ports(config: RunConfig) -> set[int]:
    return {entry.group_port for entry in config.rollout_matching.vllm.server.servers or ()}


def at(document: Any, *path: Any) -> Any:
    """Return what lies below keys and indices."""
    for step in path:
        document = document[step]
    return document


def named(items: list[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    return {item["name"]: item for item in items}
