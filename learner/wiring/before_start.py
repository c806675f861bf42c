"""Finds mistakes that keep a run from starting, without torch, a GPU or a server.

In: the configuration. Out: mistakes. `rollout-learner check` reports the mistakes, `rollout-launch` reports them before
its servers start, and `train` raises the mistakes that `check_parts` finds. Writes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from learner.config.modes import ROLLOUT, colocates
from learner.config.schema import RunConfig
from learner.extensions import check_extensions
from learner.journal.trackers import check_trackers
from learner.run import output_dir
from learner.run.best import check_kept_metric
from shared.config.checks import mistakes_of
from shared.config.model import ConfigErrors, Mistake
from shared.families import check_folder
from shared.packages import check_compiler


def check_parts(config: RunConfig) -> None:
    """Check the user's own parts, the trackers, and the metric that chooses the best checkpoint. Raises ConfigErrors
    with all mistakes."""
    checks = (check_extensions, check_trackers, check_kept_metric)
    if mistakes := [mistake for check in checks for mistake in mistakes_of(partial(check, config))]:
        raise ConfigErrors("the configuration names what cannot be used", mistakes=mistakes)


def mistakes_before_start(config: RunConfig, environment: Mapping[str, str]) -> list[Mistake]:
    """Return the mistakes about the run's folder, the checkpoint to resume from, the file for completed labels, the
    model's family, and the compiler of an engine that the learner starts."""
    model, complete = config.model, config.labels.complete
    checks: list[tuple[str, Callable[[], None]]] = [
        (output_dir.KEY, partial(output_dir.check_claimable, config, environment)),
        ("model.path", partial(check_folder, model.path, key="model.path", allow_untested=model.allow_untested_family)),
    ]
    if not output_dir.is_same_job(config, environment):
        checks.insert(1, (output_dir.RESUME_KEY, partial(output_dir.check_resume, config)))
    if complete is not None and complete.write is not None:
        checks.append(("labels.complete.write", partial(output_dir.check_annotations, config)))
    if colocates(config):
        checks.append((f"{ROLLOUT}.vllm.mode", partial(check_compiler, environment)))
    return [mistake for key, check in checks for mistake in mistakes_of(check, key)]
