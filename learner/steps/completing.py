"""Adds labels to a run's training samples if several of the model's own answers agree on them (`labels.complete`, R48,
D20).

In: the training samples, and a backend that has the weights of this step. Out: the list of training samples, with more
labels. Each completion writes the labels that it added to `labels/step_N.json` in the run directory. With `write`, all
labels are also written as annotations, in the format of the annotation file.

Invariants: every rank has the same labels. Annotated labels stay. Each completion starts from the annotated labels, not
from the last completion. A step completes labels at most once. A run resumed from step n has the labels of step n, and
the files of later steps are removed. No sample grows longer than a packed row.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping, MutableSequence, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from learner.config.sections.labels import CompleteConfig
from learner.policy.parallel import Ranks
from learner.records import DetectionObject, Sample, Votes
from learner.rollout.backend import COMPLETES_LABELS, MicroStep, RolloutBackend
from learner.run.additions import RunAnnotations
from learner.run.files import write_atomically
from learner.run.output_dir import LABELS
from learner.tasks.detection.appearance import Open, SampleCrops, share_of
from learner.tasks.detection.audit import AuditedFind, require_verdicts
from learner.tasks.detection.completion import (
    CompletionEstimate,
    LabelCandidate,
    candidates,
    completed,
    without_completed,
)
from learner.tasks.detection.gaps import PROBABLE, cluster_crops, estimate_gaps
from learner.tasks.detection.task import DetectionTask
from shared.errors import CheckpointError

log = logging.getLogger("learner.labels")

_AT_ONCE = 64  # max samples of one rank whose prompts are in memory at the same time
_TELL_EVERY_S = 10.0


_Looked = tuple[list[LabelCandidate], SampleCrops]


@dataclass(frozen=True, kw_only=True, slots=True)
class Completion:
    """The result of completing the labels once."""

    global_step: int
    ver: int  # version of the weights that made the answers
    rollouts: int  # number of answers to each sample (K)
    accept: str  # the rule that accepts labels (`labels.complete.accept`)
    min_votes: int | None  # min number of answers that must agree on a new label; None: nothing was completed
    why: str  # reason why nothing was completed; empty otherwise
    added: int  # number of labels that were added
    labels: int  # number of annotated labels of all samples
    samples: int  # number of samples that got labels
    left_out: int  # number of labels not added, because the sample would not fit a packed row
    right: float | None  # estimated fraction of the added labels that are right; None: not known
    estimate: CompletionEstimate

    def to_json(self) -> dict[str, object]:
        names = ("ver", "rollouts", "accept", "min_votes", "why", "added", "labels", "samples", "left_out", "right")
        found = {name: getattr(self, name) for name in names}
        return found | {"text": self.in_words(), "estimate": self.estimate.to_json()}

    def __str__(self) -> str:
        """Return the result as one line of text, for the console."""
        return f"labels: {self.in_words()}"

    def in_words(self) -> str:
        if self.min_votes is None:
            return f"nothing completed: {self.why}"
        which = f"which at least {self.min_votes} of {self.rollouts} answers have"
        if self.accept == "probability":
            which += " and are probably right"
        told = self.estimate.in_words(self.right) if self.right is not None else ""
        return f"{self.added} added to {self.labels}, {which}{told}"


class LabelCompletion:
    """Completes the labels of `samples`, in place. `too_long` returns None for a sample that fits into a packed row.
    Raises DataError if an audit is configured (a person's verdicts on boxes without a label), but has no verdicts."""

    def __init__(
        self,
        samples: MutableSequence[Sample],
        *,
        settings: CompleteConfig,
        backend: RolloutBackend,
        task: DetectionTask,
        ranks: Ranks,
        run_dir: Path,
        open_image: Open,
        too_long: Callable[[Sample], str | None] = lambda _: None,
        tell: Callable[[str], None] = lambda _: None,
        annotations: RunAnnotations | None = None,
    ) -> None:
        self._samples, self._settings, self._backend, self._task = samples, settings, backend, task
        self._ranks, self._folder, self._too_long, self._tell = ranks, run_dir / LABELS, too_long, tell
        self._annotations, self._open = annotations, open_image
        audit = Path(settings.audit) if settings.audit is not None else None
        self._audited: Sequence[AuditedFind] = ()
        if audit is not None:
            verdicts = audit if ranks.is_main else None
            self._audited = ranks.all_succeed(lambda: require_verdicts(verdicts) if verdicts is not None else [])[0]
        self._names = {obj.desc for sample in samples for obj in sample.objects}
        self._done_at: int | None = None

    def is_due(self, global_step: int) -> bool:
        """Return True if labels are completed before this step. The value is equal on all ranks."""
        if self._done_at is None:
            return True
        every = self._settings.refresh
        return every != "once" and global_step // every > self._done_at // every

    def complete(self, global_step: int, ver: int) -> Completion:
        """Complete the labels of all samples by answers of the backend's present weights, which have version `ver`.
        Collective."""
        settings = self._settings
        # Labels of an earlier completion must not confirm the same model's answers.
        annotated = [without_completed(sample) for sample in self._samples]
        looked = self._candidates(annotated, global_step)
        # Rank 0 estimates for all ranks, so that all ranks certainly have the same labels.
        known, found = self._ranks.broadcast_object(
            estimate_gaps(
                annotated, [own for own, _ in looked], [own for _, own in looked], settings.rollouts, self._audited
            )
            if self._ranks.is_main
            else None
        )
        min_votes, why, probable = known.min_votes, known.why, 0.0
        if settings.accept == "probability" and known.missing is not None:
            probable = PROBABLE
            if settings.min_votes == "auto" and not known.may_be_complete:
                min_votes, why = 1, ""
        # A number that the user has set wins over the estimate.
        if settings.min_votes != "auto":
            min_votes, why = settings.min_votes, ""
        left_out = 0
        if min_votes is not None:
            for i, (sample, own) in enumerate(zip(annotated, found, strict=True)):
                self._samples[i], number = self._completed(sample, own, min_votes, probable)
                left_out += number
        else:
            self._samples[:] = annotated
        self._done_at = global_step
        grown = [len(new.objects) - len(old.objects) for new, old in zip(self._samples, annotated, strict=True)]
        completion = Completion(
            global_step=global_step,
            ver=ver,
            rollouts=settings.rollouts,
            accept=settings.accept,
            min_votes=min_votes,
            why=why,
            added=sum(grown),
            labels=sum(len(sample.objects) for sample in annotated),
            samples=sum(number > 0 for number in grown),
            left_out=left_out,
            right=_right(found, min_votes, probable) if known.missing is not None else None,
            estimate=known,
        )
        self._ranks.all_succeed(lambda: self._write(completion))
        self._ranks.all_succeed(self._write_annotations)
        return completion

    def restore(self, global_step: int, beside: Path) -> None:
        """Restore the labels that the run had before `global_step`. `beside`: the checkpoint's run directory.
        Collective. Raises CheckpointError."""
        # The record is put into a tuple, because `broadcast_object` does not accept None.
        (stored,) = self._ranks.broadcast_object((self._newest(global_step, beside) if self._ranks.is_main else None,))
        if stored is None:
            return  # the run had not completed labels before that step
        added: Mapping[str, Any] = stored["samples"]
        for i, sample in enumerate(self._samples):
            extra = map(read_label, added.get(sample.sample_id, {}).get("objects", ()))
            objects = sorted([*sample.objects, *extra], key=self._task.canonical_key)
            self._samples[i] = replace(sample, objects=tuple(objects))
        self._done_at = int(stored["global_step"])
        self._ranks.all_succeed(self._write_annotations)

    # ---- parts -----------------------------------------------------------------------------------------------------

    def _candidates(self, annotated: Sequence[Sample], global_step: int) -> list[_Looked]:
        """Return the label candidates of each sample, in order, with the pixels of the free candidates (candidates that
        overlap no label). The samples are divided into parts. For each part, each rank gets the answers to some of its
        samples, and then the ranks exchange their results."""
        found: list[_Looked] = []
        share_of_labels = share_of(sum(len(sample.objects) for sample in annotated))
        size = _AT_ONCE * self._ranks.world_size
        began = told = time.monotonic()
        for start in range(0, len(annotated), size):
            part = annotated[start : start + size]
            share = -(-len(part) // self._ranks.world_size)
            first = self._ranks.rank * share
            asked = part[first : first + share]
            named = self._of(asked, start + first, global_step)
            own = [
                (one, cluster_crops(sample, one, self._open, share_of_labels))
                for sample, one in zip(asked, named, strict=True)
            ]
            # Ranks exchange the answers part by part, so that only one part's prompts and pixels are in memory at a
            # time.
            found += [one for others in self._ranks.all_gather_object(own) for one in others]
            if time.monotonic() - told > _TELL_EVERY_S and len(found) < len(annotated):
                told = time.monotonic()
                self._tell(f"labels: answers to {len(found)} of {len(annotated)} samples, {told - began:.0f} s")
        return found

    def _of(self, samples: Sequence[Sample], first: int, global_step: int) -> list[list[LabelCandidate]]:
        number = self._settings.rollouts
        # All answers to a sample are neighbours, so the backend encodes its prompt once.
        line = [sample for sample in samples for _ in range(number)]
        window = [MicroStep(samples=line, micro_step_idx=COMPLETES_LABELS, first_req_idx=first * number)]
        (rollouts,) = self._backend.generate_window(window, global_step=global_step, temperature=1.0)
        answers = [[one.object for one in self._task.parse(rollout).objects] for rollout in rollouts]
        return [
            candidates(
                sample,
                answers[i * number : (i + 1) * number],
                can_be_label=lambda obj: obj.desc in self._names and self._task.can_be_taught(obj),
            )
            for i, sample in enumerate(samples)
        ]

    def _completed(
        self, sample: Sample, found: Sequence[LabelCandidate], min_votes: int, probable: float
    ) -> tuple[Sample, int]:
        """Return the sample with its new labels, and the number of labels left out because the sample would be too
        long. Labels with the fewest votes are left out first."""
        full, left_out = completed(sample, found, min_votes, probable=probable), 0
        while len(full.objects) > len(sample.objects) and self._too_long(full) is not None:
            fewest = min((obj for obj in full.objects if obj.votes is not None), key=lambda obj: obj.votes)
            full = replace(full, objects=tuple(obj for obj in full.objects if obj is not fewest))
            left_out += 1
        return full, left_out

    def _path(self, global_step: int) -> Path:
        return self._folder / f"step_{global_step:06d}.json"

    def _write(self, completion: Completion) -> None:
        """Write the completion's file on rank 0."""
        if not self._ranks.is_main:
            return
        samples = {sample.sample_id: added for sample in self._samples if (added := _added(sample))}
        content = {"global_step": completion.global_step, **completion.to_json(), "samples": samples}
        write_atomically(self._path(completion.global_step), json.dumps(content) + "\n")

    def _write_annotations(self) -> None:
        if self._annotations is not None and self._ranks.is_main:
            self._annotations.write(self._samples)

    def _newest(self, global_step: int, beside: Path) -> dict[str, Any] | None:
        """Return the content of the newest completion's file, among the steps up to `global_step`; None if there is no
        file. Files of later steps are removed from this run's folder."""
        by_step = dict(_files(beside / LABELS)) | dict(_files(self._folder))
        for step, path in by_step.items():
            if step > global_step and path.parent == self._folder:
                path.unlink()
        steps = [step for step in by_step if step <= global_step]
        if not steps:
            return None
        path = by_step[max(steps)]
        try:
            content: dict[str, Any] = json.loads(path.read_text())
            wanted = content["samples"].keys() - {sample.sample_id for sample in self._samples}
            if wanted:
                raise ValueError(f"samples that the training data lacks: {', '.join(sorted(wanted)[:3])}")
            for one in content["samples"].values():
                for kind in one:
                    list(map(read_label, one[kind]))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(
                "the run's completed labels can't be read",
                found=f"{path}: {type(error).__name__}: {error}",
                wanted="the file that the run wrote, and the data that it had",
                remedy=f"remove {path} to complete the labels anew by the checkpoint's weights",
            ) from error
        # A run resumed from another folder keeps the file in its own folder, so that it can be resumed again.
        if path.parent != self._folder:
            write_atomically(self._path(max(steps)), json.dumps(content) + "\n")
        return content


def _right(found: Sequence[Sequence[LabelCandidate]], min_votes: int | None, probable: float) -> float | None:
    """Return the mean probability of the accepted candidates that overlap no label (`free`). Return None if no
    candidate is accepted."""
    accepted = [
        one.probability
        for own in found
        for one in own
        if one.relation == "free"
        and one.probability is not None
        and one.votes >= (min_votes or 1)
        and one.probability >= probable
    ]
    return round(sum(accepted) / len(accepted), 4) if accepted else None


def _files(folder: Path) -> Iterator[tuple[int, Path]]:
    for path in sorted(folder.glob("step_*.json")):
        step = path.stem.removeprefix("step_")
        if step.isdigit():
            yield int(step), path


def _added(sample: Sample) -> dict[str, list[list[object]]]:
    """Return the completed labels of a sample (labels that are not annotated), as JSON."""
    added = [
        [obj.desc, obj.kind, list(obj.bins), list(obj.votes), *([] if obj.image is None else [obj.image])]
        for obj in sample.objects
        if obj.votes is not None
    ]
    return {"objects": added} if added else {}


def read_label(entry: Sequence[Any]) -> DetectionObject:
    """Return a completed label from its entry in `labels/step_N.json`."""
    desc, kind, bins, (found, answers, *_), *image = entry  # earlier versions wrote a weight too
    votes = Votes(int(found), int(answers))
    return DetectionObject(str(desc), kind, tuple(map(int, bins)), votes, *map(int, image))
