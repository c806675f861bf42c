"""The page as a whole: what is on it, that it needs nothing else, and that nothing on disk becomes markup."""

from __future__ import annotations

import base64
import io
import itertools
import json
import re
import subprocess
import sys
import tomllib
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from learner.__main__ import main
from learner.config.load import RESOLVED_NAME
from learner.records import DetectionObject
from learner.report.page import render, write_report
from learner.report.read import read_runs
from learner.report.results import cards, confusion_matrix
from learner.report.scenes import (
    DRAWING,
    MAX_SCENES,
    PER_CLASS,
    PER_FILTER,
    TAG_HEIGHT,
    choose_scenes,
    gallery,
    load_picture,
    place_tags,
)
from learner.report.scores import classify, progress_of
from tests.unit.learner.report.fake_run import write_run

HOSTILE = "\"><script>alert(1)</script><b x='&"


def body_of(page: str) -> ET.Element:
    """Return the body, which must be well-formed XML too."""
    return ET.fromstring(page[page.index("<body>") : page.index("</body>") + len("</body>")])


def headings(page: str) -> set[str]:
    return {"".join(e.itertext()) for tag in ("h2", "h3", "b") for e in body_of(page).iter(tag)}


def test_a_whole_run_shows_everything(tmp_path: Path) -> None:
    page = render(read_runs(write_run(tmp_path / "run", steps=8, quality=((0, 0.3), (8, 0.9)))))
    assert {
        "Loss",
        "Match rate",
        "Objects per step",
        "Objects dropped, by reason",
        "Seconds per step",
        "Tokens learned per second",
        "Seconds per sync",
        "Canary gap per sync, nats",
        "F1@0.5 over scenes",
        "Before",
        "After",
        "Precision by IoU threshold",
        "Recall by IoU threshold",
        "Per class, at IoU ≥ 0.5",
        "Confusion of names, at IoU ≥ 0.5",
    } <= headings(page)
    assert re.search(r"F1@0\.5 on 24 test scenes went from 0\.\d+ to 0\.\d+; the 95% interval of the gain is", page)


def test_the_page_is_self_contained(tmp_path: Path) -> None:
    page = render(read_runs(write_run(tmp_path / "run", steps=4, quality=((0, 0.3), (4, 0.9)))))
    assert not re.search(r"https?://|<script|<link|@import|url\(", page)
    references = re.findall(r'(?:href|src)="([^"]*)"', page)
    assert references
    assert all(r.startswith(("data:image/png;base64,", "#")) for r in references)
    ids = {e.get("id") for e in body_of(page).iter() if e.get("id")}
    assert {r[1:] for r in references if r.startswith("#")} <= ids


def test_an_image_is_embedded_once_for_before_and_after(tmp_path: Path) -> None:
    page = render(read_runs(write_run(tmp_path / "run", steps=2, quality=((0, 0.3), (2, 0.9)), num_scenes=5)))
    assert page.count("data:image/png") == 5
    assert page.count("<use ") == 5


def test_nothing_on_disk_becomes_markup(tmp_path: Path) -> None:
    path = write_run(tmp_path / HOSTILE.replace("/", ""), steps=2, quality=((0, 0.3), (2, 0.9)), num_scenes=3)
    (path / RESOLVED_NAME).write_text(json.dumps({"model": {"path": HOSTILE}, HOSTILE: HOSTILE}))
    for file in (path / "eval").iterdir():
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        for line in lines:
            line |= {"id": HOSTILE + line["id"], "images": [HOSTILE]}
            for item in line["truth"] + line["predictions"]:
                item["desc"] = HOSTILE
        file.write_text("\n".join(map(json.dumps, lines)))
    event = {"event": "step", "global_step": 3, "metrics": {f"drop/{HOSTILE}": 2, HOSTILE: 1}}
    spans = [[HOSTILE, HOSTILE, 0.0, 1.0]]
    timeline = {"event": "timeline", "global_step": 3, "origin": 0.0, "seconds": 2.0, "spans": spans}
    scores = {"event": "eval", "global_step": 2, "metrics": {HOSTILE: 1}}
    with (path / "metrics.jsonl").open("a") as file:
        file.write("".join(f"{json.dumps(line)}\n" for line in (event, timeline, scores)))
    page = render(read_runs(path))
    assert "<script" not in page
    assert not list(body_of(page).iter("script"))
    assert "<b x=" not in page
    assert "image not available" in page
    assert "what ran when" in page


