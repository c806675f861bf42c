"""pydantic's errors in the words of ours: the first wrong field, what was found there, and what was wanted."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple, TypeVar

from pydantic import BaseModel, ValidationError

from shared.errors import ConfigError

Model = TypeVar("Model", bound=BaseModel)


class WrongField(NamedTuple):
    found: str
    wanted: str


def first_wrong(error: ValidationError, whole: str) -> WrongField:
    """Return the first mistake. `whole` names what was read, if no field of it is to blame."""
    first = error.errors(include_url=False)[0]
    field = ".".join(map(str, first["loc"])) or whole
    return WrongField(found=f"{field}: {first['input']!r:.200}", wanted=first["msg"])


def read_if_there(model: type[Model], file: Path, *, what: str, remedy: str) -> Model | None:
    """Read a JSON file as a `model`; None if there is no such file.

    Raises ConfigError if it cannot be read: `what` that means, and the `remedy`.
    """
    if not file.is_file():
        return None
    try:
        return model.model_validate_json(file.read_bytes())
    except ValidationError as error:
        raise ConfigError(f"{file}: {what}", **first_wrong(error, "the file")._asdict(), remedy=remedy) from error
