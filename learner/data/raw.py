"""Turns records of annotation files into `Sample`s, or counts them as bad (R12, R41).

In: a `RawRecord` of a reader, with images as strings and objects in pixels of the upright image. Out: a `Sample` with
absolute image paths, and objects in bins and canonical order. Only the headers of images are read.

Nothing is skipped silently. A bad record has one of the kinds below. `data.on_bad_record` decides what happens to each
kind. `BadRecords` keeps the first errors and counts all of them, so that a user sees all mistakes of a file at once.

    no_area          an object without area, in pixels or after rounding to bins
    outside_image    an object that reaches more than a pixel out of its image
    unknown_class    an object whose class the annotations do not name
    image_missing    an image that is missing or can't be read
    image_size       an image of another size than the annotation says
    duplicate        an object that is listed twice, with the same class and the same coordinates
    image_shape      an image more than 200 times as long as it is wide, or the reverse
    too_long         prompt, labels and the longest rollout do not fit a packed row
    malformed        everything else (not JSON, a field missing, an id twice): always an error

Records of the following kinds may be right or wrong. Records of the kinds below are used, and counted like bad records:

    unlabelled       an image without a label file (YOLO), which becomes a scene without objects
    orphan_label     a label file without an image (YOLO)
    keypoints        a label with keypoints (YOLO), which are left out
    padded_name      a class name with spaces around it or control characters, which are removed
    rotated          a turned rectangle (CVAT), of which the enclosing box is taken
    found_by_name    an image that is not at its record's path; exactly one file near that path has its name
    other_shape      a point or a line (Labelme), which is left out
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

from pydantic import ValidationError

from learner.config.sections.data import BadAction, BadKind, Coordinates
from learner.data.formats.strict import plain_name
from learner.data.units import Reach, sides_in, to_pixels
from learner.records import DetectionObject, Place, RawObject, RawRecord, Sample, Size
from learner.tasks.detection.bins import canonical_order, has_area, rounded, to_bins, within
from learner.tasks.detection.grammar import NUM_BINS
from shared.errors import DataError, MediaError, RequestError
from shared.generation import Turn, render_messages
from shared.images import ImageRules, Images
from shared.reading import as_here, is_utf8
from shared.validation import fault_of

if TYPE_CHECKING:
    from learner.data.formats.source import Nearby

Kind = BadKind | Literal["malformed"]
Kept = Literal["unlabelled", "orphan_label", "keypoints", "padded_name", "rotated", "found_by_name", "other_shape"]
EDGE_TOLERANCE = 1.0  # max pixels by which a rounded coordinate may lie outside of the image
LARGEST = 1e9  # max absolute value of a coordinate; larger coordinates are refused
LONGEST_SHAPE = 200  # max longer side / shorter side; the processors of Qwen-VL models refuse more
MAX_SHOWN = 50  # max errors that are kept in full; the others are only counted
_DONE = {"drop": "left out", "clip": "cut", "keep": "kept"}


@dataclass
class BadRecords:
    """Collects the bad records of one annotation file and applies `policy` to them. `reach` counts how many boxes fit
    their photographs."""

    policy: Mapping[BadKind, BadAction]
    reach: Reach = field(default_factory=Reach)
    errors: list[DataError] = field(default_factory=list)  # the first MAX_SHOWN errors
    num_errors: int = 0
    counts: Counter[tuple[Kind | Kept, BadAction | Literal["keep"]]] = field(default_factory=Counter)
    examples: dict[tuple[str, str], str] = field(default_factory=dict)  # (kind, action) -> text about the first record

    def meet(self, kind: Kind, error: DataError, *, can_be_cut: bool = True) -> BadAction:
        """Count a bad record, and return the action for it. After the action `error` the caller continues in the same
        way as after `drop`. With `clip`, a record that cannot be cut is dropped."""
        action: BadAction = "error" if kind == "malformed" else self.policy[kind]
        if action == "clip" and not can_be_cut:
            action = "drop"
        if action == "error":
            self.num_errors += 1
            if len(self.errors) < MAX_SHOWN:
                self.errors.append(_with_way_out(kind, error))
        else:
            self._count(kind, action, error)
        return action

    def keep(self, kind: Kept, error: DataError) -> None:
        """Count a record that may be wrong, but is used."""
        self._count(kind, "keep", error)

    def _count(self, kind: Kind | Kept, action: BadAction | Literal["keep"], error: DataError) -> None:
        self.counts[kind, action] += 1
        self.examples.setdefault((kind, action), f"{error.what}; found {error.found}")

    def malformed(self, place: Place, error: ValidationError) -> None:
        """Report all mistakes that pydantic found in one record."""
        for detail in error.errors(include_url=False):
            fault = fault_of(detail)
            self.meet("malformed", place.error(fault.what, found=fault.found, wanted=fault.wanted))

    def raise_errors(self, file: str) -> None:
        """Raise DataError if there were errors. A single error is raised unchanged, several as a list."""
        if self.num_errors == 1:
            raise self.errors[0]
        if self.num_errors:
            shown = "".join(f"\n  {error}" for error in self.errors)
            more = self.num_errors - len(self.errors)
            raise DataError(
                f"{self.num_errors} records of {file} can't be used",
                found=f"{shown}\n" + (f"  and {more} more\n" if more else ""),
                wanted="records without mistakes",
                remedy=self.reach.hint() or "correct them, or choose what happens to each kind with data.on_bad_record",
            )

    def in_words(self) -> list[str]:
        """Return a line for each kind and action, with an example."""
        return [
            f"{number} {_DONE[action]} ({kind}), for example {self.examples[kind, action]}"
            for (kind, action), number in sorted(self.counts.items())
        ]

    def summary(self) -> dict[str, dict[str, int]]:
        """Return the numbers of dropped, clipped and kept records, by kind: `{"no_area": {"drop": 2}}`."""
        found: dict[str, dict[str, int]] = {}
        for (kind, action), number in sorted(self.counts.items()):
            found.setdefault(kind, {})[action] = number
        return found


def _with_way_out(kind: Kind, error: DataError) -> DataError:
    if kind == "malformed":
        return error
    drop = f"{error.remedy}, or set data.on_bad_record.{kind}: drop"
    remedy = f"{drop} (or clip)" if kind == "outside_image" else drop
    return DataError(error.what, found=error.found, wanted=error.wanted, remedy=remedy)


# ---- samples -------------------------------------------------------------------------------------------------------


class Validates(Protocol):
    """The method of a `Task` that readers need."""

    def validate(self, sample: Sample) -> None: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class SeenImages:
    """A record's images. `sources` are strings that any process can open. `sizes` are the upright images' sizes; None
    for a URL, which is not fetched. `error` is the error of the first image that cannot be read. `found` has (the name
    in the record, the file) for each image that is not at its record's path."""

    sources: tuple[str, ...] = ()
    sizes: tuple[Size | None, ...] = ()
    error: MediaError | None = None
    found: tuple[tuple[str, Path], ...] = ()

    @property
    def known(self) -> tuple[Size, ...]:
        return tuple(size for size in self.sizes if size is not None)


