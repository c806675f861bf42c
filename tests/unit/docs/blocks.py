"""The fenced blocks of the documentation, and what a shell block's commands may be.

A block is checked by its language: `yaml`, `bash`, `python`, `json`. `text` is output, and nothing in it is run. A
block that cannot be checked says why: ```` ```bash data-unchecked="needs a cluster" ````.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[3]
PAGES = [
    *sorted((ROOT / "docs").rglob("*.md")),
    *(ROOT / name for name in ("README.md", "SECURITY.md", "CONFIG.md", "deploy/README.md", "bench/README.md")),
]
FENCE = re.compile(r"^( *)(```+)([^\n`]*)\n(.*?)^\1\2 *$", re.M | re.S)
LANGUAGES = {"yaml", "bash", "python", "json", "text"}


@dataclass(frozen=True, kw_only=True)
class Block:
    page: Path
    line: int
    language: str
    unchecked: str  # the reason; "": it is checked
    text: str

    @property
    def where(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def title(self) -> str:
        """The file name in a YAML block's first line: `# run.yaml`, `# server-2.yaml: on the second node`."""
        first = re.match(r"# ([\w./-]+\.yaml)\b", self.text)
        return first[1] if first else ""


def blocks() -> Iterator[Block]:
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for found in FENCE.finditer(text):
            indent, _, info, body = found.groups()
            reason = re.search(r'data-unchecked="([^"]+)"', info)
            yield Block(
                page=page,
                line=text[: found.start()].count("\n") + 1,
                language=(info.split() or [""])[0],
                unchecked=reason[1] if reason else "",
                text="".join(line.removeprefix(indent) for line in body.splitlines(keepends=True)),
            )


def commands(text: str) -> list[list[str]]:
    """Return the words of each command of a shell block, those inside `$(...)` included."""
    text = re.sub(r"(^|\s)# .*$", "", text, flags=re.M)
    text = re.sub(r"\\\n", " ", text)
    inner = re.findall(r"\$\(([^()]+)\)", text)
    words = shlex.shlex(re.sub(r"\$\([^()]+\)", "X", text), posix=True, punctuation_chars="&|;\n")
    words.whitespace, words.whitespace_split, words.commenters = " \t", True, ""
    found: list[list[str]] = [[]]
    for word in words:
        if set(word) <= set("&|;\n"):
            found.append([])
        else:
            found[-1].append(word)
    found = [_without_variables(command) for command in found]
    return [command for command in found if command] + [c for part in inner for c in commands(part)]


def _without_variables(command: list[str]) -> list[str]:
    """Drop `NAME=VALUE` in front, and redirections."""
    while command and re.fullmatch(r"[A-Z_]+=.*", command[0]):
        command = command[1:]
    cut = next((i for i, word in enumerate(command) if word in ("<", ">", ">>")), len(command))
    return command[:cut]