def test_a_wheel_has_the_templates() -> None:
    project = tomllib.loads(Path("pyproject.toml").read_text())
    patterns = project["tool"]["setuptools"]["package-data"]["learner.report"]
    package = Path("learner/report")
    listed = {path for pattern in patterns for path in package.glob(pattern)}
    assert listed == {path for path in package.rglob("*") if path.is_file() and path.suffix not in (".py", ".pyc")}


@pytest.mark.parametrize(
    ("steps", "quality", "says"),
    [
        (0, (), "No optimizer step is recorded yet."),
        (3, (), "No evaluation is recorded yet"),
        (0, ((0, 0.4),), "Only one evaluation, at step 0"),
    ],
)
def test_a_partial_run_says_what_is_missing(
    tmp_path: Path, steps: int, quality: tuple[tuple[int, float], ...], says: str
) -> None:
    page = render(read_runs(write_run(tmp_path / "run", steps=steps, quality=quality, num_scenes=4)))
    body_of(page)
    assert says in page


def test_metrics_without_scenes_have_no_interval(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", steps=2, quality=((0, 0.3), (2, 0.9)), num_scenes=3)
    for file in (path / "eval").iterdir():
        file.unlink()
    page = render(read_runs(path))
    assert "The scenes of an evaluation were not kept" in page
    assert "no scenes, no interval" in page


def test_a_sync_that_fell_back_is_told(tmp_path: Path) -> None:
    """R15."""
    path = write_run(tmp_path / "run")
    event = {"event": "sync", "ver": 7, "mode": "full", "fallback": "the adapter is a <DoRA>"}
    with (path / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(event) + "\n")
    assert "From ver 7 on all weights were synced, not the adapter: the adapter is a &lt;DoRA&gt;" in render(
        read_runs(path)
    )


def test_scores_that_contradict_the_scenes_are_pointed_out(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", steps=1, quality=((0, 0.4),), num_scenes=6)
    assert "the recorded F1@0.5 is" not in render(read_runs(path))
    metrics = path / "metrics.jsonl"
    metrics.write_text(re.sub(r'"f1@0.5": [\d.]+', '"f1@0.5": 0.999', metrics.read_text()))
    assert "At step 0 the recorded F1@0.5 is 0.999" in render(read_runs(path))


def test_filters_choose_the_extremes_in_their_order(tmp_path: Path) -> None:
    run = read_runs(write_run(tmp_path / "run", steps=1, quality=((0, 0.3), (1, 0.8)), num_scenes=30)).runs[0]
    before, after = ({s.scene_id: s for s in point.scenes} for point in run.evals)
    chosen = choose_scenes(before, after)
    assert [name for name, _ in chosen.values()] == ["Most changed", "Worst", "Best", "At random"]
    f1 = {key: classify(after[key]).f1 for key in after}
    change = {key: abs(f1[key] - classify(before[key]).f1) for key in before}
    assert [f1[key] for key in chosen["worst"][1]] == sorted(f1.values())[:PER_FILTER]
    assert [f1[key] for key in chosen["best"][1]] == sorted(f1.values(), reverse=True)[:PER_FILTER]
    assert [change[key] for key in chosen["changed"][1]] == sorted(change.values(), reverse=True)[:PER_FILTER]
    assert choose_scenes(before, after) == chosen
    assert "changed" not in choose_scenes(before, before), "nothing has changed"
    assert "changed" not in choose_scenes(before, None)


def test_a_class_has_its_scenes_and_the_page_has_each_once(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", steps=1, quality=((0, 0.3), (1, 0.8)), num_scenes=60)
    shown = gallery(progress_of(read_runs(path).runs))
    assert shown is not None
    scenes = {row.scene_id: row.panels[-1].scene for row in shown.rows}
    assert len(scenes) == len(shown.rows) <= MAX_SCENES
    classes = [one for one in shown.filters if one.ident.startswith("class-")]
    assert len(classes) > 1
    for one in classes:
        having = {key for key, s in scenes.items() if one.name in {item.desc for item in (*s.truth, *s.predictions)}}
        assert set(one.scene_ids) <= having
        assert len(one.scene_ids) >= min(PER_CLASS, len(having))
    assert scenes.keys() == {key for one in shown.filters for key in one.scene_ids}


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["truth", "missed", "hit", "class", "spurious", "kept", "region"]),
            st.text("abc", min_size=1, max_size=40),
            st.tuples(st.integers(0, 900), st.integers(0, 900), st.integers(1, 99), st.integers(1, 99)),
        ),
        max_size=25,
    ),
    st.floats(60, 900),
)
def test_tags_cover_neither_each_other_nor_the_edge(shapes: list[Any], height: float) -> None:
    drawn = [(color, "", DetectionObject(d, "bbox_2d", (x, y, x + w, y + h))) for color, d, (x, y, w, h) in shapes]
    tags = place_tags(drawn, height)
    for tag in tags:
        assert 0 <= tag.x <= DRAWING - tag.width
        assert 0 <= tag.y <= height - TAG_HEIGHT
    for one, other in itertools.combinations(tags, 2):
        apart = one.x + one.width <= other.x or other.x + other.width <= one.x
        assert apart or abs(one.y - other.y) >= TAG_HEIGHT
    if any(color in ("missed", "hit") for color, *_ in drawn):
        assert tags, "the first one always has a place"


