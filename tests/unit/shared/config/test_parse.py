"""Every mistake at once, rules between keys, and properties of reading and writing."""

from __future__ import annotations

import pickle
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, Field

from shared.config.model import ConfigErrors, Mistake, describe, dotted
from shared.config.parse import load_yaml, parse, write_yaml
from shared.errors import ConfigError
from tests.examples import examples
from tests.unit.shared.config.examples import Item, Outer, mistakes_of, read, rule, write

# ---- every mistake, once -------------------------------------------------------------------------------------------


def test_all_mistakes_come_at_once_with_their_places(tmp_path: Path) -> None:
    text = (
        "inner:\n  rate: 2\n  flg: true\n  mode: servr\n  names: 5\n  items:\n    - {name: a, port: 99}\n    - 3\n"
        "    - {port: 1}\ncount: 3.5\ntitle: '${NONE}'\nold: {key: 1}\n"
    )
    found = {m.path: m for m in mistakes_of(tmp_path, text, retired={"old.key": ("count", "use count")})}
    assert set(found) == {
        "inner.rate",
        "inner.flg",
        "inner.mode",
        "inner.names",
        "inner.items[0].port",
        "inner.items[1]",
        "inner.items[2].name",
        "count",
        "title",
        "old.key",
    }
    assert found["inner.flg"].remedy == "did you mean inner.flag?"
    assert found["inner.mode"].remedy == "did you mean server?"
    assert found["inner.names"].wanted == "a string or a list of (a string)"
    assert found["inner.rate"].wanted == "a number in (0, 1)"
    assert found["inner.items[0].port"].wanted == "an integer in [1, 9]"
    assert found["count"].remedy == "write 3 or 4"
    assert found["old.key"].remedy == "use count"
    assert found["inner.mode"].at == f"{tmp_path / 'c.yaml'}:4"
    assert all(mistake.found and mistake.wanted and mistake.remedy for mistake in found.values())


def test_a_line_reads_path_found_wanted_remedy(tmp_path: Path) -> None:
    (mistake,) = mistakes_of(tmp_path, "inner:\n  flag: 'true'\n")
    place = f"{tmp_path / 'c.yaml'}:2"
    assert str(mistake) == (
        f"inner.flag: found the string 'true' ({place}); wanted true or false; write true or false, without quotes"
    )


@pytest.mark.parametrize(
    ("line", "without_quotes"),
    [
        ("count: '!!bool 3'", False),  # PyYAML has a KeyError for it
        ("inner: {rate: '0.5'}", True),
        ("inner: {rate: '5e-1'}", True),
        ("inner: {rate: '7'}", False),
        ("inner: {rate: abc}", False),
        ("count: '3'", True),
        ("count: 'true'", False),
        ("count: '['", False),
        ("inner: {flag: abc}", False),
        ("inner: {flag: 'true'}", True),
        ("inner: {items: '[]'}", True),
        ("inner: {items: all}", False),
    ],
)
def test_quotes_are_blamed_only_where_the_text_without_them_is_right(
    tmp_path: Path, line: str, without_quotes: bool
) -> None:
    (mistake,) = mistakes_of(tmp_path, f"{line}\n")
    assert ("without quotes" in mistake.remedy) is without_quotes
    if not without_quotes:
        assert mistake.wanted in mistake.remedy


def test_a_mistake_has_its_key_once() -> None:
    """The key that is wrong stands at the beginning of a line, whoever wrote the error."""
    error = ConfigError("inner.rate: too much of it", found="7", wanted="1", remedy="lower it")
    assert Mistake.of(error, "inner.rate").found == "too much of it: 7"
    assert Mistake.of(error, "inner.flag").found == "inner.rate: too much of it: 7"


def test_an_unknown_key_that_exists_elsewhere_is_pointed_there(tmp_path: Path) -> None:
    (mistake,) = mistakes_of(tmp_path, "flag: true\n")
    assert mistake.remedy == "did you mean inner.flag?"


def test_a_validator_of_the_model_speaks_for_itself(tmp_path: Path) -> None:
    (mistake,) = mistakes_of(tmp_path, "inner: {names: 'a*'}\n")
    assert (mistake.path, mistake.wanted) == ("inner.names", "names without stars")


def test_a_retired_key_takes_its_emptied_section_along(tmp_path: Path) -> None:
    retired = {"old.a": ("x", "y"), "old.b": ("x", "y"), "inner.gone": ("x", "y")}
    paths = [m.path for m in mistakes_of(tmp_path, "old: {a: 1, b: 2}\ninner: {gone: 1}\n", retired=retired)]
    assert paths == ["old.a", "old.b", "inner.gone"]
    assert [m.path for m in mistakes_of(tmp_path, "old: {a: 1, c: 2}\n", retired=retired)] == ["old.a", "old"]


# ---- rules between keys --------------------------------------------------------------------------------------------


def test_rules_speak_on_a_valid_configuration(tmp_path: Path) -> None:
    mistakes = mistakes_of(tmp_path, "count: 40\ninner: {items: [{name: a}]}\n", rules=[rule])
    assert [m.path for m in mistakes] == ["count", "inner.items", "count"]
    assert mistakes[0].at.endswith("c.yaml:1")


