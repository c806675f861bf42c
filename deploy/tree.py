"""README.md's file tree: one line per file, from each file's own first line. Part of `python -m deploy.docs`.

In: the files that git tracks. Out: README.md with the text between its markers replaced. Tests are listed by folder.
"""

from __future__ import annotations

import ast
import subprocess
from pathlib import Path

BEGIN, END = "<!-- files: made by `make docs` -->", "<!-- end of files -->"
SHOWN = (".py", ".sh", ".yaml")
FOLDERS = {
    "deploy/demo/checkpoint": "the demo's stage-1 weights, and how they were made",
    "tests/unit": "fast tests, mirroring the packages",
    "tests/integration": "real vLLM, real torchrun",
    "tests/gpu": "need CUDA, and say so when skipped",
}
WIDTH = 130  # characters of a line


def readme() -> str:
    """README.md as it should be."""
    text = Path("README.md").read_text(encoding="utf-8")
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n{file_tree(tracked_files())}\n{END}{after}"


def tracked_files() -> list[str]:
    """Everything that git tracks, by path."""
    listing = subprocess.run(["git", "ls-files"], capture_output=True, text=True, check=True, timeout=30)
    return listing.stdout.split()


def file_tree(files: list[str]) -> str:
    """The tree as a code block, folder by folder."""
    lines, folder = [], None
    for name in sorted((f for f in files if _is_shown(f)), key=lambda f: (str(Path(f).parent), f)):
        path = Path(name)
        if path.parent != folder:
            folder = path.parent
            lines.append(f"{folder}/" if str(folder) != "." else "./")
        lines.append(_line(f"  {path.name}", first_line(path)))
    lines += [_line(f"{name}/", what) for name, what in FOLDERS.items()]
    return "\n".join(["```", *lines, "```"])


def first_line(path: Path) -> str:
    """What the file says it is: the first line of its docstring, or its first comment."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        return (ast.get_docstring(ast.parse(text)) or "").split("\n")[0]
    comments = (line.lstrip("# ") for line in text.splitlines() if line.startswith("#") and not line.startswith("#!"))
    return next(comments, "")


def _is_shown(name: str) -> bool:
    path = Path(name)
    in_folder = any(name.startswith(f"{folder}/") for folder in FOLDERS)
    return path.suffix in SHOWN and not in_folder and path.stat().st_size > 0


def _line(name: str, what: str) -> str:
    line = f"{name:<26} {what}"
    return line if len(line) <= WIDTH else f"{line[: WIDTH - 1].rsplit(' ', 1)[0]} …"
