"""`rollout-learner evaluate` on COCO results of any detector (R43)."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from learner.__main__ import main
from tests.tiers import slow


@pytest.fixture
def truth(tmp_path: Path) -> Path:
    """Write ten images of two cells each, of two classes whose ids are not their places; return the annotations."""
    images, annotations = [], []
    for i in range(10):
        Image.new("RGB", (400, 300)).save(tmp_path / f"photo_{i}.jpg")
        images.append({"id": 100 + i, "file_name": f"photo_{i}.jpg", "width": 400, "height": 300})
        for k in range(2):
            box = [20 + 10 * i, 30 + 120 * k, 60, 50]
            annotations.append({"id": 2 * i + k, "image_id": 100 + i, "category_id": (7, 3)[k], "bbox": box})
    categories = [{"id": 7, "name": "red"}, {"id": 3, "name": "white"}]
    file = tmp_path / "test.json"
    file.write_text(json.dumps({"images": images, "annotations": annotations, "categories": categories}))
    return file


def results_of(truth: Path, **changes: Any) -> list[dict[str, Any]]:
    """Return the results of a detector that finds everything."""
    rows = json.loads(truth.read_text())["annotations"]
    return [{**{key: row[key] for key in ("image_id", "category_id", "bbox")}, "score": 0.9, **changes} for row in rows]


def evaluated(truth: Path, *arguments: str) -> list[dict[str, Any]]:
    out = truth.parent / "out"
    assert main(["evaluate", str(truth), "--out", str(out), *arguments]) == 0
    assert "evaluation" in (out / "index.html").read_text()
    found: list[dict[str, Any]] = json.loads((out / "evaluation.json").read_text())
    return found


def test_detectors_are_compared_with_the_first(truth: Path) -> None:
    good, noisy = truth.parent / "good.json", truth.parent / "noisy.json"
    rows = results_of(truth)
    good.write_text(json.dumps(rows))
    wrong = [{**row, "bbox": [300, 200, 40, 40], "score": 0.2} for row in rows]
    noisy.write_text(json.dumps(rows[::2] + wrong))
    best, other = evaluated(truth, "--predictions", str(good), "--predictions", f"b={noisy}")
    assert [best["name"], other["name"]] == ["good", "b"]
    assert best["intervals"]["f1@0.5"]["estimate"] == best["ap"]["coco/ap"] == 1.0
    assert best["differences"] == {}
    assert best["intervals"]["coco/ap"] == {"estimate": 1.0, "low": 1.0, "high": 1.0, "confidence": 0.95}
    assert other["differences"]["coco/ap"]["estimate"] == pytest.approx(other["ap"]["coco/ap"] - 1.0)
    assert other["differences"]["coco/ap"]["high"] < 0
    assert other["intervals"]["precision@0.5"]["estimate"] == 1.0, "the threshold leaves out what scores low"
    assert other["differences"]["f1@0.5"]["high"] < 0
    perfect = dict.fromkeys(("f1@0.5", "precision@0.5", "recall@0.5", "coco/ap", "coco/ap50"), 1.0)
    assert best["classes"]["red"] == {**perfect, "objects": 10.0}
    assert other["classes"]["white"]["coco/ap"] == 0.0
    assert other["classes"]["white"]["f1@0.5"] == 0.0


def test_what_touches_the_border_can_be_left_out(truth: Path) -> None:
    """Labels there are the first that people leave out: neither labels nor boxes there count."""
    file, rows = truth.parent / "found.json", results_of(truth)
    content = json.loads(truth.read_text())
    for i, one in enumerate(content["annotations"][:6]):
        one["bbox"] = [0, 30 + 120 * (i % 2), 60, 50]
    truth.write_text(json.dumps(content))
    beside = [{**row, "bbox": [300, 250, 60, 50]} for row in rows[::2]]  # at the border, on nothing
    reaching = [{**rows[6], "bbox": [0, 30, 110, 50]}]  # on a label that is not there: (50, 30), 60 wide
    file.write_text(json.dumps([*rows[7:], *reaching, *beside]))
    options = ("--predictions", f"a={file}")
    before, after = evaluated(truth, *options)[0], evaluated(truth, *options, "--ignore-border")[0]
    assert before["intervals"]["precision@0.5"]["estimate"] < 1.0
    shown = {name: after["intervals"][name]["estimate"] for name in ("precision@0.5", "recall@0.5")}
    assert shown == {"precision@0.5": 1.0, "recall@0.5": 1.0}
    assert sum(one["objects"] for one in after["classes"].values()) == 14.0


def test_the_page_shows_the_worst_images_confused_names_and_curves(truth: Path) -> None:
    """Red cells of half of the images are called white, with a lower score. AP of a class is the mean of its curve."""
    rows, file = results_of(truth), truth.parent / "found.json"
    for row in rows[:10:2]:
        row.update(category_id=3, score=0.4)
    file.write_text(json.dumps(rows))
    (found,) = evaluated(
        truth, "--predictions", f"mine={file}", "--val", str(truth), "--val-predictions", f"mine={file}"
    )
    assert found["classes"]["red"]["coco/ap50"] == pytest.approx(51 / 101), "half of the recalls have a precision of 1"
    curves = found["curves"]
    assert curves["precision_by_class"]["red"] == [1.0] * 26 + [0.0] * 25
    assert curves["precision_by_class"]["white"] == [1.0] * 51, "the wrong ones come last"
    assert curves["precision"][50] == 0.5
    assert curves["f1"][0] == pytest.approx(2 * 15 / (20 + 20))
    assert curves["f1"][-1] == 0.0, "no score is 1"
    page = (truth.parent / "out" / "index.html").read_text()
    tree = ElementTree.fromstring(page[page.index("<body>") : page.index("</body>") + len("</body>")])
    matrix = next(one for one in tree.iter("div") if "matrix" in one.get("class", ""))
    cells = {line[0].text: [cell.text for cell in line[1:]] for line in matrix.iter("tr") if line[0].tag == "td"}
    # The threshold that is best on these images leaves the wrong ones out.
    assert {name: [text for text in line if text] for name, line in cells.items() if name != "no object there"} == {
        "red": ["5", "5"],
        "white": ["10"],
    }
    assert "Precision by recall" in page
    assert "F1 by score" in page
    worst = next(one for one in tree.iter("div") if "in-worst" in one.get("class", ""))
    assert "1 of 2 found" in "".join(worst.itertext())
    assert next(worst.iter("image")).get("href", "").startswith("data:image/")


def test_every_two_detectors_are_compared(truth: Path) -> None:
    """All use the same draws of images, so that what is between two is what is from the first to each."""
    rows, files = results_of(truth), []
    for name, some in (("whole", rows), ("most", rows[:-2]), ("half", rows[::2])):
        file = truth.parent / f"{name}.json"
        file.write_text(json.dumps(some))
        files += ["--predictions", str(file)]
    whole, most, half = evaluated(truth, *files)
    assert whole["pairs"] == {}
    assert list(half["pairs"]) == ["whole", "most"]
    assert half["pairs"]["whole"] == half["differences"]
    for metric in ("f1@0.5", "f1@miou", "coco/ap", "coco/ap50"):
        between = half["pairs"]["most"][metric]
        assert between["estimate"] == pytest.approx(
            half["intervals"][metric]["estimate"] - most["intervals"][metric]["estimate"]
        )
        assert between["low"] <= between["high"] < 0
    page = (truth.parent / "out" / "index.html").read_text()
    assert f"{half['pairs']['most']['coco/ap']['estimate']:+.3f}" in page


@pytest.mark.parametrize("first", [0, 1], ids=["older versions", "newer versions"])
def test_files_as_ultralytics_writes_them(truth: Path, first: int) -> None:
    """Images by the stem of their file; classes by their place in data.yaml, which is not that of the alphabet."""
    content = json.loads(truth.read_text())
    stems = {image["id"]: Path(image["file_name"]).stem for image in content["images"]}
    places = {7: 1, 3: 0}
    labels: dict[str, list[str]] = {}
    for row in content["annotations"]:
        x, y, w, h = row["bbox"]
        place = [(x + w / 2) / 400, (y + h / 2) / 300, w / 400, h / 300]
        line = " ".join(map(str, [places[row["category_id"]], *place]))
        labels.setdefault(stems[row["image_id"]], []).append(line)
    for stem, lines in labels.items():
        (truth.parent / f"{stem}.txt").write_text("\n".join(lines))
    (truth.parent / "data.yaml").write_text("names: [white, red]\ntest: .\n")
    file = truth.parent / "yolo.json"
    given = [
        {**row, "image_id": stems[row["image_id"]], "category_id": places[row["category_id"]] + first}
        for row in results_of(truth)
    ]
    file.write_text(json.dumps(given))
    (found,) = evaluated(truth.parent / "data.yaml:test", "--predictions", f"yolo={file}")
    assert found["classes"].keys() == {"white", "red"}
    assert found["ap"]["coco/ap"] == pytest.approx(1.0)


def test_classes_by_name(truth: Path) -> None:
    names = {one["id"]: one["name"] for one in json.loads(truth.read_text())["categories"]}
    file = truth.parent / "named.json"
    rows = [{**row, "category_id": 0, "category": names[row["category_id"]]} for row in results_of(truth)]
    file.write_text(json.dumps(rows))
    (found,) = evaluated(truth, "--predictions", str(file))
    assert found["ap"]["coco/ap"] == 1.0


def test_results_of_a_folder_name_their_files(truth: Path) -> None:
    """`predict FOLDER` numbers the photographs from 1. The numbers may be the annotations' ids of other photographs."""
    names = {image["id"]: image["file_name"] for image in json.loads(truth.read_text())["images"]}
    file = truth.parent / "folder.json"
    rows = [{**row, "file_name": f"deep/{names[row['image_id']]}", "image_id": 109} for row in results_of(truth)]
    file.write_bytes(b"\xef\xbb\xbf" + json.dumps(rows).encode())  # a byte order mark is no mistake
    (found,) = evaluated(truth, "--predictions", str(file))
    assert found["ap"]["coco/ap"] == 1.0


