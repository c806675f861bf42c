"""Pages whose content follows from the code: errors, endpoints, requirement ids; and what the README promises."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
from mkdocs.exceptions import PluginError
from PIL import Image

from learner.__main__ import main
from learner.recipe import command as recipe_command
from learner.steps import ahead, shares
from rollout_server.app import JSON
from rollout_server.service import RolloutService
from shared.config.parse import write_yaml
from shared.errors import error_classes
from shared.wire import RolloutOutput, ScoreReply
from tests.unit.docs.blocks import ROOT, blocks
from tests.unit.learner.config.model_sizes import MODELS
from tests.unit.rollout_server.fakes import FakeEngine
from tests.unit.rollout_server.test_app import serve
from tools.reference import api
from tools.requirements import REQUIREMENTS
from tools.site import (
    fetched_from_elsewhere,
    links_inside,
    notebook_page,
    on_page_markdown,
    on_post_page,
    stacked_tables,
    whole_names,
)

LOADED = (ahead, recipe_command, shares)  # they define errors of their own


def test_every_error_is_listed_with_its_cause_and_its_way_out() -> None:
    page = (ROOT / "docs/troubleshooting/errors.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| ([^|]+) \| ([^|]+) \|$", page, re.M)
    classes = {name for name, cls in error_classes().items() if not cls.__module__.startswith("tests.")}
    assert len(rows) == len({name for name, *_ in rows})
    assert {name for name, *_ in rows} == classes
    assert all(meaning.strip() and way_out.strip() for _, meaning, way_out in rows)


def test_every_cited_requirement_is_explained() -> None:
    """Cited: as words in comments, docstrings and pages, such as R07."""
    cited: set[str] = set()
    for folder in ("shared", "learner", "rollout_server", "deploy", "tools", "bench", "tests"):
        for path in (ROOT / folder).rglob("*.py"):
            cited |= set(re.findall(r"\b(?:R\d\d|D\d\d?)\b", path.read_text(encoding="utf-8")))
    assert len(cited) > 30
    assert cited - REQUIREMENTS.keys() == set()


@pytest.mark.parametrize(
    ("path", "method"),
    [
        (path, method)
        for path, methods in api()["paths"].items()
        for method, operation in methods.items()
        if "example" in str(operation.get("requestBody", "example"))
    ],
)
def test_endpoints_answer_the_examples(path: str, method: str) -> None:
    async def check(http: httpx.AsyncClient, engine: FakeEngine, service: RolloutService) -> None:
        operation = api()["paths"][path][method]
        body = operation["requestBody"]["content"][JSON]["example"] if "requestBody" in operation else None
        if body and "request_config" in body:
            body["request_config"]["max_tokens"] = 8  # the fake engine's context is short
        reply = await http.request(method, path, json=body)
        assert reply.status_code == 200, reply.text
        promised = operation["responses"]["200"]["content"].get(JSON, {}).get("example")
        if isinstance(promised, dict):
            assert promised.keys() == reply.json().keys()
        if path == "/infer/":
            RolloutOutput.model_validate(reply.json()[0])
        if path == "/score/":
            ScoreReply.model_validate(reply.json())

    serve(check)


# ---- configurations as printed -------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", ["README.md", "docs/quickstart.md"])
def test_the_first_configuration_runs_as_printed(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A tiny data set is in the places that the file names."""
    (block,) = (b for b in blocks() if b.page == ROOT / page and b.title == "run.yaml")
    (tmp_path / "run.yaml").write_text(block.text)
    write_coco(tmp_path / "data")
    monkeypatch.chdir(tmp_path)
    assert main(["check", "--json", "--config", "run.yaml"]) == 0
    assert json.loads(capsys.readouterr().out)["samples"] == {"train": 2, "val": 2}


def write_coco(folder: Path) -> None:
    """Write two images with three boxes, as COCO; the same for both splits."""
    (folder / "images").mkdir(parents=True)
    for number in (1, 2):
        Image.new("RGB", (64, 48)).save(folder / "images" / f"{number}.png")
    content = {
        "images": [{"id": n, "file_name": f"{n}.png", "width": 64, "height": 48} for n in (1, 2)],
        "categories": [{"id": 1, "name": "cat"}],
        "annotations": [
            {"id": i, "image_id": image, "category_id": 1, "bbox": [x, 5, 10, 12], "area": 120, "iscrowd": 0}
            for i, (image, x) in enumerate([(1, 4), (1, 30), (2, 8)], start=1)
        ],
    }
    for split in ("train", "val"):
        (folder / f"{split}.json").write_text(json.dumps(content))


