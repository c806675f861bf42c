"""`voc`: Pascal VOC, one XML file per image.

The path is a folder or a text file. The folder has XML files, also in sub-folders. The text file lists names of XML
files, one per line (as VOC's `ImageSets`). Pixel coordinates are used unchanged. `difficult` makes ignore regions. If
CVAT's attribute `rotation` turns a rectangle, the enclosing box is used.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from xml.etree import ElementTree

from learner.data.formats.foreign import refuse_foreign
from learner.data.formats.source import SUFFIXES, Source, enclosing, files_below, text_of, turned
from learner.data.formats.strict import any_flag, number, whole
from learner.records import Place, RawObject, RawRecord, Size
from shared.errors import DataError
from shared.reading import as_here, is_file


def read_voc(source: Source) -> tuple[Path, Iterator[RawRecord]]:
    folder, files = files_of(source)
    images = VocImages(folder, source)

    def records() -> Iterator[RawRecord]:
        for file in files:
            record = _of_xml(file, images, source)
            if record is not None:
                yield record

    return images.root, records()


class VocImages:
    """Finds the images of XML files in a folder and its sub-folders. Image paths are relative to `root`."""

    def __init__(self, folder: Path, source: Source) -> None:
        near = [
            path
            for path in _near(folder)
            if path.is_dir() and any(file.suffix.lower() in SUFFIXES for file in path.iterdir())
        ]
        self.root = source.image_root(near[0] if near else folder)
        self._folder, self._has_own_root = folder, source.data.image_root is None
        self._places = {folder: [self.root]}  # folders to search for an image, by the folder of its XML file

    def name_of(self, file: Path, written: str) -> str:
        """Return the path from `root` to the image of an XML file. `written` is the image's name in that file."""
        places = self._places.setdefault(file.parent, [])
        if not places:
            inside = os.path.relpath(file.parent, self._folder)
            nearest = [path for path in _near(file.parent) if path.is_dir()] if self._has_own_root else []
            places += [*nearest, self.root / inside, self.root]
        for place in places:
            if name := _image_in(place, file, written):
                return name if place == self.root else os.path.relpath(place / name, self.root)
        return written or file.stem


def _near(folder: Path) -> list[Path]:
    """Return the folders in which the images of XML files in `folder` may be, the likeliest first."""
    above, name = folder.absolute().parent.parent, folder.absolute().name
    beside = [folder.parent / "JPEGImages", folder.parent / "images", folder, folder.parent]
    return [*beside, *(above / images / part for part in (name, "") for images in ("JPEGImages", "images"))]


def xml_below(folder: Path) -> list[Path]:
    """Return the XML files in a folder and its sub-folders, sorted."""
    return sorted(file for file in files_below(folder) if file.name.endswith(".xml"))


def files_of(source: Source) -> tuple[Path, list[Path]]:
    """Return the folder of the XML files, and the XML files of this split. Raises DataError."""
    listing = source.file
    if listing.is_dir():
        return listing, xml_below(listing)
    if listing.suffix.lower() == ".xml":
        return listing.parent, [listing]
    given = source.data.annotation_root
    near = [p / name for p in list(listing.absolute().parents)[:4] for name in ("Annotations", "voc", "annotations")]
    folders = [Path(given)] if given is not None else near
    folder = next((path for path in folders if path.is_dir()), None)
    if folder is None:
        raise DataError(
            f"{listing}: the XML files that it lists are not found",
            found=f"no folder {folders[0]}",
            wanted="the folder of the annotations",
            remedy="set data.annotation_root",
        )
    text = text_of(listing, Place(listing, "list"), "names of XML files, one per line")
    files = [_listed(line.strip(), folder) for line in text.splitlines() if line.strip()]
    return folder, _also_below(files, folder, listing)