def test_charts_of_one_value_are_folded_into_a_table(tmp_path: Path) -> None:
    page = render(read_runs(write_run(tmp_path / "run", steps=4, quality=((0, 0.3), (4, 0.9)), num_scenes=4)))
    folded = next(e for e in body_of(page).iter("details") if "Constant" in "".join(e.find("summary").itertext()))  # type: ignore[union-attr]
    rows = {row[0].text: row[1].text for row in folded.iter("tr")}
    assert rows["Gradient norm"] == "1.2"
    assert "Gradient norm" not in headings(page)
    assert "Loss" in headings(page)


def test_every_link_of_the_contents_leads_somewhere(tmp_path: Path) -> None:
    body = body_of(render(read_runs(write_run(tmp_path / "run", steps=4, quality=((0, 0.3), (4, 0.9))))))
    (contents,) = [e for e in body.iter("nav") if e.get("class") == "contents"]
    links = [str(e.get("href"))[1:] for e in contents.iter("a")]
    assert {"evaluation", "classes", "scenes", "training-0"} <= set(links)
    assert set(links) <= {e.get("id") for e in body.iter()}


def test_per_class_figures_say_of_which_run(tmp_path: Path) -> None:
    for name, quality in (("ours", ((0, 0.3), (4, 0.9))), ("sft", ((4, 0.6),))):
        write_run(tmp_path / name, steps=4, quality=quality, images=tmp_path / "images")
    page = render(read_runs(tmp_path))
    heads = [["".join(cell.itertext()) for cell in row] for row in body_of(page).iter("tr")]
    (classes,) = [head for head in heads if head[:2] == ["Class", "Objects"]]
    assert classes[2:] == [
        *(f"{name}after ours" for name in ("Predicted", "Precision", "Recall")),
        *(f"F1@0.5{name}" for name in ("before", "after ours", "after sft")),
    ]
    assert "recall: ours, evaluation at step 4." in page


