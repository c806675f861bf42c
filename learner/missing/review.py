"""A page on which one person reviews suggestions, and the new annotations: `find-missing review` and `write`.

In: a folder with `suggestions.json`. Out: `decisions.json` in it, saved after each decision, and by `write` a new
annotation file. A decision is `accept` with a name, or `reject`, by the suggestion's place in the list. The browser
keeps a copy, so that nothing is lost while the server is away. The server listens at the loopback only.
"""

from __future__ import annotations

import hashlib
import json
import mimetypes
import shlex
import threading
from collections import defaultdict
from io import BytesIO
from pathlib import Path
from typing import Literal

import jinja2
import uvicorn
from fastapi import FastAPI, HTTPException, Response
from pydantic import BaseModel, ConfigDict, Field
from starlette.middleware.trustedhost import TrustedHostMiddleware

from learner.data.formats.parts import part_of
from learner.data.splits import load_samples
from learner.missing.suggest import DECISIONS, read_folder
from learner.records import Sample
from learner.run.additions import Addition, write_with
from learner.run.files import write_atomically
from shared.addresses import listen
from shared.errors import DataError, MediaError
from shared.images import ImageRules, Images

HOSTS = ["127.0.0.1", "localhost", "[::1]"]
TEMPLATES = jinja2.Environment(
    loader=jinja2.PackageLoader("learner.missing"), autoescape=True, undefined=jinja2.StrictUndefined
)


class Decision(BaseModel):
    """`name` is what the person calls an accepted object."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    decision: Literal["accept", "reject"]
    name: str = Field(min_length=1, max_length=200)


Decisions = dict[int, Decision]


def read_decisions(folder: Path) -> Decisions:
    """Raises DataError."""
    path = folder / DECISIONS
    if not path.is_file():
        return {}
    try:
        return {int(place): Decision.model_validate(one) for place, one in json.loads(path.read_text()).items()}
    except (OSError, ValueError, AttributeError) as error:
        raise DataError(
            "the decisions can't be read",
            found=f"{path}: {error}",
            wanted="the file that the review wrote",
            remedy="restore it, or remove it to begin again",
        ) from error


def make_app(folder: Path) -> FastAPI:
    """`/` the page, `/state` suggestions and decisions, `/image/N` the photograph of suggestion N, `PUT /decisions` all
    decisions. Raises DataError."""
    _, suggestions = read_folder(folder)
    read_decisions(folder)
    names = sorted({s["name"] for s in suggestions} | {name for s in suggestions for name, _ in s["labels"]})
    digest = hashlib.sha256(json.dumps(suggestions).encode()).hexdigest()[:16]  # names what the browser keeps
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(TrustedHostMiddleware, allowed_hosts=[*HOSTS, "testserver"])
    images, lock = Images(ImageRules()), threading.Lock()

    @app.get("/")
    def page() -> Response:
        text = TEMPLATES.get_template("review.html").render(title=folder.resolve().name)
        return Response(text, media_type="text/html", headers={"Cache-Control": "no-store"})

    @app.get("/state")
    def state() -> dict[str, object]:
        decisions = {str(place): one.model_dump() for place, one in read_decisions(folder).items()}
        shown = [{k: v for k, v in s.items() if k != "image"} for s in suggestions]
        return {"suggestions": shown, "decisions": decisions, "names": names, "digest": digest}

    @app.get("/image/{place}")
    def image(place: int) -> Response:
        if not 0 <= place < len(suggestions):
            raise HTTPException(404)
        try:
            return _photograph(suggestions[place]["image"], images)
        except (MediaError, OSError) as error:
            raise HTTPException(404, str(error)) from error

    @app.put("/decisions")
    def decide(decisions: dict[int, Decision]) -> dict[str, int]:
        known = {place: one for place, one in decisions.items() if 0 <= place < len(suggestions)}
        with lock:
            text = json.dumps({str(place): one.model_dump() for place, one in sorted(known.items())}, indent=1)
            write_atomically(folder / DECISIONS, text + "\n")
        return {"saved": len(known)}

    return app


def _photograph(source: str, images: Images) -> Response:
    """Return a file as it is, and as JPEG a TIFF, which browsers do not show, or an image from elsewhere. Raises
    MediaError or OSError."""
    path = Path(source.removeprefix("file://"))
    if path.is_file() and path.suffix.lower() not in (".tif", ".tiff"):
        return Response(path.read_bytes(), media_type=mimetypes.guess_type(path.name)[0] or "image/jpeg")
    file = BytesIO()
    images.load(source).save(file, "JPEG")
    return Response(file.getvalue(), media_type="image/jpeg")


def serve(folder: Path, *, port: int) -> int:
    """Serve until Ctrl-C. Returns the exit code. Raises DataError, and ServerError if the port is taken."""
    app = make_app(folder)
    listener = listen("127.0.0.1", port, what="the review")
    print(f"review at http://127.0.0.1:{port}/ (Ctrl-C ends it; decisions are in {folder / DECISIONS})", flush=True)
    uvicorn.Server(uvicorn.Config(app, log_level="warning")).run(sockets=[listener])
    return 0


class _Anything:
    def validate(self, sample: Sample) -> None:
        return


def added_in_words(number: int, folder: Path) -> str:
    """Return what `write` added: nothing is most often a review that nobody made yet."""
    if number:
        return f"{number} new object{'s' if number > 1 else ''}"
    decided = len(read_decisions(folder))
    why = f"none of {decided} reviewed suggestions was accepted" if decided else "nothing was reviewed yet"
    return f"no new object, because {why} (rollout-learner find-missing review {shlex.quote(str(folder))})"


def to_train_on(folder: Path, out: Path) -> str:
    """Return `data.train` for what `write` made: all annotations are in it, so the part that was learned is named
    again."""
    train = read_folder(folder)[0].train
    return f"{out}{train.removeprefix(part_of(train)[0])}"


def write_reviewed(folder: Path, out: Path) -> int:
    """Write the annotations with the accepted objects; returns their number. Raises OutputError if `out` exists."""
    data, suggestions = read_folder(folder)
    added: dict[str, list[Addition]] = defaultdict(list)
    for place, one in sorted(read_decisions(folder).items()):
        if one.decision == "accept" and place < len(suggestions):
            found = suggestions[place]
            x1, y1, x2, y2 = found["box"]
            addition = Addition(one.name, (x1, y1, x2, y2), found["votes"], found["answers"])
            added[found["sample_id"]].append(addition)
    samples = load_samples(data, data.train, _Anything())
    write_with(data, data.train, samples, added, out)
    return sum(map(len, added.values()))