def test_the_output_of_check_is_the_one_on_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The data and the configuration are like those that the page speaks of. When the program says something else, so
    must the page: copy the output."""
    (block,) = (b for b in blocks() if b.page == ROOT / "docs/howto/own-data.md" and b.text.startswith("train:"))
    monkeypatch.chdir(tmp_path)
    write_raccoons(tmp_path)
    assert main(["check", "--config", "run.yaml"]) == 0
    assert capsys.readouterr().out.strip() == block.text.strip()


def write_raccoons(folder: Path) -> None:
    """Write 24 photographs of raccoons and a dog, as COCO in two files, one photograph in both; and a 2B model's
    sizes."""
    for split, numbers in (("train", range(20)), ("val", range(19, 24))):
        images = [{"id": n, "file_name": f"{n}.png", "width": 640, "height": 480} for n in numbers]
        boxes = [
            {"id": 10 * n + i, "image_id": n, "category_id": 1 + (n == 7), "bbox": [100 * i, 40, 90, 200]}
            for n in numbers
            for i in range(n % 4)
        ]
        names = [{"id": 1, "name": "raccoon"}, {"id": 2, "name": "dog"}]
        (folder / f"{split}.json").write_text(json.dumps({"images": images, "annotations": boxes, "categories": names}))
    (folder / "images").mkdir()
    for n in range(24):
        Image.new("RGB", (640, 480), (n, n, n)).save(folder / "images" / f"{n}.png")
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text(json.dumps({"model_type": "qwen3_vl", **MODELS["2B"]}))
    write_yaml(
        folder / "run.yaml",
        {
            "model": {"path": "./model", "dtype": "bfloat16", "lora": {"r": 64}, "max_pixels": 262144},
            "data": {"train": "train.json", "val": "val.json", "prompt": "<image>List every object."},
            "training": {"output_dir": "runs/mine", "num_train_epochs": 10, "effective_batch_size": 4},
            "custom": {"trainer_variant": "sft", "extra": {"rollout_matching": {"rollout_backend": "hf"}}},
            "global_max_length": 4096,
        },
    )


# ---- the site ------------------------------------------------------------------------------------------------------


def test_a_page_that_fetches_something_is_found() -> None:
    html = '<script src="https://elsewhere/x.js"></script><link rel=stylesheet href=//elsewhere/x.css>'
    assert fetched_from_elsewhere(html) == ["https://elsewhere/x.js", "//elsewhere/x.css"]
    assert fetched_from_elsewhere('<a href="https://elsewhere/">x</a><script src="assets/x.js"></script>') == []


def test_the_notebook_becomes_a_page_with_its_code_and_what_it_printed() -> None:
    cells = json.loads((ROOT / "docs/notebooks/library.ipynb").read_text())["cells"]
    page = notebook_page(cells)
    assert page.startswith("# ")
    assert page.count("````python\n") == sum(cell["cell_type"] == "code" for cell in cells)
    for cell in cells:
        assert "".join(cell["source"]).rstrip() in page
        for output in cell.get("outputs", ()):
            assert "".join(output["text"]).rstrip() in page


def test_pictures_have_a_light_and_a_dark_form_and_a_text() -> None:
    for name in ("loop.svg", "sync.svg", "target.svg", "stage2.svg"):
        text = (ROOT / "docs" / name).read_text()
        assert "prefers-color-scheme: dark" in text, name
        assert 'aria-label="' in text, name


def test_short_names_are_marked_so_that_they_do_not_break() -> None:
    html = "<p><code>--val-predictions</code> <code>a command</code></p><pre><code>x\n</code></pre>"
    assert whole_names(html) == html.replace("<code>--val", '<code class="name">--val')
    path = f"<code>bench/results/{'x' * 30}.json</code>"
    assert whole_names(path) == path, "a phone has no room for it"


def test_links_of_texts_from_outside_lead_to_pages() -> None:
    html = '<a href="../docs/howto/recipe.md#x">a</a><a href="docs/faq.md">b</a>'
    assert links_inside(html) == '<a href="../howto/recipe.html#x">a</a><a href="faq.html">b</a>'
    other = '<a href="../bench/a.md">a</a><a href="howto/docs/a.md">b</a>'
    assert links_inside(other) == other


def test_tables_with_sentences_are_lists_on_a_phone() -> None:
    text = "a sentence that is far too long for a third of a phone"
    heads = "<thead><tr><th>key</th><th>type</th><th><code>what</code></th></tr></thead>"
    table = f"<table>{heads}<tbody><tr><td>a</td><td>b</td><td>{text}</td></tr></tbody></table>"
    named = f'<td data-label="key">a</td><td data-label="type">b</td><td data-label="what">{text}</td>'
    assert stacked_tables(table) == f"<table data-stacked>{heads}<tbody><tr>{named}</tr></tbody></table>"
    for same in (table.replace(text, "0.5"), table.replace("<th>type</th>", "").replace("<td>b</td>", "")):
        assert stacked_tables(same) == same


def test_blocks_that_tests_leave_out_are_blocks_on_the_site() -> None:
    page = '```python data-unchecked="needs a running server"\nx = 1\n```\n'
    assert on_page_markdown(page) == "```python\nx = 1\n```\n"


def test_a_block_that_is_shown_as_text_ends_the_build() -> None:
    shown = SimpleNamespace(file=SimpleNamespace(src_path="a.md"))
    assert on_post_page("<pre>```</pre>", page=shown, config=None) == "<pre>```</pre>"
    with pytest.raises(PluginError):
        on_post_page("<p>```python x</p>", page=shown, config=None)
