"""`rollout-learner check --config F`: every mistake at once, or what the run is, for people or as one JSON object.

A check needs no GPU, no model and no server, and imports neither torch nor vllm nor transformers. On the command line
it also reads the annotation files. With `--probe` it asks each rollout server once, at `/ready/` and
`/get_world_size/`.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from learner.config.load import load_config
from learner.config.modes import ROLLOUT
from learner.config.plan import Plan, resolve
from learner.config.schema import RunConfig
from learner.config.sections.loss import preset_advice
from learner.config.sections.servers import SERVER, WAY_OUT
from learner.doctor.length import length_report
from learner.doctor.memory import memory_report
from learner.extensions import check_extensions
from learner.journal.trackers import check_trackers
from shared.aio import gather
from shared.config.model import ConfigErrors, Mistake
from shared.errors import ConfigError, ProjectError
from shared.families import check_folder
from shared.masking import masked_in
from shared.tokens import read_token

if TYPE_CHECKING:
    from learner.rollout.client import ServerClient

PROBE_TIMEOUT_S = 10.0  # for each answer of a server, without retries


@dataclass(frozen=True, slots=True)
class Drawing:
    """How many training photographs `check --draw` draws, and where."""

    number: int
    out: Path


def run_check(
    path: str,
    world_size: int | None = None,
    probe: bool = False,
    env: Mapping[str, str] = os.environ,
    *,
    read_data: bool = False,
    overrides: Sequence[str] = (),
    people: bool = False,
    drawing: Drawing | None = None,
) -> int:
    """Print the plan for `world_size` ranks (default 1) to stdout and return 0. If something is wrong, print one line
    per mistake to stderr and return 2. With `read_data` the plan has the number of samples in each split. `people`: as
    text instead of JSON. `drawing`: some of the training photographs are drawn too."""
    try:
        num_ranks = 1 if world_size is None else world_size
        report = masked_in(_report(path, num_ranks, probe, env, read_data, overrides, drawing))
    except ConfigErrors as error:
        print(error, file=sys.stderr)
        return ConfigError.exit_code
    if not people:
        print(json.dumps(report, indent=2))
        return 0
    from learner.doctor.data_report import in_words  # imported here: it reads images, a check of keys does not

    print("\n".join(in_words(report)))
    return 0


def _report(
    path: str,
    world_size: int,
    probe: bool,
    env: Mapping[str, str],
    read_data: bool,
    overrides: Sequence[str],
    drawing: Drawing | None,
) -> dict[str, Any]:
    """Raises ConfigErrors: the file's mistakes, or if it has none, those of the data and servers that it names."""
    if world_size < 1:
        remedy = "give the number of learner ranks"
        mistake = Mistake(path="--world-size", found=str(world_size), wanted="an integer >= 1", remedy=remedy)
        raise ConfigErrors(mistakes=[mistake])
    config = load_config(path, world_size=world_size, env=env, overrides=overrides)
    _check_parts(config)
    plan = resolve(config, world_size)
    report = plan.to_json()
    if (advice := preset_advice(config)) is not None:
        report["advice"] = [advice]
    mistakes = [*_output_dir(config), *_annotations(config), *_family(config)]
    report |= memory_report(config, world_size)
    looks = [partial(_samples, config, plan, drawing)] if read_data else []
    looks += [partial(_probed, plan, read_token(env))] if probe else []
    for look in looks:
        try:
            report |= look()
        except ConfigErrors as errors:
            mistakes += errors.mistakes
    if mistakes:
        raise ConfigErrors(f"{path} names files or servers that cannot be used", mistakes=mistakes)
    return report


def _check_parts(config: RunConfig) -> None:
    """What the configuration names besides files and servers. Raises ConfigErrors."""
    mistakes: list[Mistake] = []
    for check in (check_extensions, check_trackers):
        try:
            check(config)
        except ConfigErrors as errors:
            mistakes += errors.mistakes
    if mistakes:
        raise ConfigErrors(mistakes=mistakes)


def _output_dir(config: RunConfig) -> list[Mistake]:
    from learner.run import output_dir  # here, because it reads the schema too

    for look, key in (
        (output_dir.check_writable, output_dir.KEY),
        (output_dir.check_resume, output_dir.RESUME_KEY),
        (output_dir.check_output_dir, output_dir.KEY),
    ):
        try:
            look(config)
        except ConfigError as error:
            return [Mistake.of(error, key)]
    return []