def look_at_images(names: Sequence[str], images: Images, folder: Path, nearby: Nearby) -> SeenImages:
    """Find a record's images and read their headers. Relative paths start at `folder`; an image that does not exist
    there is searched by its file name. Several threads call this function."""
    found: list[tuple[str, Path]] = []

    def source_of(name: str) -> str:
        try:
            # Tools on Windows write names with backslashes.
            return images.resolve(as_here(name, folder), folder)
        except MediaError:
            place = nearby.find(name)
            if place is None:
                raise
            found.append((name, place))
            return images.resolve(str(place))

    try:
        sources = tuple(map(source_of, names))
        sizes = tuple(None if source[:4].lower() == "http" else images.size(source) for source in sources)
    except MediaError as error:
        return SeenImages(error=error)
    return SeenImages(sources=sources, sizes=sizes, found=tuple(found))


@dataclass(frozen=True, kw_only=True)
class SampleMaker:
    """Makes samples and counts bad records. `too_long` returns the length of a sample that does not fit a row, as text.
    `coordinates` is the unit of all records; None: each record has its own unit. If `exact` is True, bins are not
    rounded, because tiles with finer bins are cut from the samples."""

    task: Validates
    bad: BadRecords
    coordinates: Coordinates | None = None
    too_long: Callable[[Sample], str | None] | None = None
    exact: bool = False

    def make(self, record: RawRecord, seen: SeenImages) -> Sample | None:
        """Return the sample, or None if the record is not used. After an error the rest of the record is still
        checked."""
        errors = self.bad.num_errors
        number = len(record.images)
        self._tell_found(seen, record.place)
        # The sizes are needed first, to convert coordinates to bins.
        sizes = self._sizes(record, seen)
        if not self._asks_something(record.messages, number, record.place) or sizes is None:
            return None
        if seen.error is None and not self._has_name(record):
            return None
        sound = (obj for obj in map(self._sound, record.objects) if obj and self._names_image(obj, number))
        kept = [(obj, made) for obj in self._distinct(sound) if (made := self._object(obj, sizes, record))]
        # A record with an error has no sample, but all its other objects were checked too.
        if self.bad.num_errors > errors:
            return None
        sample = Sample(
            sample_id=record.sample_id,
            messages=tuple(record.messages),
            images=seen.sources,
            objects=canonical_order(made for obj, made in kept if not obj.ignored),
            width=sizes[0][0],
            height=sizes[0][1],
            ignored=tuple(made for obj, made in kept if obj.ignored),
            sizes=sizes if number > 1 else (),
        )
        # The checks need whole bins, because an answer has only whole numbers.
        taught = rounded(sample) if self.exact else sample
        return sample if self._is_valid(taught, record.place) and self._fits(taught, record.place) else None

    def finish(self, sample: Sample, seen: SeenImages, place: Place) -> Sample | None:
        """Complete a sample of the user's reader with its images' paths and sizes; None if the sample is not used."""
        if seen.error is not None:
            self._miss_image(seen.error, place)
            return None
        self._tell_found(seen, place)
        if not self._asks_something(sample.messages, len(sample.images), place) or not self._has_shape(seen, place):
            return None
        known, given = seen.known, (sample.width, sample.height)
        width, height = given if all(given) else next(iter(known), (1, 1))
        sizes = sample.sizes or (known if 1 < len(known) == len(seen.sizes) else ())
        sample = replace(sample, images=seen.sources, width=width, height=height, sizes=sizes)
        return sample if self._is_valid(sample, place) and self._fits(sample, place) else None

    def _miss_image(self, error: MediaError, place: Place) -> BadAction:
        remedy = f"{error.remedy}, or set data.image_root to the images' folder"
        bad = place.error(error.what, found=error.found, wanted=error.wanted, remedy=remedy)
        return self.bad.meet("image_missing", bad)

    def _tell_found(self, seen: SeenImages, place: Place) -> None:
        for written, file in seen.found:
            error = place.error("its image is elsewhere", found=f"{written!r:.100}, read {file}", wanted="its path")
            self.bad.keep("found_by_name", error)

    def _has_shape(self, seen: SeenImages, place: Place) -> bool:
        """Return False if the record is dropped, because an image is too long for a model's processor. With the policy
        `error` the record is not dropped, and the error is kept."""
        long = [size for size in seen.sizes if size and max(size) > LONGEST_SHAPE * min(size)]
        if not long:
            return True
        found, wanted = f"{long[0][0]} x {long[0][1]}", f"sides of at most {LONGEST_SHAPE} to 1"
        error = place.error("its image is too long for a model", found=found, wanted=wanted, remedy="cut it into parts")
        return self.bad.meet("image_shape", error) == "error"

    def _said(self, record: RawRecord, number: int) -> Sequence[Size | None]:
        """Return the sizes that the record gives for its images."""
        same = (record.width, record.height) if record.width and record.height else None
        return record.sizes or (same,) * max(1, number)

    def _is_copy(self, record: RawRecord) -> bool:
        """Return True if the record's width and height belong to a resized copy of the image."""
        return (self.coordinates or record.unit) == "resized"

    def _size(self, record: RawRecord, seen: SeenImages, size: Size | None) -> Size | None:
        """Return width and height of the only image; None if the record is dropped, or if they are not known. `size`:
        as the record says."""
        place, known = record.place, seen.known
        # The record has the size of the copy. The sample needs the size of the image itself.
        if known and size is not None and self._is_copy(record):
            return known[0]
        if size is None and (not known or self._is_copy(record)):
            what = "the size of its image is not known" if not known else "the size of the resized copy is not known"
            self.bad.meet("malformed", place.error(what, found="no width and height", wanted="both"))
            return None
        if size is not None and size not in known and len(known) == len(seen.sizes) > 0:
            bad = _wrong_size(place, size, known, seen.sources[0])
            return size if self.bad.meet("image_size", bad) == "error" else None
        return size or known[0]

    def _sizes(self, record: RawRecord, seen: SeenImages) -> tuple[Size, ...] | None:
        """Return the size of each image; one size if the record has no image. None if the record is dropped, or if a
        size is not known."""
        place, number = record.place, len(record.images)
        said = self._said(record, number)
        if seen.error is not None:
            is_kept = self._miss_image(seen.error, place) == "error" and number < 2
            return (said[0],) if is_kept and said[0] else None
        if not self._has_shape(seen, place):
            return None
        if number < 2:
            size = self._size(record, seen, said[0])
            return None if size is None else (size,)
        for k, (one, own) in enumerate(zip(said, seen.sizes, strict=True), start=1):
            name = f"its image {k}"
            if (
                one
                and own
                and one != own
                and not self._is_copy(record)
                and self.bad.meet("image_size", _wrong_size(place, one, [own], seen.sources[k - 1], name)) == "drop"
            ):
                return None
            if not one and not own:
                wanted = "width and height of each image, as `sizes`"
                bad = place.error(f"the size of {name} is not known", found="no width and height", wanted=wanted)
                self.bad.meet("malformed", bad)
        known = tuple(size for one, own in zip(said, seen.sizes, strict=True) if (size := own or one))
        return known if len(known) == number else None

    def _has_name(self, record: RawRecord) -> bool:
        """Return True if the record's id, which may be a file name, is valid UTF-8."""
        # Only ids in UTF-8 can be written to files and logs.
        if is_utf8(record.sample_id):
            return True
        found, wanted = f"the id {record.sample_id!r}", "a name in UTF-8"
        bad = record.place.error("its name is not UTF-8", found=found, wanted=wanted, remedy="rename the file")
        self.bad.meet("malformed", bad)
        return False

    def _names_image(self, obj: RawObject, number: int) -> bool:
        """Return True if the object says which of the record's images it is in, or if there is only one."""
        if (obj.image is None and number < 2) or (obj.image is not None and 1 <= obj.image <= max(1, number)):
            return True
        wanted = f"`image`: which of the {number} images it is in, from 1" if number > 1 else "image 1, or no `image`"
        found = "no `image`" if obj.image is None else f"image {obj.image}"
        self.bad.meet("malformed", obj.place.error(f"{obj.name} is in no image", found=found, wanted=wanted))
        return False

    def _asks_something(self, messages: Sequence[Turn], num_images: int, place: Place) -> bool:
        try:
            render_messages(messages, num_images)
        except RequestError as error:
            self.bad.meet("malformed", place.error(error.what, found=error.found, wanted=error.wanted))
            return False
        return True

    def _sound(self, obj: RawObject) -> RawObject | None:
        """Return the object with its class name as taught; None if its coordinates are not numbers."""
        # The comparison is false for NaN, so NaN is refused too.
        if not all(isinstance(value, int | float) and abs(value) <= LARGEST for value in obj.coords):
            error = obj.place.error(f"{obj.name} has no coordinates", found=obj.written, wanted="numbers of pixels")
            self.bad.meet("malformed", error)
            return None
        name = plain_name(obj.desc) if obj.desc else ""
        if not name or name == obj.desc:
            return obj
        found, wanted = f"{obj.desc!r:.100}", "neither spaces around it nor control characters"
        self.bad.keep("padded_name", obj.place.error("a class name with spaces around it", found=found, wanted=wanted))
        return replace(obj, desc=name)

    def _distinct(self, objects: Iterable[RawObject]) -> Iterator[RawObject]:
        seen: set[tuple[object, ...]] = set()
        for obj in objects:
            # An object without `image` is in the only image, so it equals an object with `image: 1`.
            content = (obj.desc, obj.kind, obj.coords, obj.ignored, obj.image or 1)
            if content in seen:
                wanted = "each object once"
                error = obj.place.error(f"{obj.name} stands there twice", found=obj.written, wanted=wanted)
                self.bad.meet("duplicate", error)
            else:
                seen.add(content)
                yield obj

    def _object(self, obj: RawObject, sizes: Sequence[Size], record: RawRecord) -> DetectionObject | None:
        """Return the object in bins of its image; None if it is not used. An ignore region is cut at the image's edge.
        `sizes` are the sizes of the record's images."""
        image = obj.image if len(sizes) > 1 else None
        place = 0 if image is None else image - 1
        size, unit = sizes[place], self.coordinates or record.unit
        sides = sides_in(unit, size, self._said(record, len(sizes))[place])
        if not obj.ignored:
            # Wrong boxes are counted too, because they show a wrong unit.
            self.bad.reach.add(obj.coords, size, unit, sides)
        if obj.desc is None and not obj.ignored:
            error = obj.place.error(f"{obj.name} has an unknown class", found=obj.written, wanted="a class with a name")
            self.bad.meet("unknown_class", error)
            return None
        coords = to_pixels(obj.coords, sides, size)
        if not obj.ignored and not has_area(obj.kind, coords):
            self._no_area(obj, "an area above 0")
            return None
        if not all(-EDGE_TOLERANCE <= value <= size[i % 2] + EDGE_TOLERANCE for i, value in enumerate(coords)):
            cut = within(obj.kind, coords, (0, 0, *size))
            what, wanted = f"{obj.name} lies outside the image", f"pixels within {size[0]} x {size[1]}"
            error = obj.place.error(what, found=obj.written, wanted=wanted)
            if not obj.ignored and self.bad.meet("outside_image", error, can_be_cut=bool(cut)) != "clip":
                return None
            coords = cut
        bins: tuple[float, ...] = to_bins(coords, *size) if coords else ()
        if self.exact:
            shares = (min(max(value / size[i % 2], 0.0), 1.0) for i, value in enumerate(coords))
            bins = tuple((NUM_BINS - 1) * share for share in shares)
        if bins and has_area(obj.kind, bins):
            return DetectionObject(desc=obj.desc or "", kind=obj.kind, bins=bins, image=image)  # type: ignore[arg-type]
        # Boxes that lie wholly outside were counted above.
        if not obj.ignored and coords:
            self._no_area(obj, f"an area above 0 after rounding to a thousandth of {size[0]} x {size[1]} pixels")
        return None

    def _no_area(self, obj: RawObject, wanted: str) -> None:
        self.bad.meet("no_area", obj.place.error(f"{obj.name} has no area", found=obj.written, wanted=wanted))

    def _is_valid(self, sample: Sample, place: Place) -> bool:
        try:
            self.task.validate(sample)
        except DataError as error:
            bad = place.error(error.what, found=error.found, wanted=error.wanted, remedy=error.remedy)
            self.bad.meet("malformed", bad)
            return False
        return True

    def _fits(self, sample: Sample, place: Place) -> bool:
        found = self.too_long(sample) if self.too_long else None
        if found is None:
            return True
        remedy = "raise global_max_length, or lower model.max_pixels or max_new_tokens"
        error = place.error("too long for a packed row", found=found, wanted="at most global_max_length", remedy=remedy)
        self.bad.meet("too_long", error)
        return False


def _wrong_size(place: Place, said: Size, known: Sequence[Size], source: str, name: str = "its image") -> DataError:
    own = ", ".join(f"{width} x {height}" for width, height in known)
    why, remedy = "", "correct the annotation, or set data.coordinates: resized if its boxes are in pixels of that size"
    if said[::-1] in known:
        why, remedy = ": width and height are swapped", "swap width and height in the annotation"
        # Swapped sides come from an EXIF orientation, or else from the annotation.
        if Images(ImageRules()).is_turned(source):
            why = " as its EXIF orientation turns it"
            remedy = "annotate the upright image, or remove its EXIF orientation"
    return place.error(
        f"{name} has another size than the annotation says",
        found=f"{said[0]} x {said[1]} in the annotation, {own} of the image{why}",
        wanted="boxes in pixels of the upright image, and its size",
        remedy=remedy,
    )
