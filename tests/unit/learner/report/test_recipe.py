"""The report of a recipe: its stages as a table (R49)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from learner.report.page import recipe_section, write_report
from tests.unit.learner.report.fake_run import write_run

STAGE = {
    "name": "sft",
    "why": "labels <teach>",
    "ended": "its time was up",
    "labels": "",
    "seconds": 90.0,
    "steps": 16,
    "best_step": 8,
    "score_before": 0.5,
    "score": 0.625,
    "gained": ["recall@0.5 +0.100"],
    "lost": [],
}
RECIPE: dict[str, Any] = {"stages": [STAGE], "metric": "fm@0.5", "best_of": "sft", "best_score": 0.625, "ended": ""}


def test_a_folder_of_stages_shows_them_in_numbers_and_words(tmp_path: Path) -> None:
    write_run(tmp_path / "sft", steps=4, quality=((0, 0.3), (4, 0.6)), variant="sft")
    (tmp_path / "recipe.json").write_text(json.dumps(RECIPE))
    page = write_report(tmp_path).read_text()
    for text in ("labels &lt;teach&gt;", "0.500 to 0.625", "8 of 16", "recall@0.5 +0.100", 'href="#recipe"'):
        assert text in page


@pytest.mark.parametrize(
    ("best_of", "shown"), [("sft", "sft at step 8, fm@0.5 0.625"), ("start", "start, fm@0.5 0.625")]
)
def test_the_weights_that_are_kept_are_named_by_their_step(best_of: str, shown: str) -> None:
    """The rest of the page shows the last step, which is another one."""
    found = recipe_section(RECIPE | {"best_of": best_of})
    assert found is not None
    assert shown in found.result
    assert "last" in found.result


@pytest.mark.parametrize(
    "change",
    [
        {"stages": 3},
        {"stages": [{}]},
        {"best_score": None},
        {"metric": None, "stages": [1]},
    ],
)
def test_what_is_no_recipe_shows_nothing(change: dict[str, Any]) -> None:
    assert recipe_section(RECIPE) is not None
    assert recipe_section(RECIPE | change) is None
    assert recipe_section({}) is None
