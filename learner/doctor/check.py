"""Checks a run before it starts: `rollout-learner check`, and `rollout-launch --check`.

`preflight` finds every mistake in the configuration, in the files that it names and, with `read_data`, in all
annotations. `preflight` needs no GPU, no model and no server, and imports neither torch nor vllm nor transformers.
`run_check` prints the result; with `probe` it also asks each rollout server once. `check_machine` checks this machine
and the servers too, with the checks of `machine.py` and `server_checks.py`.

Exit codes: 0 ready, 2 for mistakes, 1 if only a check of the machine or of the servers failed.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from learner.config.load import load_config
from learner.config.memory import memory_report
from learner.config.modes import ROLLOUT
from learner.config.plan import Plan, resolve
from learner.config.schema import RunConfig
from learner.config.sections.loss import preset_advice
from learner.config.sections.servers import SERVER, WAY_OUT
from learner.config.sections.training import chosen_by_test, warmup_fits
from learner.doctor.model_folder import (
    adapter_on_tied,
    images_without_eyes,
    limits_of_images,
    no_room_for_prompts,
    other_than_trained,
)
from learner.wiring.before_start import check_parts, mistakes_before_start
from shared.config.checks import READY, mistakes_of, verdict
from shared.config.model import ConfigErrors, Mistake
from shared.errors import ConfigError, ProjectError
from shared.masking import masked, masked_in
from shared.tokens import read_token

if TYPE_CHECKING:  # a plain check needs no HTTP client
    from learner.doctor.finding import Check, Finding, SeenServer, Situation


@dataclass(frozen=True, slots=True)
class DrawRequest:
    """The number of training photographs that `check --draw` draws, and their folder."""

    number: int
    out: Path


@dataclass(frozen=True, kw_only=True, slots=True)
class Preflight:
    """The result of checking a run before it starts. `report`: the run's plan and the findings, for `--json`.
    `mistakes`: why the run cannot start."""

    config: RunConfig
    plan: Plan
    report: dict[str, Any]
    mistakes: list[Mistake]


def run_check(
    path: str,
    world_size: int | None = None,
    probe: bool = False,
    env: Mapping[str, str] = os.environ,
    *,
    read_data: bool = False,
    overrides: Sequence[str] = (),
    people: bool = False,
    drawing: DrawRequest | None = None,
) -> int:
    """Print the plan for `world_size` ranks (default 1) to stdout and return 0. If something is wrong, print one line
    per mistake to stderr and return 2.

    `read_data`: the annotations are checked, and the plan has the number of samples in each split. `people`: the plan
    is text instead of JSON. `drawing`: some of the training photographs are drawn too.
    """
    try:
        options = {"read_data": read_data, "build_model": probe}
        found = preflight(path, world_size, env, **options, overrides=overrides, drawing=drawing)
        mistakes = [*found.mistakes, *(_ask_servers(found, env) if probe else ())]
        if mistakes:
            raise ConfigErrors(mistakes=mistakes)
    except ConfigErrors as error:
        print(error, file=sys.stderr)
        return error.exit_code
    report = masked_in(found.report)
    if people:
        # imported here, because a check of keys does not need code for images
        from learner.doctor.data_report import in_words

        print("\n".join([*in_words(report), READY]))
    else:
        print(json.dumps(report, indent=2))
    return 0


def preflight(
    path: str,
    world_size: int | None,
    env: Mapping[str, str],
    *,
    read_data: bool,
    build_model: bool = False,
    overrides: Sequence[str] = (),
    drawing: DrawRequest | None = None,
) -> Preflight:
    """Find the mistakes in a run. Raises ConfigErrors for mistakes in the configuration file, and in the user's own
    parts that it names. Mistakes in other files and in data are returned in `mistakes`. `build_model`: names that the
    model does not have are mistakes too."""
    num_ranks = 1 if world_size is None else world_size
    if num_ranks < 1:
        remedy = "give the number of learner ranks"
        raise ConfigErrors.one("--world-size", str(num_ranks), "an integer >= 1", remedy)
    config = load_config(path, world_size=num_ranks, env=env, overrides=overrides)
    check_parts(config)
    plan = resolve(config, num_ranks)
    report = plan.to_json()
    if (complete := config.labels.complete) is not None:
        report["labels_complete"] = {"rollouts": complete.rollouts, "refresh": complete.refresh}
    advice = (chosen_by_test(config), preset_advice(config), other_than_trained(config))
    if given := [one for one in advice if one is not None]:
        report["advice"] = given
    report |= memory_report(config, num_ranks)
    mistakes = [*mistakes_before_start(config, env), *no_room_for_prompts(config)]
    mistakes += [*adapter_on_tied(config), *limits_of_images(config)]
    if build_model:
        mistakes += _names_of_model(config)
    if read_data:
        mistakes += mistakes_of(lambda: report.update(_samples(config, plan, drawing)))
    return Preflight(config=config, plan=plan, report=report, mistakes=mistakes)


def _names_of_model(config: RunConfig) -> list[Mistake]:
    """Return a mistake for each name in the section `model` that the model does not have; [] if the model is not on
    this machine."""
    if not any((Path(config.model.path) / name).is_file() for name in ("config.json", "adapter_config.json")):
        return []
    from learner.doctor.names import names_that_are_wrong  # imported here, because it loads torch and builds the model

    return names_that_are_wrong(config.model)


def _samples(config: RunConfig, plan: Plan, drawing: DrawRequest | None) -> dict[str, Any]:
    """Return how many samples each split has, how many records are dropped or clipped, how long the run is, and which
    pictures were drawn. Raises ConfigErrors."""
    # imported here, because a check of keys alone does not need it
    from learner.data.check import check_retained, check_split, splits
    from learner.doctor.data_report import length_report, look_at_data

    checked = {split: check_split(config, split, path) for split, path in splits(config).items()}
    everything = checked | check_retained(config)
    mistakes = [mistake for found in everything.values() for mistake in found.mistakes]
    samples = {f"data.{name}": found.split.samples for name, found in everything.items() if found.split is not None}
    if mistakes := [*mistakes, *images_without_eyes(config, samples)]:
        raise ConfigErrors("annotations cannot be used", mistakes=mistakes)
    counts = {split: found.num_samples for split, found in everything.items()}
    report: dict[str, Any] = {"samples": counts}
    if bad := {split: found.dropped for split, found in everything.items() if found.dropped}:
        report["bad_records"] = bad
    length = length_report(config, plan, counts["train"])
    if short := list(warmup_fits(config, length["length"]["steps"])):
        raise ConfigErrors("the run is too short", mistakes=short)
    read = {split: found.split for split, found in checked.items() if found.split is not None}
    report |= look_at_data(config, read) | length
    if drawing is not None:
        from learner.doctor.pictures import draw_pictures

        pictures = draw_pictures(config, read["train"].samples, drawing.number, drawing.out)
        report["pictures"] = [str(picture) for picture in pictures]
    return report


def _ask_servers(found: Preflight, env: Mapping[str, str]) -> list[Mistake]:
    """Return a mistake for each server that does not answer or is not ready (R16). If all are ready, return the
    mistakes of `add_servers`."""
    seen: list[SeenServer] = []
    if found.plan.servers:
        from learner.doctor.finding import LOOK_TIMEOUT_S, look

        timeout_s = min(LOOK_TIMEOUT_S, found.plan.timeout_s)
        seen = look(found.plan.servers, read_token(env), timeout_s=timeout_s)
    obstacles = [(i, one.error or one.not_ready) for i, one in enumerate(seen)]
    mistakes = [_not_ready(f"{SERVER}.servers[{i}].base_url", error) for i, error in obstacles if error is not None]
    return mistakes or add_servers(found, seen)


def _not_ready(path: str, error: ProjectError) -> Mistake:
    mistake = Mistake.of(error, path, wanted="a ready server", remedy="start the server (make serve)")
    return mistake if WAY_OUT in mistake.remedy else replace(mistake, remedy=f"{mistake.remedy}, {WAY_OUT}")


def add_servers(found: Preflight, seen: Sequence[SeenServer]) -> list[Mistake]:
    """Add to the report the world size of each server, and how many requests a rank may have in flight (`chunk`, D4).
    All servers must have answered. Returns a mistake if the limits do not fit the ranks (R23)."""
    sizes = [one.status.world_size for one in seen if one.status is not None]
    found.report.update(server_world_sizes=sizes, chunk=None)
    if not sizes:
        return []
    from learner.rollout.distribution import chunk_size

    limits = {"decode_batch_size": found.plan.decode_batch_size, "num_ranks": found.plan.world_size}
    chunk = partial(chunk_size, server_world_sizes=sizes, **limits)
    return mistakes_of(lambda: found.report.update(chunk=chunk()), f"{ROLLOUT}.decode_batch_size")


# ---- machine -------------------------------------------------------------------------------------------------------


def check_machine(
    path: str,
    overrides: Sequence[str] = (),
    *,
    world_size: int | None,
    environment: Mapping[str, str],
    people: bool = True,
    devices: Sequence[int] | None = None,
) -> int:
    """Check a run of `world_size` ranks and this machine, print the results as text or as one JSON object, and return
    the exit code. `devices`: the run is a launch that starts its servers on this machine and uses these CUDA devices.
    Without `devices` the run's servers are called. Raises ConfigErrors if the configuration cannot be read."""
    from learner.doctor import machine, server_checks
    from learner.doctor.data_report import in_words

    # Only findings are printed, not the logs of libraries.
    logging.disable(logging.WARNING)
    # The machine is checked even if files or data have mistakes.
    found = preflight(path, world_size, environment, read_data=True, build_model=True, overrides=overrides)
    situation = _situation(found, environment, devices)
    if situation.servers and len(situation.statuses) == len(situation.servers):
        found.mistakes.extend(add_servers(found, situation.servers))
    say = partial(print, flush=True) if people else lambda line: None
    say("\n".join([*in_words(masked_in(found.report)), *(f"wrong: {mistake}" for mistake in found.mistakes)]))
    of_servers = server_checks.CHECKS if situation.servers else server_checks.WITHOUT_SERVERS
    findings = run_checks({"machine": machine.CHECKS, "servers": of_servers}, situation, say)
    verdicts = Counter(finding.verdict for group in findings.values() for finding in group.values())
    num_wrong = len(found.mistakes) + verdicts["fail"]
    say(verdict(num_wrong, verdicts["warn"]))
    if not people:
        by_name = {group: {name: asdict(one) for name, one in checks.items()} for group, checks in findings.items()}
        mistakes = [asdict(mistake) for mistake in found.mistakes]
        whole = {**found.report, **by_name, "mistakes": mistakes, "ready": not num_wrong}
        print(json.dumps(masked_in(whole), indent=2))
    return ConfigError.exit_code if found.mistakes else int(num_wrong > 0)


