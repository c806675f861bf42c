"""`rollout-learner check --config run.yaml --machine`: what `check` finds, then this machine and the servers.

Works without a running server, and says what it could not check. The exit code is 0 if nothing is wrong, 2 if `check`
finds mistakes, 1 if only a check of the machine or the servers failed.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial

from learner.config.schema import RunConfig
from learner.data.check import load_unchecked
from learner.data.prompt import PromptEncoder
from learner.doctor import machine, server_checks
from learner.doctor.check import Preflight, add_servers, preflight
from learner.doctor.data_report import READY, in_words
from learner.doctor.finding import Check, Finding, Situation
from learner.doctor.look import look
from learner.sync.canary import CanaryItem
from shared.errors import ConfigError, ProjectError
from shared.masking import masked, masked_in
from shared.tokens import read_token

CHECKS: dict[str, dict[str, Check]] = {
    "machine": {
        "python": machine.python_version,
        "libraries": machine.library_versions,
        "open files": machine.open_files,
        "shared memory": machine.shared_memory,
        "disk": machine.disk_space,
        "GPU memory": machine.gpu_memory,
        "devices": machine.devices,
        "group ports": machine.group_ports,
        "broadcast": machine.local_broadcast,
    },
    "servers": {
        "reachable": server_checks.reachable,
        "state": server_checks.ready,
        "model": server_checks.same_model,
        "adapters": server_checks.adapters,
        "cuda, nccl": server_checks.same_libraries,
        "image": server_checks.image,
        "prompt": server_checks.prompt,
        "communicator": server_checks.communicator,
    },
}

WITHOUT_SERVERS: dict[str, dict[str, Check]] = {
    **CHECKS,
    "servers": {"reachable": server_checks.reachable, "model": server_checks.same_model},
}


def doctor(
    config_path: str,
    overrides: Sequence[str] = (),
    *,
    launch: str | None,
    world_size: int,
    environment: Mapping[str, str],
    people: bool = True,
) -> int:
    """Look at everything for `world_size` ranks, print it as text or as one JSON object, and return the exit code.
    `launch`: the path of launch.yaml, to check the devices of servers and learner too. Raises ConfigErrors if the
    configuration cannot be read."""
    logging.disable(logging.WARNING)  # prints what was found, and not what libraries log
    found = preflight(config_path, world_size, environment, read_data=True, build_model=True, overrides=overrides)
    situation = _look(found, environment, launch)
    if situation.servers and len(situation.statuses) == len(situation.servers):
        found.mistakes.extend(add_servers(found, situation.servers))
    say = partial(print, flush=True) if people else _nothing
    say("\n".join([*in_words(masked_in(found.report)), *(f"wrong: {mistake}" for mistake in found.mistakes)]))
    findings = run_checks(CHECKS if found.plan.servers else WITHOUT_SERVERS, situation, say)
    verdicts = Counter(finding.verdict for group in findings.values() for finding in group.values())
    num_wrong = len(found.mistakes) + verdicts["fail"]
    say(_verdict(num_wrong, verdicts["warn"]))
    if not people:
        told = {group: {name: asdict(one) for name, one in checks.items()} for group, checks in findings.items()}
        mistakes = [asdict(mistake) for mistake in found.mistakes]
        whole = {**found.report, **told, "mistakes": mistakes, "ready": not num_wrong}
        print(json.dumps(masked_in(whole), indent=2))
    return ConfigError.exit_code if found.mistakes else int(num_wrong > 0)


def _nothing(line: str) -> None:
    """Says it to nobody."""


def _look(found: Preflight, environment: Mapping[str, str], launch: str | None) -> Situation:
    situation = Situation(config=found.config, plan=found.plan, environment=environment, launch_path=launch)
    if not found.plan.servers:
        return situation
    try:
        situation = replace(situation, probe=first_sample(found.config))
    except ProjectError as error:
        situation = replace(situation, probe_error=error)
    return replace(situation, servers=look(found.plan.servers, read_token(environment), probe=situation.probe))


def first_sample(config: RunConfig) -> CanaryItem:
    """Return the first training sample as the learner encodes it. Raises ProjectError."""
    sample = load_unchecked(config, config.data.train, limit=1)[0]
    encoder = PromptEncoder.load(
        config.model.path,
        rules=config.data.image_rules,
        min_pixels=config.model.min_pixels,
        max_pixels=config.model.max_pixels,
    )
    return CanaryItem(
        sample=sample, prompt=encoder.encode(sample), response_token_ids=(encoder.tokenizer.eos_token_id,)
    )


def run_checks(
    groups: Mapping[str, Mapping[str, Check]], situation: Situation, say: Callable[[str], None]
) -> dict[str, dict[str, Finding]]:
    """Return the findings of each group by name. Each is said as it ends."""
    findings: dict[str, dict[str, Finding]] = {}
    for group, checks in groups.items():
        say(f"{group}:")
        findings[group] = {}
        for name, check in checks.items():
            finding = findings[group][name] = check(situation)
            say(in_line(name, finding))
    return findings


_MARKS = {"ok": "", "warn": "! ", "fail": "wrong: ", "skipped": "not checked: "}


def in_line(name: str, finding: Finding) -> str:
    """Return what was found, and what to do, on one line."""
    remedy = f"; {finding.remedy}" if finding.remedy else ""
    return f"  {_MARKS[finding.verdict]}{name}: {masked(' '.join(f'{finding.text}{remedy}'.split()))}"


def _verdict(num_wrong: int, num_warnings: int) -> str:
    if num_wrong:
        return f"not ready: {num_wrong} thing{'s are' if num_wrong > 1 else ' is'} wrong"
    return f"{READY}, with {num_warnings} warning{'s' if num_warnings > 1 else ''}" if num_warnings else READY
