"""`rollout-learner doctor --config run.yaml [--launch launch.yaml]`: runs the table of checks, prints one line each.

Works without a running server, and says what it could not check. The exit code is 0 if nothing failed, else 1. If the
configuration cannot be read, the output is that of `--check`, and the exit code is 2.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace

from rich.console import Console
from rich.markup import escape

from learner.config.load import load_config
from learner.config.plan import resolve
from learner.data.check import load_unchecked, splits
from learner.doctor import machine, servers
from learner.doctor.finding import Check, Finding, Situation, failed, ok
from learner.doctor.look import Servers, first_sample
from shared.errors import ProjectError
from shared.masking import masked
from shared.tokens import read_token

_COLOURS = {"ok": "green", "warn": "yellow", "fail": "bold red", "skipped": "dim"}


def annotation_files(situation: Situation) -> Finding:
    """Every row of every annotation file."""
    config = situation.config
    try:
        counts = {split: len(load_unchecked(config, path)) for split, path in splits(config).items()}
    except ProjectError as error:
        return failed(error)
    return ok(", ".join(f"{number} samples in {split}" for split, number in counts.items()))


CHECKS: tuple[tuple[str, Check], ...] = (
    ("python", machine.python_version),
    ("libraries", machine.library_versions),
    ("open files", machine.open_files),
    ("shared memory", machine.shared_memory),
    ("disk", machine.disk_space),
    ("proxies", machine.proxies),
    ("annotations", annotation_files),
    ("devices", machine.devices),
    ("group ports", machine.group_ports),
    ("broadcast", machine.local_broadcast),
    ("servers", servers.reachable),
    ("ready", servers.ready),
    ("model", servers.same_model),
    ("adapters", servers.adapters),
    ("cuda, nccl", servers.same_libraries),
    ("image", servers.image),
    ("prompt", servers.prompt),
)


def doctor(
    config_path: str,
    overrides: Sequence[str] = (),
    *,
    launch: str | None,
    world_size: int,
    environment: Mapping[str, str],
) -> int:
    """Run all checks for `world_size` ranks and return the exit code. `launch`: the path of launch.yaml, to check the
    devices of servers and learner too. Raises ConfigErrors if the configuration is wrong."""
    logging.disable(logging.WARNING)  # only the findings are printed, not what libraries log
    config = load_config(config_path, world_size=world_size, env=environment, overrides=overrides)
    situation = Situation(config=config, plan=resolve(config, world_size), environment=environment, launch_path=launch)
    try:
        situation = replace(situation, probe=first_sample(config))
    except ProjectError as error:
        situation = replace(situation, probe_error=error)
    group = Servers(situation.plan.servers, read_token(environment))
    try:
        situation = replace(situation, servers=group.look(situation.probe))
        return report([*CHECKS, ("communicator", group.join)], situation)
    finally:
        group.close()


def report(checks: Sequence[tuple[str, Check]], situation: Situation) -> int:
    """Run the checks and print each as it ends. Returns 1 if one failed, else 0."""
    console = Console(highlight=False, soft_wrap=True)
    width = max(len(name) for name, _ in checks)
    verdicts = []
    for name, check in checks:
        finding = check(situation)
        verdicts.append(finding.verdict)
        verdict = f"[{_COLOURS[finding.verdict]}]{finding.verdict:<7}[/]"
        console.print(f"{name:<{width}}  {verdict}  {escape(masked(one_line(finding)))}")
    counts = ", ".join(f"{verdicts.count(verdict)} {verdict}" for verdict in _COLOURS if verdict in verdicts)
    console.print(f"[bold]{counts}[/]")
    return 1 if "fail" in verdicts else 0


def one_line(finding: Finding) -> str:
    """What was found, and what to do, on one line."""
    return " ".join(f"{finding.text} -> {finding.remedy}".split()) if finding.remedy else " ".join(finding.text.split())