@pytest.mark.parametrize("mode", ["mode: servr", "mde: server"])
def test_a_rule_stops_at_a_value_that_is_itself_wrong(tmp_path: Path, mode: str) -> None:
    """The key that was probably meant is not trusted either."""
    text = f"count: 40\ninner: {{{mode}, items: [{{name: a}}]}}\n"
    assert len(mistakes_of(tmp_path, text, rules=[rule])) == 2  # the first of the rule, and the key itself


def test_rules_still_speak_beside_other_mistakes(tmp_path: Path) -> None:
    mistakes = mistakes_of(tmp_path, "count: 40\ninner: {rate: 7, items: [{name: a}]}\n", rules=[rule])
    assert [m.path for m in mistakes] == ["inner.rate", "count", "inner.items", "count"]


def test_a_view_shows_converted_values(tmp_path: Path) -> None:
    class Loose(BaseModel):
        folder: Path = Path()
        count: int = 0

    def is_folder(config: Loose) -> Iterator[Mistake]:
        if not config.folder.is_dir():
            yield Mistake(path="folder", found="no folder", wanted="one", remedy="create it")

    assert len(mistakes_of(tmp_path, "folder: /nowhere\ncount: x\n", Loose, rules=[is_folder])) == 2


# ---- words ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("annotation", "words"),
    [
        (int | None, "an integer or null"),
        (Annotated[int, Field(ge=1)], "an integer >= 1"),
        (list[Annotated[float, Field(le=2)]] | None, "a list of (a number <= 2) or null"),
        (Literal["a", "b"], "a or b"),
        (Item, "a mapping"),
        (dict[str, Any], "a mapping"),
    ],
)
def test_types_in_words(annotation: Any, words: str) -> None:
    assert describe(annotation) == words


def test_paths_in_words() -> None:
    assert dotted(("a", 0, "b", "odd key", "\ud800")) == "a[0].b.'odd key'.'\\ud800'"
    assert dotted(()) == "(root)"


def test_errors_survive_pickling_and_are_config_errors() -> None:
    errors = ConfigErrors(mistakes=[Mistake(path="a", found="b", wanted="c", remedy="d")])
    again = pickle.loads(pickle.dumps(errors))
    assert isinstance(again, ConfigError)
    assert str(again) == str(errors) == "a: found b; wanted c; d"


# ---- properties ----------------------------------------------------------------------------------------------------

text_values = st.text(st.characters(exclude_categories=["Cs"]), max_size=30) | st.text(
    "$ {}AB:#-'\"\n\t!&*", max_size=12
)
plain_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | text_values
    | st.sampled_from(["yes", "1e4", "0x1", "null", "2024-01-01", "<<", "=", "010", "1:20"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(text_values, inner, max_size=4),
    max_leaves=12,
)


@given(values=st.dictionaries(text_values.filter(lambda k: k not in ("base", "<<")), plain_values, max_size=5))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=examples(300))
def test_what_is_dumped_reads_back_the_same(tmp_path: Path, values: dict[str, Any]) -> None:
    write_yaml(tmp_path / "c.yaml", values, "made by a test\nof two lines")

    def without_merge_keys(value: Any) -> bool:
        if isinstance(value, dict):
            return "<<" not in value and all(map(without_merge_keys, value.values()))
        return all(map(without_merge_keys, value)) if isinstance(value, list) else True

    found = load_yaml(tmp_path / "c.yaml", {})
    if all(map(without_merge_keys, values.values())):
        assert repr(dict(found)) == repr(values)  # repr: 1 is not 1.0, nor True
        assert not found.mistakes


SEED_TEXT = 'base: x.yaml\ninner: {rate: 1e-4, flag: true, items: [{name: "${A}", port: 3}]}\ncount: &n 3\nneeded: *n\n'


@given(
    st.binary(max_size=60)
    | st.text(max_size=60).map(str.encode)
    | st.text("ab:-[]{}&*!|>?'\"#%@`, \n\t0.e~<", max_size=60).map(str.encode)
)
@example(b"? ")
@example(b"!!binary x")
@example(b"%YAML 9.9\n--- a")
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=examples(400))
def test_fuzzed_text_is_a_mapping_or_mistakes(tmp_path: Path, text: bytes) -> None:
    _survives(tmp_path, text)


@given(seed=st.integers(0, 10**6), edits=st.integers(1, 6))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=examples(300))
def test_mutated_configurations_are_valid_or_mistakes(tmp_path: Path, seed: int, edits: int) -> None:
    random_state, text = random.Random(seed), list(SEED_TEXT)
    for _ in range(edits):
        at = random_state.randrange(len(text))
        text[at : at + random_state.randrange(3)] = random_state.choice(
            ["", ":", "-", "\t", "[", "}", "*n", "\n", "'", "é", "9", " "]
        )
    write(tmp_path, "title: base\n", "x.yaml")
    _survives(tmp_path, "".join(text).encode())


def _survives(folder: Path, text: bytes) -> None:
    """Check that it is valid, or raises ConfigErrors with all four parts; any other exception fails the test."""
    try:
        parse(Outer, read(folder, text, A="a"), rules=[rule])
    except ConfigErrors as errors:
        mistakes = errors.mistakes
    else:
        return
    assert mistakes
    assert all(m.path and m.found and m.wanted and m.remedy for m in mistakes)
