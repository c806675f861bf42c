"""The formula that predicts a gain: it finds what is there, and says if nothing is."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest

from bench.calibrate import calibrate, read_studies
from learner.predict.gain import PACKAGED, Formula, fit, read_calibration, write_calibration
from shared.errors import DataError

ROOT = Path(__file__).parents[4]
NAMES = ("missing_labels", "headroom_places")


def regimes(number: int) -> list[dict[str, float]]:
    drawn = np.random.default_rng(0).random((number, 3))
    return [dict(zip((*NAMES, "nats_train"), row.tolist(), strict=True)) for row in drawn]


def test_a_linear_gain_is_found() -> None:
    seen = regimes(12)
    formula = fit(seen, [0.01 + 0.2 * one[NAMES[0]] - 0.1 * one[NAMES[1]] for one in seen], NAMES)
    assert formula.intercept == pytest.approx(0.01)
    assert dict(formula.coefficients) == pytest.approx({NAMES[0]: 0.2, NAMES[1]: -0.1})
    assert formula.r2 == pytest.approx(1.0)
    assert formula.rmse == pytest.approx(0.0, abs=1e-9)
    assert formula.gain({NAMES[0]: 0.5, NAMES[1]: 0.5}) == pytest.approx(0.06)


def test_gains_that_have_nothing_to_do_with_the_features_are_not_explained() -> None:
    gains = np.random.default_rng(7).normal(size=14).tolist()
    formula = fit(regimes(14), gains, NAMES)
    assert formula.r2 < 0.3
    # The same by hand: each regime is left out, and predicted from the rest.
    inputs = np.array([[1.0, one[NAMES[0]], one[NAMES[1]]] for one in regimes(14)])
    errors = []
    for i in range(14):
        rest = [j for j in range(14) if j != i]
        errors.append(gains[i] - inputs[i] @ np.linalg.pinv(inputs[rest]) @ np.array(gains)[rest])
    assert formula.rmse == pytest.approx(np.sqrt(np.mean(np.square(errors))))


def test_too_few_regimes_or_a_missing_feature_is_an_error() -> None:
    with pytest.raises(DataError, match="too few regimes"):
        fit(regimes(4), [0.1] * 4, NAMES)
    with pytest.raises(DataError, match="no_such"):
        fit(regimes(9), [0.1] * 9, ["no_such"])
    with pytest.raises(DataError, match="nats_val"):
        Formula(intercept=0.0, coefficients={"nats_val": 1.0}, r2=1.0, rmse=0.0, num_regimes=9).gain({})


def test_a_model_unlike_all_that_were_measured_is_outside() -> None:
    """One that finds nothing was promised 32 points, because all it draws is unlabelled."""
    seen = [{**one, "f1_greedy": 0.4 + 0.05 * i} for i, one in enumerate(regimes(8))]
    formula = fit(seen, [0.1] * 8, NAMES)
    inside = seen[3]
    assert formula.outside(inside) == []
    assert formula.outside({**inside, "f1_greedy": 0.35}) == [], "a little outside"
    (told,) = formula.outside({**inside, "f1_greedy": 0.0})
    assert "f1_greedy 0.000" in told
    assert len(formula.outside({**inside, "f1_greedy": 0.0, NAMES[0]: 3.0})) == 2


def write_study(folder: Path, number: int) -> None:
    """Write a study as bench.study writes it: `grpo` was run everywhere, another arm once, and one regime has no
    features. What `union of 8` gains has nothing to do with the features."""
    found = {}
    drawn = random.Random(5)
    (folder / "features").mkdir()
    for i, one in enumerate(regimes(number)):
        gain = {"sft": {"f1@0.5": {"value": 0.3 * one[NAMES[1]], "low": 0.0, "high": 1.0}}}
        found[f"regime-{i}"] = {"arms": {"sft": {"minus": {}}, "base": {"minus": gain}, "grpo": {"minus": gain}}}
        noise = {"sft": {"f1@0.5": {"value": drawn.uniform(-0.1, 0.1), "low": -1.0, "high": 1.0}}}
        found[f"regime-{i}"]["arms"]["union of 8"] = {"minus": noise}
        (folder / "features" / f"regime-{i}.json").write_text(json.dumps({"features": one}))
    found["regime-0"]["arms"]["best of 8"] = {"minus": gain}
    found["not measured"] = {"arms": {}}
    (folder / "study.json").write_text(json.dumps({"regimes": found}))


def test_a_study_becomes_a_calibration(tmp_path: Path) -> None:
    write_study(tmp_path, 8)
    formulas, left_out = calibrate(read_studies([tmp_path]), NAMES)
    write_calibration(formulas, tmp_path / "calibration.json")
    assert read_calibration(tmp_path / "calibration.json") == formulas
    assert list(formulas) == ["grpo"]
    assert formulas["grpo"].coefficients[NAMES[1]] == pytest.approx(0.3)
    assert left_out["best of 8"] == "only 1 regimes"
    assert "do not tell" in left_out["union of 8"]
    assert left_out.keys() == {"best of 8", "union of 8"}


def test_several_studies_add_up(tmp_path: Path) -> None:
    for name, number in (("one", 4), ("two", 4)):
        (tmp_path / name).mkdir()
        write_study(tmp_path / name, number)
    formulas, _ = calibrate(read_studies([tmp_path / "one", tmp_path / "two"]), NAMES)
    assert formulas["grpo"].num_regimes == 8


def test_a_study_of_few_regimes_has_no_formula(tmp_path: Path) -> None:
    write_study(tmp_path, 4)
    with pytest.raises(DataError, match="only 4 regimes"):
        calibrate(read_studies([tmp_path]), NAMES)


@pytest.mark.parametrize("text", ["", "[]", '{"grpo": 1}', '{"grpo": {"intercept": 0}}'])
def test_a_damaged_calibration_is_an_error(text: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text(text)
    with pytest.raises(DataError):
        read_calibration(tmp_path / "file")
    with pytest.raises(DataError):
        read_studies([tmp_path])


def close(found: Formula, wanted: Formula) -> None:
    """Assert that both are one formula, up to the rounding of another processor."""
    assert found.num_regimes == wanted.num_regimes
    assert found.ranges == wanted.ranges, "read from the studies, not computed"
    assert dict(found.coefficients) == pytest.approx(dict(wanted.coefficients), rel=1e-9, abs=1e-12)
    assert (found.intercept, found.r2, found.rmse) == pytest.approx(
        (wanted.intercept, wanted.r2, wanted.rmse), rel=1e-9, abs=1e-12
    )


def test_the_shipped_calibration_is_that_of_the_committed_studies() -> None:
    studies = [ROOT / "bench" / "results" / f"study-{where}-2026-11-23" for where in ("gpu", "cpu")]
    formulas, _ = calibrate(read_studies(studies), ["missing_labels"])
    shipped = read_calibration(PACKAGED)
    assert shipped.keys() == formulas.keys()
    for method, formula in formulas.items():  # least squares differ in the last digits between processors
        close(shipped[method], formula)
    assert all(formula.num_regimes >= 10 for formula in formulas.values())
