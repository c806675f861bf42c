"""The exception tree of both programs.

Every error that a user can meet carries four parts: what happened, what was found, what was wanted, and what to do.
`http_status` is what the server answers with; `exit_code` is what a program ends with. `ErrorBody` in `wire.py` is the
same thing as JSON, so that the server's own words reach the learner's user.

    ProjectError
    ├── ConfigError             a key of a YAML file is wrong
    ├── DataError               a dataset row or image is wrong
    ├── RequestError            the client asked for something that can't be served
    │   ├── UnauthorizedError       no or wrong bearer token
    │   ├── MediaError              an image is missing, too large, or not allowed
    │   └── PromptTooLongError      prompt and answer do not fit the model's context
    ├── ServerError             the learner's view of a rollout server
    │   ├── ServerUnreachableError  no answer
    │   ├── ServerBusyError         it answered: try again later
    │   ├── ServerPoisonedError     its weights are not known to be right
    │   └── ServerMismatchError     another model, tokenizer or protocol than the learner's
    ├── SyncError               a weight sync did not complete
    │   ├── CommunicatorError       joining, sending or receiving failed
    │   ├── DigestError             the bytes differ
    │   ├── CoverageError           a served parameter was not written
    │   └── CanaryError             the served model gives other probabilities than the learner's
    ├── PromptMismatchError     the two sides tokenize a prompt differently
    ├── RolloutError            an answer is malformed or incomplete
    │   └── NotFiniteError          the model's log-probabilities are not finite
    ├── LossError               a supervised index outside the assistant span, or a loss that is not finite
    ├── OutOfMemoryError        a row of the learner does not fit the memory that is left
    ├── WindowMismatchError     a repeated accumulation window came with other samples than the first time
    ├── DeadlineError           a wait passed its deadline
    └── CheckpointError         a checkpoint can't be written or read
"""

from __future__ import annotations


class ProjectError(Exception):
    """Base of all errors that are told to the user without a traceback."""

    http_status: int = 500
    exit_code: int = 1

    def __init__(self, what: str, *, found: str = "", wanted: str = "", remedy: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.found = found
        self.wanted = wanted
        self.remedy = remedy

    def __str__(self) -> str:
        parts = [self.what]
        if self.found:
            parts.append(f"found {self.found}")
        if self.wanted:
            parts.append(f"wanted {self.wanted}")
        if self.remedy:
            parts.append(self.remedy)
        return "; ".join(parts)

    def __reduce__(self) -> tuple[object, ...]:
        # Exceptions cross process boundaries (DataLoader workers, engine workers); keyword-only parts must survive.
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
    pass


class PromptMismatchError(ProjectError):
    exit_code = 2


class RolloutError(ProjectError):
    http_status = 502


class NotFiniteError(RolloutError):
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
    """Another rank is gone or silent: mostly the consequence of an error there."""


class CheckpointError(ProjectError):
    exit_code = 2


def error_classes() -> dict[str, type[ProjectError]]:
    """Every class of the tree by name, to rebuild an error from its `ErrorBody`."""
    found: dict[str, type[ProjectError]] = {}
    todo: list[type[ProjectError]] = [ProjectError]
    while todo:
        cls = todo.pop()
        found[cls.__name__] = cls
        todo.extend(cls.__subclasses__())
    return found
