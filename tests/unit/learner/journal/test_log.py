"""Tests of what a run has on disk of its measurements, line by line, in JSON that any reader takes; and of a step's
seconds, which add up."""

from __future__ import annotations

import dataclasses
import json
import logging
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from learner.config.load import load_config, write_resolved
from learner.config.plan import resolve
from learner.config.sections.logging import LoggingConfig
from learner.journal import log as metrics
from learner.journal.log import MetricsLog, PhaseClock, Timeline, log_to_file
from learner.policy.parallel import Ranks
from learner.rollout.control import ServerControl
from learner.rollout.membership import Member, Membership
from tests.unit.learner.config.examples import minimal

PLAIN = LoggingConfig(trackers=[])
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


def lines(run_dir: Path) -> list[dict[str, Any]]:
    """Read the lines strictly: Python's reader takes NaN by default, others do not."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    text = (run_dir / "metrics.jsonl").read_text(encoding="utf-8")
    return [json.loads(line, parse_constant=refuse) for line in text.splitlines()]


@dataclasses.dataclass(frozen=True)
class Measured:
    loss: float
    parts: dict[str, float]


def test_no_file_of_a_run_shows_a_secret(tmp_path: Path) -> None:
    """No secret is in the configuration, the plan, events, the list of servers and logs, also where a server's URL was
    normalised. The values are still those that the run uses."""
    data = minimal()
    url = "http://${HOST_KEY}.example:8000/${PATH_TOKEN}/"
    data["custom"]["extra"]["rollout_matching"]["vllm"]["server"]["servers"][0]["base_url"] = url
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(data))
    env = {"HOST_KEY": "Tenant-77", "PATH_TOKEN": "geh|eim"}
    config = load_config(tmp_path / "run.yaml", env=env)
    plan = resolve(config, 1)
    [server] = plan.servers
    assert server.base_url == "http://Tenant-77.example:8000/geh|eim"
    normalised = str(httpx.URL(server.base_url))
    assert "tenant-77" in normalised
    run_dir = tmp_path / "run"
    write_resolved(config, run_dir)
    log = MetricsLog(run_dir, PLAIN)
    log.write("plan", plan.to_json())
    log.write("server", {"base_url": normalised, "because": RuntimeError(server.base_url), normalised: [1]})
    log.close()
    member = Member(base_url=server.base_url, group_port=server.group_port)
    ServerControl(run_dir).show(Membership(members=(member,)))
    handlers = list(logging.getLogger("learner").handlers)
    log_to_file(run_dir, 0)
    logging.getLogger("learner").warning("POST %s", normalised)
    logging.getLogger("learner").handlers[:] = handlers
    written = [path for path in run_dir.rglob("*") if path.is_file()]
    assert {path.name for path in written} == {"config.yaml", "metrics.jsonl", "state.json", "learner_rank0.log"}
    for path in written:
        text = path.read_text().lower()
        assert "tenant" not in text, path.name
        assert "eim" not in text, path.name
        assert "${host_key}" in text, path.name
    assert "enant" not in json.dumps(plan.to_json())


# ---- the log -------------------------------------------------------------------------------------------------------


def test_a_line_is_on_disk_as_soon_as_it_is_written(tmp_path: Path) -> None:
    """R15: what a killed run had measured is kept; nothing here closes the log before it is read."""
    log = MetricsLog(tmp_path / "run", PLAIN)
    log.write("step", Measured(loss=0.5, parts={"a": 1.0}), step=3)
    log.write("note", {"seeds": (1, 2)})
    step, note = lines(tmp_path / "run")
    assert step.pop("time") <= note.pop("time")
    assert step == {"event": "step", "global_step": 3, "loss": 0.5, "parts": {"a": 1.0}}
    assert note == {"event": "note", "seeds": [1, 2]}
    log.close()


def test_a_resumed_run_goes_on_in_the_same_file(tmp_path: Path) -> None:
    for step in (1, 2):
        log = MetricsLog(tmp_path, PLAIN)
        log.write("step", {"loss": 0.0}, step=step)
        log.close()
    assert [line["global_step"] for line in lines(tmp_path)] == [1, 2]


def test_only_rank_0_writes(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "run", LoggingConfig(trackers=["tensorboard"]), enabled=False)
    log.write("step", {"loss": 0.5}, step=1)
    log.close()
    assert not (tmp_path / "run").exists()


def test_an_events_own_name_and_time_win(tmp_path: Path) -> None:
    """A metric that is called `event` must not turn the line into another event."""
    log = MetricsLog(tmp_path, PLAIN)
    log.write("eval", {"event": 7.0, "time": 8.0, "global_step": 9}, step=2)
    log.close()
    (line,) = lines(tmp_path)
    assert (line["event"], line["global_step"]) == ("eval", 2)
    assert line["time"] != 8.0


def finite(value: Any) -> Any:
    """Return the reference: through Python's own JSON, which spells what is not finite as bare words."""
    return json.loads(json.dumps(value), parse_constant=lambda word: None)


