"""Both forms of the server section and every bad pairing (R05, R06, R16)."""

from __future__ import annotations

from typing import Any

import pytest

from learner.config.sections.rollouts import SHORT
from learner.config.sections.servers import ServerEntry, entry_mistakes
from tests.unit.learner.config.examples import REMOVE, ROLLOUT, SERVER, changed, minimal, mistakes, only_mistake, valid


def form(**server: Any) -> dict[str, Any]:
    return {SERVER: server}


def servers_of(**server: Any) -> list[tuple[str, int]]:
    config = valid(minimal(), form(**server))
    section = config.rollout_matching.vllm.server
    assert section.base_url is None
    assert section.group_port is None
    return [(entry.base_url, entry.group_port) for entry in section.servers or []]


def test_r05_explicit_list() -> None:
    entries = [{"base_url": "http://a:1", "group_port": 5}, {"base_url": "http://b:1/pre/fix/", "group_port": 5}]
    assert servers_of(servers=entries) == [("http://a:1", 5), ("http://b:1/pre/fix", 5)]


def test_r05_one_url_one_port() -> None:
    assert servers_of(base_url="http://a:8000", group_port=51216) == [("http://a:8000", 51216)]


def test_r05_lists_pair_by_index() -> None:
    assert servers_of(base_url=["http://a:1", "http://b:1"], group_port=[7, 9]) == [
        ("http://a:1", 7),
        ("http://b:1", 9),
    ]


def test_r05_one_port_counts_up() -> None:
    urls = ["http://a:1", "http://a:2", "http://b:1"]
    assert servers_of(base_url=urls, group_port=70) == [("http://a:1", 70), ("http://a:2", 71), ("http://b:1", 72)]


@pytest.mark.parametrize(
    "url",
    [
        "http://u:geheim@a:1",
        "http://a:1?token=geheim",
        "u:geheim@a:1",
        "http://u:geheim@a:99999999",
        "http://u:geh/eim@a",
    ],
)
def test_a_wrong_url_is_shown_without_what_may_be_secret(url: str) -> None:
    found = only_mistake(minimal(), form(servers=[{"base_url": url, "group_port": 5}]))
    assert "eheim" not in str(found)
    assert [mistake.path for mistake in entry_mistakes(url, None)] == ["URL"]


def test_r05_defaults() -> None:
    server = valid(minimal()).rollout_matching.vllm.server
    assert server.servers == [ServerEntry(base_url="http://h:8000", group_port=9000)]
    assert (server.timeout_s, server.infer_timeout_s) == (240.0, None)


@pytest.mark.parametrize(
    ("server", "path", "words"),
    [
        ({}, "servers", "nothing"),
        ({"servers": []}, "servers", "an empty list"),
        ({"base_url": [], "group_port": 1}, "base_url", "an empty list"),
        ({"base_url": "http://a:1"}, "group_port", "nothing"),
        ({"base_url": ["http://a:1"]}, "group_port", "nothing"),
        ({"group_port": 5}, "base_url", "nothing"),
        ({"base_url": "http://a:1", "group_port": [5]}, "group_port", "a list of 1"),
        ({"base_url": ["http://a:1", "http://b:1"], "group_port": [5]}, "group_port", "1 ports for 2 URLs"),
        ({"base_url": ["http://a:1"], "group_port": [5, 6]}, "group_port", "2 ports for 1 URLs"),
        ({"base_url": ["http://a:1", "http://b:1"], "group_port": 65535}, "group_port", "ends at 65536"),
        ({"base_url": "http://a:1", "group_port": "5"}, "group_port", "the string '5'"),
        ({"base_url": "http://a:1", "group_port": True}, "group_port", "the boolean true"),
        ({"base_url": "http://a:1", "group_port": 5.0}, "group_port", "the number 5.0"),
        ({"base_url": "http://a:1", "group_port": 0}, "group_port", "the integer 0"),
        ({"base_url": ["http://a:1"], "group_port": [70000]}, "group_port[0]", "the integer 70000"),
        ({"base_url": 5, "group_port": 5}, "base_url", "the integer 5"),
        ({"base_url": ["http://a:1", 5], "group_port": 5}, "base_url[1]", "the integer 5"),
        ({"servers": {"base_url": "http://a:1", "group_port": 5}}, "servers", "a mapping with 2"),
        ({"servers": ["http://a:1"]}, "servers[0]", "the string 'http://a:1'"),
        ({"servers": [{"base_url": "http://a:1"}]}, "servers[0].group_port", "nothing"),
        ({"servers": [{"group_port": 5}]}, "servers[0].base_url", "nothing"),
        ({"servers": [{"base_url": "http://a:1", "group_port": 99999}]}, "servers[0].group_port", "99999"),
        ({"servers": [{"base_url": "http://a:1", "group_port": 5, "port": 1}]}, "servers[0].port", "unknown key"),
    ],
)
def test_r05_r16_bad_forms(server: dict[str, Any], path: str, words: str) -> None:
    mistake = only_mistake(minimal(), form(**server))
    assert mistake.path == f"{SERVER}.{path}"
    assert words in mistake.found


