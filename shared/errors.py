"""The exception tree of both programs.

Every error that a user can meet has four parts: what happened, what was found, what was wanted, and what to do. Errors
do not contain secrets of the configuration (`shared.masking`). `http_status` is the status of the server's answer;
`exit_code` is the program's exit code. `ErrorBody` in `wire.py` is an error as JSON, so the server's own text reaches
the learner's user.

    ProjectError
    ├── ConfigError             a key of a YAML file is wrong
    │   └── ConfigErrors            every mistake of a file at once (shared.config.model)
    ├── DataError               a dataset row or image is wrong
    ├── RequestError            the client asked for something that cannot be served
    │   ├── UnauthorizedError       no bearer token, or a wrong one
    │   ├── MediaError              an image is missing, too large, or not allowed
    │   └── PromptTooLongError      prompt and answer do not fit the model's context
    ├── ServerError             a rollout server failed, as the learner sees it
    │   ├── ServerUnreachableError  no answer
    │   ├── ServerBusyError         it answered: try again later
    │   ├── ServerPoisonedError     its weights are not known to be right
    │   └── ServerMismatchError     another model, tokenizer, protocol or weight version than the learner's
    ├── SyncError               a weight sync did not complete
    │   ├── CommunicatorError       joining, sending or receiving failed
    │   ├── DigestError             the bytes differ
    │   ├── CoverageError           a served parameter was not written
    │   └── CanaryError             the served model gives other probabilities than the learner's
    ├── PromptMismatchError     the two sides tokenize a prompt differently
    ├── RolloutError            an answer is malformed or incomplete
    │   └── NotFiniteError          the model's log-probabilities are not finite
    ├── RewardError             a reward function of the user's failed (learner.tasks.rewards)
    ├── CallbackError           a callback of the user's failed (learner.run.callbacks)
    ├── LossError               a supervised index outside the assistant span, or a loss that is not finite
    ├── OutOfMemoryError        a row of the learner does not fit the memory that is left
    ├── WindowMismatchError     a repeated accumulation window came with other samples than the first time
    ├── PipelineStoppedError    the pipeline between rollouts and learning was stopped (learner.steps.shares)
    ├── DeadlineError           a wait passed its deadline
    │   ├── CollectiveError         another rank is gone or silent
    │   └── StarvedError            Channel-B steps found no rollouts for too long (learner.steps.ahead)
    ├── StageError              a stage of a recipe ended with an error (learner.recipe.command)
    ├── CheckpointError         a checkpoint cannot be written or read
    └── OutputError             another file of a run cannot be written
"""

from __future__ import annotations

from typing import Self

from shared.masking import masked


def _shown(text: str) -> str:
    """Return a text without secrets, with escapes for bytes that are not UTF-8."""
    # Bytes that are not UTF-8, as in a file's name, cannot be printed or logged.
    return masked(text.encode(errors="backslashreplace").decode())


class ProjectError(Exception):
    """Base of all errors that are shown to the user without a traceback."""

    http_status: int = 500
    exit_code: int = 1

    def __init__(self, what: str, *, found: str = "", wanted: str = "", remedy: str = "") -> None:
        # Secrets are masked as the error is made, because errors reach logs, events and other programs in many ways.
        self.what, self.found, self.wanted, self.remedy = map(_shown, (what, found, wanted, remedy))
        super().__init__(self.what)

    def __str__(self) -> str:
        parts = [self.what]
        if self.found:
            parts.append(f"found {self.found}")
        if self.wanted:
            parts.append(f"wanted {self.wanted}")
        if self.remedy:
            parts.append(self.remedy)
        return "; ".join(parts)

    def as_status(self, http_status: int) -> Self:
        """Return this error, with `http_status` in place of the HTTP status of its class."""
        self.http_status = http_status
        return self

    def named(self, who: str) -> Self:
        """Return a copy of the error whose text begins with `who`."""
        again = type(self)(f"{who}: {self.what}", found=self.found, wanted=self.wanted, remedy=self.remedy)
        again.__cause__ = self
        return again

    def __reduce__(self) -> tuple[object, ...]:
        # Exceptions cross process boundaries (DataLoader workers, engine workers). By default pickle rebuilds them from
        # `args` alone, without the keyword-only parts.
        return (_rebuild, (type(self), self.what, self.found, self.wanted, self.remedy))


def _rebuild(cls: type[ProjectError], what: str, found: str, wanted: str, remedy: str) -> ProjectError:
    return cls(what, found=found, wanted=wanted, remedy=remedy)


class ConfigError(ProjectError):
    exit_code = 2
    http_status = 400


class DataError(ProjectError):
    exit_code = 2
    http_status = 400


class RequestError(ProjectError):
    exit_code = 2
    http_status = 400


class UnauthorizedError(RequestError):
    http_status = 401


class MediaError(RequestError):
    http_status = 422


class PromptTooLongError(RequestError):
    http_status = 413


class ServerError(ProjectError):
    http_status = 502


class ServerUnreachableError(ServerError):
    exit_code = 2


class ServerBusyError(ServerError):
    http_status = 503


class ServerPoisonedError(ServerError):
    http_status = 503


class ServerMismatchError(ServerError):
    exit_code = 2
    http_status = 409


class SyncError(ProjectError):
    http_status = 500


class CommunicatorError(SyncError):
    pass


class DigestError(SyncError):
    pass


class CoverageError(SyncError):
    pass


class CanaryError(SyncError):
    """The served model gives wrong probabilities, although the bytes arrived intact. The remedy is one of the two texts
    below: STALE_CACHE if only scores through the prefix cache are wrong, else LIKELY_CAUSES."""

    LIKELY_CAUSES = (
        "likely causes, in order: 1. the server computes in another precision: set its dtype to the learner's "
        "model.dtype; 2. it has another "
        "model configuration (rope, image processor): serve the folder of model.path; 3. vLLM loads this "
        "architecture wrongly: report it. If the gap is as large at every sync and below twice the tolerance, kernels "
        "differ: raise canary_tolerance"
    )
    STALE_CACHE = (
        "the same tokens passed without the prefix cache, so it still has keys and values of earlier weights: report "
        "it with the version of vLLM; enable_prefix_caching: false in the server's engine_args works around it"
    )


class PromptMismatchError(ProjectError):
    exit_code = 2


class RolloutError(ProjectError):
    http_status = 502


class NotFiniteError(RolloutError):
    pass


class RewardError(ProjectError):
    pass


class CallbackError(ProjectError):
    pass


class LossError(ProjectError):
    pass


class OutOfMemoryError(ProjectError):
    pass


class WindowMismatchError(ProjectError):
    pass


class DeadlineError(ProjectError):
    http_status = 504


class CollectiveError(DeadlineError):
    """Another rank is gone or silent. Most often an error on that rank is the cause."""


class CheckpointError(ProjectError):
    exit_code = 2


class OutputError(ProjectError):
    exit_code = 2


def error_classes() -> dict[str, type[ProjectError]]:
    """Return every class of the tree by name, to rebuild an error from its `ErrorBody`."""
    found: dict[str, type[ProjectError]] = {}
    todo: list[type[ProjectError]] = [ProjectError]
    while todo:
        cls = todo.pop()
        found[cls.__name__] = cls
        todo.extend(cls.__subclasses__())
    return found
