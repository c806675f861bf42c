"""The table of the project's size counts what is there."""

from __future__ import annotations

from pathlib import Path

from tools.size import HOLDS, LIMITS, SUBJECTS, by_subject, kinds, lines_of, long_files, measured, tracked


def test_every_limit_is_measured() -> None:
    found = measured()
    assert found.keys() == LIMITS.keys()
    assert (found["imports up"], found["circles"]) == (0, 0)
    assert min(found["core, lines"], found["tests, lines"], found["learner keys"]) > 0


def test_lines_are_those_of_code() -> None:
    here = Path("tests/test_size.py")
    assert lines_of([here, Path("README.md")]) == {here: len(Path(__file__).read_text().splitlines())}
    assert long_files({Path("learner/a.py"): 451, Path("shared/b.py"): 450, here: 999}) == [Path("learner/a.py")]


def test_each_line_of_the_core_has_one_subject() -> None:
    assert sum(by_subject(lines_of(tracked())).values()) == measured()["core, lines"]
    assert by_subject({Path("learner/tasks/detection/gaps.py"): 2})["gaps, audit, predict, calibrate"] == 2
    assert by_subject({Path("learner/trainer.py"): 2, Path("tools/size.py"): 1})["run, journal, wiring, trainer"] == 2


def test_code_words_and_blank_lines_are_told_apart(tmp_path: Path) -> None:
    file = tmp_path / "a.py"
    file.write_text(
        '"""Two\n\nparts."""\n\n# why\na = """\n# text"""\n\n\ndef f():\n    """One."""\n    return 1  # one\n'
    )
    code, words, blank = kinds([file])
    assert (words, blank) == (6, 3)  # a line of a text that looks like a comment counts as one
    assert code + words + blank == len(file.read_text().splitlines())


def test_every_subject_says_what_holds_it() -> None:
    assert HOLDS.keys() == SUBJECTS.keys()