@pytest.mark.parametrize(
    "extra", [{"base_url": "http://b:1"}, {"group_port": 6}, {"base_url": "http://b:1", "group_port": 6}]
)
def test_r05_both_forms_at_once(extra: dict[str, Any]) -> None:
    mistake = only_mistake(minimal(), form(servers=[{"base_url": "http://a:1", "group_port": 5}], **extra))
    assert (mistake.path, mistake.wanted) == (SERVER, "exactly one form")
    assert all(name in mistake.found for name in ("servers", *extra))


@pytest.mark.parametrize(
    "url",
    ["", "h:8000", "ftp://h:1", "http://", "http://:80", "http://h:99999", "http://h:0", "http://h:x", "http://h 1:1",
     "http://h:1/?q=1", "http://h:1/#f", "http://user:secret@h:1", "http://[::1", "//h:1", "http:/h:1"],
)  # fmt: skip
def test_r06_r16_bad_urls(url: str) -> None:
    """Every other entry is fine, so that the right one is blamed; a password is not repeated."""
    entries = [{"base_url": "http://good:1", "group_port": 5}, {"base_url": url, "group_port": 6}]
    mistake = only_mistake(minimal(), form(servers=entries))
    assert mistake.path == f"{SERVER}.servers[1].base_url"
    assert "secret" not in str(mistake)
    if url:
        mistake = only_mistake(minimal(), form(base_url=["http://good:1", url], group_port=5))
        assert mistake.path == f"{SERVER}.base_url[1]"
        assert only_mistake(minimal(), form(base_url=url, group_port=5)).path == f"{SERVER}.base_url"


@pytest.mark.parametrize(
    "url", ["http://h:1", "https://h", "http://h:1/a/b/", "http://[::1]:8000", "HTTP://h:1", "http://10.0.0.1:1"]
)
def test_r06_good_urls(url: str) -> None:
    assert servers_of(base_url=url, group_port=5) == [(url.rstrip("/"), 5)]


@pytest.mark.parametrize(
    ("pairs", "path"),
    [
        ([("http://a:1", 5), ("http://a:1/", 6)], "servers[1].base_url"),
        ([("http://a:1", 5), ("http://a:2", 5)], "servers[1].group_port"),
        ([("http://a:1", 1)], "servers[0].group_port"),
        ([("http://a", 80)], "servers[0].group_port"),
        ([("https://a", 443)], "servers[0].group_port"),
    ],
)
def test_r16_servers_that_clash(pairs: list[tuple[str, int]], path: str) -> None:
    entries = [{"base_url": url, "group_port": port} for url, port in pairs]
    assert only_mistake(minimal(), form(servers=entries)).path == f"{SERVER}.{path}"


