"""Checkpoints: a model in Hugging Face's format, which other programs load too, and the state that a resumed run needs.

    OUTPUT_DIR/checkpoint-STEP/
        model.safetensors, config.json, ...        `save_pretrained` (with LoRA/DoRA: peft's adapter files instead)
        tokenizer and processor files
        inference.json                              settings for `predict`: prompt, task, classes
        training_state/optimizer.safetensors        moments by parameter name
        training_state/rng.safetensors              torch's generators, one per rank
        trainer_state.json                          `TrainerState`
        manifest.json                               size and SHA-256 of every file above; written last

In checkpoints of earlier versions the training state is next to the weights, and is read from there.

Invariants: a folder called checkpoint-STEP is complete, because it gets this name only after all its files are on disk.
The newest checkpoint is never removed with old ones. Rank 0 writes while the other ranks wait, and if it fails, all
ranks raise the error (`save_alone` does not wait). A run that is resumed at step n on the same number of ranks is
equal, bit for bit, to a run that was never interrupted. Sharded and whole models write the same files, and each can
resume from the other's checkpoints. A sharded model's tensors are first gathered, one by one, in rank 0's host memory.
"""

from __future__ import annotations

import hashlib
import json
import logging
import operator
import os
import platform
import re
import shutil
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from learner.policy.files import contiguous, gathered_weights, load_weights, save_model
from learner.policy.load import Policy
from learner.policy.optim import Optimizer
from learner.policy.parallel import Ranks
from learner.run.best import kept
from shared.errors import CheckpointError
from shared.reading import json_in

logger = logging.getLogger(__name__)

MANIFEST, STATE = "manifest.json", "trainer_state.json"
# The training state is in a subfolder, because programs that serve a model load every `*.safetensors` in the folder of
# its configuration.
OPTIMIZER, RNG = "training_state/optimizer.safetensors", "training_state/rng.safetensors"
_NAME = re.compile(r"checkpoint-(\d+)")
_UNFINISHED = ".unfinished-"  # beginning of the name of a folder that is being written or removed

# For each rank the states of torch's random generators: the keys are "cpu", and "cuda" with a GPU.
Generators = list[dict[str, torch.Tensor]]


@dataclass(frozen=True, kw_only=True)
class TrainerState:
    """The state that a resumed run needs in addition to weights, moments and random generators."""

    global_step: int = 0  # number of completed optimizer steps
    ver: int = 0  # number of completed weight syncs
    cursor: Mapping[str, object] = field(default_factory=dict)  # position in the data, as JSON

    def after_step(self) -> TrainerState:
        return replace(self, global_step=self.global_step + 1)