def test_a_spike_has_its_samples_beside_it(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", steps=9, quality=((0, 0.3),), num_scenes=4)
    scene = json.loads((path / "eval" / "step_000000.jsonl").read_text().splitlines()[0])
    samples = [{**scene, "id": "odd", "row_loss": 9.5}, {"id": "gone", "row_loss": 0.25}, "?"]
    spikes = [
        {"event": "spike", "global_step": 7, "metric": metric, "value": 9.0, "usual": 1.0, "samples": samples}
        for metric in ("loss", "grad_norm")
    ]
    with (path / "metrics.jsonl").open("a") as file:
        file.write("".join(json.dumps(line) + "\n" for line in (*spikes, {"event": "spike", "samples": 3})))
    page = render(read_runs(path))
    body = body_of(page)
    (spike,) = [e for e in body.iter("section") if e.get("id") == "run-0-spike-7"]
    said = " ".join("".join(spike.itertext()).split())
    assert "Step 7: loss 9, usually 1; gradient norm 9, usually 1" in said
    assert "odd" in said
    assert "row loss 9.5" in said
    assert "gone" in said
    assert len(list(spike.iter("image"))) == 1
    marks = [e for e in body.iter("a") if e.get("href") == "#run-0-spike-7"]
    assert len(marks) == 2, "the loss chart and the contents; the constant gradient norm has no chart"


@pytest.mark.parametrize(
    ("end", "says"),
    [
        ({"how": "finished", "because": ""}, ""),
        ({"how": "failed", "because": "OutOfMemoryError: <b>"}, "failed, after step 3: OutOfMemoryError: &lt;b&gt;"),
        ({"how": "stopped", "because": "stopped by SIGTERM"}, "The run stopped, after step 3: stopped by SIGTERM."),
    ],
)
def test_a_run_that_ended_early_says_why(tmp_path: Path, end: dict[str, str], says: str) -> None:
    path = write_run(tmp_path / "run", steps=3, quality=(), num_scenes=1)
    with (path / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"event": "end", "global_step": 3, **end}) + "\n")
    page = render(read_runs(path))
    assert (says in page) if says else ("The run" not in page)
    assert f"·  {end['how']}" in page


def test_no_page_for_users_has_requirement_ids() -> None:
    """They are the project's own."""
    for template in Path("learner/report/templates").iterdir():
        assert not re.search(r"\b[RD]\d{1,2}\b", template.read_text()), template


def test_a_scene_names_its_file(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", steps=1, quality=((0, 0.5),), num_scenes=3)
    file = path / "eval" / "step_000000.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    inline = base64.b64encode(Path(lines[1]["images"][0]).read_bytes()).decode()
    lines[1]["images"] = [f"data:image/png;base64,{inline}"]
    lines[2]["images"] = []
    file.write_text("\n".join(map(json.dumps, lines)))
    names = [
        "".join(e.itertext()) for e in body_of(render(read_runs(path))).iter("div") if e.get("class") == "scene-name"
    ]
    assert any("scene_0000.png" in name for name in names)
    assert not any("base64" in name for name in names)
    assert sum("no image named" in name for name in names) == 1


def test_the_matrix_pools_rare_names_and_loses_none(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", steps=1, quality=((0, 0.6),), num_scenes=40)
    file = path / "eval" / "step_000000.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    for i, line in enumerate(lines):
        for item in line["truth"] + line["predictions"]:
            item["desc"] += f" of {i % 3}"
    file.write_text("\n".join(map(json.dumps, lines)))
    main = progress_of(read_runs(path).runs)[0]
    matrix = confusion_matrix(main)
    assert matrix is not None
    assert matrix.columns[-2:] == ["other names", "missed"]
    scenes = read_runs(path).runs[0].evals[0].scenes
    rows = [[count for count, _ in cells] for _, _, cells in matrix.rows]
    assert sum(map(sum, rows[:-1])) == sum(len(scene.truth) for scene in scenes)
    assert sum(sum(row[:-1]) for row in rows) == sum(len(scene.predictions) for scene in scenes)
    assert sum(cells[i][0] for i, (_, _, cells) in enumerate(matrix.rows) if cells[i][1] == "right") <= sum(
        len(classify(scene).found) for scene in scenes
    )


def test_syncs_are_counted_as_the_console_counts_them(tmp_path: Path) -> None:
    """The end of a demo counts the syncs of all its runs; a step's line names only those that came before a step."""
    for name, variant in (("stage2", "rollout_matching_sft"), ("sft", "sft")):
        write_run(tmp_path / name, steps=4, quality=((0, 0.5), (4, 0.5)), variant=variant, images=tmp_path / "images")
    with (tmp_path / "sft" / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"event": "sync", "ver": 1, "seconds": 9.0, "canary_gap": 0.5, "global_step": 4}) + "\n")
        file.write(json.dumps({"event": "rollout_call"}) + "\n")
        file.write(json.dumps({"event": "eval", "global_step": 4, "metrics": {"f1@0.5": 0.5}}) + "\n")
    runs = read_runs(tmp_path)
    card = cards(progress_of(runs.runs))[-1]
    assert card.big.startswith("5 × ")
    assert "stage2 4, sft 1" in card.sub
    assert "0.5" in card.sub


