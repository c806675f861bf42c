"""mkdocs' hooks for the documentation site.

A page that would fetch anything from elsewhere ends the build: the site works without network and from disk, so
scripts, styles, fonts and pictures must be its own. The notebook becomes a page, with the outputs that are saved in it.
Short names in code never break. On a phone, a table of three columns or more with sentences in it becomes a list.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from itertools import cycle
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File

_FETCHED = re.compile(r"<(?:script|link|img|iframe|source)\b[^>]*?\b(?:src|href)=[\"']?((?:https?:)?//[^\"'\s>]+)")
_OUTSIDE = re.compile(r'href="((?:\.\./)?)docs/([\w/-]+)\.md')
_NAME = re.compile(r"<code>([^<\s]{1,32})</code>")

_TABLE = re.compile(r"<table>.*?</table>", re.DOTALL)
_HEAD = re.compile(r"<th\b[^>]*>(.*?)</th>", re.DOTALL)
_CELL = re.compile(r"<td\b([^>]*)>(.*?)</td>", re.DOTALL)
_MIN_COLUMNS, _MIN_TEXT = 3, 40  # characters of the longest cell

_REASON = re.compile(r"^(```\w+) data-unchecked=\"[^\"]*\"$", re.MULTILINE)
_BLOCK = re.compile(r"<pre.*?</pre>", re.DOTALL)

NOTEBOOK, PAGE = "notebooks/library.ipynb", "notebooks/library.md"


def on_files(files: Any, *, config: Any) -> Any:
    """Return the site's files, and the notebook's page."""
    notebook = json.loads((Path(config["docs_dir"]) / NOTEBOOK).read_text(encoding="utf-8"))
    files.append(File.generated(config, PAGE, content=notebook_page(notebook["cells"])))
    return files


def notebook_page(cells: Iterable[Mapping[str, Any]]) -> str:
    """Return the cells as Markdown: text as it is, code and what it printed as blocks."""
    parts = []
    for cell in cells:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else _block("python", source))
        if printed := "".join("".join(output.get("text", ())) for output in cell.get("outputs", ())):
            parts.append(_block("text", printed))
    return "\n\n".join(parts) + "\n"


def _block(language: str, text: str) -> str:
    return f"````{language}\n{text.rstrip()}\n````"


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Return the page without notes on why tests skip a code block: behind such a note mkdocs recognizes no block."""
    return _REASON.sub(r"\1", markdown)


def on_post_page(output: str, *, page: Any, config: Any) -> str:
    """Return the page with unbroken names. Raises PluginError if it fetches from elsewhere, or shows a block as
    text."""
    if fetched := fetched_from_elsewhere(output):
        raise PluginError(f"{page.file.src_path} fetches {', '.join(fetched)}; put a copy into docs/assets")
    if "```" in _BLOCK.sub("", output):
        raise PluginError(f"{page.file.src_path} has a block that is shown as text; correct its first line")
    return whole_names(stacked_tables(links_inside(output)))


def links_inside(html: str) -> str:
    """Return the page with links to `docs/` turned into links to the site's pages, for texts from outside of the
    folder."""
    return _OUTSIDE.sub(r'href="\1\2.html', html)


def whole_names(html: str) -> str:
    """Mark inline code of one short word, so that the style keeps it on one line. Browsers break it at hyphens and
    slashes, and a broken key is misread. Longer words may break, or a phone could not show them."""
    return _NAME.sub(r'<code class="name">\1</code>', html)


def stacked_tables(html: str) -> str:
    """Give each cell of a table with sentences the name of its column: on narrow screens the style shows a row's cells
    below each other. Tables of two columns and of numbers stay as they are."""
    return _TABLE.sub(_stacked, html)


def _stacked(table: re.Match[str]) -> str:
    heads = [_text(cell) for cell in _HEAD.findall(table[0])]
    if len(heads) < _MIN_COLUMNS or max(len(_text(cell[1])) for cell in _CELL.findall(table[0])) < _MIN_TEXT:
        return table[0]
    names = cycle(heads)

    def named(cell: re.Match[str]) -> str:
        name = next(names)
        return f'<td data-label="{name}"{cell[1]}>{cell[2]}</td>' if name else cell[0]

    return _CELL.sub(named, table[0]).replace("<table>", "<table data-stacked>", 1)


def _text(cell: str) -> str:
    return re.sub(r"<[^>]*>", "", cell).replace('"', "&quot;").strip()


def fetched_from_elsewhere(html: str) -> list[str]:
    return _FETCHED.findall(html)
