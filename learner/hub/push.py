"""`rollout-learner push`: upload an export, with a model card, to the Hugging Face hub.

In: a folder with whole weights, and a name. Out: one commit with what serving and `predict` need, and `README.md`. A
`README.md` that is already in the folder is uploaded as it is; otherwise `model_card` writes it, from the run that the
export says it is of.

Invariant: only files that belong to a model (`BELONGS`) leave this machine. What only the learner needs (`LEARNERS`)
stays: it is large, or names paths of this machine. Whatever else is in the folder stays too, and is named: it may be
photographs or annotations.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from huggingface_hub import CommitOperationAdd, HfApi, get_session, get_token, metadata_load
from huggingface_hub.errors import HfHubHTTPError

from learner.config.inference import CALIBRATION_NAME, INFERENCE_NAME
from learner.detector.model import ADAPTER, ModelFiles, find_model, model_folder, read_origin
from learner.hub.card import HUB_ID, base_of, model_card
from learner.report.read import is_run, read_run
from learner.report.records import RunRecord
from learner.run.best import kept
from learner.run.files import write_atomically
from shared.errors import ConfigError, HubError

CARD = "README.md"
LEARNERS = {"training_state", "trainer_state.json", "manifest.json", "origin.json"}
# These are the files that transformers, vLLM and `predict` read, as patterns of their names.
BELONGS = (
    *("*.safetensors", "*.safetensors.index.json", "config.json", "generation_config.json", "chat_template.*"),
    *("*processor_config.json", "tokenizer*", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.*", "merges.txt", "*.model", "*.tiktoken", INFERENCE_NAME, CALIBRATION_NAME),
    *(CARD, "LICENSE*", "NOTICE*"),
)
TEMPLATES = Path("additional_chat_templates")  # the one folder of a model
SHOWN = 3  # names of files that stay
CALL_TIMEOUT_S = 120.0  # limits each read and write of a connection; the client's own default is to wait for ever
_NOT_ALLOWED = (401, 403)


@dataclass(frozen=True, kw_only=True)
class PushOptions:
    """The options of a push. `run`: None for the one that the export came from. `license`: None for the base
    model's."""

    model: Path
    repo: str
    private: bool = False
    run: Path | None = None
    license: str | None = None
    dry_run: bool = False


def push(options: PushOptions, *, endpoint: str | None = None) -> int:
    """Returns the exit code. `endpoint`: None for the hub of HF_ENDPOINT. Raises ConfigError, DataError, HubError."""
    _require_name(options.repo)
    model = _whole_model(options.model)
    files, others = _files(model.folder)
    api = HfApi(endpoint=endpoint, token=get_token() or False)
    get_session().timeout = CALL_TIMEOUT_S
    if not options.dry_run:
        _require_token(api)
    card = model.folder / CARD
    if not card.is_file():
        write_atomically(card, _card(options, model, api))
        print(f"wrote {card}")
    else:
        _say_the_card_is_there(card, options)
    paths = sorted({*files, card})
    _say_what_goes(model.folder, paths, others)
    if options.dry_run:
        print(f"nothing was uploaded; without --dry-run {len(paths)} files go to {options.repo}")
        return 0
    print(_upload(api, options, model.folder, paths))
    return 0


def _say_the_card_is_there(card: Path, options: PushOptions) -> None:
    print(f"{card} is there already, and is used as it is; remove it to have a new one")
    if unused := [f"--{name}" for name in ("run", "license") if getattr(options, name) is not None]:
        print(f"not used, because they are for a new card: {', '.join(unused)}")


def _say_what_goes(folder: Path, paths: Sequence[Path], others: Sequence[Path]) -> None:
    for path in paths:
        print(f"  {path.relative_to(folder)}  {_size(path.stat().st_size)}")
    if others:
        shown = ", ".join(str(path.relative_to(folder)) for path in others[:SHOWN])
        more = ", ..." if len(others) > SHOWN else ""
        print(f"not uploaded, because they are no part of a model: {len(others)} of the folder's files ({shown}{more})")


def _require_name(repo: str) -> None:
    if not HUB_ID.fullmatch(repo):
        raise ConfigError(
            "--repo is no name of a repository",
            found=repr(repo),
            wanted="owner/name, of letters, digits, ., _ and -",
            remedy="correct --repo",
        )


def _whole_model(path: Path) -> ModelFiles:
    """Raises ConfigError if the folder is not an export or a checkpoint of a whole model."""
    folder = model_folder(path)
    export = f"write one with rollout-learner export --model {folder} --out DIR"
    if (folder / ADAPTER).is_file():
        found, remedy = f"{folder}: an adapter", f"{export}, which merges it"
        raise ConfigError("--model is no whole model", found=found, wanted="merged weights", remedy=remedy)
    if not any(folder.glob("*.safetensors")):
        raise ConfigError(
            "--model is no model",
            found=f"{folder}: no weights in it",
            wanted="an export, or a checkpoint without an adapter",
            remedy="correct --model, or write one with rollout-learner export --model DIR --out DIR",
        )
    return find_model(folder)


