"""Suggestions of missing labels, the review page's server, and the annotations that it ends in (R43)."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
from contextlib import ExitStack
from dataclasses import asdict, replace
from io import BytesIO
from pathlib import Path

import httpx
import pytest
import uvicorn
from fastapi import Response
from fastapi.testclient import TestClient
from PIL import Image

from learner.__main__ import main
from learner.config.sections.data import DataConfig
from learner.missing.review import make_app, read_decisions, to_train_on, write_reviewed
from learner.missing.suggest import AUDIT, DECISIONS, SUGGESTIONS, of_sample
from learner.records import DetectionObject
from learner.tasks.detection.audit import AuditedFind, audit_text, read_audit
from learner.tasks.detection.completion import candidates
from learner.tasks.detection.scores import ScoredObject
from shared.addresses import free_port
from shared.errors import DataError, OutputError
from tests.unit.learner.run.test_additions import FORMATS, read

FIRST, SECOND = (600, 200, 800, 500), (700, 700, 900, 900)


def folder_of(tmp_path: Path, name: str = "coco") -> tuple[Path, Path]:
    """Return a folder of suggestions, and where new annotations go. The first is found by all three answers."""
    path, out = FORMATS[name](tmp_path)
    sample = next(one for one in read(path) if Path(one.images[0]).stem == "0")
    found = [DetectionObject("dog", "bbox_2d", FIRST), DetectionObject("cat", "bbox_2d", SECOND)]
    answers = [[found[0], *sample.objects], found, found[:1]]
    suggestions = sorted(of_sample(sample, candidates(sample, answers)), key=lambda one: -one.rank)
    folder = tmp_path / "suggestions"
    folder.mkdir()
    data = DataConfig(train=path).model_dump(mode="json")
    content = {"data": data, "suggestions": [asdict(one) for one in suggestions]}
    (folder / SUGGESTIONS).write_text(json.dumps(content))
    return folder, out


def client_of(folder: Path) -> TestClient:
    return TestClient(make_app(folder), base_url="http://127.0.0.1")


def test_looks_come_before_agreement(tmp_path: Path) -> None:
    """What looks and votes say decides the order, times the agreement's root; a find that repeats another comes
    last, but is not lost."""
    path, _ = FORMATS["coco"](tmp_path)
    sample = next(one for one in read(path) if Path(one.images[0]).stem == "0")
    dog, cat = DetectionObject("dog", "bbox_2d", FIRST), DetectionObject("cat", "bbox_2d", SECOND)
    again = DetectionObject("fox", "bbox_2d", (640, 200, 840, 500))
    found = candidates(sample, [[dog, cat, again], [dog]])
    known = [replace(one, probability={"dog": 0.3, "cat": 0.9, "fox": 0.0}.get(one.object.desc)) for one in found]
    line = sorted(of_sample(sample, known), key=lambda one: -one.rank)
    assert [(one.name, one.rank) for one in line] == [
        ("cat", pytest.approx(0.9 * 0.5**0.5)),
        ("dog", 0.3),
        ("fox", 0.0),
    ]


def test_an_audit_is_drawn_once_and_keeps_its_verdicts(tmp_path: Path) -> None:
    folder, _ = folder_of(tmp_path)
    client = TestClient(make_app(folder, 60), base_url="http://127.0.0.1")
    drawn = [one.place for one in read_audit(folder / AUDIT)]
    assert sorted(drawn) == [0, 1]
    assert "Wrong name" in client.get("/").text
    assert [s["votes"] for s in client.get("/state").json()["suggestions"]] == [3 - 2 * place for place in drawn]
    verdicts = {"0": {"decision": "wrong name", "name": "dog"}, "1": {"decision": "accept", "name": "cat"}}
    assert client.put("/decisions", json=verdicts).json() == {"saved": 2}
    again = TestClient(make_app(folder, 1), base_url="http://127.0.0.1")
    assert {k: v["decision"] for k, v in again.get("/state").json()["decisions"].items()} == {
        "0": "wrong name",
        "1": "accept",
    }
    assert [one.verdict for one in read_audit(folder / AUDIT)] == ["wrong name", "right"]
    assert again.put("/decisions", json={"1": verdicts["1"]}).json() == {"saved": 1}
    assert [one.verdict for one in read_audit(folder / AUDIT)] == [None, "right"]
    assert not (folder / DECISIONS).exists()
    assert "Wrong name" not in client_of(folder).get("/").text


def test_an_audit_of_other_suggestions_is_refused(tmp_path: Path) -> None:
    folder, _ = folder_of(tmp_path)
    (folder / AUDIT).write_text(audit_text([AuditedFind(2, 1, 3, None)]))
    with pytest.raises(DataError) as error:
        make_app(folder, 60)
    assert str(folder / AUDIT) in str(error.value)


def test_suggestions_have_no_label_and_the_best_come_first(tmp_path: Path) -> None:
    folder, _ = folder_of(tmp_path)
    found = json.loads((folder / SUGGESTIONS).read_text())["suggestions"]
    assert [(one["name"], one["votes"], one["answers"]) for one in found] == [("dog", 3, 3), ("cat", 1, 3)]
    assert found[0]["agreement"] > found[1]["agreement"]
    assert [name for name, _ in found[0]["labels"]] == ["cat"]


def test_what_is_probable_comes_before_what_answers_agree_on(tmp_path: Path) -> None:
    """A score is of the same object: of its name if one overlaps it, and of another name if none has its name."""
    path, _ = FORMATS["coco"](tmp_path)
    sample = next(one for one in read(path) if Path(one.images[0]).stem == "0")
    dog, cat = DetectionObject("dog", "bbox_2d", FIRST), DetectionObject("cat", "bbox_2d", SECOND)
    near = (610, 205, 800, 500)
    found = candidates(sample, [[dog, cat], [dog]])
    scored = [
        ScoredObject(DetectionObject("cat", "bbox_2d", FIRST), 0.9, 1),
        ScoredObject(DetectionObject("dog", "bbox_2d", near), 0.2, 2),
        ScoredObject(DetectionObject("fox", "bbox_2d", SECOND), 0.8, 1),
    ]
    by_name = {one.name: one for one in of_sample(sample, found, scored)}
    assert (by_name["dog"].score, by_name["cat"].score) == (0.2, 0.8)
    assert (by_name["dog"].rank, by_name["cat"].rank) == (0.2, 0.4)
    assert [one.score for one in of_sample(sample, found, [])] == [0, 0]
    assert [one.rank for one in of_sample(sample, found)] == [1, 0.5]


@pytest.mark.parametrize("name", FORMATS)
def test_what_is_accepted_is_written_in_the_format_that_came_in(name: str, tmp_path: Path) -> None:
    folder, out = folder_of(tmp_path, name)
    client = client_of(folder)
    decisions = {"0": {"decision": "accept", "name": "cat"}, "1": {"decision": "reject", "name": "cat"}}
    assert client.put("/decisions", json=decisions).json() == {"saved": 2}
    assert client.get("/state").json()["decisions"] == decisions
    assert write_reviewed(folder, out) == 1
    after = read(f"{out / 'data.yaml'}:train" if name == "yolo" else str(out))
    assert sorted(len(sample.objects) for sample in after) == [0, 2]
    assert {obj.desc for sample in after for obj in sample.objects} == {"cat"}
    with pytest.raises(OutputError):
        write_reviewed(folder, out)


@pytest.mark.parametrize("name", FORMATS)
def test_what_is_trained_on_next_are_the_same_photographs(name: str, tmp_path: Path) -> None:
    """`write` copies the validation part, too."""
    folder, out = folder_of(tmp_path, name)
    content = json.loads((folder / SUGGESTIONS).read_text())
    whole = content["data"]["train"]
    content["data"]["train"] = part = next(part for i in range(1, 100) if one_in(part := f"{whole}[:{i}%]"))
    (folder / SUGGESTIONS).write_text(json.dumps(content))
    write_reviewed(folder, out)
    after = to_train_on(folder, out)
    assert [Path(one.images[0]).name for one in read(after)] == [Path(one.images[0]).name for one in read(part)]


def one_in(path: str) -> bool:
    try:
        return len(read(path)) == 1
    except DataError:
        return False


def test_a_review_that_nobody_made_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, out = folder_of(tmp_path)
    assert main(["find-missing", "write", str(folder), "--out", str(out)]) == 0
    assert "nothing was reviewed yet" in capsys.readouterr().out


def test_a_port_that_is_taken_is_told_before_the_address(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, _ = folder_of(tmp_path)
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        assert main(["find-missing", "review", str(folder), "--port", str(port)]) == 1
    said = capsys.readouterr()
    assert "http" not in said.out
    assert (str(port) in said.err, "--port" in said.err) == (True, True)


def test_photographs_are_those_of_the_suggestions_only(tmp_path: Path) -> None:
    folder, _ = folder_of(tmp_path)
    client = client_of(folder)
    assert client.get("/image/0").headers["content-type"] == "image/png"
    assert client.get("/image/2").status_code == 404
    assert client.get("/image/-1").status_code == 404
    assert "image" not in client.get("/state").json()["suggestions"][0]


def test_a_tiff_is_shown_as_what_browsers_show(tmp_path: Path) -> None:
    folder, _ = folder_of(tmp_path)
    content = json.loads((folder / SUGGESTIONS).read_text())
    Image.new("RGB", (40, 30), "red").save(tmp_path / "scan.TIF")
    content["suggestions"][0]["image"] = str(tmp_path / "scan.TIF")
    (folder / SUGGESTIONS).write_text(json.dumps(content))
    with client_of(folder) as client:
        shown = client.get("/image/0")
    assert shown.headers["content-type"] == "image/jpeg"
    assert Image.open(BytesIO(shown.content)).size == (40, 30)


@pytest.mark.parametrize(
    "made", ["/proc/self/environ", "page.html", "picture.svg", "cut.png", "/dev/zero", "pipe", "."]
)
def test_what_is_no_image_does_not_leave(made: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`suggestions.json` may be anybody's."""
    folder, _ = folder_of(tmp_path)
    monkeypatch.chdir(tmp_path)
    content = json.loads((folder / SUGGESTIONS).read_text())
    png = Path(content["suggestions"][0]["image"]).read_bytes()
    Path("page.html").write_text("<script>alert(1)</script>")
    Path("picture.svg").write_text('<svg xmlns="http://www.w3.org/2000/svg"><script>alert(1)</script></svg>')
    Path("cut.png").write_bytes(png[:40] + b"password")
    os.mkfifo("pipe")
    content["suggestions"][0]["image"] = made
    (folder / SUGGESTIONS).write_text(json.dumps(content))
    answer = client_of(folder).get("/image/0")
    assert (answer.status_code, answer.headers["x-content-type-options"]) == (404, "nosniff")
    assert not any(part in answer.text for part in ("PATH", "alert", "password", "svg"))


