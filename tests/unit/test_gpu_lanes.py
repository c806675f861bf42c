"""Tests of what `python -m tests.gpu` makes of its lanes' reports; the lanes themselves need a GPU."""

from __future__ import annotations

from pathlib import Path

from tests.gpu.__main__ import Case, lanes, read_cases, summary

REPORT = """<testsuites><testsuite>
<testcase classname="tests.gpu.test_a" name="test_one[x]" time="1.5"/>
<testcase classname="tests.gpu.test_a" name="test_two" time="2.0"><failure message="assert 1 == 2"/></testcase>
<testcase classname="tests.gpu.test_a" name="test_three" time="0"><skipped message="needs 2 CUDA GPUs"/></testcase>
</testsuite></testsuites>"""


def test_each_file_runs_once() -> None:
    found = [name for part in lanes() for lane in part for name in lane]
    there = {path.name for path in (Path(__file__).parents[1] / "gpu").glob("test_*.py")}
    assert len(found) == len(set(found))
    assert set(found) == there


def test_outcomes_are_read_and_failures_come_first(tmp_path: Path) -> None:
    report = tmp_path / "a.xml"
    report.write_text(REPORT)
    cases = list(read_cases(report, ["test_a.py"]))
    assert [case.outcome for case in cases] == ["passed", "failed", "skipped"]
    said = summary(cases, seconds=9.0, memory_mib=2048.0)
    assert "1 passed, 1 failed, 1 skipped" in said
    assert said.index("assert 1 == 2") < said.index("test_one[x]")


def test_a_lane_without_a_report_has_failed(tmp_path: Path) -> None:
    (case,) = read_cases(tmp_path / "none.xml", ["test_a.py", "test_b.py"])
    assert isinstance(case, Case)
    assert (case.outcome, case.file) == ("failed", "test_a.py test_b.py")


def test_a_lane_that_ran_no_test_has_failed(tmp_path: Path) -> None:
    """pytest writes such a report when it is interrupted while it collects."""
    report = tmp_path / "a.xml"
    report.write_text('<testsuites><testsuite tests="0" time="11.8"></testsuite></testsuites>')
    (case,) = read_cases(report, ["test_a.py"])
    assert (case.outcome, case.file) == ("failed", "test_a.py")


def test_the_test_in_which_a_lane_was_cut_off_has_failed(tmp_path: Path) -> None:
    """pytest gives it no name, and no outcome."""
    report = tmp_path / "a.xml"
    report.write_text(REPORT.replace("</testsuite>", '<testcase time="0.003"/></testsuite>'))
    assert list(read_cases(report, ["test_a.py"]))[-1][:3] == ("test_a.py", "", "failed")
