"""The files through which a run is asked about its servers (R40): what is shown, and what is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from learner.rollout.control import FOLDER, REQUESTS, STATE, ServerControl, ServerRequest, read_state, state_lines
from learner.rollout.membership import Member, Membership
from shared.errors import ConfigError
from shared.wire import ServedWeights

URLS = ["http://a:1", "http://b:2"]
MEMBERSHIP = Membership(members=tuple(Member(base_url=url, group_port=5) for url in URLS))


def test_what_a_run_shows_is_one_line_per_server_and_one_for_the_weights(tmp_path: Path) -> None:
    control = ServerControl(tmp_path)
    control.show(MEMBERSHIP)
    lines = state_lines(read_state(tmp_path))
    assert lines == ["http://a:1  serving  since start", "http://b:2  serving  since start", "weights: none synced yet"]
    served = ServedWeights(ver=7, incarnation="i", weights="w")
    control.show(MEMBERSHIP.leave_out(URLS[1], "killed", now_s=1e9).synced(URLS[:1], served, now_s=2e9))
    lines = state_lines(read_state(tmp_path))
    assert lines[0] == "http://a:1  serving  since start"
    assert re.fullmatch(r"http://b:2  out  since 2001-09-\d\d \d\d:46:40  killed", lines[1])
    assert lines[2] == "weights: ver 7"


@pytest.mark.parametrize(
    "damaged",
    [
        [],
        {"servers": "http://a:1"},
        {"servers": [7]},
        {"servers": [{"base_url": 7, "state": "serving"}]},
        {"servers": [{"base_url": "http://a:1", "state": None}]},
        {"servers": [{"base_url": "http://a:1", "since_s": "today"}]},
        {"servers": [{"base_url": "http://a:1", "since_s": 1e300}]},
        {"servers": [], "served": 7},
        {"servers": [], "served": {"ver": "7"}},
        {"servers": [], "served": {}},
    ],
)
def test_a_damaged_state_is_a_typed_error(damaged: Any, tmp_path: Path) -> None:
    path = tmp_path / FOLDER / STATE
    path.parent.mkdir()
    path.write_text(json.dumps(damaged))
    with pytest.raises(ConfigError, match="has no list of rollout servers"):
        read_state(tmp_path)


def test_requests_are_taken_once_in_order_and_damaged_ones_are_removed(tmp_path: Path) -> None:
    control = ServerControl(tmp_path)
    assert control.take() == []
    folder = tmp_path / FOLDER / REQUESTS
    folder.mkdir(parents=True)
    (folder / "1.json").write_text(json.dumps({"action": "add", "base_url": URLS[0], "group_port": 65535}))
    (folder / "2.json").write_text(json.dumps({"action": "remove", "base_url": URLS[1]}))
    for number, request in enumerate(
        (
            {"action": "stop", "base_url": URLS[0]},
            {"action": "add", "base_url": 7},
            {"action": "add", "base_url": URLS[0], "group_port": 65536},
            {"action": "add", "base_url": URLS[0], "group_port": -1},
            {"action": "add", "base_url": URLS[0], "group_port": True},
            {"action": "add", "base_url": URLS[0]},
            {"action": "add", "base_url": "ftp://a:1", "group_port": 5},
            {"action": "remove", "base_url": "http://u:p@a:1"},
            ["add"],
        )
    ):
        (folder / f"3{number}.json").write_text(json.dumps(request))
    assert control.take() == [
        ServerRequest(action="add", base_url=URLS[0], group_port=65535),
        ServerRequest(action="remove", base_url=URLS[1]),
    ]
    assert list(folder.iterdir()) == []
    assert control.take() == []


def test_requests_to_an_earlier_run_are_not_taken(tmp_path: Path) -> None:
    folder = tmp_path / FOLDER / REQUESTS
    folder.mkdir(parents=True)
    (folder / "1.json").write_text(json.dumps({"action": "remove", "base_url": URLS[1]}))
    assert ServerControl(tmp_path).take() == []
    assert list(folder.iterdir()) == []