def test_a_photograph_has_the_type_of_its_decoder(tmp_path: Path) -> None:
    folder, _ = folder_of(tmp_path)
    content = json.loads((folder / SUGGESTIONS).read_text())
    Image.new("RGB", (8, 6)).save(tmp_path / "page.html", "WEBP")
    content["suggestions"][0]["image"] = str(tmp_path / "page.html")
    (folder / SUGGESTIONS).write_text(json.dumps(content))
    assert client_of(folder).get("/image/0").headers["content-type"] == "image/webp"


def test_decisions_are_bounded_by_the_number_of_suggestions(tmp_path: Path) -> None:
    """12 MB took 17 s and 870 MB."""
    folder, _ = folder_of(tmp_path)
    client = client_of(folder)
    longest = {str(place): {"decision": "accept", "name": "\U0001f600" * 200} for place in range(2)}
    assert client.put("/decisions", json=longest).json() == {"saved": 2}
    many = json.dumps({str(place): {"decision": "reject", "name": "cat"} for place in range(10_000)}).encode()
    assert client.put("/decisions", content=many).status_code == 413
    assert client.put("/decisions", content=iter([many[:2000]] * 200)).status_code == 413, "without its length"
    assert client.put("/decisions", content=b"[" * 5000).status_code == 422
    assert {one.name for one in read_decisions(folder).values()} == {"\U0001f600" * 200}