def test_the_threshold_is_that_of_validation(truth: Path) -> None:
    file, val = truth.parent / "a.json", truth.parent / "val.json"
    rows = results_of(truth)
    wrong = [{**row, "bbox": [300, 200, 40, 40], "score": 0.6} for row in rows]
    file.write_text(json.dumps(rows + wrong))
    val.write_text(json.dumps([{**row, "score": 0.5} for row in rows]))  # 0.5 is good enough there
    arguments = ("--val", str(truth), "--val-predictions", f"a={val}")
    (found,) = evaluated(truth, "--predictions", f"a={file}", *arguments)
    assert found["threshold"] == pytest.approx(0.25)
    assert found["intervals"]["precision@0.5"]["estimate"] == 0.5


@pytest.mark.parametrize("val", [True, False], ids=["validation", "five parts"])
def test_the_threshold_is_best_for_the_f1_that_is_shown(truth: Path, val: bool) -> None:
    """Each image has two cells that overlap. The first box lies on both, the second on the first cell alone. One-to-one
    matching pairs both boxes; a match by score gives the first cell to the first box, and leaves the second box out."""
    content, file = json.loads(truth.read_text()), truth.parent / "crossed.json"
    for one in content["annotations"]:
        one.update(bbox=[100 + 40 * (one["id"] % 2), 100, 100, 100], category_id=7)
    truth.write_text(json.dumps(content))
    rows = results_of(truth)
    for i, row in enumerate(rows):
        row.update(bbox=[(115, 70)[i % 2], 100, 100, 100], score=(0.9, 0.8)[i % 2])
    wrong = [{**row, "bbox": [300, 10, 40, 40], "score": 0.7} for row in rows[::2]]
    file.write_text(json.dumps(rows + wrong))
    options = ("--val", str(truth), "--val-predictions", f"a={file}") if val else ()
    (found,) = evaluated(truth, "--predictions", f"a={file}", *options)
    assert found["intervals"]["f1@0.5"]["estimate"] == 1.0
    assert found["threshold"] == (pytest.approx(0.75) if val else None)
    assert max(found["curves"]["f1"]) == 1.0