def _files(folder: Path) -> tuple[list[Path], list[Path]]:
    """Return the files to upload, and what else is in the folder, but for the learner's own files and hidden ones."""
    files: list[Path] = []
    others: list[Path] = []
    for path in sorted(folder.rglob("*")):
        inside = path.relative_to(folder)
        if not path.is_file() or {*inside.parts} & LEARNERS or any(part.startswith(".") for part in inside.parts):
            continue
        belongs = inside.parent == TEMPLATES or (len(inside.parts) == 1 and _belongs(path.name))
        (files if belongs else others).append(path)
    return files, others


def _belongs(name: str) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in BELONGS)


def _require_token(api: HfApi) -> None:
    if not api.token:
        raise ConfigError(
            "there is no token for the hub",
            found="neither HF_TOKEN nor a login",
            wanted="a token that may write",
            remedy="make one in the settings of your account there, then set HF_TOKEN, or run: hf auth login",
        )


# ---- the card ------------------------------------------------------------------------------------------------------


def _card(options: PushOptions, model: ModelFiles, api: HfApi) -> str:
    run, step = _run_of(options, model)
    if run is None:
        print("the card has no figures: no run is known; name it with --run")
    license = options.license or _license(run, api)
    if license is None:
        print("the card names no licence: the base model's is unknown; name it with --license")
    return model_card(options.repo, model.settings, run, step, license)


def _run_of(options: PushOptions, model: ModelFiles) -> tuple[RunRecord | None, int | None]:
    """Return the run that trained the weights, and the step after which they are these. Without a word about the step,
    the best one, or the last one that was evaluated. Raises ConfigError if --run is none."""
    origin = read_origin(model.folder)
    path = options.run or (origin.run if origin else None)
    if path is None or (options.run is None and not is_run(path)):
        return None, None
    if not is_run(path):
        raise ConfigError(
            "--run is no run",
            found=str(path),
            wanted="the folder that a run wrote (training.output_dir)",
            remedy="correct --run",
        )
    run = read_run(path)
    best = kept(path)
    origin = origin or (read_origin(best) if best else None)
    return run, origin.step if origin else run.evals[-1].global_step if run.evals else None


def _license(run: RunRecord | None, api: HfApi) -> str | None:
    """Return the base model's license: from its folder's card, or from its page on the hub. None if neither says it."""
    path = run.setting("model", "path") if run else None
    try:
        if isinstance(path, str) and (Path(path) / CARD).is_file():
            return _text((metadata_load(Path(path) / CARD) or {}).get("license"))
        if base := base_of(run):
            data = api.model_info(base, timeout=CALL_TIMEOUT_S).card_data
            return _text(data.get("license")) if data else None
    except Exception:  # the upload does not depend on what the hub, the network or a card does
        return None
    return None


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None


# ---- the upload ----------------------------------------------------------------------------------------------------


def _upload(api: HfApi, options: PushOptions, folder: Path, paths: list[Path]) -> str:
    """Returns the address of the repository."""
    added = [CommitOperationAdd(str(path.relative_to(folder)), path) for path in paths]
    with _hub_errors(options.repo):
        url = api.create_repo(options.repo, private=True if options.private else None, exist_ok=True)
        api.create_commit(options.repo, added, commit_message="Upload the model")
    return str(url)


@contextmanager
def _hub_errors(repo: str) -> Iterator[None]:
    """Raises HubError for whatever the client raises: the answers of the hub, the network, a file that vanished."""
    try:
        yield
    except HfHubHTTPError as error:
        status = error.response.status_code
        found = f"{status}: {error.server_message or str(error).splitlines()[0]}"
        if status in _NOT_ALLOWED:
            wanted, remedy = f"a token that may write {repo}", "give HF_TOKEN that right, or correct --repo"
        else:
            wanted, remedy = "an upload that the hub takes", "try again later; what arrived is not sent again"
        raise HubError("the hub refuses the upload", found=found, wanted=wanted, remedy=remedy) from error
    except Exception as error:
        cause = error.__cause__ or error
        text = " ".join(re.sub(r"\?\S+", "", str(cause)).split())
        raise HubError(
            "the upload failed",
            found=f"{type(cause).__name__}: {text}",
            wanted="a hub that answers",
            remedy="check the network, HF_ENDPOINT and HF_HUB_OFFLINE, then push again; what arrived is not sent again",
        ) from error


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:,.1f} MB" if num_bytes >= 1e5 else f"{num_bytes:,} bytes"