def _also_below(files: Sequence[Path], folder: Path, listing: Path) -> list[Path]:
    """Return the files that a list names. A file that is not in the folder itself is searched in its sub-folders.
    Raises DataError if two sub-folders have a file of that name."""
    if all(file.parent != folder or is_file(file) for file in files):
        return list(files)
    below: dict[str, list[Path]] = {}
    for file in xml_below(folder):
        below.setdefault(file.name, []).append(file)
    found = []
    for file in files:
        named = [file] if file.parent != folder or is_file(file) else below.get(file.name, [file])
        if len(named) > 1:
            raise DataError(
                f"{listing}: a name that several XML files have",
                found=f"{file.stem}: {', '.join(map(str, named))}",
                wanted="one file of each name",
                remedy=f"write the folder too, such as {named[0].relative_to(folder).with_suffix('')}",
            )
        found += named
    return found


def _listed(line: str, folder: Path) -> Path:
    """Return the XML file that a line names. A name may contain spaces, and VOC's lists per class add a flag after the
    name. So the longest prefix of the line for which a file exists is used."""
    _, *rest = line.split()
    names = [line, *(line.rsplit(maxsplit=n)[0] for n in range(1, len(rest) + 1))]
    files = [folder / as_here(f"{name.removesuffix('.xml')}.xml", folder) for name in names]
    missing = files[-1] if all(word.lstrip("-").isdigit() for word in rest) else files[0]
    return next((file for file in files if is_file(file)), missing)


def _of_xml(file: Path, images: VocImages, source: Source) -> RawRecord | None:
    place = Place(file, "annotation")
    try:
        tree = _root_of(file)
        width, height = (_side(tree.find("size"), name) for name in ("width", "height"))
        filename = _text(tree, "filename")
    except OSError as error:
        source.bad.meet("malformed", place.error("the file is missing", found=str(error), wanted="an XML file"))
        return None
    except (ElementTree.ParseError, LookupError, ValueError) as error:  # LookupError: the XML names an unknown encoding
        found, wanted = str(error)[:300], "Pascal VOC: size, and objects with name and bndbox"
        source.bad.meet("malformed", place.error("not Pascal VOC", found=found, wanted=wanted))
        return None
    nodes = enumerate(tree.findall("object"), start=1)
    size = (width, height) if width and height else None
    objects = [obj for n, node in nodes if (obj := _of_voc_object(node, Place(file, f"object {n}"), size, source))]
    return RawRecord(
        place=place,
        sample_id=file.stem,
        messages=source.messages,
        images=(images.name_of(file, filename),),
        objects=objects,
        width=width,
        height=height,
    )


_CORNERS = ("xmin", "ymin", "xmax", "ymax")
_FLAGS = ("difficult", "ignore", "iscrowd")
# Tags with another parent or spelling would be skipped, and the scene would look empty.
_PARENTS = {  # allowed parents of the tags that are read
    "size": ("annotation",),
    "filename": ("annotation",),
    "object": ("annotation",),
    "part": ("object",),  # VOC 2012 has boxes for a head or a hand, which are not objects
    "name": ("object", "part", "owner", "attribute"),  # the names of CVAT's attributes are read, to find `rotation`
    "bndbox": ("object", "part"),
    **dict.fromkeys(("width", "height"), ("size",)),
    **dict.fromkeys(_CORNERS, ("bndbox",)),
    **dict.fromkeys(_FLAGS, ("object",)),
}
_MARKS = ("filename", "size", "object")  # an XML file with none of these tags is not a VOC file


def _root_of(file: Path) -> ElementTree.Element:
    """Return the root element. Raises OSError, ElementTree.ParseError, LookupError or ValueError; DataError if the
    XML is not a Pascal VOC annotation."""
    # A pipe or a device may never end, so it is not read.
    if not is_file(file):
        raise FileNotFoundError(f"no file {file}")
    root = parsed(file.read_bytes())
    if root.tag != "annotation":
        # All files of the folder probably have this format, so the first file decides.
        refuse_foreign(file)
        raise ValueError(f"the root <{root.tag}> instead of <annotation>")
    for parent in root.iter():
        for node in parent:
            _check_place(node.tag, parent.tag)
    if not any(root.find(mark) is not None for mark in _MARKS):
        raise ValueError("an <annotation> without filename, size and object")
    return root