@pytest.mark.parametrize("change", [{"image_id": 5}, {"category_id": 9}, {"bbox": [1, 2]}])
def test_results_of_other_annotations_are_refused(
    truth: Path, change: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    file = truth.parent / "other.json"
    file.write_text(json.dumps(results_of(truth, **change)))
    assert main(["evaluate", str(truth), "--predictions", str(file), "--out", str(truth.parent / "out")]) == 2
    assert "other.json" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "nothing"),
        ("{}", "a list"),
        ('[{"image_id": 1}]', "0.bbox is missing: only image_id, and 1 more"),
        ('[{"image_id": 1, "bbox": [1, 2], "score": 1}]', "[1, 2] is not at least 4"),
        (None, "no file"),
    ],
)
def test_a_file_that_has_no_results_is_told_in_words(
    truth: Path, text: str | None, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = truth.parent / "other.json"
    if text is not None:
        file.write_text(text)
    assert main(["evaluate", str(truth), "--predictions", str(file), "--out", str(truth.parent / "out")]) == 2
    told = capsys.readouterr().err
    assert says in told
    assert "pydantic" not in told
    assert "Errno" not in told


# ---- what is checked before it is scored (R52) ----------------------------------------------------------------------


def told(truth: Path, rows: list[dict[str, Any]], capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, str]:
    """Return exit code and stderr of results that may be wrong."""
    file = truth.parent / "given.json"
    file.write_text(json.dumps(rows))
    out = str(truth.parent / "out")
    code = main(["evaluate", str(truth), "--out", out, "--predictions", str(file), *options])
    return code, capsys.readouterr().err


def f1(truth: Path) -> float:
    found: float = json.loads((truth.parent / "out/evaluation.json").read_text())[0]["intervals"]["f1@0.5"]["estimate"]
    return found


def scaled(box: list[float], sides: tuple[float, float]) -> list[float]:
    return [value * sides[i % 2] / (400, 300)[i % 2] for i, value in enumerate(box)]


@pytest.mark.parametrize("unit", ["shares", "percent", "thousandths", "pixels"])
@pytest.mark.parametrize("form", ["xywh", slow("xyxy")])
def test_boxes_in_another_form_are_refused_with_the_form_that_fits(
    truth: Path, unit: str, form: str, capsys: pytest.CaptureFixture[str]
) -> None:
    sides = {"shares": (1, 1), "percent": (100, 100), "thousandths": (1000, 1000), "pixels": (400, 300)}[unit]
    rows = results_of(truth)
    for row in rows:
        x, y, width, height = row["bbox"]
        row["bbox"] = scaled([x, y, width, height] if form == "xywh" else [x, y, x + width, y + height], sides)
    code, err = told(truth, rows, capsys)
    options = ("--coordinates", unit, "--box-format", form)
    if (unit, form) == ("pixels", "xywh"):
        assert code == 0
    else:
        assert code == 2
        assert " ".join(options) in err
    assert told(truth, rows, capsys, *options)[0] == 0
    assert f1(truth) == 1.0


def test_classes_numbered_in_another_order(truth: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{**row, "category_id": {7: 3, 3: 7}[row["category_id"]]} for row in results_of(truth)]
    code, err = told(truth, rows, capsys)
    assert (code, f1(truth)) == (0, 0.0)
    assert "20 of 20 boxes on an object lie on one of another name" in err
    assert "--names 3=red,7=white" in err
    assert told(truth, rows, capsys, "--names", "3=red,7=white")[0] == 0
    assert f1(truth) == 1.0


@pytest.mark.parametrize("first", [slow(0), 1])
def test_numbers_that_are_places_and_not_ids(truth: Path, first: int, capsys: pytest.CaptureFixture[str]) -> None:
    """The annotations' ids are 7 and 3."""
    rows = [{**row, "category_id": {7: 0, 3: 1}[row["category_id"]] + first} for row in results_of(truth)]
    code, err = told(truth, rows, capsys)
    names = f"{first}=red,{first + 1}=white"
    assert code == 2
    assert f"--names {names}" in err
    for option in (names, "red,white"):
        assert told(truth, rows, capsys, "--names", option)[0] == 0
        assert f1(truth) == 1.0


def test_numbers_from_0_where_0_was_never_found(truth: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """YOLO's names have no ids: the objects decide, and it is said."""
    content = json.loads(truth.read_text())
    stems = {image["id"]: Path(image["file_name"]).stem for image in content["images"]}
    for row in content["annotations"]:
        x, y, w, h = row["bbox"]
        line = f"{ {7: 1, 3: 2}[row['category_id']] } {(x + w / 2) / 400} {(y + h / 2) / 300} {w / 400} {h / 300}\n"
        with (truth.parent / f"{stems[row['image_id']]}.txt").open("a") as labels:
            labels.write(line)
    (truth.parent / "data.yaml").write_text("names: [person, red, white]\ntest: .\n")
    rows = results_of(truth)
    for shift in (0, 1):
        numbered = [
            {**row, "image_id": stems[row["image_id"]], "category_id": {7: 1, 3: 2}[row["category_id"]] + shift}
            for row in rows
        ]
        (truth.parent / "yolo.json").write_text(json.dumps(numbered))
        (found,) = evaluated(truth.parent / "data.yaml:test", "--predictions", str(truth.parent / "yolo.json"))
        assert found["ap"]["coco/ap"] == pytest.approx(1.0)
        assert f"from {shift}" in capsys.readouterr().err


@pytest.mark.parametrize("spelling", ["Red", slow("RED "), slow("re-d"), "crimson"])
def test_a_name_in_another_spelling_is_a_stranger(
    truth: Path, spelling: str, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{**row, "category": {7: spelling, 3: "white"}[row["category_id"]]} for row in results_of(truth)]
    code, err = told(truth, rows, capsys)
    assert code == 2
    assert spelling.strip() in err
    assert "10 of 20" in err
    assert "red" in err
    assert told(truth, rows, capsys, "--names", f"{spelling}=red")[0] == 0
    assert f1(truth) == 1.0
    assert told(truth, rows, capsys, "--names", f"{spelling}=")[0] == 0
    assert f1(truth) == pytest.approx(2 / 3)


def test_names_with_spaces_around_them(truth: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content = json.loads(truth.read_text())
    content["categories"] = [{"id": 7, "name": "red "}, {"id": 3, "name": " white"}]
    rows = results_of(truth)
    truth.write_text(json.dumps(content))
    assert told(truth, rows, capsys)[0] == 0
    assert f1(truth) == 1.0
    assert (
        told(truth, [{**row, "category": {7: " red", 3: "white"}[row["category_id"]]} for row in rows], capsys)[0] == 0
    )
    assert f1(truth) == 1.0


def test_pictures_without_a_result_and_boxes_that_are_none_are_told(
    truth: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = results_of(truth)
    _, err = told(truth, [*rows[:8], {**rows[0], "bbox": [10, 10, 0, 5]}], capsys)
    assert "no result for 6 of 10 pictures" in err
    assert "1 of 9 boxes have no area" in err
    outside = [{**row, "bbox": [350, 250, 100, 100]} for row in rows]
    assert "20 of 40 boxes reach out" in told(truth, rows + outside, capsys)[1]


def test_nothing_to_evaluate(truth: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["evaluate", str(truth), "--out", str(truth.parent / "out")]) == 2
    assert "--predictions" in capsys.readouterr().err


def test_a_file_without_boxes_is_said(truth: Path, capsys: pytest.CaptureFixture[str]) -> None:
    empty, full = truth.parent / "empty.json", truth.parent / "full.json"
    empty.write_text("[]")
    full.write_text(json.dumps(results_of(truth)))
    arguments = ("--predictions", str(full), "--predictions", f"a={empty}", "--val", str(truth))
    nothing = evaluated(truth, *arguments, "--val-predictions", f"a={full}", "--val-predictions", f"full={full}")[1]
    assert (nothing["num_boxes"], nothing["intervals"]["f1@0.5"]["estimate"]) == (0, 0.0)
    (warning,) = (line for line in capsys.readouterr().err.splitlines() if "warning" in line)
    assert str(empty) in warning
    evaluated(truth, "--predictions", str(full))
    assert "warning" not in capsys.readouterr().err


@pytest.mark.parametrize(
    "there",
    [
        {"index.html": "my page"},
        slow({"evaluation.json": '{"mine": 1}'}),
        slow({"evaluation.json": "no JSON", "index.html": "my page"}),
        {"evaluation.json": '[{"name": "a", "intervals": {}}]', "index.html": "predict's", "request.json": "{}"},
    ],
)
def test_only_what_evaluate_wrote_is_replaced(
    truth: Path, there: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    out, file = truth.parent / "out", truth.parent / "a.json"
    file.write_text(json.dumps(results_of(truth)))
    out.mkdir()
    for name, text in there.items():
        (out / name).write_text(text)
    command = ["evaluate", str(truth), "--predictions", str(file), "--out", str(out)]
    assert main(command) == 2
    told = capsys.readouterr().err
    assert str(out) in told
    assert "--overwrite" in told
    assert {path.name: path.read_text() for path in out.iterdir()} == there
    assert main([*command, "--overwrite"]) == 0
    (out / "request.json").unlink(missing_ok=True)
    file.write_text("[]")
    assert main(command) == 0, "its own files are replaced"
    assert json.loads((out / "evaluation.json").read_text())[0]["num_boxes"] == 0
