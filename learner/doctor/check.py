"""The facts that can be known of a run before it starts: `rollout-learner check`.

`preflight` reads the configuration, the files that it names and, where asked to, every annotation. It finds every
mistake at once, needs no GPU, no model and no server, and imports neither torch nor vllm nor transformers. `--probe`
asks each rollout server once.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from learner.config.load import load_config
from learner.config.memory import memory_report
from learner.config.modes import ROLLOUT, colocates
from learner.config.plan import Plan, resolve
from learner.config.schema import RunConfig
from learner.config.sections.loss import preset_advice
from learner.config.sections.servers import SERVER, WAY_OUT
from learner.config.sections.training import chosen_by_test
from learner.doctor.finding import SeenServer
from learner.doctor.length import length_report
from learner.doctor.model_folder import (
    adapter_on_tied,
    images_without_eyes,
    limits_of_images,
    no_room_for_prompts,
    other_than_trained,
)
from learner.extensions import check_extensions
from learner.journal.trackers import check_trackers
from learner.run.best import check_kept_metric
from shared.config.model import ConfigErrors, Mistake
from shared.errors import ConfigError, ProjectError
from shared.families import check_folder
from shared.masking import masked_in
from shared.packages import check_compiler
from shared.tokens import read_token


@dataclass(frozen=True, slots=True)
class DrawRequest:
    """The number of training photographs that `check --draw` draws, and their folder."""

    number: int
    out: Path


@dataclass(frozen=True, kw_only=True, slots=True)
class Preflight:
    """A run before it starts. `report`: its plan and what was found, for `--json`. `mistakes`: what keeps it from
    running."""

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
    per mistake to stderr and return 2. With `read_data` the plan has the number of samples in each split. `people`: as
    text instead of JSON. `drawing`: some of the training photographs are drawn too."""
    num_ranks = 1 if world_size is None else world_size
    try:
        options = {"read_data": read_data, "build_model": probe}
        found = preflight(path, num_ranks, env, **options, overrides=overrides, drawing=drawing)
        mistakes = [*found.mistakes, *(_ask_servers(found, env) if probe else ())]
        if mistakes:
            raise ConfigErrors(mistakes=mistakes)
    except ConfigErrors as error:
        print(error, file=sys.stderr)
        return ConfigError.exit_code
    report = masked_in(found.report)
    if not people:
        print(json.dumps(report, indent=2))
        return 0
    from learner.doctor.data_report import READY, in_words  # imported here: it reads images, a check of keys does not

    print("\n".join([*in_words(report), f"{READY} (--json prints the whole plan)"]))
    return 0


def preflight(
    path: str,
    world_size: int,
    env: Mapping[str, str],
    *,
    read_data: bool,
    build_model: bool = False,
    overrides: Sequence[str] = (),
    drawing: DrawRequest | None = None,
) -> Preflight:
    """Raises ConfigErrors if there is no configuration to look at: the file's mistakes, or those of parts that it
    names. What is wrong with files and data is in `mistakes`; with `build_model` also names that the model lacks."""
    if world_size < 1:
        remedy = "give the number of learner ranks"
        mistake = Mistake(path="--world-size", found=str(world_size), wanted="an integer >= 1", remedy=remedy)
        raise ConfigErrors(mistakes=[mistake])
    config = load_config(path, world_size=world_size, env=env, overrides=overrides)
    _check_parts(config)
    plan = resolve(config, world_size)
    report = plan.to_json()
    if (complete := config.labels.complete) is not None:
        report["labels_complete"] = {"rollouts": complete.rollouts, "refresh": complete.refresh}
    said = (chosen_by_test(config), preset_advice(config), other_than_trained(config))
    if advice := [one for one in said if one is not None]:
        report["advice"] = advice
    mistakes = [*_output_dir(config), *_annotations(config), *_family(config)]
    mistakes += [*no_room_for_prompts(config), *adapter_on_tied(config), *limits_of_images(config)]
    mistakes += _no_compiler(config, env)
    report |= memory_report(config, world_size)
    if build_model:
        mistakes += _names_of_model(config)
    if read_data:
        try:
            report |= _samples(config, plan, drawing)
        except ConfigErrors as errors:
            mistakes += errors.mistakes
    return Preflight(config=config, plan=plan, report=report, mistakes=mistakes)


