"""Serves a page where a person reviews suggestions, and writes new annotations: `find-missing review`, `audit`,
`write`.

In: a folder with `suggestions.json`. Out: `decisions.json` in this folder, saved after each decision, and a new
annotation file, which `write` makes. A decision is `accept` with a name, or `reject`. Each decision's key is the
suggestion's index in the list. An audit shows a random sample of the suggestions. The audit's verdicts are in
`audit.json`, which runs read (`labels.complete.audit`). The browser keeps a copy of the decisions, so that nothing is
lost while this server does not answer. `learner.report.web` decides who reaches the page.
"""

from __future__ import annotations

import hashlib
import json
import shlex
import threading
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import jinja2
from fastapi import FastAPI, HTTPException, Request, Response
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError
from starlette.concurrency import run_in_threadpool

from learner.data.formats.parts import part_of
from learner.data.splits import load_samples
from learner.detector.inputs import Anything
from learner.missing.suggest import AUDIT, DECISIONS, read_folder
from learner.report.web import html, page_app, photograph, serve_page
from learner.run.additions import Addition, write_with
from learner.run.files import write_atomically
from learner.tasks.detection.audit import AuditedFind, Verdict, audit_text, draw, read_audit
from shared.errors import DataError
from shared.images import ImageRules, Images
from shared.validation import first_wrong

LONGEST_NAME = 200  # max characters of an object's name
_DECISION_BYTES = 100 + 12 * LONGEST_NAME  # max bytes of one decision as JSON; a character may become two `\\u0000`
_MOST_BYTES = 4 << 20  # max bytes of a request: 70,000 decisions with names of usual length
TEMPLATES = jinja2.Environment(
    loader=jinja2.PackageLoader("learner.missing"), autoescape=True, undefined=jinja2.StrictUndefined
)


