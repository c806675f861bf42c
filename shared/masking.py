"""Replaces secrets of the configuration in texts.

In: secret environment variables (by their name) that a configuration uses as `${NAME}`. Out: texts in which each secret
value is replaced by `${NAME}`. Errors, logs, events and printed output go through `masked`. Known secrets are global to
the process, because a log handler has no configuration.

A value is also found in changed forms: percent-encoded or in lower case (as in a normalised URL), and quoted. Values of
fewer than MIN_CHARS characters are not masked: they would be found in many words.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import TypeVar, overload
from urllib.parse import unquote

V = TypeVar("V")
MIN_CHARS = 4
_SECRET = re.compile(r"TOKEN|KEY|SECRET|PASSWORD", re.IGNORECASE)

_known: dict[str, str] = {}  # each secret value -> `${NAME}` of its variable
_pattern: re.Pattern[str] | None = None  # matches any secret; has a group per value of `_known`


def is_secret(name: str) -> bool:
    """Return True if an environment variable's name marks a secret, such as a token or password."""
    return _SECRET.search(name) is not None


def remember(name: str, value: str) -> None:
    """Make `masked` show `${name}` instead of `value`."""
    global _pattern
    if len(value) < MIN_CHARS or value in _known:
        return
    _known[value] = f"${{{name}}}"
    # A secret may contain another secret, so longer secrets are tried first.
    longest_first = sorted(_known.items(), key=lambda item: -len(item[0]))
    _known.clear()
    _known.update(longest_first)
    _pattern = re.compile("|".join(f"({_in_any_form(value)})" for value in _known))


def forget() -> None:
    """Forget all secrets."""
    global _pattern
    _known.clear()
    _pattern = None


def masked(text: str) -> str:
    """Return the text with `${NAME}` in place of each known secret."""
    if _pattern is None:
        return text
    written = list(_known.values())
    return _pattern.sub(lambda found: written[(found.lastindex or 1) - 1], text)


def as_written(text: str) -> str:
    """Return the text as a configuration has to write it, so that it reads back as the same text. Only in a URL may
    other forms of a secret, such as percent-encoding, become `${NAME}`."""
    escaped = text.replace("${", "$${")
    if "://" in text:
        return masked(escaped)
    # Only the exact value is replaced, because reading fills `${NAME}` with the exact value. If `${NAME}` replaced
    # another form of the secret, the text would change.
    for value, written in _known.items():
        escaped = escaped.replace(value, written)
    return escaped


def bare_url(url: str) -> str:
    """Return a URL as messages show it: without user, password, query and fragment, which may hold a token. The URL may
    be malformed, so it is split as plain text."""
    shown = re.split(r"[?#]", url, maxsplit=1)[0]
    scheme, separator, rest = shown.rpartition("://")
    authority, slash, path = rest.partition("/")
    if "@" in authority:
        authority = authority.rpartition("@")[2]
    elif ":" in authority and not re.fullmatch(r"(\[[^\[\]]*\]|[^:]*):[0-9]*", authority):
        # The port is no number, so the text may be a password that holds a slash.
        return f"{scheme}{separator}..."
    return f"{scheme}{separator}{authority}{slash}{path}{'' if shown == url else '?...'}"


@overload
def masked_in(value: dict[str, V]) -> dict[str, V]: ...


@overload
def masked_in(value: object) -> object: ...


def masked_in(value: object) -> object:
    """Return JSON values and tuples without secrets, also in the keys of mappings."""
    if _pattern is None:
        return value
    if isinstance(value, str):
        return masked(value)
    if isinstance(value, Mapping):
        return {masked_in(name): masked_in(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [masked_in(one) for one in value]
    return value


def _in_any_form(value: str) -> str:
    """Return a pattern for the value and its percent-decoded form. The pattern also finds changed characters
    (`_any_form`)."""
    return "|".join("".join(map(_any_form, text)) for text in dict.fromkeys((value, unquote(value))))


def _any_form(character: str) -> str:
    percent = "".join(f"%{byte:02x}" for byte in character.encode("utf-8", "surrogatepass"))
    forms = [character, character.lower(), percent, percent.upper(), repr(character)[1:-1], json.dumps(character)[1:-1]]
    if character == " ":
        forms.append("+")
    return f"(?:{'|'.join(re.escape(form) for form in dict.fromkeys(forms))})"
