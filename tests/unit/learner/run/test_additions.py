"""Annotations written again with more objects, in the format that they came in (R43, R48)."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import pytest
from PIL import Image

from learner.config.sections.data import DataConfig
from learner.data.splits import load_samples
from learner.records import DetectionObject, Sample, Votes
from learner.run.additions import Addition, RunAnnotations, addition_of, write_with
from learner.run.files import why_unwritable
from shared.errors import DataError, OutputError

OLD = ("cat", (10.0, 20.0, 50.0, 60.0))
NEW = [Addition("dog", (100.0, 20.0, 140.0, 80.0), 3, 4), Addition("cat", (150.0, 120.0, 190.0, 150.0))]
WIDTH, HEIGHT = 200, 160


class Anything:
    def validate(self, sample: Sample) -> None:
        return


def images(folder: Path, number: int = 2) -> list[Path]:
    folder.mkdir(parents=True)
    paths = [folder / f"{i}.png" for i in range(number)]
    for path in paths:
        Image.new("RGB", (WIDTH, HEIGHT)).save(path)
    return paths


def coco(folder: Path) -> tuple[str, Path]:
    paths = images(folder / "images")
    rows = [{"id": i, "file_name": f"images/{p.name}", "width": WIDTH, "height": HEIGHT} for i, p in enumerate(paths)]
    x1, y1, x2, y2 = OLD[1]
    one = {"id": 7, "image_id": 0, "category_id": 3, "bbox": [x1, y1, x2 - x1, y2 - y1], "area": 1600, "iscrowd": 0}
    content = {"images": rows, "annotations": [one], "categories": [{"id": 3, "name": "cat"}], "licenses": ["kept"]}
    (folder / "old.json").write_text(json.dumps(content))
    return str(folder / "old.json"), folder / "new.json"


def jsonl(folder: Path) -> tuple[str, Path]:
    rows = [
        {
            "id": str(i),
            "messages": [{"role": "user", "content": "<image>Find."}],
            "images": [f"images/{path.name}"],
            "objects": [{"desc": OLD[0], "bbox_2d": list(OLD[1])}] if i == 0 else [],
            "width": WIDTH,
            "height": HEIGHT,
        }
        for i, path in enumerate(images(folder / "images"))
    ]
    (folder / "old.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(folder / "old.jsonl"), folder / "new.jsonl"


def voc(folder: Path) -> tuple[str, Path]:
    (folder / "old").mkdir(parents=True)
    for i, path in enumerate(images(folder / "JPEGImages")):
        corners = "".join(f"<{n}>{v:g}</{n}>" for n, v in zip(("xmin", "ymin", "xmax", "ymax"), OLD[1], strict=True))
        found = f"<object><name>{OLD[0]}</name><bndbox>{corners}</bndbox></object>" if i == 0 else ""
        size = f"<size><width>{WIDTH}</width><height>{HEIGHT}</height><depth>3</depth></size>"
        (folder / "old" / f"{i}.xml").write_text(
            f"<annotation><filename>{path.name}</filename>{size}{found}</annotation>"
        )
    return str(folder / "old"), folder / "new"


def yolo(folder: Path) -> tuple[str, Path]:
    images(folder / "set" / "images" / "train")
    (folder / "set" / "labels" / "train").mkdir(parents=True)
    x1, y1, x2, y2 = (v / (WIDTH, HEIGHT)[i % 2] for i, v in enumerate(OLD[1]))
    line = f"0 {(x1 + x2) / 2} {(y1 + y2) / 2} {x2 - x1} {y2 - y1}\n"
    (folder / "set" / "labels" / "train" / "0.txt").write_text(line)
    (folder / "set" / "labels" / "train" / "1.txt").write_text("")
    (folder / "set" / "data.yaml").write_text("train: images/train\nnames: [cat, dog]\n")
    return f"{folder / 'set' / 'data.yaml'}:train", folder / "new"


def voc_in_sub_folders(folder: Path) -> tuple[str, Path]:
    """Each XML file and its photograph are in sub-folders of their own."""
    path, out = voc(folder)
    for i in range(2):
        for place, name in (("old", f"{i}.xml"), ("JPEGImages", f"{i}.png")):
            (folder / place / f"day {i}").mkdir()
            (folder / place / name).rename(folder / place / f"day {i}" / name)
    return path, out


def coco_of_windows(folder: Path) -> tuple[str, Path]:
    path, _ = coco(folder)
    Path(path).write_text(Path(path).read_text().replace("images/", r"images\\"))
    (folder / "elsewhere").mkdir()
    return path, folder / "elsewhere/new.json"


FORMATS = {
    "coco": coco,
    "coco_of_windows": coco_of_windows,
    "jsonl": jsonl,
    "voc": voc,
    "voc_in_sub_folders": voc_in_sub_folders,
    "yolo": yolo,
}
POLYGONS = [(name, "poly") for name in ("coco", "jsonl", "yolo")]


def read(path: str, **settings: Any) -> list[Sample]:
    return load_samples(DataConfig(train=path, **settings), path, Anything())


def found(sample: Sample) -> list[tuple[str, tuple[float, ...]]]:
    scale = (sample.width / 999, sample.height / 999)
    return sorted((o.desc, tuple(round(v * scale[i % 2]) for i, v in enumerate(o.bins))) for o in sample.objects)


@pytest.mark.parametrize("name", FORMATS)
def test_what_is_read_again_is_the_old_and_the_new(name: str, tmp_path: Path) -> None:
    path, out = FORMATS[name](tmp_path)
    before = read(path)
    old_files = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    samples = {Path(sample.images[0]).stem: sample for sample in before}
    write_with(DataConfig(train=path), path, before, {samples["0"].sample_id: NEW}, out)
    assert all(p.read_bytes() == content for p, content in old_files.items())
    new_path = f"{out / 'data.yaml'}:train" if name == "yolo" else str(out)
    after = {Path(sample.images[0]).stem: sample for sample in read(new_path)}
    assert found(after["0"]) == sorted([(OLD[0], OLD[1]), *((one.desc, one.box) for one in NEW)])
    assert found(after["1"]) == []


@pytest.mark.parametrize("name", FORMATS)
def test_nothing_is_overwritten(name: str, tmp_path: Path) -> None:
    path, out = FORMATS[name](tmp_path)
    samples = read(path)
    write_with(DataConfig(train=path), path, samples, {}, out)
    with pytest.raises(OutputError) as error:
        write_with(DataConfig(train=path), path, samples, {}, out)
    assert str(out) in str(error.value)


def drawn(sample: Sample, rng: random.Random, *, polygons: bool) -> list[DetectionObject]:
    """Return objects of any size, at any place."""
    objects = []
    for i in range(rng.randrange(12)):
        (x1, x2), (y1, y2) = (sorted(rng.sample(range(1000), 2)) for _ in range(2))
        bins: tuple[int, ...] = (x1, y1, x2, y2)
        if polygons and i % 2:
            bins = (x1, y1, x2, y1, x1, y2)
        objects.append(
            DetectionObject(rng.choice(["cat", "dog"]), "poly" if len(bins) > 4 else "bbox_2d", bins, Votes(2, 4))
        )
    return objects


def seen(samples: Sequence[Sample]) -> list[tuple[Any, ...]]:
    """Return what the samples are, in an order that no format gives."""
    found = [(s.sample_id, Path(s.images[0]).resolve(), s.messages, {o[:3] for o in s.objects}) for s in samples]
    return sorted(found, key=lambda one: one[0])


@pytest.mark.parametrize("where", ["beside", "elsewhere"])
@pytest.mark.parametrize(("name", "geometry"), [*((name, "bbox_2d") for name in FORMATS), *POLYGONS])
def test_every_label_is_read_again_in_its_bins(name: str, geometry: Any, where: str, tmp_path: Path) -> None:
    """Ids and images too, wherever the new annotations are."""
    path, out = FORMATS[name](tmp_path / "data")
    out = out if where == "beside" else tmp_path / "a" / "b" / out.name
    data, rng = DataConfig(train=path, prompt=None), random.Random(name + where)
    before = load_samples(data, path, Anything(), geometry=geometry)
    new = {sample.sample_id: drawn(sample, rng, polygons=geometry == "poly") for sample in before}
    added = {s.sample_id: [addition_of(obj, s) for obj in new[s.sample_id]] for s in before}
    write_with(data, path, before, added, out)
    new_path = f"{out / 'data.yaml'}:train" if name == "yolo" else str(out)
    after = load_samples(data.model_copy(update={"train": new_path}), new_path, Anything(), geometry=geometry)
    assert seen(after) == seen([replace(s, objects=(*s.objects, *new[s.sample_id])) for s in before])


def test_a_line_of_jsonl_may_hold_any_character(tmp_path: Path) -> None:
    """Only a newline ends it."""
    path, out = jsonl(tmp_path)
    rows = [json.loads(line) for line in Path(path).read_text().splitlines()]
    rows[0]["messages"][0]["content"] += " \u2028 \x85 ä"
    text = "\n\n".join(json.dumps({**row, "id": None}, ensure_ascii=False) for row in rows)
    Path(path).write_text("\ufeff" + text, encoding="utf-8")
    samples = read(path)
    write_with(DataConfig(train=path), path, samples, {"1": NEW}, out)
    after = read(str(out))
    assert [(s.sample_id, s.messages) for s in after] == [(s.sample_id, s.messages) for s in samples]
    assert [len(s.objects) for s in after] == [3, 0]


def test_a_part_keeps_its_photographs(tmp_path: Path) -> None:
    """The new annotations have those of the other parts too, as they were."""
    for name, make in FORMATS.items():
        path, out = make(tmp_path / name)
        part = f"{path}[:50%]"
        try:
            first = read(part)
        except DataError:  # no id is in this part
            part, first = f"{path}[50%:]", read(f"{path}[50%:]")
        write_with(DataConfig(train=part), part, first, {first[0].sample_id: NEW[:1]}, out)
        new_path = f"{out / 'data.yaml'}:train" if name == "yolo" else str(out)
        assert sorted(s.sample_id for s in read(new_path)) == sorted(s.sample_id for s in read(path))
        assert sum(len(s.objects) for s in read(new_path)) == 2


def test_a_folder_with_splits_is_written_too(tmp_path: Path) -> None:
    path, _ = coco(tmp_path / "data")
    Path(path).rename(tmp_path / "data" / "train.json")
    (tmp_path / "data" / "val.json").write_text("{}")
    folder = str(tmp_path / "data")
    data = DataConfig(train=folder, val=folder + ":val")
    samples = load_samples(data, folder, Anything())
    write_with(data, folder, samples, {samples[0].sample_id: NEW[:1]}, tmp_path / "new.json")
    assert [len(s.objects) for s in read(str(tmp_path / "new.json"))] == [2, 0]


def test_keypoints_stay_readable(tmp_path: Path) -> None:
    path, out = yolo(tmp_path)
    file, label = Path(path.removesuffix(":train")), tmp_path / "set" / "labels" / "train" / "0.txt"
    file.write_text("train: images/train\nnames: [cat, dog]\nkpt_shape: [1, 2]\n")
    label.write_text("0 0.5 0.5 0.2 0.2 0.5 0.5\n")
    samples = read(path)
    write_with(DataConfig(train=path), path, samples, {samples[0].sample_id: NEW}, out)
    assert [len(s.objects) for s in read(f"{out / 'data.yaml'}:train")] == [3, 0]


def test_class_names_in_a_file_of_their_own_become_a_data_yaml(tmp_path: Path) -> None:
    yolo(tmp_path)
    whole = tmp_path / "set"
    (whole / "data.yaml").unlink()
    (whole / "classes.txt").write_text("cat\ndog\n")
    path, out = str(whole), tmp_path / "new"
    samples = read(path)
    write_with(DataConfig(train=path), path, samples, {samples[0].sample_id: NEW}, out)
    assert [len(s.objects) for s in read(f"{out / 'data.yaml'}:train")] == [3, 0]


# ---- a run's own file -----------------------------------------------------------------------------------------------


def completed(samples: Sequence[Sample], number: int) -> list[Sample]:
    boxes = [DetectionObject("dog", "bbox_2d", (i, 600, 900 + i, 990), Votes(2, 4)) for i in range(number)]
    return [replace(sample, objects=(*sample.objects, *boxes)) for sample in samples]


@pytest.mark.parametrize("name", FORMATS)
def test_a_run_writes_its_file_again_and_no_other(name: str, tmp_path: Path) -> None:
    path, out = FORMATS[name](tmp_path)
    new_path, samples = f"{out / 'data.yaml'}:train" if name == "yolo" else str(out), read(path)
    run = RunAnnotations(DataConfig(train=path), out, tmp_path / "run")
    for number in (2, 1):
        run.write(completed(samples, number))
        assert [len(s.objects) for s in read(new_path)] == [1 + number, number]
    later = RunAnnotations(DataConfig(train=path), out, tmp_path / "later", tmp_path / "run")
    later.write(completed(samples, 3))  # it goes on with that run
    with pytest.raises(OutputError):
        RunAnnotations(DataConfig(train=path), out, tmp_path / "other").check()
    changed = out if out.is_file() else next(file for file in sorted(out.rglob("*")) if file.is_file())
    changed.write_bytes(changed.read_bytes() + b" ")
    with pytest.raises(OutputError) as error:
        later.write(samples)
    assert str(out) in str(error.value)


def test_a_run_that_is_killed_while_it_writes_knows_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, out = coco(tmp_path)
    run, samples = RunAnnotations(DataConfig(train=path), out, tmp_path / "run"), read(path)
    run.write(completed(samples, 1))
    with monkeypatch.context() as patched:
        patched.setattr(Path, "replace", killed_at(out))
        with pytest.raises(KeyboardInterrupt):
            run.write(completed(samples, 2))
    run.write(completed(samples, 3))
    assert [len(s.objects) for s in read(str(out))] == [4, 3]


def killed_at(out: Path) -> Any:
    whole = Path.replace

    def replace(self: Path, target: Path) -> Path:
        if target == out:
            raise KeyboardInterrupt
        return whole(self, target)

    return replace


def test_a_place_that_cannot_be_written_is_named_before_anything_is_spent(tmp_path: Path) -> None:
    path, _ = coco(tmp_path)
    with pytest.raises(OutputError, match=r"labels\.complete\.write") as error:
        RunAnnotations(DataConfig(train=path), Path(path) / "new.json", tmp_path / "run").check()
    assert path in error.value.found
    with pytest.raises(OutputError, match=r"labels\.complete\.write") as error:
        RunAnnotations(DataConfig(train=path), Path(path), tmp_path / "run").check()
    assert path in error.value.found


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs /proc")
def test_a_file_system_that_takes_no_file_is_found_before_anything_is_spent(tmp_path: Path) -> None:
    """`check` said ready, and the run failed once all answers were there: root may write any folder by its rights."""
    path, _ = coco(tmp_path)
    for out in ("/proc/x.json", "/proc/new/x.json"):
        with pytest.raises(OutputError) as error:
            RunAnnotations(DataConfig(train=path), Path(out), tmp_path / "run").check()
        assert "/proc" in error.value.found


def test_looking_if_a_folder_can_be_written_leaves_nothing(tmp_path: Path) -> None:
    assert why_unwritable(tmp_path / "new/folder") is None
    assert not list(tmp_path.iterdir())


def test_a_reader_of_ones_own_has_no_file(tmp_path: Path) -> None:
    path, out = coco(tmp_path)
    with pytest.raises(DataError) as error:
        RunAnnotations(DataConfig(train=path, format="my.module:read"), out, tmp_path).check()
    assert "data.format" in str(error.value)


def test_coco_keeps_everything_else_and_says_where_a_box_comes_from(tmp_path: Path) -> None:
    path, out = coco(tmp_path)
    write_with(DataConfig(train=path), path, read(path), {"0": NEW}, out)
    content = json.loads(out.read_text())
    assert content["licenses"] == ["kept"]
    assert [one["id"] for one in content["annotations"]] == [7, 8, 9]
    assert content["annotations"][1]["votes"] == 3
    assert "votes" not in content["annotations"][2]
    assert [one["name"] for one in content["categories"]] == ["cat", "dog"]


def test_a_hugging_face_data_set_is_not_written_again(tmp_path: Path) -> None:
    boxes = {"bbox": [[1, 2, 3, 4]], "category": ["cat"]}
    datasets.Dataset.from_list([{"image": "1.png", "objects": boxes}]).save_to_disk(str(tmp_path / "set"))
    with pytest.raises(DataError) as error:
        RunAnnotations(DataConfig(train=str(tmp_path / "set")), tmp_path / "new", tmp_path).check()
    assert "a Hugging Face data set" in str(error.value)


def test_bins_become_pixels() -> None:
    sample = Sample(sample_id="s", messages=(), images=(), objects=(), width=999, height=1998)
    obj = DetectionObject("cat", "bbox_2d", (1, 2, 3, 4), Votes(2, 4))
    assert addition_of(obj, sample) == Addition("cat", (1.0, 4.0, 3.0, 8.0), 2, 4)


def test_a_box_is_written_with_its_image(tmp_path: Path) -> None:
    for name, size in (("1.png", (200, 100)), ("2.png", (50, 80))):
        Image.new("RGB", size).save(tmp_path / name)
    turn, place = {"role": "user", "content": "<image><image>?"}, {"image": 1, "bbox_2d": [0, 0, 100, 50]}
    row = {"id": "a", "messages": [turn], "images": ["1.png", "2.png"], "objects": [{"desc": "x", **place}]}
    path, out = tmp_path / "old.jsonl", tmp_path / "new.jsonl"
    path.write_text(json.dumps(row))
    before = read(str(path))
    new = DetectionObject("y", "bbox_2d", (0, 500, 999, 999), Votes(2, 4), image=2)
    addition = addition_of(new, before[0])
    assert addition.box == (0.0, 40.04, 50.0, 80.0)
    write_with(DataConfig(train=str(path)), str(path), before, {"a": [addition]}, out)
    (after,) = read(str(out))
    assert after.objects == (*before[0].objects, new._replace(votes=None))