@given(value=JSON)
def test_whatever_is_measured_is_a_line_of_json(tmp_path_factory: pytest.TempPathFactory, value: Any) -> None:
    """NaN and infinities are null at every depth; all else is as it was."""
    run_dir = tmp_path_factory.mktemp("run")
    log = MetricsLog(run_dir, PLAIN)
    log.write("note", {"value": value})
    log.close()
    (line,) = lines(run_dir)
    assert line["value"] == finite(value)


def test_numbers_of_a_step_are_scalars_by_event_and_name(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path, LoggingConfig(trackers=["tensorboard"]))
    fields = {"loss": 0.5, "metrics": {"matched": 3, "gap": float("nan")}, "channel": "B", "skipped": True}
    log.write("step", fields, step=4)
    log.write("note", {"loss": 9.0})  # belongs to no step
    log.close()
    board = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert sorted(board.Tags()["scalars"]) == ["step/loss", "step/metrics/matched"]
    assert [(event.step, event.value) for event in board.Scalars("step/metrics/matched")] == [(4, 3.0)]


# ---- the clock -----------------------------------------------------------------------------------------------------


class Hands:
    """A clock that goes on when it is told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now

    def time(self) -> float:
        return self.now


@pytest.fixture
def hands(monkeypatch: pytest.MonkeyPatch) -> Hands:
    hands = Hands()
    monkeypatch.setattr(metrics, "time", hands)
    return hands


@given(spent=st.lists(st.tuples(st.sampled_from(["rollout", "learn", ""]), st.integers(0, 50)), max_size=8))
def test_a_steps_phases_add_up_to_the_step(spent: list[tuple[str, int]]) -> None:
    """`other_s` is what no phase claims; a phase that comes twice has both."""
    with pytest.MonkeyPatch.context() as patch:
        hands = Hands()
        patch.setattr(metrics, "time", hands)
        clock = PhaseClock()
        for phase, seconds in spent:
            if phase:
                with clock.phase(phase):
                    hands.now += seconds
            else:
                hands.now += seconds
        read = clock.read()
    assert read.pop("step_s") == sum(read.values()) == sum(seconds for _, seconds in spent)
    for phase in {phase for phase, _ in spent if phase}:
        assert read[f"{phase}_s"] == sum(seconds for name, seconds in spent if name == phase)


def test_reading_starts_a_new_step(hands: Hands) -> None:
    clock = PhaseClock()
    with clock.phase("learn"):
        hands.now += 2
    clock.read()
    hands.now += 1
    assert clock.read() == {"other_s": 1.0, "step_s": 1.0}


def test_an_error_ends_its_phase(hands: Hands) -> None:
    clock = PhaseClock()

    def fail_after_3_seconds() -> None:
        with clock.phase("sync"):
            hands.now += 3
            raise ValueError

    with pytest.raises(ValueError):
        fail_after_3_seconds()
    hands.now += 1
    assert clock.read() == {"sync_s": 3.0, "other_s": 1.0, "step_s": 4.0}


def test_a_server_that_does_not_serve_has_a_bar_until_it_does() -> None:
    """R40: the event of every step that it missed has one."""
    timeline = Timeline(0)

    def bars() -> list[tuple[str, str]]:
        return [(lane, name) for lane, name, _, _ in timeline.event(Ranks(), 1)["spans"]]

    assert bars() == []
    timeline.server("http://a", serves=False, is_member=True)
    assert bars() == bars() == [("http://a", "out")]
    timeline.server("http://a", serves=True, is_member=True)
    assert bars() == [("http://a", "out")]
    assert bars() == []
    timeline.server("http://a", serves=False, is_member=False)
    assert bars() == []
