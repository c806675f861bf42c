"""Secrets of the configuration stay out of what is written, also where a URL's form changed them."""

from __future__ import annotations

import json
import re
from urllib.parse import quote

import httpx
import pytest

from shared.config.model import Mistake, show
from shared.errors import ServerError
from shared.masking import bare_url, masked, masked_in, remember

VALUE = "Geheim/+ä b"


@pytest.fixture(autouse=True)
def known() -> None:
    remember("API_TOKEN", VALUE)


@pytest.mark.parametrize(
    "form",
    [
        VALUE,
        quote(VALUE),
        quote(VALUE, safe=""),
        re.sub("%..", lambda found: found[0].lower(), quote(VALUE, safe="")),
        VALUE.lower(),
        repr(VALUE)[1:-1],
        json.dumps(VALUE)[1:-1],
        str(httpx.URL(f"http://host/{VALUE}"))[len("http://host/") :],
    ],
)
def test_a_secret_is_found_in_every_form(form: str) -> None:
    assert masked(f"GET http://host/{form}?x: 404") == "GET http://host/${API_TOKEN}?x: 404"


def test_a_host_in_lower_case_is_found() -> None:
    remember("HOST_KEY", "Tenant-77")
    assert masked(str(httpx.URL("http://Tenant-77.example:8000"))) == "http://${HOST_KEY}.example:8000"


def test_errors_and_mistakes_do_not_show_one() -> None:
    error = ServerError(f"http://h/{VALUE}: no answer", found=VALUE, wanted=quote(VALUE), remedy=VALUE.lower())
    mistake = Mistake(path="a", found=VALUE, wanted=VALUE, remedy=VALUE)
    shown = f"{error} {error.args} {error!r} {error.__reduce__()} {mistake} {show('x' * 70 + VALUE)}"
    assert "eheim" not in shown.lower()


def test_values_within_values() -> None:
    found = masked_in({"a": [VALUE, {"b": (f"x{VALUE}",)}], VALUE: 1, "n": 3, "t": True, "z": None})
    assert found == {"a": ["${API_TOKEN}", {"b": ["x${API_TOKEN}"]}], "${API_TOKEN}": 1, "n": 3, "t": True, "z": None}


def test_a_short_value_is_no_secret() -> None:
    remember("SORT_KEY", "id")
    assert masked("valid") == "valid"


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("http://host:8000/a/b.png", "http://host:8000/a/b.png"),
        ("https://host/@name/b.png", "https://host/@name/b.png"),
        ("http://[::1]:8000/x", "http://[::1]:8000/x"),
        ("http://user:geheim@host:8000/a", "http://host:8000/a"),
        ("http://host/a.png?token=geheim", "http://host/a.png?..."),
        ("http://host/a#geheim", "http://host/a?..."),
        ("user:geheim@host:8000", "host:8000"),
        ("http://user:geh/eim@host/a", "http://..."),
        ("http://user:geh?eim@host/a", "http://..."),
        ("http:geheim@host", "host"),
        ("here is one: http://user:geheim@host", "here is one: http://host"),
        ("", ""),
    ],
)
def test_a_url_is_shown_without_what_may_be_secret(url: str, shown: str) -> None:
    assert bare_url(url) == shown