def test_r16_the_way_out_is_named() -> None:
    remedy = only_mistake(minimal(), {SERVER: REMOVE}).remedy
    assert "vllm.mode: colocate" in remedy
    assert "rollout_backend: hf" in remedy


def test_r16_all_bad_servers_are_told() -> None:
    paths = [m.path for m in mistakes(minimal(), form(base_url=["x", "http://good:1", "y"], group_port=5))]
    assert paths == [f"{SERVER}.base_url[0]", f"{SERVER}.base_url[2]"]


@pytest.mark.parametrize("unused", [{f"{ROLLOUT}.vllm.mode": "colocate"}, {f"{ROLLOUT}.rollout_backend": "hf"}])
def test_r16_a_section_out_of_use_may_stay(unused: dict[str, Any]) -> None:
    """Switching back to colocate or hf is one key."""
    config = valid(minimal(), {**form(base_url=["http://a:1"], group_port=[5, 6]), **unused})
    assert config.rollout_matching.vllm.server.group_port == [5, 6]


@pytest.mark.parametrize(
    ("given", "wanted"), [(0, "> 0"), (-1.0, "> 0"), (float("nan"), "> 0"), ("240", "> 0"), (None, "> 0")]
)
def test_r05_timeout_is_a_positive_number(given: object, wanted: str) -> None:
    mistake = only_mistake(minimal(), {f"{SERVER}.timeout_s": given})
    assert mistake.path == f"{SERVER}.timeout_s"
    assert wanted in mistake.wanted


@pytest.mark.parametrize("given", [None, 0, -1, 3, 2.5])
def test_r05_infer_timeout_takes_null_and_any_number(given: float | None) -> None:
    assert valid(minimal(), {f"{SERVER}.infer_timeout_s": given}).rollout_matching.vllm.server.infer_timeout_s == given


def test_short_names_of_rollouts_are_the_long_ones() -> None:
    """Each short name writes its long one, and equal values may stand in both places."""
    entry = {"base_url": "http://h:8000", "group_port": 9000}
    values = {
        "servers": [entry],
        "mode": "server",
        "backend": "vllm",
        "max_new_tokens": 77,
        "temperature": 0.5,
        "batch_size": 3,
    }
    assert values.keys() == SHORT.keys()
    short = {key: value for key, value in minimal().items() if key != "custom"}
    short |= {"custom": {"trainer_variant": "rollout_matching_sft"}, "rollouts": values}
    long = changed(minimal(), {SHORT[name]: value for name, value in values.items()})
    assert valid(short) == valid(long) == valid(changed(long, {"rollouts": values}))
    assert valid(short).rollout_matching.decoding.max_new_tokens == 77


def test_a_short_name_that_disagrees_or_is_wrong_is_one_mistake() -> None:
    mistake = only_mistake(minimal(), {"rollouts.max_new_tokens": 77, SHORT["max_new_tokens"]: 78})
    assert mistake.path == "rollouts.max_new_tokens"
    assert "78" in mistake.found
    assert SHORT["max_new_tokens"] in mistake.found
    other = [{"base_url": "http://other:8000", "group_port": 9000}]
    assert only_mistake(minimal(), {"rollouts.servers": other}).path == "rollouts.servers"
    assert only_mistake(minimal(), {"rollouts.max_new_tokens": "many"}).path == "rollouts.max_new_tokens"
    assert only_mistake(minimal(), {"rollouts.server": other}).remedy == "did you mean servers?"


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("epochs", "training.num_train_epochs"),
        ("training.epochs", "training.num_train_epochs"),
        ("imgsz", "model.max_pixels"),
        ("model.imgsz", "model.max_pixels"),
        ("training.batch", "training.effective_batch_size"),
        ("lr0", "training.learning_rate"),
        ("training.lr0", "training.learning_rate"),
        ("val", "data.val"),
        ("training.patience", "training.early_stop_patience"),
    ],
)
def test_words_of_yolo_are_understood(word: str, meant: str) -> None:
    assert f"did you mean {meant}" in only_mistake(minimal(), {word: 10}).remedy