class Decision(BaseModel):
    """A person's decision on a suggestion. `name` is the object's name if it is accepted. `wrong name` and `cannot
    tell` are used only in audits."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    decision: Literal["accept", "reject", "wrong name", "cannot tell"]
    name: str = Field(min_length=1, max_length=LONGEST_NAME)


Decisions = dict[int, Decision]
_DECISIONS: TypeAdapter[Decisions] = TypeAdapter(Decisions)


def read_decisions(folder: Path) -> Decisions:
    """Return the decisions saved in the folder; {} if there is no file yet. Raises DataError for a bad file."""
    path = folder / DECISIONS
    if not path.is_file():
        return {}
    try:
        return _DECISIONS.validate_json(path.read_bytes())
    except (OSError, ValidationError) as error:
        found = first_wrong(error, "the file").found if isinstance(error, ValidationError) else str(error)
        raise DataError(
            "the decisions can't be read",
            found=f"{path}: {found}",
            wanted="the file that the review wrote",
            remedy="restore it, or remove it to begin again",
        ) from error


def make_app(folder: Path, audit: int | None = None) -> FastAPI:
    """Return the app: `/` is the page, `/state` has suggestions and decisions, `/image/N` is the photograph of
    suggestion N, `PUT /decisions` saves all decisions. If `audit` is a number, only the suggestions of the folder's
    audit are shown. Without an audit, `audit` suggestions are sampled at random. Raises DataError."""
    _, suggestions = read_folder(folder)
    if audit is None:
        # The decisions are read here, so that a damaged file is an error before the page is served.
        read_decisions(folder)
    else:
        suggestions = [suggestions[one.place] for one in audited(folder, audit)]
    names = sorted({s["name"] for s in suggestions} | {name for s in suggestions for name, _ in s["labels"]})
    # The browser keeps the user's decisions under this name.
    digest = hashlib.sha256(json.dumps(suggestions).encode()).hexdigest()[:16]
    # The size of a body is limited, because reading decisions of 12 MB took 17 s and 870 MB of memory.
    app = page_app(body_bytes=min(_MOST_BYTES, (1 + len(suggestions)) * _DECISION_BYTES))
    images, lock = Images(ImageRules()), threading.Lock()

    @app.get("/")
    def page() -> Response:
        return html(TEMPLATES.get_template("review.html"), title=folder.resolve().name, audit=audit is not None)

    @app.get("/state")
    def state() -> dict[str, object]:
        known = read_decisions(folder) if audit is None else verdicts_of(folder, suggestions)
        decisions = {str(place): one.model_dump() for place, one in known.items()}
        # The page asks for images by number, so it cannot name a file.
        shown = [{k: v for k, v in s.items() if k != "image"} for s in suggestions]
        return {"suggestions": shown, "decisions": decisions, "names": names, "digest": digest}

    @app.get("/image/{place}")
    def image(place: int) -> Response:
        if not 0 <= place < len(suggestions):
            raise HTTPException(404)
        return photograph(suggestions[place]["image"], images)

    @app.put("/decisions")
    async def decide(request: Request) -> dict[str, int]:
        try:
            decisions = _DECISIONS.validate_json(await request.body())
        except ValidationError as error:
            found, wanted = first_wrong(error, "the decisions")
            raise HTTPException(422, f"{found}; wanted: {wanted}") from error
        return {"saved": await run_in_threadpool(save, decisions)}

    def save(decisions: Decisions) -> int:
        known = {place: one for place, one in decisions.items() if 0 <= place < len(suggestions)}
        # The lock is needed, because saves run on several threads.
        with lock:
            if audit is not None:
                return save_verdicts(folder, known)
            text = json.dumps({str(place): one.model_dump() for place, one in sorted(known.items())}, indent=1)
            write_atomically(folder / DECISIONS, text + "\n")
        return len(known)

    return app


def serve(folder: Path, *, port: int, audit: int | None = None) -> int:
    """Serve until Ctrl-C. Returns the exit code. Raises DataError, and ServerError if the port is taken."""
    app, file = make_app(folder, audit), folder / (DECISIONS if audit is None else AUDIT)
    return serve_page(app, name="review" if audit is None else "audit", port=port, note=f"; decisions are in {file}")


# ---- audit ----------------------------------------------------------------------------------------------------------

_VERDICTS: dict[str, Verdict] = {
    "accept": "right",
    "reject": "nothing there",
    "wrong name": "wrong name",
    "cannot tell": "cannot tell",
}


def audited(folder: Path, number: int) -> list[AuditedFind]:
    """Return the suggestions in the folder's audit. Without an audit, sample `number` suggestions at random and save
    them as an audit. Raises DataError."""
    path, suggestions = folder / AUDIT, read_folder(folder)[1]
    if path.is_file():
        found = read_audit(path)
        if any(one.place >= len(suggestions) for one in found):
            raise DataError(
                "an audit is of other suggestions",
                found=f"{path}, and {len(suggestions)} suggestions",
                wanted="the suggestions that it was drawn from",
                remedy=f"remove {path} to begin again",
            )
        return found
    places = draw([one["votes"] for one in suggestions], number)
    known = ((place, suggestions[place]) for place in places)
    found = [AuditedFind(i, one["votes"], one["answers"], one.get("probability")) for i, one in known]
    write_atomically(path, audit_text(found))
    return found


def verdicts_of(folder: Path, shown: Sequence[Mapping[str, Any]]) -> Decisions:
    """Return the verdicts of the audit as decisions of the page, by index in `shown`."""
    names = {verdict: name for name, verdict in _VERDICTS.items()}
    found = enumerate(zip(read_audit(folder / AUDIT), shown, strict=True))
    return {
        i: Decision.model_validate({"decision": names[one.verdict], "name": suggestion["name"]})
        for i, (one, suggestion) in found
        if one.verdict is not None
    }


def save_verdicts(folder: Path, decisions: Decisions) -> int:
    """Write the page's decisions as verdicts, and return their number. A verdict that was taken back is removed."""
    found = [
        one._replace(verdict=_VERDICTS[decisions[i].decision] if i in decisions else None)
        for i, one in enumerate(read_audit(folder / AUDIT))
    ]
    write_atomically(folder / AUDIT, audit_text(found))
    return len(decisions)


def added_in_words(number: int, folder: Path) -> str:
    """Return in words how many objects `write_reviewed` added (`number`). If `number` is 0, say why: nothing was
    accepted, or nothing was reviewed."""
    if number:
        return f"{number} new object{'s' if number > 1 else ''}"
    decided = len(read_decisions(folder))
    why = f"none of {decided} reviewed suggestions was accepted" if decided else "nothing was reviewed yet"
    return f"no new object, because {why} (rollout-learner find-missing review {shlex.quote(str(folder))})"


def to_train_on(folder: Path, out: Path) -> str:
    """Return the value of `data.train` for training on the file `out` of `write_reviewed`: its path, with the part
    (such as `[:90%]`) on which the run was trained."""
    # The part is added, because the file has the samples of all parts.
    train = read_folder(folder)[0].train
    return f"{out}{train.removeprefix(part_of(train)[0])}"


def write_reviewed(folder: Path, out: Path) -> int:
    """Write the annotations with the accepted objects, and return the number of these objects. Raises OutputError if
    `out` exists."""
    data, suggestions = read_folder(folder)
    added: dict[str, list[Addition]] = defaultdict(list)
    for place, one in sorted(read_decisions(folder).items()):
        if one.decision == "accept" and place < len(suggestions):
            found = suggestions[place]
            x1, y1, x2, y2 = found["box"]
            addition = Addition(one.name, (x1, y1, x2, y2), found["votes"], found["answers"])
            added[found["sample_id"]].append(addition)
    samples = load_samples(data, data.train, Anything())
    write_with(data, data.train, samples, added, out)
    return sum(map(len, added.values()))
