"""The live view over HTTP: it follows a run, shows answers token by token, asks servers, and lets no web page in."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
import yaml
from fastapi.testclient import TestClient

from learner.__main__ import main
from learner.config.load import RESOLVED_NAME
from learner.report import live
from learner.report.live import Follower, covered, create_app
from learner.report.read import read_run
from shared.tokens import TOKEN_VARIABLE
from tests.proxies import watched_proxy
from tests.unit.learner.report.fake_run import make_scene, write_run
from tests.unit.learner.report.test_page import HOSTILE, body_of
from tests.waits import wait_until

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(live, "POLL_S", 0.0)
    return write_run(tmp_path / "run", steps=6, quality=((0, 0.3), (6, 0.9)), num_scenes=2)


def client(run_dir: Path) -> TestClient:
    return TestClient(create_app(run_dir, host="127.0.0.1", token=None), base_url="http://127.0.0.1")


def write_answers(run_dir: Path, **changes: Any) -> None:
    scene = make_scene(0, run_dir / "images")
    tokens = [["{", "kept", ""], ["<|coord_5|>", "matched", "<|coord_7|>"], ["x", "dropped", "bbox_invalid"]]
    tokens += [["cut!", "cut", ""], ["more", "appended", ""], ["less", "unlearned", ""]]
    one = {**scene, "ignored": [], "predictions": scene["truth"][:1], "pairs": [[0, 0, 0.9]], "tokens": tokens}
    one |= {"missed": list(range(1, len(scene["truth"]))), "drops": {"bbox_invalid": 1}, "usable": True, "ver": 4}
    (run_dir / "answers.json").write_text(json.dumps({"global_step": 6, "answers": [one | changes]}))


def test_the_newest_evaluation_is_drawn_also_of_a_run_without_rollouts(run_dir: Path) -> None:
    """`sft` writes no answers, but evaluations do. What is wrong with a run stands on the page too."""
    with (run_dir / "metrics.jsonl").open("a") as lines:
        why = {"event": "warning", "global_step": 6, "what": "the score is near 0: nothing found", "steps": 0}
        lines.write(json.dumps({**why, "remedy": "name the classes"}) + "\n")
    page = client(run_dir).get("/").text
    assert "Newest evaluation" in page
    assert "step 6, as the model answered" in page
    assert page.count("eval-") >= 2
    assert "At step 6: the score is near 0: nothing found; name the classes" in page


def test_the_page_follows_the_run(run_dir: Path) -> None:
    web = client(run_dir)
    page = web.get("/").text
    assert "step 6 of 6" in page
    for title in ("Loss", "Match rate", "F1@0.5 by step", "Seconds per step"):
        assert f"<b>{title}</b>" in page
    with (run_dir / "metrics.jsonl").open("a") as file:
        step = {"event": "step", "global_step": 7, "loss": 0.5, "channel": "B", "metrics": {}, "time": time.time()}
        file.write(json.dumps(step) + '\n{"event": "step", "glob')
    fresh = web.get("/now").text
    assert "step 7 of 6" in fresh
    assert "may have been killed" not in fresh
    body_of(f"<body>{fresh}</body>")


def append(run_dir: Path, *events: dict[str, Any]) -> None:
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write("".join(json.dumps(event) + "\n" for event in events))


@pytest.mark.parametrize(
    ("end", "name", "says"),
    [
        ({"how": "finished", "because": ""}, "Finished", "step 6 of 9"),
        ({"how": "stopped", "because": "stopped by SIGTERM"}, "Stopped", "stopped by SIGTERM"),
        ({"how": "failed", "because": "ServerError: <gone>"}, "Failed", "ServerError: &lt;gone&gt;"),
    ],
)
def test_a_run_that_ended_says_so(run_dir: Path, end: dict[str, str], name: str, says: str) -> None:
    begin = {"event": "begin", "global_step": 0, "total_steps": 9, "time": 1.0}
    metrics = run_dir / "metrics.jsonl"
    metrics.write_text(json.dumps(begin) + "\n" + metrics.read_text())
    append(run_dir, {"event": "end", "global_step": 6, "time": time.time() - 3 * live.SILENT_S, **end})
    page = client(run_dir).get("/now").text
    assert f">{name}</span>" in page
    assert says in page
    assert "killed" not in page
    assert " left" not in page


def test_a_run_that_goes_on_says_how_long_it_will_take(run_dir: Path) -> None:
    """Steps before a resume, and the time between, do not count."""
    now = time.time()
    append(run_dir, {"event": "end", "how": "stopped", "because": "", "global_step": 6, "time": now - 5000})
    append(run_dir, {"event": "begin", "global_step": 6, "total_steps": 100, "time": now - 80})
    assert "Running" in client(run_dir).get("/now").text
    for step in (7, 8, 9, 10):
        fields = {"loss": 0.5, "channel": "B", "metrics": {}, "time": now - 10 * (10 - step)}
        append(run_dir, {"event": "step", "global_step": step, **fields})
    page = client(run_dir).get("/now").text
    assert "step 10 of 100" in page
    assert "about 15 min 0 s left" in page
    body = body_of(f"<body>{page}</body>")
    (bar,) = body.iter("progress")
    assert (bar.get("value"), bar.get("max")) == ("10", "100")


@pytest.mark.parametrize(("total", "says"), [(100_000, "step 8  ·  6 min"), (10, "step 8 of 10")])
def test_a_run_that_time_will_end_says_how_much_is_left(run_dir: Path, total: int, says: str) -> None:
    """R49: the length in steps of a recipe's stage is never reached."""
    settings = run_dir / RESOLVED_NAME
    config = yaml.safe_load(settings.read_text())
    settings.write_text(yaml.safe_dump(config | {"training": {**config["training"], "max_minutes": 10}}))
    now = time.time()
    append(run_dir, {"event": "begin", "global_step": 6, "total_steps": total, "time": now - 200})
    assert "of 100000" not in client(run_dir).get("/now").text, "no step has shown the pace"
    for step in (7, 8):
        fields = {"loss": 0.5, "channel": "B", "metrics": {}, "time": now - 100 * (8 - step)}
        append(run_dir, {"event": "step", "global_step": step, **fields})
    assert says in client(run_dir).get("/now").text


