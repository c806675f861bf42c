"""Tests of what somebody else's files may be: a value, OSError or ValueError."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from shared.reading import is_file, is_there, json_in, json_of, lines_in, yaml_of


@pytest.mark.parametrize("text", [b"[" * 100_000, b"\xff", b"", b"{", b"9" * 5000])
def test_what_is_no_json_is_a_value_error(text: bytes) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        json_of(text)


TAGS = ["!!bool 3", "!!timestamp x", "!!set [1]", "!!omap 3", "!!int x", "!!float [1]", "!!binary é", "*a", "!x 1", "["]


@pytest.mark.parametrize("text", [*TAGS, "[" * 10_000])
def test_what_is_no_yaml_is_a_value_error(text: str) -> None:
    """Tags that do not fit their values, for which PyYAML raises errors of many kinds."""
    with pytest.raises(ValueError, match=r"\w"):
        yaml_of(text)


def test_folders_pipes_and_missing_files_are_os_errors(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")  # reading a pipe would wait for ever
    for path in (tmp_path, tmp_path / "pipe", tmp_path / "none"):
        with pytest.raises(OSError, match=str(path)):
            json_in(path)
        with pytest.raises(OSError, match=str(path)):
            list(lines_in(path))


def test_lines_come_with_their_numbers(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"\xef\xbb\xbfx\n\n y \n")
    assert list(lines_in(tmp_path / "a")) == [(1, b"x"), (3, b"y")]


@pytest.mark.parametrize("name", ["x" * 5000, "\0", "none"])
def test_a_name_that_no_file_can_have_is_not_there(name: str) -> None:
    assert not is_file(Path(name))
    assert not is_there(Path(name))
