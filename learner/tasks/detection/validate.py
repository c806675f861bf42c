"""Whether a sample's ground truth can be written as an answer and read back. Called per sample, before training."""

from __future__ import annotations

from typing import TYPE_CHECKING

from learner.records import DetectionObject, Sample
from learner.tasks.detection.bins import arity_is_right, canonical_key, encloses_something
from learner.tasks.detection.grammar import NUM_BINS
from shared.errors import DataError

if TYPE_CHECKING:
    from learner.tasks.pieces import TokenPieces


def validate_sample(sample: Sample, pieces: TokenPieces | None) -> None:
    """Raise DataError, naming sample and object, where an object could not be a target.

    `pieces` None: all but whether descriptions survive tokenization.
    """
    for number, obj in enumerate(sample.objects, start=1):
        fault = object_fault(obj, pieces)
        if fault is not None:
            found, wanted, remedy = fault
            raise DataError(
                f"sample {sample.sample_id}: ground-truth object {number} can't be used",
                found=found,
                wanted=wanted,
                remedy=remedy,
            )
    keys = [canonical_key(obj) for obj in sample.objects]
    if keys != sorted(keys):
        raise DataError(
            f"sample {sample.sample_id}: ground truth is not in canonical order",
            found=f"(y1, x1) = {keys}"[:200],
            wanted="top to bottom, then left to right",
            remedy="order the objects with learner.tasks.detection.bins.canonical_order",
        )


def object_fault(obj: DetectionObject, pieces: TokenPieces | None) -> tuple[str, str, str] | None:
    """What is found, what is wanted and what to do where an object could not be a target."""
    return _geometry_fault(obj) or _desc_fault(obj.desc, pieces)


def _geometry_fault(obj: DetectionObject) -> tuple[str, str, str] | None:
    found, remedy = f"{obj.kind} {list(obj.bins)}"[:200], "fix or remove this object"
    if not all(0 <= value < NUM_BINS for value in obj.bins):
        return found, f"bins in 0..{NUM_BINS - 1}", remedy
    if not arity_is_right(obj.kind, obj.bins):
        return found, "4 numbers for a box, an even number of at least 6 for a polygon", remedy
    if not encloses_something(obj.kind, obj.bins) or not _has_area(obj):
        return found, "x1 < x2 and y1 < y2 in bins, and an area above 0", remedy
    return None


def _has_area(obj: DetectionObject) -> bool:
    if obj.kind == "bbox_2d":
        return True  # as it encloses something
    from learner.tasks.detection.geometry import area  # here, so that boxes are checked without loading shapely

    return area(obj) > 0


def _desc_fault(desc: str, pieces: TokenPieces | None) -> tuple[str, str, str] | None:
    remedy = "rewrite the description"
    if not desc.strip():
        return repr(desc), "a description that is not blank", remedy
    if "<|" in desc:
        return repr(desc), "no text that tokenizers read as special tokens", remedy
    try:
        text = desc.encode()
    except UnicodeEncodeError:
        return repr(desc), "valid Unicode", remedy
    if pieces is None:
        return None
    token_ids = pieces.encode(desc)
    if pieces.tokenizer.eos_token_id in token_ids or pieces.text(token_ids).data != text:
        return repr(desc), "text that survives tokenization", f"{remedy} (in Unicode form NFC, without special tokens)"
    return None