def _situation(found: Preflight, environment: Mapping[str, str], devices: Sequence[int] | None) -> Situation:
    from learner.doctor.finding import Situation, look
    from learner.doctor.server_checks import first_sample

    situation = Situation(config=found.config, plan=found.plan, environment=environment, devices=devices)
    if not found.plan.servers or devices is not None:
        return situation
    try:
        situation = replace(situation, probe=first_sample(found.config))
    except ProjectError as error:
        situation = replace(situation, probe_error=error)
    return replace(situation, servers=look(found.plan.servers, read_token(environment), probe=situation.probe))


_MARKS = {"ok": "", "warn": "! ", "fail": "wrong: ", "skipped": "not checked: "}


def run_checks(
    groups: Mapping[str, Mapping[str, Check]], situation: Situation, say: Callable[[str], None]
) -> dict[str, dict[str, Finding]]:
    """Return the findings of each group by name. `say` gets a line as each check ends."""
    findings: dict[str, dict[str, Finding]] = {}
    for group, checks in groups.items():
        say(f"{group}:")
        findings[group] = {}
        for name, check in checks.items():
            finding = findings[group][name] = check(situation)
            remedy = f"; {finding.remedy}" if finding.remedy else ""
            text = masked(" ".join(f"{finding.text}{remedy}".split()))
            say(f"  {_MARKS[finding.verdict]}{name}: {text}")
    return findings
