"""`latest` points to the newest run, and never harms what is not a link."""

from __future__ import annotations

from pathlib import Path

from learner.journal.log import LATEST, point_latest


def test_latest_moves_to_the_newest_run(tmp_path: Path) -> None:
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        point_latest(tmp_path / name)
        assert (tmp_path / LATEST).resolve() == tmp_path / name
    assert sorted(path.name for path in tmp_path.iterdir()) == ["first", LATEST, "second"]


def test_a_folder_of_that_name_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / LATEST).mkdir()
    (tmp_path / "run").mkdir()
    point_latest(tmp_path / "run")
    point_latest(tmp_path / LATEST)
    assert not (tmp_path / LATEST).is_symlink()
