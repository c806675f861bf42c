"""mkdocs' hook for the documentation site: a page that would fetch anything from elsewhere ends the build.

The site works without network and from disk, so scripts, styles, fonts and pictures must be its own.
"""

from __future__ import annotations

import re
from typing import Any

from mkdocs.exceptions import PluginError

_FETCHED = re.compile(r"<(?:script|link|img|iframe|source)\b[^>]*?\b(?:src|href)=[\"']?((?:https?:)?//[^\"'\s>]+)")


def on_post_page(output: str, *, page: Any, config: Any) -> str:
    """Raises PluginError if the page fetches something."""
    if fetched := fetched_from_elsewhere(output):
        raise PluginError(f"{page.file.src_path} fetches {', '.join(fetched)}; put a copy into docs/assets")
    return output


def fetched_from_elsewhere(html: str) -> list[str]:
    return _FETCHED.findall(html)
