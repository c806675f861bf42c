"""The report and the live view of a real run, driven in a real browser: what a filter leaves, what an enlarged scene
covers, and that nothing is wider than a phone."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from deploy.demo.build_data import Build, build
from learner.report.live import create_app
from learner.report.page import write_report
from learner.report.read import read_runs
from shared.config.parse import write_yaml
from tests.ranks import learner

pytestmark = [pytest.mark.integration, pytest.mark.slow]
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking")
STEPS = 3


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run rollout matching by the trained model itself, on scenes whose labels have gaps; return the run's folder."""
    folder = tmp_path_factory.mktemp("run")
    build(Build(train=8, val=0, test=6, annotation_dropout=0.4, seed=3), folder / "data")
    rollouts = {"rollout_backend": "hf", "decode_batch_size": 8, "decoding": {"max_new_tokens": 120}}
    config = {
        "model": {"path": "deploy/demo/checkpoint", "dtype": "float32"},
        "data": {"train": str(folder / "data" / "train.jsonl"), "test": str(folder / "data" / "test.jsonl")},
        "task": {"container": "index_map", "coordinates": "tokens"},
        "loss": {"prefix_end": "first_miss", "matched_desc_weight": 1.0, "keep_unmatched": True},
        "training": {
            "output_dir": str(folder / "run"),
            "max_steps": STEPS,
            "effective_batch_size": 2,
            "per_device_train_batch_size": 2,
            "learning_rate": 1e-4,
            "eval_on_start": True,
            "save_on_end": False,
        },
        "custom": {"trainer_variant": "rollout_matching_sft", "extra": {"rollout_matching": rollouts}},
        "global_max_length": 1024,
        "logging": {"trackers": []},
    }
    write_yaml(folder / "run.yaml", config, "A tiny run.")
    ended = learner(folder / "run.yaml", timeout_s=500.0)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return folder / "run"


def driven(page: str, script: str, tmp_path: Path, *, width: int) -> dict[str, Any]:
    """Return what `script` puts into `found` after it has driven `page`, in a frame of `width` pixels: a window has 500
    at least. The page's own policy is in force, the script is the frame's parent's."""
    quoted = json.dumps(page).replace("</", "<\\/")
    outer = f"""<!doctype html><body><iframe id="frame" style="width:{width}px;height:800px;border:0"></iframe><script>
    const frame = document.getElementById("frame"), found = {{}};
    frame.onload = () => {{
      const page = frame.contentDocument, shown = e => frame.contentWindow.getComputedStyle(e).display !== "none";
      try {{ {script} }} catch (error) {{ found.error = String(error); }}
      document.body.dataset.found = JSON.stringify(found);
    }};
    frame.srcdoc = {quoted};
    </script>"""
    (tmp_path / "outer.html").write_text(outer)
    argv = [str(CHROMIUM), *FLAGS, "--window-size=1400,900", "--virtual-time-budget=5000", "--dump-dom"]
    argv += [f"--user-data-dir={tmp_path}/profile", (tmp_path / "outer.html").as_uri()]
    dom = subprocess.run(argv, capture_output=True, text=True, timeout=120, check=False).stdout
    found = re.search(r'<body data-found="([^"]*)"', dom)
    assert found is not None, dom[-2000:]
    return dict(json.loads(found[1].replace("&quot;", '"').replace("&amp;", "&")))


REPORT = """
  found.width = page.documentElement.scrollWidth;
  found.left = {};
  for (const input of page.querySelectorAll(".filters input")) {
    input.click();
    const order = e => +frame.contentWindow.getComputedStyle(e).order;
    const scenes = [...page.querySelectorAll(".scene")].filter(shown).sort((a, b) => order(a) - order(b));
    found.left[input.id] = scenes.map(e => e.querySelector("b").textContent);
  }
  const first = page.querySelector(".scene"), box = first.querySelector(".enlarge input");
  box.click();
  const place = first.getBoundingClientRect();
  found.enlarged = [place.left, place.top, place.width, place.height];
  found.panel = first.querySelector(".panel svg").getBoundingClientRect().width;
  box.click();
  found.closed = frame.contentWindow.getComputedStyle(first).position;
"""


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
@pytest.mark.parametrize("width", [1280, 390])
def test_scenes_are_filtered_and_enlarged_without_a_script(run_dir: Path, tmp_path: Path, width: int) -> None:
    page = write_report(run_dir).read_text()
    assert "default-src 'none'" in page
    found = driven(page, REPORT, tmp_path, width=width)
    assert "error" not in found
    assert found["width"] <= width
    left = found["left"]
    assert {"f-worst", "f-best", "f-random", "f-all"} <= left.keys()
    scenes = {scene.scene_id: scene for scene in read_runs(run_dir).runs[0].evals[-1].scenes}
    assert set(left["f-all"]) == scenes.keys()
    names = re.findall(r'id="f-(class-\d+)"/><span>(\w+)', page)
    assert names
    for ident, name in names:
        shown = left[f"f-{ident}"]
        having = {key for key, s in scenes.items() if name in {item.desc for item in (*s.truth, *s.predictions)}}
        assert set(shown) == having
    assert left["f-worst"] != left["f-best"]
    assert found["enlarged"] == [0, 0, width, 800]
    assert found["panel"] > (320 if width < 500 else 500)
    assert found["closed"] == "static"


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
@pytest.mark.parametrize("width", [1280, 390])
def test_the_live_view_fits_and_says_that_the_run_finished(run_dir: Path, tmp_path: Path, width: int) -> None:
    page = TestClient(create_app(run_dir, host="127.0.0.1", token=None), base_url="http://127.0.0.1").get("/").text
    script = """
      found.width = page.documentElement.scrollWidth;
      found.state = page.querySelector(".badge").textContent;
      found.facts = page.querySelector(".facts").textContent;
      const isCut = e => e.clientWidth && e.scrollWidth > e.clientWidth + 1;
      found.cut = [...page.querySelectorAll(".card *")].filter(isCut).length;
      found.answers = page.querySelectorAll(".answer").length;
    """
    found = driven(re.sub(r"<script.*?</script>", "", page, flags=re.DOTALL), script, tmp_path, width=width)
    assert "error" not in found
    assert found["width"] <= width
    assert (found["state"], found["cut"]) == ("Finished", 0)
    assert f"step {STEPS} of {STEPS}" in found["facts"]
    assert found["answers"] > 0


def test_answers_of_a_run_name_what_its_loss_keeps(run_dir: Path) -> None:
    answers = json.loads((run_dir / "answers.json").read_text())["answers"]
    for one in answers:
        matched = {p for p, *_ in one["pairs"]}
        assert not matched & set(one["kept"])
        assert set(one["kept"]) <= set(range(len(one["predictions"])))
