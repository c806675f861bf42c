"""Tests of what `find-missing suggest` asks the model, and of how it reads the annotations (R43). The engine is a
fake."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from learner.__main__ import main
from learner.config.sections.data import DataConfig
from learner.detector.answers import Answers, AnswerSettings
from learner.detector.model import ModelFiles, find_model
from learner.missing.review import write_reviewed
from learner.missing.suggest import DECISIONS, annotations_of, require_one_image, suggest
from learner.records import DetectionObject, Rollout, Sample
from learner.tasks.detection.task import DetectionTask
from shared.config.parse import write_yaml
from shared.errors import DataError
from tests.unit.learner.run.test_additions import HEIGHT, WIDTH, coco, read, voc

CHECKPOINT = Path(__file__).parents[4] / "deploy" / "demo" / "checkpoint"
EIGHT = DetectionObject("eight", "bbox_2d", (600, 200, 800, 500))
CUT = DetectionObject("eight", "bbox_2d", (900, 200, 999, 500))


class Sure(Answers):
    """Every answer has an eight at the same place; to a tile at the left, one that the tile's right edge cuts."""

    prompts: list[Any]

    def __enter__(self) -> Sure:
        type(self).prompts = []
        return self

    def of(self, groups: Mapping[int, Sequence[Sample]]) -> dict[int, list[list[Rollout]]]:
        number = 1 + self.asked.samples
        return {place: [[self._answer(one)] * number for one in own] for place, own in groups.items()}

    def _answer(self, sample: Sample) -> Rollout:
        self.prompts.append(sample.messages)
        tokenizer = self.encoder.tokenizer
        said = CUT if sample.view is not None and sample.view.window[0] == 0 else EIGHT
        text = DetectionTask(self._model.settings.task, tokenizer).serialize([said], after=None).text
        tokens = tuple(tokenizer.encode(text))
        answered: dict[str, Any] = {"prompt_token_ids": (), "response_token_ids": tokens, "finish_reason": "stop"}
        return Rollout(sample=sample, ver=0, seed=None, logprobs=(-0.5,) * len(tokens), **answered)


@pytest.fixture(autouse=True)
def sure(monkeypatch: pytest.MonkeyPatch) -> None:
    # `suggest` imports it later, and then it would keep the class of this test.
    import_module("learner.detector.calibration")
    monkeypatch.setattr("learner.detector.answers.Answers", Sure)


def suggested(model: ModelFiles, data: DataConfig, out: Path) -> int:
    return len(suggest(model, data, out, AnswerSettings(backend="hf", samples=2)))


def model_of_a_run(folder: Path, **data: Any) -> ModelFiles:
    """Return the shipped model, as if a run with this `data` had written it."""
    from learner.config.load import load_config

    config = {"model": {"path": str(CHECKPOINT)}, "data": data, "custom": {"trainer_variant": "sft"}}
    config |= {"training": {"output_dir": str(folder / "run"), "max_steps": 1}, "global_max_length": 4096}
    write_yaml(folder / "run.yaml", config, "test")
    return replace(find_model(CHECKPOINT), run=load_config(str(folder / "run.yaml"), world_size=1))


def test_the_model_is_asked_with_its_own_prompt(tmp_path: Path) -> None:
    """`calibrate` and `predict` ask the same. COCO and VOC files have no prompt."""
    path, _ = coco(tmp_path)
    model = find_model(CHECKPOINT)
    assert suggested(model, annotations_of(model, path, named=True), tmp_path / "out") == 2
    assert set(map(str, Sure.prompts)) == {str(tuple(model.settings.messages))}


def test_answers_to_tiles_are_answers_to_the_photograph(tmp_path: Path) -> None:
    """Each size of tiles gives as many answers more. Their boxes are where they are in the photograph. What a tile's
    edge cuts is left out. If a photograph is no larger than a tile, its own answers count again."""
    path, _ = coco(tmp_path)
    model, asked = find_model(CHECKPOINT), AnswerSettings(backend="hf", samples=2)
    found = suggest(model, annotations_of(model, path), tmp_path / "out", asked, tiles=[120, WIDTH])
    assert (len({one.sample_id for one in found}), {one.answers for one in found}) == (2, {6})
    own = [(tuple(map(round, one.box)), one.votes) for one in found if one.sample_id == found[0].sample_id]
    in_tiles = [((152, 19 + top, 176, 48 + top), 2) for top in (0, HEIGHT - 96)]  # of 120 x 96 pixels, at the right
    assert own == [((120, 32, 160, 80), 4), *in_tiles]


def test_a_box_beyond_the_border_stops_neither_suggestions_nor_what_is_written(tmp_path: Path) -> None:
    path, out = voc(tmp_path)
    model, file = find_model(CHECKPOINT), Path(path) / "0.xml"
    file.write_text(file.read_text().replace("<xmin>10<", "<xmin>-3<"))
    assert suggested(model, annotations_of(model, path), tmp_path / "found") == 2
    accepted = {str(i): {"decision": "accept", "name": "cat"} for i in range(2)}
    (tmp_path / "found" / DECISIONS).write_text(json.dumps(accepted))
    assert write_reviewed(tmp_path / "found", out) == 2
    assert [len(one.objects) for one in read(str(out), on_bad_record="clip")] == [2, 1]
    boxes = [one.findtext("bndbox/xmin") for one in ET.parse(out / "0.xml").iter("object")]
    assert boxes[0] == "-3", "what was there stays as it was"


def test_annotations_of_the_run_are_read_as_the_run_reads_them(tmp_path: Path) -> None:
    """Their images are elsewhere, and the command need not say so again."""
    path, _ = coco(tmp_path / "here")
    elsewhere = tmp_path / "else" / "where"
    elsewhere.mkdir(parents=True)
    (tmp_path / "here" / "images").rename(elsewhere / "images")
    model = model_of_a_run(tmp_path, train=path, image_root=str(elsewhere))
    assert suggested(model, annotations_of(model, path, named=True), tmp_path / "out") == 2
    assert suggested(replace(model, run=None), annotations_of(model, path, image_root=str(elsewhere)), tmp_path / "o")
    with pytest.raises(DataError):
        suggested(model, annotations_of(replace(model, run=None), path), tmp_path / "other")


@pytest.mark.parametrize("key", ["train", "val", "test"])
def test_what_was_held_out_is_not_called_what_to_train_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], key: str
) -> None:
    """After suggestions for the validation photographs, `write` said that the next run should learn these."""
    path, out = coco(tmp_path)
    model = model_of_a_run(tmp_path, **{"train": "other.json", key: path})
    suggested(model, annotations_of(model, path), tmp_path / "found")
    assert main(["find-missing", "write", str(tmp_path / "found"), "--out", str(out)]) == 0
    assert f'for the next run: data.{key}="{out}"' in capsys.readouterr().out


def test_annotations_that_cannot_be_written_again_are_refused_before_a_person_reviews_them(tmp_path: Path) -> None:
    path, _ = coco(tmp_path)
    model = find_model(CHECKPOINT)
    data = annotations_of(model, path).model_copy(update={"format": "my.reader:read"})
    with pytest.raises(DataError, match="convert"):
        suggested(model, data, tmp_path / "out")


def test_find_missing_says_that_it_looks_at_photographs_one_by_one() -> None:
    sample = Sample(sample_id="pair", messages=(), images=("a", "b"), objects=(), width=1, height=1)
    with pytest.raises(DataError, match="find-missing looks at photographs one by one"):
        require_one_image([sample])
