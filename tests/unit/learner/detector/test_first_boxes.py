"""A first box of a model that nobody trained here (R50): its family's words, and suggestions from its answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from learner.__main__ import main
from learner.config.inference import InferenceSettings
from learner.detector.answers import AnswerSettings
from learner.detector.boxes import Prediction, ScoredBox
from learner.detector.detector import Detector
from learner.detector.first_boxes import FAMILIES, FirstReader, first_settings
from learner.detector.model import find_model
from learner.missing import first_labels
from learner.missing.review import write_reviewed
from learner.missing.suggest import DECISIONS
from learner.tasks.tokens import pieces_of
from shared.errors import ConfigError
from tests.unit.learner.data.annotations import box, samples_of
from tests.unit.learner.data.fakes import draw
from tests.unit.learner.tasks.fakes import CuttingTokenizer, make_rollout

SIZE = (2000, 1000)
TOKENIZER = CuttingTokenizer()


def model(folder: Path, family: str) -> tuple[InferenceSettings, FirstReader]:
    (folder / "config.json").write_text(json.dumps({"model_type": family}))
    limits = {"size": {"shortest_edge": 3136, "longest_edge": 1003520}, "patch_size": 14, "merge_size": 2}
    (folder / "preprocessor_config.json").write_text(json.dumps(limits))
    settings, unit = first_settings(folder, ["raccoon", "dog"])
    return settings, FirstReader(folder, settings, unit, pieces_of(TOKENIZER))


def found(reader: FirstReader, text: str) -> list[tuple[str, tuple[int, ...]]]:
    answer = make_rollout(TOKENIZER.encode(text))
    return [(one.object.desc, tuple(map(round, one.object.bins))) for one in reader.objects(answer, SIZE)]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_prompt_names_the_classes(tmp_path: Path, family: str) -> None:
    settings, _ = model(tmp_path, family)
    (turn,) = settings.messages
    assert "raccoon, dog" in turn["content"]
    assert turn["content"].count("<image>") == 1
    assert settings.classes == ["raccoon", "dog"]


WRITTEN = {
    "thousandths": [100, 200, 500, 800],
    "resized": [140, 140, 700, 560],  # the model sees 1400 x 700
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "form",
    [
        '[{{"bbox_2d": {}, "label": "raccoon"}}]',
        '```json\n[\n\t{{"bbox_2d": {}, "label": "Raccoons"}},\n\t{{"bbox_2d": [1, 2',
        'One: {{"bbox_2d": {}, "label": "raccoon", "sub": "x"}}, a {{"bbox_2d": [1, 2, 3, 4], "label": "cat"}}.',
    ],
)
def test_answers_are_read_as_the_family_writes(tmp_path: Path, family: str, form: str) -> None:
    _, reader = model(tmp_path, family)
    expected = [100, 200, 500, 800]
    ((name, bins),) = found(reader, form.format(WRITTEN[FAMILIES[family]]))
    assert name == "raccoon"
    assert bins == pytest.approx(expected, abs=2)


def test_marks_of_qwen2(tmp_path: Path) -> None:
    _, reader = model(tmp_path, "qwen2_vl")
    one = "<|object_ref_start|>{}<|object_ref_end|><|box_start|>(100,200),(500,800)<|box_end|>"
    assert found(reader, one.format("raccoon") + one.format("dog")) == [
        ("raccoon", (100, 200, 500, 799)),
        ("dog", (100, 200, 500, 799)),
    ]
    assert found(reader, "I see nothing. {} []") == []
    assert (
        found(reader, '[{"bbox_2d": [500, 800, 100, 200], "label": "dog"}, {"bbox_2d": ["a"], "label": "dog"}]') == []
    )


def test_a_family_whose_words_are_not_known_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ConfigError, match="qwen3_vl"):
        first_settings(tmp_path, ["a"])
    with pytest.raises(ConfigError, match="--classes"):
        find_model(tmp_path)


class FakeDetector(Detector):
    """Finds a raccoon in each photograph. (A random model would find nothing.)"""

    def __init__(self, path: Any, **options: Any) -> None:
        pass

    def __enter__(self) -> FakeDetector:  # type: ignore[override]
        return self

    def close(self) -> None:
        pass

    def predictions(self, line: Any) -> Any:
        for place, image in line.items():
            boxes = (ScoredBox("raccoon", 0.5 + 0.1 * place, (20.0, 30.0, 100.0, 120.0)),)
            yield (
                place,
                Prediction(id=image.id, name=image.name, source=image.source, width=320, height=240, boxes=boxes),
            )


def test_suggestions_become_the_first_labels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    draw(tmp_path / "photos", "a.jpg", "deep/b.jpg", size=(320, 240))
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text('{"model_type": "qwen3_vl"}')
    monkeypatch.setattr(first_labels, "Detector", FakeDetector)
    out = tmp_path / "out"
    first_labels.label(tmp_path / "photos", out, tmp_path / "model", ("raccoon", "dog"), AnswerSettings())
    folder = out / "labels/suggestions"
    best, _ = json.loads((folder / "suggestions.json").read_text())["suggestions"]
    assert best["image"].endswith("deep/b.jpg")
    (folder / DECISIONS).write_text(json.dumps({"0": {"decision": "accept", "name": "raccoon"}}))
    assert write_reviewed(folder, out / "labels/train.json") == 1
    first, second = samples_of(out / "labels/train.json")
    assert (first.objects, second.objects) == ((), (box("raccoon", 62, 125, 312, 500),))
    assert samples_of(f"{out / 'labels'}:train") == [first, second]
    assert main(["init", str(tmp_path / "photos"), "--out", str(out), "--label-with", str(tmp_path / "model")]) == 2


@pytest.mark.slow
def test_a_base_model_is_asked_without_settings(tiny_vlm: Path, tmp_path: Path) -> None:
    """Its weights are random, so it finds nothing; the command ends well."""
    draw(tmp_path, "a.jpg", size=(64, 64))
    command = ["predict", "--model", str(tiny_vlm), "--out", str(tmp_path / "out"), "--backend", "hf"]
    assert main([*command, "--classes", "raccoon,dog", "--max-new-tokens", "8", str(tmp_path / "a.jpg")]) == 0
    assert json.loads((tmp_path / "out/predictions.json").read_text()) == []
    assert main([*command, "--overwrite", str(tmp_path / "a.jpg")]) == 2
