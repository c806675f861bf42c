"""The one door of all pages: who reaches them, and what every answer has."""

from __future__ import annotations

import jinja2
import pytest
from fastapi import FastAPI, Request
from fastapi.testclient import TestClient

from learner.report import web
from learner.report.web import HEADERS, html, page_app

PAGE = jinja2.Template('<script nonce="{{ nonce }}">{{ title }}</script>')


@pytest.fixture
def app() -> FastAPI:
    made = page_app(body_bytes=10)

    @made.get("/")
    def page() -> object:
        return html(PAGE, title="cells")

    @made.put("/told")
    async def told(request: Request) -> int:
        return len(await request.body())

    return made


def client(app: object, host: str = "127.0.0.1") -> TestClient:
    return TestClient(app, base_url=f"http://{host}:8791")  # type: ignore[arg-type]


def test_every_answer_has_the_headers(app: FastAPI) -> None:
    here = client(app)
    answers = {
        200: here.get("/"),
        404: here.get("/other"),
        405: here.post("/"),
        413: here.put("/told", content=b"x" * 11),
        400: client(app, "evil.example").get("/"),
    }
    outside = client(web._Behind(app, "/secret")).get("/")
    for code, answer in [*answers.items(), (404, outside)]:
        assert answer.status_code == code
        assert {name: answer.headers[name] for name in HEADERS if name != "Content-Security-Policy"} == {
            name: value for name, value in HEADERS.items() if name != "Content-Security-Policy"
        }
        assert "default-src 'none'" in answer.headers["content-security-policy"]


def test_scripts_run_by_their_nonce_which_is_new_each_time(app: FastAPI) -> None:
    pages = [client(app).get("/") for _ in range(2)]
    for page in pages:
        (nonce,) = [part for part in page.headers["content-security-policy"].split("'") if part.startswith("nonce-")]
        assert page.text == f'<script nonce="{nonce.removeprefix("nonce-")}">cells</script>'
    assert pages[0].text != pages[1].text


@pytest.mark.parametrize("host", ["testserver", "evil.example", "127.0.0.1.evil.example"])
def test_other_names_of_this_machine_reach_nothing(host: str, app: FastAPI) -> None:
    assert client(app, host).get("/").status_code == 400
    assert client(app, "localhost").get("/").status_code == 200


def test_bodies_are_bounded_with_and_without_their_length(app: FastAPI) -> None:
    here = client(app)
    assert here.put("/told", content=b"x" * 10).json() == 10
    assert here.put("/told", content=b"x" * 11).status_code == 413
    assert here.put("/told", content=iter([b"x"] * 11)).status_code == 413
    assert here.request("GET", "/", content=b"x" * 11).status_code == 413


@pytest.mark.parametrize("path", ["/", "/told", "/secre/", "/secret", "/secret2/", "//secret/", "/SECRET/"])
def test_without_the_path_that_was_printed_there_is_nothing(path: str, app: FastAPI) -> None:
    behind = client(web._Behind(app, "/secret"))
    assert behind.get(path).status_code == 404
    assert behind.get("/secret/").status_code == 200
    assert behind.put("/secret/told", content=b"abc").json() == 3