@pytest.mark.slow
def test_the_review_is_where_its_url_says_and_nowhere_else(tmp_path: Path) -> None:
    folder, _ = folder_of(tmp_path)
    argv = [sys.executable, "-m", "learner", "find-missing", "review", str(folder), "--port"]
    with ExitStack() as running:
        ports, lines = [free_port(), free_port()], []
        started = [subprocess.Popen([*argv, str(port)], stdout=subprocess.PIPE, text=True) for port in ports]
        for process in started:
            running.enter_context(process)
            running.callback(process.terminate)
        for process in started:
            assert process.stdout is not None
            lines.append(process.stdout.readline())
        urls = [url for line in lines for url in re.findall(r"http://\S+", line)]
        path = httpx.URL(urls[0]).path
        assert path != httpx.URL(urls[1]).path, "a new one each time"
        with httpx.Client(base_url=urls[0], trust_env=False, timeout=60.0) as web:
            assert "Is this object unlabelled?" in web.get("").text
            assert len(web.get("state").json()["suggestions"]) == 2
            assert web.get("image/0").headers["content-type"] == "image/png"
            assert web.get("", headers={"Host": "testserver"}).status_code == 400
            for other in ("/", "/state", "/image/0", f"{path[:-2]}/state", "//state"):
                assert web.get(f"http://127.0.0.1:{ports[0]}{other}").status_code == 404