def test_a_run_without_news_may_have_been_killed(run_dir: Path) -> None:
    page = client(run_dir).get("/now").text  # its events are of years ago
    assert "No news" in page
    assert "may have been killed" in page


def test_finds_that_the_loss_keeps_are_no_errors(run_dir: Path) -> None:
    write_answers(run_dir, pairs=[], missed=[0])
    page = client(run_dir).get("/now").text
    assert "o-spurious" in page
    assert "without a label" not in page
    write_answers(run_dir, pairs=[], missed=[0], kept=[0])
    page = client(run_dir).get("/now").text
    assert "o-spurious" not in page
    assert "o-kept" in page
    assert "1 without a label, kept" in page
    assert "x-kept" in page, "the legend says what it is"


def test_answers_are_shown_with_what_became_of_their_tokens(run_dir: Path) -> None:
    write_answers(run_dir)
    page = client(run_dir).get("/now").text
    spans = re.findall(r'<span class="tok k-(\w+)"( title="[^"]*")?>([^<]*)</span>', page.split('class="tokens"')[1])
    assert [(kind, text) for kind, _, text in spans] == [
        ("kept", "{"),
        ("matched", "&lt;|coord_5|&gt;"),
        ("dropped", "x"),
        ("cut", "cut!"),
        ("appended", "more"),
        ("unlearned", "less"),
    ]
    assert "coord_7" in spans[1][1]
    assert "1 dropped: bbox_invalid" in page
    assert "data:image/png;base64," in page


