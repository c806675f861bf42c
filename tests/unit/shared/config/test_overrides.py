"""`path.to.key=VALUE` of the command line, laid over a file."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shared.config.model import ConfigErrors, Mistake
from shared.config.parse import load_yaml, parse
from shared.config.yaml import COMMAND_LINE
from tests.examples import examples
from tests.unit.shared.config.examples import Outer, write

FILE = "inner: {rate: 0.25, items: [{name: a, port: 2}, {name: b}]}\ncount: 1\n"


def read(folder: Path, *overrides: str, text: str = FILE, **env: str) -> dict[str, Any]:
    return load_yaml(write(folder, text), env, overrides)


def mistakes_of(folder: Path, *overrides: str, text: str = FILE) -> tuple[Mistake, ...]:
    with pytest.raises(ConfigErrors) as error:
        parse(Outer, read(folder, *overrides, text=text))
    return error.value.mistakes


@pytest.mark.parametrize(
    ("override", "path", "value"),
    [
        ("count=5", ("count",), 5),
        ("inner.rate=1e-3", ("inner", "rate"), 1e-3),
        ("inner.flag=true", ("inner", "flag"), True),
        ("inner.names=[a, b]", ("inner", "names"), ["a", "b"]),
        ("inner.items[1].port=9", ("inner", "items"), [{"name": "a", "port": 2}, {"name": "b", "port": 9}]),
        ("inner={flag: true}", ("inner", "rate"), 0.25),  # a mapping is merged
        ("title=a=b", ("title",), "a=b"),
        ("title=${WHO}", ("title",), "me"),
        ("title='5'", ("title",), "5"),
        ("inner.items=", ("inner", "items"), None),
    ],
)
def test_a_value_of_the_command_line_wins(tmp_path: Path, override: str, path: tuple[str, ...], value: object) -> None:
    found: Any = read(tmp_path, override, WHO="me")
    for part in path:
        found = found[part]
    assert found == value


def test_later_ones_win_and_sections_are_made(tmp_path: Path) -> None:
    assert read(tmp_path, "count=1", "count=2", "inner.flag=true", text="title: x\n") == {
        "title": "x",
        "count": 2,
        "inner": {"flag": True},
    }


@pytest.mark.parametrize(
    ("override", "path", "says"),
    [
        ("inner.rate=high", "inner.rate", "the string 'high'"),
        ("inner.rte=0.5", "inner.rte", "did you mean inner.rate?"),
        ("inner.items[0].port=99", "inner.items[0].port", "99"),
        ("inner.items[7].port=1", "inner.items[7].port", "no item 7"),
        ("title=${NO_SUCH}", "title", "NO_SUCH"),
        ("title=[1", "title", "YAML"),
        ("title=a: b: c", "title", "YAML"),
        ("title=!!python/object:os.system {}", "title", "tag"),
        ("titel=5", "titel", "unknown"),
        ("iner.flag=1", "iner", "unknown"),
        ("title", "title", "KEY=VALUE"),
        ("=5", "=5", "KEY=VALUE"),
        ("a..b=5", "a..b=5", "KEY=VALUE"),
    ],
)
def test_a_mistake_names_its_key_and_the_command_line(tmp_path: Path, override: str, path: str, says: str) -> None:
    (mistake,) = mistakes_of(tmp_path, override)
    assert (mistake.path, mistake.at) == (path, COMMAND_LINE)
    assert says in str(mistake)


def test_mistakes_of_file_and_command_line_come_together(tmp_path: Path) -> None:
    found = {m.path: m.at for m in mistakes_of(tmp_path, "inner.flag=1", text="count: x\ninner: {rate: 3}\n")}
    assert {path: at.rpartition("/")[2] for path, at in found.items()} == {
        "count": "c.yaml:1",
        "inner.rate": "c.yaml:2",
        "inner.flag": COMMAND_LINE,
    }


def test_a_wrong_value_of_the_file_can_be_corrected(tmp_path: Path) -> None:
    assert parse(Outer, read(tmp_path, "count=3", text="count: x\n")).count == 3


@given(text=st.text(max_size=40))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=examples(200))
def test_any_text_is_a_configuration_or_mistakes(tmp_path: Path, text: str) -> None:
    for override in (text, f"title={text}"):
        with suppress(ConfigErrors):
            parse(Outer, read(tmp_path, override))
