"""Reads a launch file into a `Plan`, from which every place writes its files.

The configurations of the servers and the learner become self-contained: bases are merged, and variables are filled in.
Only secrets (`${NAME}` whose name contains TOKEN, KEY, SECRET or PASSWORD) are not filled in, because the place (Slurm,
Kubernetes, ...) provides them. Paths stay as they are: every place starts both programs in a folder that has `data/`
and `runs/`. `Plan.paths` lists the paths.

Raises ConfigErrors. This machine may be a laptop without the data, so paths are not checked. A model `a/b` is a path if
this machine has such a file or folder, else a name on the Hugging Face hub.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from deploy.launch_file import IMAGE, NO_IMAGE, ClusterLaunch, LaunchConfig, rank_devices
from learner.config.load import config_of
from learner.config.modes import uses_servers
from learner.config.sections.servers import SERVER
from rollout_server.config import ServerConfig
from shared.config.kinds import for_program
from shared.config.model import ConfigErrors, Hidden, Mistake, without_secrets
from shared.config.parse import Document, dump_yaml, load_yaml, parse
from shared.config.yaml import merge
from shared.tokens import TOKEN_VARIABLE

GROUP_PORT = 51216  # port of the servers' broadcast groups (weight syncs)
RENDEZVOUS_PORT = 29400  # port where the torchruns of several machines meet
SHARED = ("data/", "runs/")  # folders that every place provides
SYSTEM_PORTS = (32768, 60999)  # range from which Linux chooses ports for NCCL and gloo
HEADER = "# Written by `rollout-launch --to {place}` from {source}. Do not edit: change that file and write it again.\n"
_VARIABLE = re.compile(r"\$\{(\w+)\}")
_HUB = re.compile(r"[\w.-]+(/[\w.-]+)?")
_PART = re.compile(r"\[[\d:%]*\]$")
# Keys of both programs whose values are paths: WRITTEN if a run writes to the path, READ if a run only reads it. A test
# checks that no such key is missing.
WRITTEN = frozenset({"output_dir", "write", "log_dir"})
READ = frozenset(
    {"path", "train", "val", "test", "image_root", "annotation_root", "resume_from_checkpoint", "discovery", "model"}
    | {"allowed_image_roots"}
)


@dataclass(frozen=True, kw_only=True)
class ServerPlan:
    """One entry of `servers`, which stands for `count` equal servers. `values` is their configuration as plain data,
    `config` the same configuration as a model."""

    values: Mapping[str, Any]
    config: ServerConfig
    count: int
    max_restarts: int
    devices: tuple[int, ...]

    @property
    def num_devices(self) -> int:
        return self.config.world_size

    def file(self, address: str, port: int) -> str:
        """Return the server's YAML. The server listens on every interface; learners join it for syncs at `address`."""
        address = Hidden(address)  # `Hidden` keeps `${NAME}` as it is written
        return dump_yaml({**self.values, "host": "0.0.0.0", "port": port, "communicator_host": address})