def test_nothing_from_disk_becomes_markup(run_dir: Path) -> None:
    write_answers(run_dir, id=HOSTILE, tokens=[[HOSTILE, "kept", ""], [HOSTILE, "dropped", HOSTILE]])
    answer = client(run_dir).get("/")
    assert "<script>alert" not in answer.text
    nonces = re.findall(r"'nonce-([^']+)'", answer.headers["content-security-policy"])
    assert re.findall(r"<script[^>]*>", answer.text) == [f'<script nonce="{nonces[0]}">']


@pytest.mark.parametrize("text", ["", "[]", '{"global_step": 1, "answers": [{}]}', '{"answers": 3}'])
def test_a_damaged_file_of_answers_is_left_out(run_dir: Path, text: str) -> None:
    (run_dir / "answers.json").write_text(text)
    assert "None yet" in client(run_dir).get("/now").text


def test_only_this_machine_by_its_own_name_and_only_reading(run_dir: Path) -> None:
    web = client(run_dir)
    assert web.get("/", headers={"Host": "evil.example"}).status_code == 400
    assert web.post("/now").status_code == 405
    assert web.get("/../config.yaml").status_code == 404
    assert web.get("/metrics.jsonl").status_code == 404


def test_servers_are_shown_with_their_gate(run_dir: Path) -> None:
    config = json.dumps(
        {
            "custom": {
                "extra": {"rollout_matching": {"vllm": {"server": {"servers": [{"base_url": "http://127.0.0.1:1"}]}}}}
            }
        }
    )
    (run_dir / RESOLVED_NAME).write_text(config)
    assert "no answer (ConnectError)" in client(run_dir).get("/now").text
    added = {"base_url": "http://127.0.0.1:2", "state": "out", "because": "it did not answer"}
    (run_dir / "servers").mkdir()
    (run_dir / "servers" / "state.json").write_text(json.dumps({"servers": [added]}))
    page = client(run_dir).get("/now").text
    assert "http://127.0.0.1:2" in page
    assert "it did not answer" in page
    assert "http://127.0.0.1:1<" not in page


