"""Wait for the rollout servers that a learner's configuration names: `python -m deploy.wait_ready --config F`.

In: the learner's YAML, and how long to wait. Out: an exit code. The exit code is 0 once every server has answered
`/ready/` with 200, 1 after the timeout, and 2 if the configuration is wrong. After the timeout, the last answer of each
server that is not ready is printed. Needs no token. The command is for schedulers that start servers and learner
separately.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import Annotated

import httpx
import typer

from learner.config.load import load_config
from learner.config.modes import uses_servers
from shared.answers import ask
from shared.errors import ConfigError, DeadlineError, ProjectError
from shared.reading import json_of
from shared.version import Version
from shared.waits import Retry

POLL_S = 1.0
ANSWER_S = 5.0


app = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False, add_completion=False)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    try:
        app(sys.argv[1:] if argv is None else list(argv), prog_name="deploy.wait_ready")
    except SystemExit as ended:  # typer always raises it at the end
        return int(ended.code or 0)
    return 0


@app.command()
def wait(
    config: Annotated[str, typer.Option(help="The learner's configuration file.")],
    timeout_s: Annotated[float, typer.Option(help="How long the servers may take.")] = 1800.0,
    version: Version = False,
) -> None:
    """Wait for a learner's rollout servers."""
    try:
        urls = server_urls(config)
        seconds = wait_all_ready(urls, timeout_s)
    except ProjectError as error:
        print(f"error: {type(error).__name__}: {error}", file=sys.stderr)
        raise typer.Exit(error.exit_code) from error
    print(f"[wait_ready] {len(urls)} server(s) ready after {seconds:.0f} s", flush=True)


def server_urls(config_path: str) -> list[str]:
    """Return the base URLs that the configuration names. Raises ConfigErrors, and ConfigError if the run uses no
    servers."""
    config = load_config(config_path)
    if not uses_servers(config):
        raise ConfigError(
            f"{config_path}: nothing to wait for",
            found="a run without rollout servers",
            wanted="vllm.mode: server",
            remedy="start the learner without waiting",
        )
    return [entry.base_url for entry in config.rollout_matching.vllm.server.servers or ()]


def wait_all_ready(urls: Sequence[str], timeout_s: float) -> float:
    """Wait until each server has answered `/ready/` with 200 once, and return the seconds it took.

    Raises DeadlineError, which names the servers that were not ready.
    """
    started, retry = time.monotonic(), Retry(timeout_s, POLL_S)
    last = dict.fromkeys(urls, "nothing yet")
    with httpx.Client(trust_env=False, timeout=ANSWER_S) as client:
        while last := {url: said for url in last if (said := look(client, url))}:
            if not retry.wait():
                break
        else:
            return time.monotonic() - started
    raise DeadlineError(
        f"{len(last)} of {len(urls)} rollout servers were not ready in time",
        found="; ".join(f"{url}: {said}" for url, said in last.items()),
        wanted=f"200 from /ready/ within {timeout_s:g} s",
        remedy="see the servers' logs, correct the URLs, or raise --timeout-s",
    )


def look(client: httpx.Client, url: str, server_id: str = "") -> str:
    """Ask `/ready/` once. Return "" if the server is ready, otherwise its answer or the error as text. `server_id`: the
    id that the answer must have; "": any. A server gets a new id at each start."""
    try:
        code, content = ask(client, f"{url}/ready/", timeout_s=client.timeout.read or ANSWER_S)
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    if code != httpx.codes.OK:
        return f"HTTP {code}: {content[:200].decode(errors='replace')}"
    if not server_id:
        return ""
    try:
        found = json_of(content)["server_id"]
    except (ValueError, KeyError, TypeError):
        found = "unknown"
    return "" if found == server_id else f"the answer of another server (id {found})"


if __name__ == "__main__":
    sys.exit(main())
