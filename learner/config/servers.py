"""The two ways to name rollout servers, made one (R05): `servers`, or `base_url` paired with `group_port`.

`server_mistakes` finds everything that is wrong with a `vllm.server` section in use; `paired_servers` gives its
servers, in order, for a section without mistakes. Called by `rules.py` and `load.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from urllib.parse import urlsplit

from learner.config.schema import ServerClientConfig, ServerEntry
from shared.config_errors import Mistake, show

SERVER = "custom.extra.rollout_matching.vllm.server"
WAY_OUT = (
    "or switch to custom.extra.rollout_matching.vllm.mode: colocate "
    "or custom.extra.rollout_matching.rollout_backend: hf"
)
MAX_PORT = 65535


def paired_servers(server: ServerClientConfig) -> list[ServerEntry]:
    """The servers of either form; a single port goes up by one per URL. URLs lose their trailing slashes."""
    if server.servers is not None:
        pairs = [(entry.base_url, entry.group_port) for entry in server.servers]
    else:
        urls, ports = _paired_lists(server)
        pairs = list(zip(urls, ports, strict=True))
    return [ServerEntry(base_url=url.rstrip("/"), group_port=port) for url, port in pairs]


def server_mistakes(server: ServerClientConfig) -> Iterator[Mistake]:
    """For a section that is in use: none, both or half a form, wrong pairing, bad URLs, ports that clash (R05, R16)."""
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
            remedy = "keep `servers` and remove the others (or set `servers: null` where it comes from a base)"
            yield Mistake(path=SERVER, found=found, wanted="exactly one form", remedy=remedy)
        elif not server.servers:
            remedy = f"name the servers, {WAY_OUT}"
            yield Mistake(path=f"{SERVER}.servers", found="an empty list", wanted="at least one server", remedy=remedy)
    elif url is None and port is None:
        wanted = "a list of {base_url, group_port}"
        yield Mistake(path=f"{SERVER}.servers", found="nothing", wanted=wanted, remedy=f"name the servers, {WAY_OUT}")
    elif port is None:
        remedy = f"add the port of the weight-sync group, {WAY_OUT}"
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
            wanted, remedy = "one integer, as base_url is one string", "write the port itself, or make base_url a list"
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
        remedy = "give one port per URL, or one integer from which they count up"
        yield Mistake(path=path, found=found, wanted=wanted, remedy=remedy)


def _url_mistake(url: str, at: str) -> Mistake | None:
    wanted, remedy = "a URL prefix such as http://127.0.0.1:8000", "write scheme, host and port"
    try:
        parts = urlsplit(url)
        port_is_wrong = parts.port == 0
    except ValueError:
        return Mistake(path=at, found=show(url), wanted=wanted, remedy=remedy)
    if parts.username is not None or parts.password is not None:
        remedy = "remove user and password; the server's token is read from the environment"
        return Mistake(path=at, found="a URL with credentials", wanted=wanted, remedy=remedy)
    if parts.query or parts.fragment:
        return Mistake(path=at, found=show(url), wanted=wanted, remedy="remove what follows ? or #")
    bad = parts.scheme not in ("http", "https") or not parts.hostname or port_is_wrong or url != "".join(url.split())
    return Mistake(path=at, found=show(url), wanted=wanted, remedy=remedy) if bad else None


def _port_mistakes(urls: list[str], ports: list[int], url_at: list[str], port_at: list[str]) -> Iterator[Mistake]:
    """The same server twice, two groups on one host's port, or a group on the port that answers HTTP."""
    bases: dict[str, str] = {}
    groups: dict[tuple[str | None, int], str] = {}
    for url, port, here, port_here in zip(urls, ports, url_at, port_at, strict=True):
        base, parts = url.rstrip("/"), urlsplit(url)
        if base in bases:
            wanted = f"each server once ({bases[base]} has it too)"
            yield Mistake(path=here, found=show(url), wanted=wanted, remedy="remove one of the two")
        elif (parts.hostname, port) in groups:
            wanted = f"a port of its own on {parts.hostname} ({groups[parts.hostname, port]} has it too)"
            yield Mistake(path=port_here, found=str(port), wanted=wanted, remedy="choose another port")
        elif port == (parts.port or (443 if parts.scheme == "https" else 80)):
            wanted = "another port than the one that answers HTTP"
            yield Mistake(path=port_here, found=str(port), wanted=wanted, remedy="choose another port")
        bases.setdefault(base, here)
        groups.setdefault((parts.hostname, port), port_here)
