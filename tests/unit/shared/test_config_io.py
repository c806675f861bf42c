"""Reading configuration files: the YAML dialect, composition, variables, and every mistake at once."""

from __future__ import annotations

import pickle
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict, Field, field_validator

from shared.config_errors import ConfigErrors, Mistake, dotted
from shared.config_io import Document, dump_yaml, load_yaml, parse, write_yaml
from shared.config_model import describe
from shared.errors import ConfigError


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
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=50)
def test_merging_is_key_by_key(tmp_path: Path, parts: list[Any]) -> None:
    """Against the obvious reference: every leaf path, the last file that sets it or cuts it wins."""

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


def rule(config: Outer) -> Iterator[Mistake]:
    if config.count > 2:
        yield Mistake(path="count", found=str(config.count), wanted="up to 2", remedy="lower it")
    if config.inner.mode == "colocate" and config.inner.items:
        yield Mistake(path="inner.items", found="items", wanted="none", remedy="remove them")
    if config.doubled + config.plus(1) > 100:
        yield Mistake(path="count", found="too much", wanted="less", remedy="lower it")


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
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=300)
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
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=400)
def test_fuzzed_text_is_a_mapping_or_mistakes(tmp_path: Path, text: bytes) -> None:
    _survives(tmp_path, text)


@given(seed=st.integers(0, 10**6), edits=st.integers(1, 6))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=300)
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
    """Valid, or ConfigErrors with all four parts; any other exception fails the test."""
    try:
        parse(Outer, read(folder, text, A="a"), rules=[rule])
    except ConfigErrors as errors:
        mistakes = errors.mistakes
    else:
        return
    assert mistakes
    assert all(m.path and m.found and m.wanted and m.remedy for m in mistakes)