def test_other_sites_reach_nothing(tmp_path: Path) -> None:
    folder, _ = folder_of(tmp_path)
    client = client_of(folder)
    assert client.get("/state", headers={"Host": "evil.example"}).status_code == 400
    wrong = client.put("/decisions", json={"0": {"decision": "maybe", "name": "cat"}})
    assert wrong.status_code == 422
    assert not (folder / DECISIONS).exists()


def test_decisions_that_cannot_be_read_are_not_written_over(tmp_path: Path) -> None:
    folder, _ = folder_of(tmp_path)
    (folder / DECISIONS).write_text('{"0": {"decision": "accept"}}')
    with pytest.raises(DataError) as error:
        make_app(folder)
    assert DECISIONS in str(error.value)
    with pytest.raises(DataError):
        read_decisions(folder)
    with pytest.raises(DataError):
        make_app(tmp_path / "nowhere")


@pytest.mark.parametrize("text", ["", "[]", "3", "{}", "[" * 100_000, '{"data": {"train": "a"}, "suggestions": [{}]}'])
@pytest.mark.parametrize("name", [SUGGESTIONS, DECISIONS])
def test_damaged_files_are_errors_that_name_them(name: str, text: str, tmp_path: Path) -> None:
    folder, out = folder_of(tmp_path)
    (folder / name).write_text(text)
    if (name, text) == (DECISIONS, "{}"):
        return
    with pytest.raises(DataError, match=name):
        make_app(folder)
    with pytest.raises(DataError, match=name):
        write_reviewed(folder, out)


CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking")
# Accept the first with another name, reject the second, take that back, reject it again; then say how wide the page is.
DRIVE = """
<script>
const wait = ms => new Promise(done => setTimeout(done, ms));
const press = (key, on = document.body) => on.dispatchEvent(new KeyboardEvent("keydown", {key, bubbles: true}));
(async () => {
  while (!document.body.dataset.ready) await wait(20);
  press("n"); const name = document.getElementById("name"); name.value = "fox"; press("Enter", name); await wait(100);
  press("r"); await wait(100); press("u"); await wait(100);
  document.body.dataset.undone = document.getElementById("count").textContent;
  press("r"); await wait(300);
  document.body.dataset.width = document.documentElement.scrollWidth;
  document.body.dataset.kept = Object.keys(JSON.parse(Object.values(localStorage)[0]).decisions).length;
})();
</script>"""


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
@pytest.mark.parametrize("size", [(1280, 900), (500, 844)], ids=["desktop", "phone"])
def test_a_person_decides_by_keyboard_in_a_browser(tmp_path: Path, size: tuple[int, int]) -> None:
    folder, out = folder_of(tmp_path)
    app = make_app(folder)

    @app.get("/driven")
    def driven() -> Response:
        page = client_of(folder).get("/")
        (nonce,) = re.findall(r'nonce="([^"]+)"', page.text)
        drive = DRIVE.replace("<script>", f'<script nonce="{nonce}">')
        policy = {"Content-Security-Policy": page.headers["content-security-policy"]}
        return Response(page.text + drive, media_type="text/html", headers=policy)

    port = free_port()
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=port, log_level="warning"))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        argv = [str(CHROMIUM), *FLAGS, f"--window-size={size[0]},{size[1]}", "--virtual-time-budget=8000", "--dump-dom"]
        argv += [f"--user-data-dir={tmp_path}/profile", f"http://127.0.0.1:{port}/driven"]
        dom = subprocess.run(argv, capture_output=True, text=True, timeout=120).stdout
    finally:
        server.should_exit = True
        thread.join(30)
    body = re.search(r"<body([^>]*)>", dom)
    assert body is not None
    facts = dict(re.findall(r'data-(\w+)="([^"]*)"', body[1]))
    assert (int(facts["width"]) <= size[0], facts["kept"]) == (True, "2")
    assert "1 decided" in facts["undone"]
    decisions = read_decisions(folder)
    assert [(one.decision, one.name) for one in decisions.values()] == [("accept", "fox"), ("reject", "cat")]
    assert write_reviewed(folder, out) == 1
    assert "fox" in out.read_text()
