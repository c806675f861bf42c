"""The YAML dialect: what scalars mean, and what is no configuration."""

from __future__ import annotations

from pathlib import Path

import pytest

from shared.config.model import ConfigErrors
from shared.config.parse import load_yaml
from tests.unit.shared.config.examples import mistakes_of, read

# ---- scalars -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-4", 1e-4),
        ("1E+3", 1000.0),
        ("-2.5e3", -2500.0),
        (".5", 0.5),
        ("1_000", 1000),
        ("010", 10),
        ("0x1F", 31),
        ("0o17", 15),
        ("-7", -7),
        ("true", True),
        ("False", False),
        ("yes", "yes"),
        ("off", "off"),
        ("~", None),
        ("", None),
        ("null", None),
        ("2024-01-02", "2024-01-02"),
        ("12:30:45", "12:30:45"),
        ('"1"', "1"),
        (".inf", float("inf")),
        ("-", None),
    ],
)
def test_scalars_mean_what_people_write(tmp_path: Path, text: str, value: object) -> None:
    found = read(tmp_path, f"key: {text}\n" if text != "-" else "key:\n")["key"]
    assert found == value
    assert type(found) is type(value)


def test_a_number_that_is_none_stays_recognisable(tmp_path: Path) -> None:
    (mistake,) = mistakes_of(tmp_path, "inner: {rate: .nan}")
    assert (mistake.path, mistake.found, mistake.remedy) == ("inner.rate", "the number nan", "write a finite number")


# ---- text that is no configuration ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "nothing"),
        ("# only a comment\n", "nothing"),
        ("- a\n- b\n", "a list of 2"),
        ("just words", "the string 'just words'"),
        ("a: 1\n\tb: 2\n", "c.yaml:2"),
        ("a: [1, 2\n", "c.yaml"),
        ("a: 1\n---\nb: 2\n", "document"),
        (b"a: \xff\xfe\n", "not UTF-8"),
        ("a: \x00\n", "c.yaml"),
        ('a: "\\Uffffffff"\n', "c.yaml"),
        ("&a [*a]\n", "more than a configuration can hold"),
        ("[" * 5000, "nesting"),
        ("a: " + "[" * 100 + "]" * 100, "more than a configuration can hold"),
        ("x" * (1 << 20) + ": 1\n", "bytes"),
        ("a: *nothing\n", "undefined alias"),
    ],
)
def test_unreadable_text_is_one_mistake_with_its_place(tmp_path: Path, text: str | bytes, words: str) -> None:
    with pytest.raises(ConfigErrors, match=r"c\.yaml") as caught:
        read(tmp_path, text)
    assert words in str(caught.value)
    assert caught.value.exit_code == 2


def test_tabs_are_explained(tmp_path: Path) -> None:
    with pytest.raises(ConfigErrors, match="indent with spaces"):
        read(tmp_path, "a:\n\tb: 2\n")


def test_an_alias_bomb_ends_quickly(tmp_path: Path) -> None:
    rows = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    rows += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 10)]
    with pytest.raises(ConfigErrors, match="remove the aliases"):
        read(tmp_path, "\n".join(rows))


def test_aliases_of_ordinary_size_work(tmp_path: Path) -> None:
    assert read(tmp_path, "a: &x {k: 1}\nb: *x\n") == {"a": {"k": 1}, "b": {"k": 1}}


def test_a_missing_file_says_where_it_looked(tmp_path: Path) -> None:
    with pytest.raises(ConfigErrors, match="the working directory is"):
        load_yaml(tmp_path / "none.yaml")
    with pytest.raises(ConfigErrors, match="no readable file"):
        load_yaml(tmp_path)


@pytest.mark.parametrize(
    ("text", "path", "words"),
    [
        ("count: 1\ncount: 2\n", "count", "twice, first in line 1 (FILE:2)"),
        ("inner:\n  rate: 0.1\n  flag: true\n  rate: 0.2\n", "inner.rate", "twice, first in line 2 (FILE:4)"),
        ("1: x\n", "(root)", "the key '1', which is not a string"),
        ("[a, b]: x\n", "(root)", "the key 'a collection'"),
        ("inner: {true: 1}\n", "inner", "the key 'true'"),
        ("title: !!python/object:os.system x\n", "title", "the tag"),
        ("title: !custom x\n", "title", "the tag '!custom'"),
        ("inner: !!set {a, b}\n", "inner", "the tag"),
        ("count: !!int abc\n", "count", "does not fit its tag"),
        ("count: " + "9" * 5000, "count", "does not fit its tag"),
        ("inner: {<<: {rate: 0.1}}\n", "inner.'<<'", "a merge key"),
    ],
)
def test_yaml_that_a_configuration_does_not_use(tmp_path: Path, text: str, path: str, words: str) -> None:
    mistakes = mistakes_of(tmp_path, text)
    assert [mistake.path for mistake in mistakes] == [path]
    assert words.replace("FILE", str(tmp_path / "c.yaml")) in str(mistakes[0])