def parsed(content: bytes) -> ElementTree.Element:
    """Return the root of an XML document. The document may be in an encoding that expat does not know, such as GBK or
    Shift JIS. Raises ElementTree.ParseError, LookupError, ValueError."""
    try:
        return ElementTree.fromstring(content)
    except ElementTree.ParseError as error:
        if "token" in str(error) and not _is_utf8(content) and b"encoding" not in content[:100]:
            raise ValueError(
                "bytes that are not UTF-8, and no encoding that says what they are: save it as UTF-8"
            ) from error
        raise
    # expat does not read encodings with several bytes per character.
    except ValueError:
        declared = re.match(rb"""\s*<\?xml[^>]*?encoding=["']([\w.-]+)["'][^>]*\?>""", content)
        if declared is None:
            raise
        return ElementTree.fromstring(content[declared.end() :].decode(declared[1].decode()))


def _is_utf8(content: bytes) -> bool:
    try:
        content.decode()
    except UnicodeDecodeError:
        return False
    return True


def _check_place(tag: object, parent: object) -> None:
    """Raises ValueError if a tag that is read has another parent or another spelling."""
    if not isinstance(tag, str):
        return  # a comment
    name = tag.rpartition("}")[2].lower()  # the XML namespace `{...}` is cut off
    parents = _PARENTS.get(name)
    if parents is None or parent == "source":
        return
    if name != tag:
        raise ValueError(f"<{tag}> instead of <{name}>")
    if parent not in parents:
        raise ValueError(f"<{name}> inside <{parent}>, where it is not read")


def _text(parent: ElementTree.Element | None, name: str) -> str:
    """Return the text of the only child with that name; "" if there is no such child. Raises ValueError if there are
    several such children."""
    found = parent.findall(name) if parent is not None else []
    if len(found) > 1:
        raise ValueError(f"{len(found)} times <{name}>")
    return (found[0].text or "").strip() if found else ""


def _side(size: ElementTree.Element | None, name: str) -> int | None:
    """Return a side in pixels; None if the file has no side or has 0, which some tools write for an unknown size."""
    text = _text(size, name)
    try:
        return whole(text or 0) or None
    except ValueError as error:
        raise ValueError(f"{name} {text}") from error


def _rotation(node: ElementTree.Element) -> float:
    """Return the degrees in CVAT's attribute `rotation`; 0 without that attribute. Raises ValueError."""
    attributes = node.iterfind("attributes/attribute")
    return next((number(_text(one, "value")) for one in attributes if _text(one, "name") == "rotation"), 0.0)


def _of_voc_object(node: ElementTree.Element, place: Place, size: Size | None, source: Source) -> RawObject | None:
    desc = written = ""
    try:
        desc = _text(node, "name")
        _text(node, "bndbox")  # raises if the object has several boxes
        bounds = node.find("bndbox")
        texts = [_text(bounds, corner) for corner in _CORNERS]
        written = ", ".join(f"{corner} {text}" for corner, text in zip(_CORNERS, texts, strict=True))
        coords = tuple(number(text) for text in texts)
        degrees = _rotation(node)
        ignored = any_flag({name: _text(node, name) for name in _FLAGS}, _FLAGS)
    except ValueError as error:
        found = f"{desc!r}: {written} ({error})"[:300]
        source.bad.meet("malformed", place.error("not Pascal VOC", found=found, wanted="name and bndbox"))
        return None
    if degrees % 180:
        coords = enclosing(turned(coords, degrees, size))
        told = place.error("a turned rectangle", found=f"{degrees:g} degrees", wanted="an upright one")
        source.bad.keep("rotated", told)
    return RawObject(
        desc=desc or None,
        kind="bbox_2d",
        coords=coords,
        written=written,
        name=f"the object ({desc!r})",
        place=place,
        ignored=ignored,
    )


def _image_in(folder: Path, file: Path, written: str) -> str | None:
    """Return the file name of the image that an XML file calls `written`, if it is in `folder`; else None. Other
    suffixes and the XML file's own stem are tried too."""
    written = as_here(written, folder)
    if written and is_file(folder / written):
        return written
    # Some tools omit the suffix or rename files.
    stems = [Path(written).name, Path(written).stem, file.stem]
    found = (f"{stem}{suffix}" for stem in stems if stem for suffix in (*SUFFIXES, *map(str.upper, SUFFIXES)))
    return next((image for image in found if is_file(folder / image)), None)