def _check_parts(config: RunConfig) -> None:
    """Check what the configuration names besides files and servers. Raises ConfigErrors."""
    mistakes: list[Mistake] = []
    for check in (check_extensions, check_trackers, check_kept_metric):
        try:
            check(config)
        except ConfigErrors as errors:
            mistakes += errors.mistakes
    if mistakes:
        raise ConfigErrors(mistakes=mistakes)


def _output_dir(config: RunConfig) -> list[Mistake]:
    from learner.run import output_dir  # imported here because it reads the schema too

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
    from learner.run.additions import KEY
    from learner.run.output_dir import check_annotations

    try:
        check_annotations(config)
    except ProjectError as error:
        return [Mistake.of(error, KEY)]
    return []


def _family(config: RunConfig) -> list[Mistake]:
    key = "model.path"
    try:
        check_folder(config.model.path, key=key, allow_untested=config.model.allow_untested_family)
    except ConfigError as error:
        return [Mistake.of(error, key)]
    return []


def _no_compiler(config: RunConfig, env: Mapping[str, str]) -> list[Mistake]:
    """Return a mistake if the engine that the learner starts could not compile. Servers say it themselves."""
    try:
        if colocates(config):
            check_compiler(env)
    except ConfigError as error:
        return [Mistake.of(error, f"{ROLLOUT}.vllm.mode")]
    return []


def _names_of_model(config: RunConfig) -> list[Mistake]:
    """Return what the section names that the model does not have. Nothing if the model is not on this machine."""
    if not any((Path(config.model.path) / name).is_file() for name in ("config.json", "adapter_config.json")):
        return []
    from learner.doctor.names import names_that_are_wrong  # imported here: it builds the model

    return names_that_are_wrong(config.model)


def _samples(config: RunConfig, plan: Plan, drawing: DrawRequest | None) -> dict[str, Any]:
    """Return how many samples each split has, what is dropped or clipped of it, how long the run is, and what was
    drawn."""
    from learner.data.check import check_retained, check_split, splits  # imported here: not needed to check keys
    from learner.doctor.data_report import look_at_data

    checked = {split: check_split(config, split, path) for split, path in splits(config).items()}
    retained = check_retained(config)
    mistakes = [mistake for found in (*checked.values(), *retained.values()) for mistake in found.mistakes]
    named = {f"data.{name}": found.split for name, found in (checked | retained).items()}
    mistakes += images_without_eyes(config, {key: split.samples for key, split in named.items() if split is not None})
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


def _ask_servers(found: Preflight, env: Mapping[str, str]) -> list[Mistake]:
    """Return each server that does not answer or is not ready (R16), or what `add_servers` finds."""
    seen: list[SeenServer] = []
    if found.plan.servers:
        from learner.doctor.look import LOOK_TIMEOUT_S, look  # imported here: a plain check needs no HTTP client

        timeout_s = min(LOOK_TIMEOUT_S, found.plan.timeout_s)
        seen = look(found.plan.servers, read_token(env), timeout_s=timeout_s)
    obstacles = [(i, one.error or one.not_ready) for i, one in enumerate(seen)]
    mistakes = [_not_ready(f"{SERVER}.servers[{i}].base_url", error) for i, error in obstacles if error is not None]
    return mistakes or add_servers(found, seen)


def add_servers(found: Preflight, seen: Sequence[SeenServer]) -> list[Mistake]:
    """Add the world size of each server, all of which have answered, and the requests that a rank may have in flight
    (`chunk`, D4), to the report. Returns a mistake if the caps do not fit the ranks (R23)."""
    sizes = [one.status.world_size for one in seen if one.status is not None]
    found.report.update(server_world_sizes=sizes, chunk=None)
    if not sizes:
        return []
    from learner.rollout.distribution import chunk_size

    try:
        found.report["chunk"] = chunk_size(
            decode_batch_size=found.plan.decode_batch_size, server_world_sizes=sizes, num_ranks=found.plan.world_size
        )
    except ConfigError as error:
        return [Mistake.of(error, f"{ROLLOUT}.decode_batch_size")]
    return []


def _not_ready(path: str, error: ProjectError) -> Mistake:
    mistake = Mistake.of(error, path, wanted="a ready server", remedy="start the server (make serve)")
    return mistake if WAY_OUT in mistake.remedy else replace(mistake, remedy=f"{mistake.remedy}, {WAY_OUT}")