@dataclass(frozen=True, kw_only=True)
class NamedPath:
    """A path that the configuration `file` names at its key `key`. `written`: the run writes there. `of_server`: True
    if `file` is the configuration of a server."""

    key: str
    file: str
    path: PurePosixPath
    written: bool
    of_server: bool

    @property
    def is_model(self) -> bool:
        return self.key in {"model", "model.path"}

    @property
    def is_on_hub(self) -> bool:
        """Return True if the path could be a name on the Hugging Face hub, and this machine has no such file or
        folder."""
        is_name = _HUB.fullmatch(str(self.path)) is not None and not str(self.path).startswith(SHARED)
        return is_name and not self.written and not Path(self.path).exists()

    def mistake(self, wanted: str, remedy: str) -> Mistake:
        return Mistake(path=self.key, found=str(self.path), wanted=wanted, remedy=remedy, at=self.file)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One run. `source` is the launch file's path, `learner` the values of the learner's configuration, `secrets` the
    names of the environment variables that hold secrets."""

    source: str
    launch: LaunchConfig
    servers: tuple[ServerPlan, ...]
    learner: Mapping[str, Any]
    secrets: tuple[str, ...]
    paths: tuple[NamedPath, ...]

    @property
    def cluster(self) -> ClusterLaunch:
        return self.launch.cluster

    @property
    def num_servers(self) -> int:
        return sum(server.count for server in self.servers)

    @property
    def each_server(self) -> list[ServerPlan]:
        return [server for server in self.servers for _ in range(server.count)]

    @property
    def num_ranks(self) -> int:
        return self.launch.learner.nodes * self.launch.learner.nproc

    def learner_values(self, urls: Sequence[str], discovery: list[str] | None = None) -> dict[str, Any]:
        """Return the values of the learner's configuration, with `urls` as its servers, and with `discovery` (a command
        that lists servers) if it is given."""
        servers = [{"base_url": Hidden(url), "group_port": GROUP_PORT} for url in urls]
        over: dict[str, Any] = {"servers": servers, "base_url": None, "group_port": None}
        if discovery is not None:
            over["discovery"] = discovery
        for name in reversed(SERVER.split(".")):
            over = {name: over}
        return merge(dict(self.learner), over)

    def learner_file(self, urls: Sequence[str], discovery: list[str] | None = None) -> str:
        return dump_yaml(self.learner_values(urls, discovery))

    def header(self, place: str) -> str:
        """Return the comment line that begins each file. A line break in `source` is escaped."""
        # A line break in the name would begin a second line, which a shell would run.
        source = self.source if self.source.isprintable() else json.dumps(self.source)
        return HEADER.format(place=place, source=source)


def read_plan(path: str, overrides: Sequence[str] = ()) -> Plan:
    """Read the run that a launch file describes. Raises ConfigErrors."""
    whole = for_program(load_yaml(path, overrides=overrides), "launcher")
    launch = parse(LaunchConfig, whole, rules=(rank_devices, nothing_elsewhere))
    servers, secrets = [], {TOKEN_VARIABLE}
    paths: list[NamedPath] = []
    for entry in launch.servers:
        document = for_program(load_yaml(entry.config), "server")
        secrets |= _secrets(document)
        paths += paths_in(document, entry.config, of_server=True)
        servers.append(
            ServerPlan(
                values=without_secrets(dict(document), document.secrets),
                config=parse(ServerConfig, document),
                count=entry.count,
                max_restarts=entry.max_restarts,
                devices=tuple(entry.devices),
            )
        )
    document = for_program(load_yaml(launch.learner.config), "learner")
    plan = Plan(
        source=path,
        launch=launch,
        servers=tuple(servers),
        learner=without_secrets(dict(document), document.secrets),
        secrets=tuple(sorted(secrets | _secrets(document))),
        paths=(*paths, *paths_in(document, launch.learner.config, of_server=False)),
    )
    _check_learner(plan, document)
    return plan


def nothing_elsewhere(config: LaunchConfig) -> Iterator[Mistake]:
    """Yield a mistake for each `via` (command that runs a program elsewhere): with `--to`, the place decides where
    programs run."""
    for owner, entry in config.parts.items():
        if entry.via:
            remedy = "remove it, or launch without --to"
            yield Mistake(path=f"{owner}.via", found=f"{entry.via}", wanted="none with --to", remedy=remedy)


def paths_in(
    values: object, file: str, *, of_server: bool, key: str = "", annotations: str = ""
) -> Iterator[NamedPath]:
    """Yield the paths that a configuration names. A `:split` or a `[part]` after a path is left out. `annotations`: the
    format of the data; data of the format `datasets` may be on the Hugging Face hub, and then yields no path."""
    name = key.rpartition(".")[2].partition("[")[0]
    if isinstance(values, Mapping):
        annotations = values.get("format") or annotations
        for inner, value in values.items():
            inner = f"{key}.{inner}".lstrip(".")
            yield from paths_in(value, file, of_server=of_server, key=inner, annotations=annotations)
    # The value of `discovery` is a command, whose parts are not collected as paths.
    elif isinstance(values, list) and name != "discovery":
        for i, value in enumerate(values):
            yield from paths_in(value, file, of_server=of_server, key=f"{key}[{i}]", annotations=annotations)
    elif isinstance(values, str) and name in READ | WRITTEN and values != "latest":
        path = _PART.sub("", values)
        if ":" in path and not Path(path).exists():
            path = path.rpartition(":")[0]
        named = NamedPath(key=key, file=file, path=PurePosixPath(path), written=name in WRITTEN, of_server=of_server)
        if path.startswith(".") or not ((named.is_model or annotations == "datasets") and named.is_on_hub):
            yield named


def _check_learner(plan: Plan, document: Document) -> None:
    """Raises ConfigErrors if the learner's file has mistakes, by itself or with the list of all servers of the
    launch."""
    config_of(document, world_size=plan.num_ranks)
    urls = [f"http://server-{i}:8000" for i in range(plan.num_servers)]
    learner = config_of(plan.learner_values(urls), world_size=plan.num_ranks)
    if not uses_servers(learner):
        remedy = "change it, or start this learner with torchrun alone"
        raise ConfigErrors.one("learner.config", "a run without rollout servers", "vllm.mode: server", remedy)


def _secrets(document: Document) -> set[str]:
    return {name for written in document.secrets.values() for name in _VARIABLE.findall(written)}


def image_mistakes(cluster: ClusterLaunch) -> Iterator[Mistake]:
    """Yield a mistake for each image that is not named by a digest."""
    for key in ("server_image", "learner_image"):
        image = getattr(cluster, key)
        # A tag may name another image later.
        if not re.fullmatch(IMAGE, image):
            found = "the placeholder" if image == NO_IMAGE else image
            remedy = "build and push it (deploy/docker/Dockerfile); `docker push` prints the digest"
            yield Mistake(path=f"cluster.{key}", found=found, wanted="NAME@sha256:<64 digits>", remedy=remedy)
