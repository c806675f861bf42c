"""`base:` and `${VAR}`."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shared.config.model import ConfigErrors, Section, key, shown
from shared.config.parse import dump_yaml, load_yaml, parse
from shared.config.yaml import MAX_BYTES
from tests.examples import examples
from tests.unit.shared.config.examples import Outer, mistakes_of, read, write

# ---- composition ---------------------------------------------------------------------------------------------------


def test_bases_merge_and_later_ones_win(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    write(tmp_path, "a: {x: 1, y: 1, z: [1, 2]}\nb: 1\n", "deep/root.yaml")
    write(tmp_path, "base: root.yaml\na: {y: 2}\nc: {k: 1}\n", "deep/one.yaml")
    write(tmp_path, "a: {z: [3]}\nc: null\n", "two.yaml")
    found = read(tmp_path, "base: [deep/one.yaml, two.yaml]\na: {x: 4}\n")
    assert found == {"a": {"x": 4, "y": 2, "z": [3]}, "b": 1, "c": None}
    assert found.lines["a.x"].endswith("c.yaml:2")
    assert found.lines["a.y"].endswith("one.yaml:2")
    assert found.lines["b"].endswith("root.yaml:2")


@given(
    parts=st.lists(
        st.recursive(st.integers(), lambda inner: st.dictionaries(st.sampled_from("abc"), inner)),
        min_size=1,
        max_size=4,
    )
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=examples(50))
def test_merging_is_key_by_key(tmp_path: Path, parts: list[Any]) -> None:
    """The reference is the obvious one: every leaf path, the last file that sets it or cuts it wins."""

    def reference(below: Any, above: Any) -> Any:
        if not isinstance(below, dict) or not isinstance(above, dict):
            return above
        keys = {**below, **above}
        return {k: reference(below[k], above[k]) if k in below and k in above else keys[k] for k in keys}

    expected: Any = {}
    for i, part in enumerate(parts):
        write(tmp_path, dump_yaml({"v": part}), f"b{i}.yaml")
        expected = reference(expected, {"v": part})
    assert read(tmp_path, dump_yaml({"base": [f"b{i}.yaml" for i in range(len(parts))]})) == expected


def test_a_cycle_of_bases_is_named(tmp_path: Path) -> None:
    write(tmp_path, "base: c.yaml\n", "other.yaml")
    with pytest.raises(ConfigErrors, match=r"c\.yaml -> other\.yaml -> c\.yaml"):
        read(tmp_path, "base: other.yaml\n")


def test_bases_that_multiply_are_stopped(tmp_path: Path) -> None:
    write(tmp_path, "a: 1\n", "n0.yaml")
    for i in range(1, 10):
        write(tmp_path, f"base: [n{i - 1}.yaml, n{i - 1}.yaml, n{i - 1}.yaml]\n", f"n{i}.yaml")
    with pytest.raises(ConfigErrors):
        load_yaml(tmp_path / "n9.yaml")


@pytest.mark.parametrize("base", ["3", "{a: b}", "[1]", '[""]', '"a\\0b"'])
def test_a_base_is_a_path_or_a_list(tmp_path: Path, base: str) -> None:
    (mistake,) = mistakes_of(tmp_path, f"base: {base}\n")
    assert (mistake.path, mistake.wanted) == ("base", "a path or a list of paths")


def test_a_missing_base_names_itself(tmp_path: Path) -> None:
    with pytest.raises(ConfigErrors, match=r"gone\.yaml"):
        read(tmp_path, "base: gone.yaml\n")


@pytest.mark.parametrize("name", ["/dev/zero", "pipe.yaml", "."])
def test_a_base_is_a_regular_file(tmp_path: Path, name: str) -> None:
    """A pipe would be waited for, and a device read for ever."""
    os.mkfifo(tmp_path / "pipe.yaml")
    with pytest.raises(ConfigErrors) as raised:
        read(tmp_path, f"base: {name}\n")
    assert any(name in mistake.path or mistake.path.endswith(tmp_path.name) for mistake in raised.value.mistakes)


def test_no_more_of_a_file_is_read_than_a_configuration_may_have() -> None:
    with pytest.raises(ConfigErrors) as raised:
        load_yaml("/dev/zero")
    assert str(MAX_BYTES) in raised.value.mistakes[0].wanted


# ---- environment ---------------------------------------------------------------------------------------------------


def test_variables_fill_strings_and_stay_strings(tmp_path: Path) -> None:
    text = 'base: "${WHERE}.yaml"\na: "${X}/b/${X}"\nn: "${N}"\nlist: ["${X}"]\nliteral: "$${X} $X"\n'
    write(tmp_path, "z: 1\n", "basis.yaml")
    found = read(tmp_path, text, X="home", N="5", WHERE="basis")
    assert found == {"a": "home/b/home", "n": "5", "list": ["home"], "literal": "${X} $X", "z": 1}


def test_what_a_variable_holds_is_not_expanded_again(tmp_path: Path) -> None:
    assert read(tmp_path, 'a: "${X}"\n', X="${Y}") == {"a": "${Y}"}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("${NOT_SET}", "${NOT_SET}, which is not set"),
        ("${NAME:-default}", "${VAR} with a plain name"),
        ("${", "${VAR} with a plain name"),
        ("${}", "${VAR} with a plain name"),
        ("a ${open", "${VAR} with a plain name"),
    ],
)
def test_other_forms_of_variables_are_refused(tmp_path: Path, text: str, words: str) -> None:
    (mistake,) = mistakes_of(tmp_path, f'title: "{text}"\n')
    assert mistake.path == "title"
    assert words in str(mistake)


def test_a_variable_in_a_replaced_value_is_not_needed(tmp_path: Path) -> None:
    write(tmp_path, 'title: "${NOT_SET}"\n', "below.yaml")
    assert read(tmp_path, "base: below.yaml\ntitle: here\n") == {"title": "here"}


def test_a_variable_can_not_give_a_number(tmp_path: Path) -> None:
    with pytest.raises(ConfigErrors, match="can only fill a string"):
        parse(Outer, read(tmp_path, 'count: "${N}"\n', N="5"))


class Hiding(Section):
    header: str = key("a")
    other: str = key("b")
    names: list[str] = key("c")


SECRETS = """header: "Bearer ${API_TOKEN}"\nother: "${PLACE}"\nnames: ["${DB_PASSWORD}", "x"]\n"""


def test_secrets_are_written_as_variables(tmp_path: Path) -> None:
    """The written file reads back as the same configuration."""
    env = {"API_TOKEN": "geheim", "PLACE": "here", "DB_PASSWORD": "pw"}
    config = parse(Hiding, load_yaml(write(tmp_path, SECRETS), env))
    assert (config.header, config.other, config.names) == ("Bearer geheim", "here", ["pw", "x"])
    for one in (config, config.model_copy(update={"other": "there"})):
        text = dump_yaml(shown(one))
        assert "geheim" not in text + json.dumps(shown(one))
        assert "pw" not in text.replace("names", "")
    (tmp_path / "written.yaml").write_text(dump_yaml(shown(config)))
    assert parse(Hiding, load_yaml(tmp_path / "written.yaml", env)) == config


def test_an_escaped_variable_is_none_of_the_process_s(tmp_path: Path) -> None:
    """The environment itself refuses to be asked for anything but text."""
    assert load_yaml(write(tmp_path, 'a: "$${HOME}"\n'), os.environ) == {"a": "${HOME}"}


def test_a_secret_is_found_in_what_became_of_a_value(tmp_path: Path) -> None:
    """A URL without its last slash, with its host in lower case; a default that was made of it. What is written reads
    back as it is."""
    env = {"URL_KEY": "Tenant-77/", "PATH_TOKEN": "geheim"}
    content = 'header: "http://${URL_KEY}x/"\nother: "$${HOME} costs"\nnames: ["${PATH_TOKEN}"]\n'
    config = parse(Hiding, load_yaml(write(tmp_path, content), env))
    changed = config.model_copy(
        update={"header": "http://tenant-77/x", "other": "${HOME} geheim costs", "names": ["Geheimnis"]}
    )
    assert shown(changed)["header"] == "http://${URL_KEY}x"
    (tmp_path / "written.yaml").write_text(dump_yaml(shown(changed)))
    again = parse(Hiding, load_yaml(tmp_path / "written.yaml", env))
    assert (again.other, again.names) == (changed.other, changed.names)
    assert again.header.lower() == changed.header


def test_a_mistake_does_not_show_a_secret(tmp_path: Path) -> None:
    path = write(tmp_path, 'header: 1\nother: "a"\nnames: "${MY_KEY}"\n')
    with pytest.raises(ConfigErrors) as raised:
        parse(Hiding, load_yaml(path, {"MY_KEY": "geheim"}))
    assert "geheim" not in str(raised.value)
    assert "${MY_KEY}" in str(raised.value)
