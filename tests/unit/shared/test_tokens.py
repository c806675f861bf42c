"""R42: the bearer token is read in one place, checked, and never shown."""

from __future__ import annotations

import pytest

from shared.errors import ConfigError
from shared.tokens import MAX_CHARS, TOKEN_VARIABLE, read_token


@pytest.mark.parametrize(
    ("found", "token"),
    [(None, None), ("", None), (" \n", None), ("abc", "abc"), (" abc\r\n", "abc"), ("a=b/+~", "a=b/+~")],
)
def test_spaces_around_it_are_dropped(found: str | None, token: str | None) -> None:
    assert read_token({} if found is None else {TOKEN_VARIABLE: found}) == token


@pytest.mark.parametrize(
    "token", ["geheim\ntoken", "geheim token", "gehéim", "geheim\0", "geheim" * MAX_CHARS, "\udcffgeheim"]
)
def test_what_no_header_can_hold_is_refused_and_not_shown(token: str) -> None:
    with pytest.raises(ConfigError) as raised:
        read_token({TOKEN_VARIABLE: token})
    assert TOKEN_VARIABLE in str(raised.value)
    assert "geheim" not in str(raised.value)
    assert "geh" not in str(raised.value)