def test_a_secret_part_of_a_url_is_not_filled_in(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run writes `${NAME}` in its place. This process may know it, and the folder may be anybody's."""
    asked: list[str] = []
    monkeypatch.setattr("learner.report.live.ask", lambda _, url, **__: asked.append(url))
    monkeypatch.setenv("PATH_TOKEN", "geheim")
    (run_dir / "servers").mkdir()
    member = {"base_url": "http://127.0.0.1:1/${PATH_TOKEN}", "state": "serving", "because": ""}
    (run_dir / "servers" / "state.json").write_text(json.dumps({"servers": [member]}))
    page = client(run_dir).get("/now").text
    assert "${PATH_TOKEN} for a part of its URL" in page
    assert "geheim" not in page
    assert asked == []


def test_a_proxy_of_the_environment_is_not_asked(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would see the token of `--send-token`."""
    (run_dir / "servers").mkdir()
    member = {"base_url": "http://rollout.invalid", "state": "in", "because": ""}
    (run_dir / "servers" / "state.json").write_text(json.dumps({"servers": [member]}))
    with watched_proxy(monkeypatch) as asked:
        assert "no answer (ConnectError)" in client(run_dir).get("/now").text
    assert asked == []


def test_a_long_answer_of_a_server_is_not_read_to_its_end(run_dir: Path) -> None:
    """The addresses in a run's folder may be anybody's. Packed, it would be 200 MB out of 200 KB."""
    listening = socket.create_server(("127.0.0.1", 0))

    def answer() -> None:
        connection, _ = listening.accept()
        with connection, contextlib.suppress(OSError):
            connection.recv(1 << 16)
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 209715200\r\n\r\n")
            for _ in range(200):
                connection.sendall(bytes(1 << 20))
                sent.append(1 << 20)

    sent: list[int] = []
    thread = threading.Thread(target=answer, daemon=True)
    thread.start()
    (run_dir / "servers").mkdir()
    url = f"http://127.0.0.1:{listening.getsockname()[1]}"
    member = {"base_url": url, "state": "in", "because": ""}
    (run_dir / "servers" / "state.json").write_text(json.dumps({"servers": [member]}))
    assert "no answer (ValueError)" in client(run_dir).get("/now").text
    thread.join(10)
    listening.close()
    assert sum(sent) < 50 << 20


@pytest.mark.parametrize("asked", [False, True])
def test_servers_get_the_token_only_if_asked_for(
    asked: bool, run_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`--send-token`: whoever wrote the folder chose the addresses."""
    got: list[str | None] = []

    class Server(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            got.append(self.headers.get("Authorization"))
            self.send_error(401)

        def log_message(self, *args: object) -> None:
            pass

    pages: list[str] = []

    def look(server: uvicorn.Server, sockets: list[socket.socket]) -> None:
        sockets[0].close()
        (path,) = re.findall(r"http://[^/]+(/\S+)", capsys.readouterr().out)
        pages.append(TestClient(server.config.app, base_url="http://127.0.0.1").get(f"{path}now").text)  # type: ignore[arg-type]

    monkeypatch.setattr(uvicorn.Server, "run", look)
    monkeypatch.setenv(TOKEN_VARIABLE, "token-of-mine")
    with HTTPServer(("127.0.0.1", 0), Server) as listening:
        thread = threading.Thread(target=listening.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        member = {"base_url": f"http://127.0.0.1:{listening.server_port}", "state": "in", "because": ""}
        (run_dir / "servers").mkdir()
        (run_dir / "servers" / "state.json").write_text(json.dumps({"servers": [member]}))
        code = main(["report", str(run_dir), "--live", "--port", "0", *(["--send-token"] if asked else [])])
        listening.shutdown()
        thread.join(10)
    assert code == 0
    assert got == ["Bearer token-of-mine" if asked else None]
    assert "needs --send-token" in pages[0]
    assert "token-of-mine" not in pages[0] + capsys.readouterr().out


def test_what_is_read_piecewise_is_what_is_read_at_once(run_dir: Path) -> None:
    path = run_dir / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("")
    follower = Follower(run_dir)
    for line in lines:
        with path.open("a") as file:
            file.write(line)
        run = follower.read()
    whole = read_run(run_dir)
    assert (run.steps, run.syncs, run.wall_s) == (whole.steps, whole.syncs, whole.wall_s)
    path.write_text(lines[0])
    assert not follower.read().steps, "another run has taken the folder"


def test_busy_time_counts_once() -> None:
    assert covered([(0, 2), (1, 3), (5, 6), (5.5, 5.7)]) == 4
    assert covered([]) == 0


@pytest.fixture
def served(run_dir: Path) -> Iterator[str]:
    """Run the command itself, on a free port; yield its URL."""
    argv = [sys.executable, "-m", "learner", "report", str(run_dir), "--live", "--port", "0"]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    try:
        assert process.stdout is not None
        yield process.stdout.readline().split()[-4]
    finally:
        process.terminate()
        process.wait(20)


@pytest.mark.slow
@pytest.mark.integration
def test_a_browser_shows_what_comes_later(served: str, run_dir: Path, tmp_path: Path) -> None:
    """A real browser shows that the script has replaced the parts. Without one, plain HTTP is read."""
    assert "step 6 of 6" in httpx.get(served, trust_env=False, timeout=60.0).text
    write_answers(run_dir)
    if CHROMIUM is None:
        wait_until(lambda: "bbox_invalid" in httpx.get(f"{served}now", trust_env=False, timeout=60.0).text)
        return  # a page is kept for half a period
    # The browser's clock is virtual, and runs ahead of the server's, which keeps a page for half a period: look again.
    argv = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=6000", "--dump-dom"]
    shown, deadline = "", time.monotonic() + 90
    while 'class="tok k-dropped"' not in shown and time.monotonic() < deadline:
        command = [*argv, f"--user-data-dir={tmp_path}/profile", served]
        shown = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=90, check=False).stdout
    assert 'class="tok k-dropped"' in shown
    assert 'id="lost" role="status" hidden' in shown