class Cadence:
    """Says when a checkpoint is due: every `save_steps` steps, and when the last checkpoint is `save_minutes` old.
    Rank 0's clock decides for all ranks."""

    def __init__(
        self,
        ranks: Ranks,
        *,
        save_steps: int | None,
        save_minutes: float | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ranks, self._clock = ranks, clock
        self._save_steps, self._save_minutes = save_steps, save_minutes
        self._saved_at_s = clock()

    def is_due(self, global_step: int) -> bool:
        """Return True if a checkpoint is due after this step. Collective if `save_minutes` is set."""
        by_steps = self._save_steps is not None and global_step % self._save_steps == 0
        if self._save_minutes is None:
            return by_steps
        return self._ranks.broadcast_object(self._clock() - self._saved_at_s >= 60 * self._save_minutes) or by_steps

    def saved(self) -> None:
        """Note that a checkpoint was written or loaded now."""
        self._saved_at_s = self._clock()


@dataclass(frozen=True, kw_only=True)
class Content:
    """The content of a checkpoint, which rank 0 writes."""

    weights: Mapping[str, torch.Tensor] | None  # tensors of a sharded model by name; None: the model is not sharded
    moments: Mapping[str, torch.Tensor]  # see `Optimizer.state`
    state: TrainerState
    generators: Generators


@dataclass(frozen=True, kw_only=True)
class CheckpointStore:
    """The checkpoints of one run, in the folder `root`. `save` and `load` are collective: every rank calls them."""

    root: Path
    ranks: Ranks
    save_total_limit: int | None = None  # max checkpoints to keep in addition to the best one; None: all
    config_digest: str = ""  # digest of the configuration; a resumed run warns if it has changed
    notes: Mapping[str, str] = field(default_factory=dict)  # further files of each checkpoint: file name -> text
    held_off: Callable[[], AbstractContextManager[None]] = nullcontext  # makes a block that no stop interrupts

    def save(
        self, policy: Policy, optimizer: Optimizer, state: TrainerState, generators: Generators | None = None
    ) -> Path:
        """Write `checkpoint-STEP`, and return its path. Then remove the oldest checkpoints if there are more than
        `save_total_limit`. Raises CheckpointError on every rank if rank 0 cannot write.

        `generators`: the states of the random generators that belong to `state`; None: their present states.
        """
        content = Content(
            weights=gathered_weights(policy, keep=self.ranks.is_main),
            moments=optimizer.state(keep=self.ranks.is_main),
            state=state,
            generators=self.generators() if generators is None else generators,
        )
        return self._finish(state, self.ranks.broadcast_object(self._try(policy, content)))

    def save_alone(
        self, policy: Policy, optimizer: Optimizer, state: TrainerState, generators: Generators
    ) -> Path | None:
        """Save as `save` does, but without waiting for other ranks, which may have ended. Rank 0 writes the checkpoint
        and returns its path. Other ranks do nothing and return None. Raises CheckpointError on every rank if the model
        is sharded."""
        if policy.is_sharded:
            raise CheckpointError(
                "a sharded model can't be saved by one rank",
                found="model.sharding: fsdp, and ranks that may be gone with their parts of the weights",
                wanted="all ranks, at the same step",
                remedy="resume from the last checkpoint; with a smaller training.save_minutes fewer steps are lost",
            )
        content = Content(weights=None, moments=optimizer.state(), state=state, generators=generators)
        failure = self._try(policy, content)
        return self._finish(state, failure) if self.ranks.is_main else None

    def generators(self) -> Generators:
        """Return the present states of all ranks' random generators. Collective."""
        return self.ranks.all_gather_object(_generator_state(self.ranks))

    def _try(self, policy: Policy, content: Content) -> str:
        """Write the checkpoint if this is rank 0. Return the error as text, or "" without an error."""
        if self.ranks.is_main:
            try:
                with self.held_off():
                    self._write(self.path_of(content.state), policy, content)
            except Exception as error:
                # The tokenizers library raises a plain Exception if it cannot write.
                if not isinstance(error, OSError | SafetensorError) and type(error) is not Exception:
                    raise
                return f"{type(error).__name__}: {error}"
        return ""

    def path_of(self, state: TrainerState) -> Path:
        """Return the folder in which `save` writes the checkpoint of `state`."""
        return self.root / f"checkpoint-{state.global_step}"

    def _finish(self, state: TrainerState, failure: str) -> Path:
        path = self.path_of(state)
        if failure:
            raise CheckpointError(
                "the checkpoint can't be written",
                found=f"{failure} (at {path})",
                wanted="a writable folder with enough space",
                remedy="free space or change training.output_dir; earlier checkpoints are untouched",
            )
        return path

    def load(self, where: str, policy: Policy, optimizer: Optimizer) -> TrainerState:
        """Restore weights, moments and this rank's random generators, and return the trainer's state. `where`: a
        checkpoint's path, or "latest" for the newest checkpoint that rank 0 sees.

        Raises CheckpointError, on every rank, if a rank does not see the checkpoint, or if the checkpoint is damaged or
        of another model.
        """
        path = self._agreed(where)
        manifests = self.ranks.all_succeed(lambda: self._check_own(path))
        if other := [rank for rank, manifest in enumerate(manifests) if manifest != manifests[0]]:
            raise CheckpointError(
                f"rank {other[0]} sees another checkpoint of that name than rank 0",
                found=f"another manifest at {path}",
                wanted="the same complete checkpoint on every node",
                remedy="put training.output_dir on a file system that all nodes share, or copy rank 0's folder",
            )
        # All files are read before weights or moments change, so a damaged checkpoint changes nothing.
        state, config_digest = _read_state(path)
        moments, generators = (_read_tensors(path, _place(path, name)) for name in (OPTIMIZER, RNG))
        if config_digest != self.config_digest:
            logger.warning("%s was written under another configuration; going on under the present one", path)
        load_weights(path, policy)
        optimizer.load_state(moments)
        self._load_generators(path, generators)
        return state

    def _agreed(self, where: str) -> Path:
        """Return the path of the checkpoint that all ranks load; for "latest", rank 0's newest one. Raises
        CheckpointError if there is no checkpoint."""
        latest = self.latest() if where == "latest" and self.ranks.is_main else None
        # The name is put into a tuple, because `broadcast_object` does not accept None.
        (name,) = self.ranks.broadcast_object((latest.name if latest else None,))
        if where != "latest":
            return Path(where)
        if name is None:
            raise CheckpointError(
                "there is no checkpoint to resume from",
                found=f"training.resume_from_checkpoint: latest, and no checkpoint-STEP under {self.root}",
                wanted="a complete checkpoint",
                remedy="unset training.resume_from_checkpoint to start at the beginning, or name a path",
            )
        return self.root / name

    def _check_own(self, path: Path) -> str:
        """Return the text of the checkpoint's manifest. Raises CheckpointError if this rank does not see the
        checkpoint, or sees it damaged."""
        if not (path / MANIFEST).is_file():
            raise CheckpointError(
                f"rank {self.ranks.rank} on {platform.node()} does not see the checkpoint that rank 0 resumes from",
                found=f"no {path / MANIFEST}",
                wanted="the same complete checkpoint on every node",
                remedy="put training.output_dir on a file system that all nodes share, or copy the folder to this node",
            )
        verify(path)
        return (path / MANIFEST).read_text()

    def latest(self) -> Path | None:
        """Return the complete checkpoint of the highest step; None if there is none."""
        return next(reversed(self._complete()), None)

    def _complete(self) -> list[Path]:
        """Return the complete checkpoints in order of steps. A folder without a manifest was not written by `save`, so
        it is left out here, and neither loaded nor removed."""
        found = [(int(m[1]), p) for p in self.root.glob("checkpoint-*") if (m := _NAME.fullmatch(p.name))]
        return [path for _, path in sorted(found) if (path / MANIFEST).is_file()]

    def _write(self, path: Path, policy: Policy, content: Content) -> None:
        self.root.mkdir(parents=True, exist_ok=True)
        for leftover in self.root.glob(f"{_UNFINISHED}*"):
            shutil.rmtree(leftover)
        work = self.root / f"{_UNFINISHED}{path.name}"
        try:
            self._fill(work, policy, content)
            # An old folder is removed first, because a rename cannot replace a folder that has files.
            if path.exists():
                self._remove(path)
            work.rename(path)
        except BaseException:
            # The disk may be full, so the unfinished folder is removed.
            shutil.rmtree(work, ignore_errors=True)
            raise
        # The rename is on disk only after the parent folder has been written there.
        _sync_to_disk(self.root)
        best = kept(self.root)
        for old in self._complete()[: -self.save_total_limit] if self.save_total_limit else ():
            if old.resolve() != best:
                self._remove(old)

    def _fill(self, work: Path, policy: Policy, content: Content) -> None:
        (work / OPTIMIZER).parent.mkdir(parents=True)
        save_model(policy, work, content.weights)
        for name, text in self.notes.items():
            (work / name).write_text(text)
        save_file(contiguous(content.moments), work / OPTIMIZER)
        generators = {f"{rank}.{key}": t for rank, own in enumerate(content.generators) for key, t in own.items()}
        save_file(generators, work / RNG)
        stored = asdict(content.state) | {"config_digest": self.config_digest, "world_size": self.ranks.world_size}
        (work / STATE).write_text(json.dumps(stored, indent=2))
        manifest = {str(p.relative_to(work)): _entry(p) for p in sorted(work.rglob("*")) if p.is_file()}
        (work / MANIFEST).write_text(json.dumps(manifest, indent=2))
        _sync_to_disk(work)

    def remove(self, path: Path) -> None:
        """Remove a checkpoint on rank 0, if it is still there. Other ranks do nothing."""
        if self.ranks.is_main and path.is_dir():
            self._remove(path)

    def _remove(self, path: Path) -> None:
        doomed = self.root / f"{_UNFINISHED}removed-{path.name}"
        # The folder is renamed first, so that a half-removed folder does not have a checkpoint's name.
        path.rename(doomed)
        shutil.rmtree(doomed)

    def _load_generators(self, path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
        rank = self.ranks.rank
        if f"{rank}.cpu" not in tensors:
            logger.warning("%s was written by fewer ranks; rank %d keeps its fresh generator", path, rank)
            return
        try:
            torch.set_rng_state(tensors[f"{rank}.cpu"])
            if self.ranks.device.type == "cuda" and f"{rank}.cuda" in tensors:
                torch.cuda.set_rng_state(tensors[f"{rank}.cuda"], self.ranks.device)
        except (RuntimeError, TypeError) as error:
            raise damaged(path, f"{RNG}: {error}") from error


def verify(path: Path) -> None:
    """Raises CheckpointError if a file of the manifest is missing or has changed, or if weights or training state are
    not in the manifest."""
    try:
        manifest = json_in(path / MANIFEST)
        if not isinstance(manifest, dict):
            raise ValueError(f"a {type(manifest).__name__}, no mapping of files")
        ours = {_place(path, OPTIMIZER), _place(path, RNG)}
        weights = {str(p.relative_to(path)) for p in path.rglob("*.safetensors")} - ours
        # Only safetensors files are loaded, because other formats may be pickled.
        if not weights:
            raise ValueError("no weights beside it")
        wrong = {n for n, entry in manifest.items() if not (path / n).is_file() or _entry(path / n) != entry}
    except (OSError, ValueError) as error:
        raise damaged(path, f"{MANIFEST}: {error}") from error
    if unlisted := sorted({STATE, *ours, *weights} - manifest.keys()):
        raise damaged(path, f"{', '.join(unlisted)} not in {MANIFEST}")
    if wrong:
        raise damaged(path, f"{', '.join(sorted(wrong))} missing or not as written")


_TOO_MANY = 1 << 53  # limit of stored numbers of steps and versions: larger numbers are not exact as floats


def _read_state(path: Path) -> tuple[TrainerState, str]:
    """Return the trainer's state in a checkpoint, and the digest of the run's configuration. Raises CheckpointError if
    the file is damaged."""
    try:
        stored = json_in(path / STATE)
        step, ver = operator.index(stored["global_step"]), operator.index(stored["ver"])
        if not (0 <= step < _TOO_MANY and 0 <= ver < _TOO_MANY) or not isinstance(stored["cursor"], dict):
            raise ValueError(f"global_step {step}, ver {ver}, cursor {stored['cursor']!r:.60}")
        return TrainerState(global_step=step, ver=ver, cursor=stored["cursor"]), str(stored["config_digest"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise damaged(path, f"{STATE}: {type(error).__name__}: {error}") from error


def _place(path: Path, name: str) -> str:
    """Return the path of the training state's file `name` within the checkpoint: `name` itself, or a path next to the
    weights if an earlier version wrote the checkpoint."""
    beside = Path(name).name
    return beside if (path / beside).is_file() else name


def _read_tensors(path: Path, name: str) -> dict[str, torch.Tensor]:
    """Return the tensors in a checkpoint's file, by name. Raises CheckpointError if the file is damaged."""
    try:
        return load_file(path / name)
    except (OSError, SafetensorError, ValueError) as error:
        raise damaged(path, f"{name}: {error}") from error


def _generator_state(ranks: Ranks) -> dict[str, torch.Tensor]:
    state = {"cpu": torch.get_rng_state()}
    if ranks.device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(ranks.device)
    return state


def _entry(path: Path) -> dict[str, int | str]:
    with path.open("rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def _sync_to_disk(folder: Path) -> None:
    for path in [*(folder.rglob("*") if folder.name.startswith(_UNFINISHED) else ()), folder]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def damaged(path: Path, found: str) -> CheckpointError:
    """Return the error to raise for a checkpoint whose files are not as they were written; `found` says which."""
    return CheckpointError(
        "the checkpoint is damaged or incomplete",
        found=f"{path}: {found}",
        wanted="every file as its manifest says",
        remedy="remove the folder to resume from the checkpoint before it, or restore it from a copy",
    )
