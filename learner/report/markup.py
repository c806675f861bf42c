"""HTML and SVG as strings that are escaped by construction.

A child of `el` that is not `Html` is text and is escaped; attribute values always are. So a file name, a description or
a configuration value from disk can't become markup.
"""

from __future__ import annotations

from html import escape

_VOID = frozenset({"meta", "br", "hr", "img"})


class Html(str):
    """Markup that is known to be escaped."""

    __slots__ = ()


def el(name: str, /, *children: str | Html | None, **attributes: object) -> Html:
    """One element. `cls` is written `class`, underscores become hyphens, None attributes and children are left out."""
    written = "".join(f' {_attribute(key)}="{_text(value)}"' for key, value in attributes.items() if value is not None)
    if name in _VOID:
        return Html(f"<{name}{written}>")
    return Html(f"<{name}{written}>{join(*children)}</{name}>")


def join(*children: str | Html | None) -> Html:
    """Children one after another; plain strings are escaped."""
    return Html("".join(c if isinstance(c, Html) else escape(c, quote=False) for c in children if c is not None))


def _attribute(key: str) -> str:
    return "class" if key == "cls" else key.removesuffix("_").replace("_", "-")


def _text(value: object) -> str:
    return escape(f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value), quote=True)