def _annotations(config: RunConfig) -> list[Mistake]:
    if config.labels.complete is None or config.labels.complete.write is None:
        return []
    from learner.run.output_dir import check_annotations

    try:
        check_annotations(config)
    except ProjectError as error:
        return [Mistake.of(error, "labels.complete.write")]
    return []


def _family(config: RunConfig) -> list[Mistake]:
    key = "model.path"
    try:
        check_folder(config.model.path, key=key, allow_untested=config.model.allow_untested_family)
    except ConfigError as error:
        return [Mistake.of(error, key)]
    return []


def _samples(config: RunConfig, plan: Plan, drawing: Drawing | None) -> dict[str, Any]:
    """How many samples each split has, what is dropped or clipped of it, how long the run is, and what was drawn."""
    from learner.data.check import check_retained, check_split, splits  # imported here: not needed to check keys
    from learner.doctor.data_report import look_at_data

    checked = {split: check_split(config, split, path) for split, path in splits(config).items()}
    retained = check_retained(config)
    mistakes = [mistake for found in (*checked.values(), *retained.values()) for mistake in found.mistakes]
    if mistakes:
        raise ConfigErrors("annotations cannot be used", mistakes=mistakes)
    everything = checked | retained
    bad = {split: found.dropped for split, found in everything.items() if found.dropped}
    counts = {split: found.num_samples for split, found in everything.items()}
    report: dict[str, Any] = {"samples": counts, "bad_records": bad} if bad else {"samples": counts}
    read = {split: found.split for split, found in checked.items() if found.split is not None}
    length = length_report(config, plan, counts["train"])
    _check_warmup(config, length["length"]["steps"])
    report |= look_at_data(config, read) | length
    if drawing is not None:
        from learner.doctor.pictures import draw_pictures

        pictures = draw_pictures(config, read["train"].samples, drawing.number, drawing.out)
        report["pictures"] = [str(picture) for picture in pictures]
    return report


def _check_warmup(config: RunConfig, steps: int) -> None:
    """Raises ConfigErrors if the run ends before its learning rate has risen. The number of steps follows from the data
    where the run has epochs."""
    warmup = config.training.warmup_steps
    if warmup > steps:
        wanted, remedy = f"at most the run's {steps} steps", "lower it, or train longer"
        mistake = Mistake(path="training.warmup_steps", found=str(warmup), wanted=wanted, remedy=remedy)
        raise ConfigErrors("the run is too short", mistakes=[mistake])


def _probed(plan: Plan, token: str | None) -> dict[str, Any]:
    """World size per server, and the requests that a rank may have in flight (`chunk`, D4). Raises ConfigErrors if a
    server does not answer or is not ready (R16), or if the caps do not fit the ranks (R23)."""
    if not plan.servers:
        return {"server_world_sizes": [], "chunk": None}
    import asyncio

    from learner.rollout.client import ServerClient, Timeouts  # imported here: a plain check needs no HTTP client
    from learner.rollout.distribution import chunk_size

    timeouts = Timeouts.of(min(PROBE_TIMEOUT_S, plan.timeout_s), None)
    clients = [ServerClient(entry.base_url, timeouts=timeouts, token=token) for entry in plan.servers]
    answers = asyncio.run(gather(_world_size(client) for client in clients))
    sizes = [answer for answer in answers if isinstance(answer, int)]
    if len(sizes) < len(answers):
        mistakes = [
            _not_ready(f"{SERVER}.servers[{i}].base_url", error)
            for i, error in enumerate(answers)
            if isinstance(error, ProjectError)
        ]
        raise ConfigErrors("rollout servers are not ready", mistakes=mistakes)
    try:
        chunk = chunk_size(
            decode_batch_size=plan.decode_batch_size, server_world_sizes=sizes, num_ranks=plan.world_size
        )
    except ConfigError as error:
        mistake = Mistake(
            path=f"{ROLLOUT}.decode_batch_size", found=error.found, wanted=error.wanted, remedy=error.remedy
        )
        raise ConfigErrors(error.what, mistakes=[mistake]) from error
    return {"server_world_sizes": sizes, "chunk": chunk}


async def _world_size(client: ServerClient) -> int | ProjectError:
    try:
        await client.ready()
        return await client.world_size()
    except ProjectError as error:
        return error
    finally:
        await client.aclose()


def _not_ready(path: str, error: ProjectError) -> Mistake:
    mistake = Mistake.of(error, path, wanted="a ready server", remedy="start the server (make serve)")
    return mistake if WAY_OUT in mistake.remedy else replace(mistake, remedy=f"{mistake.remedy}, {WAY_OUT}")
