"""A small model and shorthands for the tests of the configuration reader."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
from pydantic import BaseModel, ConfigDict, Field, field_validator

from shared.config.model import ConfigErrors, Mistake
from shared.config.parse import Document, load_yaml, parse


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class Item(Strict):
    name: str
    port: int = Field(default=1, ge=1, le=9)


class Inner(Strict):
    rate: float = Field(default=0.5, gt=0.0, lt=1.0)
    flag: bool = False
    mode: Literal["server", "colocate"] = "colocate"
    names: str | list[str] = "all"
    items: list[Item] | None = None

    @field_validator("names")
    @classmethod
    def _no_stars(cls, value: str | list[str]) -> str | list[str]:
        if "*" in value:
            raise ValueError("names without stars")
        return value


class Outer(Strict):
    inner: Inner = Inner()
    count: int = 3
    title: str = ""
    needed: int = 0

    @property
    def doubled(self) -> int:
        return 2 * self.count

    def plus(self, other: int) -> int:
        return self.count + other


def write(folder: Path, text: str | bytes, name: str = "c.yaml") -> Path:
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def read(folder: Path, text: str | bytes, **env: str) -> Document:
    return load_yaml(write(folder, text), env)


def mistakes_of(folder: Path, text: str | bytes, model: type[BaseModel] = Outer, **kwargs: Any) -> tuple[Mistake, ...]:
    with pytest.raises(ConfigErrors) as caught:
        parse(model, read(folder, text), **kwargs)
    return caught.value.mistakes


def rule(config: Outer) -> Iterator[Mistake]:
    if config.count > 2:
        yield Mistake(path="count", found=str(config.count), wanted="up to 2", remedy="lower it")
    if config.inner.mode == "colocate" and config.inner.items:
        yield Mistake(path="inner.items", found="items", wanted="none", remedy="remove them")
    if config.doubled + config.plus(1) > 100:
        yield Mistake(path="count", found="too much", wanted="less", remedy="lower it")