def test_two_runs_side_by_side(tmp_path: Path) -> None:
    for name, quality in (("stage2", ((0, 0.3), (4, 0.9))), ("sft", ((4, 0.6),))):
        variant = "sft" if name == "sft" else "rollout_matching_sft"
        write_run(tmp_path / name, steps=4, quality=quality, variant=variant, images=tmp_path / "images")
    page = render(read_runs(tmp_path))
    assert {"Training: stage2", "Training: sft", "After stage2", "After sft"} <= headings(page)
    assert "After, against sft" in page
    assert "Not in this run: match rate, FN appended, drop reasons, sync seconds, canary gap." in page
    compared = write_report(tmp_path / "stage2", out=tmp_path / "out" / "x.html", compare=tmp_path / "sft")
    assert {"After stage2", "After sft"} <= headings(compared.read_text())


def test_the_command_writes_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_run(tmp_path / "run", steps=2, quality=((0, 0.5),), num_scenes=2)
    assert main(["report", str(path)]) == 0
    assert capsys.readouterr().out.strip() == str(path / "report.html")
    assert (path / "report.html").read_text().startswith("<!doctype html>")


def test_no_run_exits_2_without_a_traceback(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "learner", "report", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == 2
    assert ended.stderr.startswith("error: DataError: the directory is no run; found ")
    assert "Traceback" not in ended.stderr


def test_pictures_are_upright_as_the_runs_see_them(tmp_path: Path) -> None:
    """D13: a photograph that lies on its side in the file, and says so in its EXIF."""
    image = Image.new("RGB", (600, 300))
    exif = Image.Exif()
    exif[0x0112] = 6
    image.save(tmp_path / "a.jpg", exif=exif)
    picture = load_picture(["a.jpg"], [tmp_path])
    assert picture is not None
    with Image.open(io.BytesIO(base64.b64decode(picture.uri.partition(",")[2]))) as shown:
        assert shown.size == (300, 600)
    assert load_picture(["https://example.org/a.jpg"], [tmp_path]) is None


def test_bad_records_are_told(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=2, quality=((0, 0.3), (2, 0.8)))
    event = {"event": "data", "time": 1.0, "train": 205, "evaluation": 72}
    event["bad_records"] = {"train": {"no_area": {"drop": 2}, "outside_image": {"clip": 1}}}
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(event) + "\n")
    page = render(read_runs(run))
    assert "2 no area dropped" in page
    assert "1 outside image clipped" in page
    assert "205 training samples" in page


def test_ignore_regions_are_drawn_and_explained_where_there_are_some(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=2, quality=((0, 0.3), (2, 0.8)))
    assert "in an ignore region" not in render(read_runs(run))
    for file in (run / "eval").iterdir():
        scenes = [json.loads(line) for line in file.read_text().splitlines()]
        for scene in scenes:
            scene["ignored"] = [{"desc": "", "bbox_2d": [0, 0, 999, 999]}]
        file.write_text("".join(json.dumps(scene) + "\n" for scene in scenes))
    page = render(read_runs(run))
    assert "in an ignore region" in page
    assert "ignore region: any class" in page
    assert "prediction, false positive" in page  # the legend has it
    assert "prediction, false positive:" not in page  # none is left
