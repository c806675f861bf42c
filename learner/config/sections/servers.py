"""The section `vllm.server` of the rollouts: where the rollout servers are.

A configuration names servers in one of two forms (R05): the list `servers`, or `base_url` together with `group_port`.
`paired_servers` returns a list of servers for either form.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Literal
from urllib.parse import urlsplit

from pydantic import Field

from learner.config.modes import ROLLOUT, Rule, uses_servers
from shared.config.model import Mistake, Section, key, show
from shared.masking import bare_url
from shared.tokens import TOKEN_VARIABLE

if TYPE_CHECKING:
    from learner.config.schema import RunConfig

Port = Annotated[int, Field(ge=1, le=65535)]
AtLeastOne = Annotated[int, Field(ge=1)]
FileOrCommand = Annotated[str, Field(min_length=1)] | Annotated[list[str], Field(min_length=1)]
SERVER = f"{ROLLOUT}.vllm.server"
WAY_OUT = (
    "or switch to custom.extra.rollout_matching.vllm.mode: colocate "
    "or custom.extra.rollout_matching.rollout_backend: hf"
)
MAX_PORT = 65535


class ServerEntry(Section):
    """One rollout server."""

    base_url: str = key(
        "URL prefix of the server's endpoints, such as `http://127.0.0.1:8000`", req="R05 R06", min_length=1
    )
    group_port: int = key(
        "TCP port of the weight sync on that server's host; servers of one machine use the port of the first one",
        req="R05",
        ge=1,
        le=65535,
    )


class ServerClientConfig(Section):
    """The rollout servers: either `servers`, or `base_url` with `group_port`. Loading turns the second form into the
    first."""

    servers: list[ServerEntry] | None = key("rollout servers, in order", None, req="R05")
    base_url: str | list[str] | None = key("paired form: one URL prefix, or several", None, req="R05")
    group_port: Port | list[Port] | None = key(
        "paired form: one port (server i gets port + i), or one port per URL", None, req="R05"
    )
    allow_shared_gpu: bool = key(
        "let a server and the learner be on one GPU. Weights then travel through sockets, at a few GB/s",
        False,
        req="R05",
    )
    # R05 gives this default.
    timeout_s: float = key(
        "deadline of reachability checks, of joining the weight sync, and of a weight update",
        240.0,
        unit="s",
        req="R05",
        gt=0.0,
    )
    infer_timeout_s: float | None = key(
        "deadline of one `/infer/` call, which also holds while `/health/` answers; a call that exceeds it counts as "
        "failed. null or <= 0: derived from `max_new_tokens` and the server's measured pace, at most 600 s",
        None,
        unit="s",
        req="R05 R30 D16",
    )
    # D15 gives this default.
    min_servers: AtLeastOne | Literal["all"] = key(
        "servers that must serve. A server that fails while the run goes on is left out: the others take its requests, "
        "with the same seeds, and it comes back after a full sync once it is ready. With fewer servers than this the "
        "run saves a checkpoint and ends; `all`: it ends with the first server that fails. At the start every server "
        "must answer",
        1,
        unit="servers",
        req="D15 R40",
    )
    discovery: FileOrCommand | None = key(
        "a list of servers that is read while the run goes on, one a line: URL and, if it differs, group port. A "
        "server that appears in it joins, one that disappears from it is removed. A file's path, or a program and its "
        "arguments, whose output is the list; no shell is used. null: none",
        None,
        req="R40",
    )


def paired_servers(server: ServerClientConfig) -> list[ServerEntry]:
    """Return the servers of a section without mistakes, in either form. If several URLs have a single port, server i
    gets that port + i. Slashes at the end of a URL are removed."""
    if server.servers is not None:
        pairs = [(entry.base_url, entry.group_port) for entry in server.servers]
    else:
        urls, ports = _paired_lists(server)
        pairs = list(zip(urls, ports, strict=True))
    return [ServerEntry(base_url=url.rstrip("/"), group_port=port) for url, port in pairs]


def entry_mistakes(base_url: str, group_port: int | None) -> list[Mistake]:
    """Return the mistakes in the URL and the port (None: no port is given) of a server that is named outside of a
    configuration, on the command line or in a list."""
    found = _url_mistake(base_url, "URL")
    mistakes = [found] if found else []
    if group_port is not None and not 1 <= group_port <= MAX_PORT:
        wanted = f"a port from 1 to {MAX_PORT}"
        remedy = str(ServerEntry.model_fields["group_port"].description)
        mistakes.append(Mistake(path="--group-port", found=show(group_port), wanted=wanted, remedy=remedy))
    return mistakes


def server_mistakes(server: ServerClientConfig) -> Iterator[Mistake]:
    """Yield the mistakes in the section of a run that uses servers: no form or both forms, URLs without ports, ports
    without URLs, lists of different lengths, wrong URLs, ports that clash (R05, R16)."""
    form = list(_form_mistakes(server))
    yield from form
    if form:
        return
    if server.servers is not None:
        places = [f"{SERVER}.servers[{i}]" for i in range(len(server.servers))]
        urls, ports = [entry.base_url for entry in server.servers], [entry.group_port for entry in server.servers]
        url_at = [f"{place}.base_url" for place in places]
        port_at = [f"{place}.group_port" for place in places]
    else:
        urls, ports = _paired_lists(server)
        url_at = _places(f"{SERVER}.base_url", server.base_url)
        one_port = isinstance(server.group_port, int)
        port_at = (
            [f"{SERVER}.group_port"] * len(urls) if one_port else _places(f"{SERVER}.group_port", server.group_port)
        )
    if isinstance(server.min_servers, int) and server.min_servers > len(urls):
        remedy = "lower it, or name more servers"
        yield Mistake(
            path=f"{SERVER}.min_servers", found=show(server.min_servers), wanted=f"at most {len(urls)}", remedy=remedy
        )
    bad_urls = [_url_mistake(url, at) for url, at in zip(urls, url_at, strict=True)]
    yield from (mistake for mistake in bad_urls if mistake)
    if not any(bad_urls):
        yield from _port_mistakes(urls, ports, url_at, port_at)


def _paired_lists(server: ServerClientConfig) -> tuple[list[str], list[int]]:
    urls = [server.base_url] if isinstance(server.base_url, str) else list(server.base_url or ())
    port = server.group_port
    ports = [port + i for i in range(len(urls))] if isinstance(port, int) else list(port or ())
    return urls, ports


def _places(path: str, value: object) -> list[str]:
    return [f"{path}[{i}]" for i in range(len(value))] if isinstance(value, list | tuple) else [path]


def _form_mistakes(server: ServerClientConfig) -> Iterator[Mistake]:
    url, port = server.base_url, server.group_port
    if server.servers is not None:
        if url is not None or port is not None:
            found = "`servers` and " + " and ".join(
                n for n in ("base_url", "group_port") if getattr(server, n) is not None
            )
            remedy = "keep `servers` and remove the others (or set `servers: null` if it comes from a base)"
            yield Mistake(path=SERVER, found=found, wanted="exactly one form", remedy=remedy)
        elif not server.servers:
            remedy = f"name the servers, {WAY_OUT}"
            yield Mistake(path=f"{SERVER}.servers", found="an empty list", wanted="at least one server", remedy=remedy)
    elif url is None and port is None:
        wanted = "a list of {base_url, group_port}"
        yield Mistake(path=f"{SERVER}.servers", found="nothing", wanted=wanted, remedy=f"name the servers, {WAY_OUT}")
    elif port is None:
        remedy = f"add the port of the weight sync, {WAY_OUT}"
        yield Mistake(path=f"{SERVER}.group_port", found="nothing", wanted="one port, or one per URL", remedy=remedy)
    elif url is None:
        remedy = f"add the servers' URLs, {WAY_OUT}"
        yield Mistake(path=f"{SERVER}.base_url", found="nothing", wanted="a URL, or a list of URLs", remedy=remedy)
    else:
        yield from _pairing_mistakes(url, port)


def _pairing_mistakes(url: str | list[str], port: int | list[int]) -> Iterator[Mistake]:
    path = f"{SERVER}.group_port"
    if isinstance(url, str):
        if not isinstance(port, int):
            wanted, remedy = "one integer, as base_url is one string", "write one port, or make base_url a list"
            yield Mistake(path=path, found=show(port), wanted=wanted, remedy=remedy)
    elif not url:
        remedy = f"name the servers, {WAY_OUT}"
        yield Mistake(path=f"{SERVER}.base_url", found="an empty list", wanted="at least one URL", remedy=remedy)
    elif isinstance(port, int):
        if port + len(url) - 1 > MAX_PORT:
            found = f"{port} for {len(url)} servers, which ends at {port + len(url) - 1}"
            yield Mistake(path=path, found=found, wanted=f"ports up to {MAX_PORT}", remedy="choose a lower first port")
    elif len(port) != len(url):
        found, wanted = f"{len(port)} ports for {len(url)} URLs", f"{len(url)} ports, paired by index"
        remedy = "give one port per URL, or one integer to count up from"
        yield Mistake(path=path, found=found, wanted=wanted, remedy=remedy)


def _url_mistake(url: str, at: str) -> Mistake | None:
    wanted, remedy = "a URL prefix such as http://127.0.0.1:8000", "write scheme, host and port"
    try:
        parts = urlsplit(url)
        # urlsplit checks the port only when it is read.
        port_is_wrong = parts.port == 0
    except ValueError:
        # A URL may hold a password or a token, so messages show it without them.
        return Mistake(path=at, found=show(bare_url(url)), wanted=wanted, remedy=remedy)
    if parts.username is not None or parts.password is not None:
        remedy = f"remove user and password; the server's token is read from {TOKEN_VARIABLE}"
        return Mistake(path=at, found="a URL with credentials", wanted=wanted, remedy=remedy)
    if parts.query or parts.fragment:
        found = f"{show(bare_url(url))}, a URL with a query or fragment"
        return Mistake(path=at, found=found, wanted=wanted, remedy="remove ? or # and what follows")
    # urlsplit drops tabs and line breaks in silence, so the text itself is compared.
    bad = parts.scheme not in ("http", "https") or not parts.hostname or port_is_wrong or url != "".join(url.split())
    return Mistake(path=at, found=show(bare_url(url)), wanted=wanted, remedy=remedy) if bad else None


def _port_mistakes(urls: list[str], ports: list[int], url_at: list[str], port_at: list[str]) -> Iterator[Mistake]:
    """Yield the mistakes of a list of servers: a server is named twice, two servers on one host have the same group
    port, or a group port is the server's HTTP port."""
    bases: dict[str, str] = {}
    groups: dict[tuple[str | None, int], str] = {}
    for url, port, here, port_here in zip(urls, ports, url_at, port_at, strict=True):
        base, parts = url.rstrip("/"), urlsplit(url)
        if base in bases:
            wanted = f"each server once (also at {bases[base]})"
            yield Mistake(path=here, found=show(url), wanted=wanted, remedy="remove one of the two")
        elif (parts.hostname, port) in groups:
            wanted = f"a port of its own on {parts.hostname} (also at {groups[parts.hostname, port]})"
            yield Mistake(path=port_here, found=str(port), wanted=wanted, remedy="choose another port")
        elif port == (parts.port or (443 if parts.scheme == "https" else 80)):
            wanted = "a port other than the HTTP port"
            yield Mistake(path=port_here, found=str(port), wanted=wanted, remedy="choose another port")
        bases.setdefault(base, here)
        groups.setdefault((parts.hostname, port), port_here)


def servers_are_named(config: RunConfig) -> Iterator[Mistake]:
    """`vllm.mode: server` needs servers, named in one of the two forms, with valid URLs and ports that do not clash
    (R05 R16)."""
    # A section that the run does not use is not checked.
    if uses_servers(config):
        yield from server_mistakes(config.rollout_matching.vllm.server)


RULES: tuple[Rule, ...] = (servers_are_named,)
