"""Opens images that are named by strings, by the same rules in both programs (D13, R13).

A string names an image in one of five ways, tried in this order:

1. a `data:` URL
2. an `http(s)://` URL, of a host that is allowed
3. a `file://` URL
4. the path of an existing file, below a folder that is allowed
5. base64 of an image: the decoded bytes begin like JPEG, PNG, WebP, GIF, BMP or TIFF

Everything else is a MediaError that names all five. The error's message is the same for a file outside the allowed
folders and for a file that does not exist.

Pixels are RGB and upright: the EXIF orientation is applied, so boxes refer to the picture as people see it. Transparent
pixels become white, because people never see their stored colour, which is mostly black. 16-bit grey is scaled to 8
bits. An animation gives its first frame. The size in bytes is checked before an image is read, the size in pixels
before it is decoded. All functions block, and may be called from any thread.
"""

from __future__ import annotations

import base64
import binascii
import io
import os
import re
import stat
import struct
from pathlib import Path
from typing import IO, Literal
from urllib.parse import unquote, unquote_to_bytes

from PIL import Image, UnidentifiedImageError

from shared.errors import MediaError
from shared.fetching import Fetcher
from shared.image_rules import SHOWN_CHARS, ImageRules, check_bytes, media_error, short
from shared.reading import is_file, is_utf8

__all__ = ["FIVE_WAYS", "FORMATS", "ImageRules", "Images", "media_error", "short"]

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")
FIVE_WAYS = (
    "a data: URL, an http(s):// URL, a file:// URL, the path of an existing file, "
    f"or base64 of an image ({', '.join(FORMATS)})"
)
Way = Literal["data", "http", "file", "path", "base64"]

_SIGNATURE = re.compile(
    rb"\xff\xd8\xff|\x89PNG\r\n\x1a\n|RIFF....WEBP|GIF8[79]a|BM|II[\x2a\x2b]\x00|MM\x00[\x2a\x2b]", re.DOTALL
)
_SIGNATURE_CHARS = 16  # base64 of 12 bytes, as long as the longest signature
_SPACES = b" \t\n\r\f\v"
_MOST_PERCENTS = 1 << 20  # max `%XX` in a data URL; decoding one takes 100 times the memory of its three bytes
_LONGEST_PATH = 4096  # max bytes of a path: Linux's PATH_MAX

# `max_pixels` replaces Pillow's own limit. Pillow's limit only warns, and the warning can only be silenced for all
# threads.
Image.MAX_IMAGE_PIXELS = None

_JPEG_SCAN = b"\xff\xda"
_ORIENTATION = 0x0112  # EXIF tag that says how the picture is turned
_TRANSPOSE = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_DECODING_ERRORS = (UnidentifiedImageError, OSError, ValueError, SyntaxError, EOFError, struct.error)


class Images:
    """Reads the images that `rules` allow. A pickled or copied object begins with an empty cache of fetched images."""

    def __init__(self, rules: ImageRules) -> None:
        self.rules = rules
        self._fetcher = Fetcher(rules)

    def __reduce__(self) -> tuple[type[Images], tuple[ImageRules]]:
        return Images, (self.rules,)

    def resolve(self, source: str, folder: Path = Path()) -> str:
        """Return the string in a form that any process of this machine understands: a path relative to `folder` becomes
        absolute, other strings stay. Raises MediaError for a string that names no usable image. Fetches nothing."""
        way = _way_of(source, folder)
        if way == "http":
            self._fetcher.check(source)
        elif way == "data":
            self._from_data_url(source)
        elif way != "base64" or not self._from_base64(source):
            file, path = self._file(source, folder)
            file.close()
            # Neither a request nor a file of results could hold a name that is not UTF-8.
            if not is_utf8(str(path)):
                raise media_error(source, "a name that is not UTF-8", "a name in UTF-8", "rename the file or folder")
            return str(path)
        return source

    def load(self, source: str) -> Image.Image:
        """Return the image: RGB, upright, fully decoded. Raises MediaError."""
        return self.decode(self.read(source), source)

    def decode(self, data: bytes, source: str) -> Image.Image:
        """Return the decoded image of bytes from `read`. Raises MediaError."""
        try:
            image = self._open(io.BytesIO(data), source)
            image.load()
            return _to_rgb(_upright(image))
        except _DECODING_ERRORS as error:
            raise self._no_image(source, data, error) from error

    def look(self, data: bytes, source: str) -> tuple[int, int]:
        """Return (number of pixels, number of passes that decoding makes over them). Raises MediaError."""
        try:
            image = self._open(io.BytesIO(data), source)
        except _DECODING_ERRORS as error:
            raise self._no_image(source, data, error) from error
        # A JPEG may have thousands of scans, each over all pixels. The marker of a scan never occurs in scan data.
        is_jpeg = image.format in ("JPEG", "MPO") or image.info.get("compression") == "jpeg"
        return image.width * image.height, max(1, data.count(_JPEG_SCAN)) if is_jpeg else 1

    def size(self, source: str) -> tuple[int, int]:
        """Return (width, height) of the upright image, from its header. Raises MediaError."""
        way = _way_of(source)
        with self._file(source)[0] if way in ("file", "path") else io.BytesIO(self.read(source)) as file:
            try:
                check_bytes(_num_bytes(file), source, self.rules)
                return _upright_size(self._open(file, source), file)
            except _DECODING_ERRORS as error:
                file.seek(0)
                raise self._no_image(source, file.read(self.rules.max_bytes), error) from error

    def forget(self, source: str) -> None:
        """Drop a URL from the cache, because its bytes were no image or only a part of one."""
        self._fetcher.forget(source)

    def _no_image(self, source: str, data: bytes, error: Exception) -> MediaError:
        self.forget(source)
        why = f"begins with {data[:16]!r}" if isinstance(error, UnidentifiedImageError) else str(error)[:200]
        found = f"{len(data)} bytes that are not an image ({why})"
        return media_error(source, found, " or ".join(FORMATS), "repair or replace the image")

    def is_turned(self, source: str) -> bool:
        """Return True if the EXIF orientation swaps width and height. Raises MediaError."""
        try:
            return 5 <= _orientation(self._open(io.BytesIO(self.read(source)), source)) <= 8
        except _DECODING_ERRORS:
            return False

    # ---- bytes -----------------------------------------------------------------------------------------------------

    def read(self, source: str) -> bytes:
        """Return the encoded image. Raises MediaError."""
        way = _way_of(source)
        if way == "http":
            return self._fetcher.read(source)
        if way == "data":
            return self._from_data_url(source)
        if way == "base64" and (data := self._from_base64(source)):
            return data
        with self._file(source)[0] as file:
            data = file.read(self.rules.max_bytes + 1)
        check_bytes(len(data), source, self.rules)
        return data

    def _file(self, source: str, folder: Path = Path()) -> tuple[IO[bytes], Path]:
        """Return the open file that a path or a `file://` URL names, and its absolute path. Raises MediaError.

        The check is of the opened file, so changing a link meanwhile cannot bypass it.
        """
        for text in _paths_in(source):
            # The path is made only once, because making paths takes most of the time in a check of 100,000 photographs.
            path = folder / text
            try:
                handle = os.open(path, os.O_PATH | os.O_CLOEXEC)  # O_PATH: opens no device and waits for no pipe
            except (OSError, ValueError):  # raised also for a name that is too long or holds a zero byte
                continue
            try:
                # The opened file is checked, not its path, so changing a link meanwhile has no effect.
                if self._may_read(handle):
                    return open(f"/proc/self/fd/{handle}", "rb"), path.absolute()  # noqa: PTH123
            except OSError:
                continue
            finally:
                os.close(handle)
        raise self._nothing_there(source, folder)

    def _may_read(self, handle: int) -> bool:
        """Return True if the opened file is a regular file that really lies below an allowed folder, links resolved."""
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            return False
        if (roots := self.rules.roots) is None:
            return True
        path = Path(f"/proc/self/fd/{handle}").readlink()
        return any(path.is_relative_to(root.resolve()) for root in roots)

    def _nothing_there(self, source: str, folder: Path) -> MediaError:
        """Return an error that does not tell whether the file is missing or may not be read."""
        rules = self.rules
        if rules.roots is None:
            found = f"no file {folder.absolute() / source}" if len(source) <= SHOWN_CHARS else "no file of that name"
            return media_error(
                source, f"{found}, and no base64 of an image", FIVE_WAYS, "correct the path or the string"
            )
        if not rules.roots:
            remedy = f"set {rules.keys}allowed_image_roots, or send the image itself as base64"
            return media_error(source, "no base64 of an image, and local paths are not allowed", FIVE_WAYS, remedy)
        roots = ", ".join(str(root) for root in rules.roots)
        found = f"no such file in an allowed folder ({roots}), and no base64 of an image"
        return media_error(
            source, found, FIVE_WAYS, f"correct the path, or add its folder to {rules.keys}allowed_image_roots"
        )

    def _from_data_url(self, source: str) -> bytes:
        header, comma, body = source.partition(",")
        if not comma:
            raise media_error(
                source, "a data URL without a comma", "data:image/png;base64,...", "encode the image again"
            )
        if body.count("%") > _MOST_PERCENTS:
            found = f"{body.count('%')} percent signs"
            raise media_error(source, found, f"at most {_MOST_PERCENTS}", "send base64 without percent-encoding")
        if not header.lower().endswith(";base64"):
            check_bytes(len(body) // 3, source, self.rules)
            return unquote_to_bytes(body)
        try:
            return self._decoded(unquote(body) if "%" in body else body, source)
        except (binascii.Error, ValueError) as error:
            raise media_error(
                source, f"text that is not base64 ({error})", "base64", "encode the image again"
            ) from error

    def _from_base64(self, source: str) -> bytes | None:
        """Return the decoded bytes, or None if the text is not base64."""
        try:
            return self._decoded(source, source)
        except (binascii.Error, ValueError):
            return None

    def _decoded(self, text: str, source: str) -> bytes:
        """Decode base64, with or without line breaks. Raises ValueError, MediaError."""
        data = text.encode("ascii").translate(None, _SPACES)
        # The size is checked before decoding, because decoding takes memory.
        check_bytes(len(data) * 3 // 4 - 2, source, self.rules)
        # Without `validate` foreign characters would be skipped, and a path could be taken for base64.
        return base64.b64decode(data, validate=True)

    # ---- headers ---------------------------------------------------------------------------------------------------

    def _open(self, file: IO[bytes], source: str) -> Image.Image:
        """Return the image with its header read, but not its pixels. Raises MediaError for too many pixels."""
        # The size is checked first, because Pillow allocates memory for all pixels of a WebP when it opens the file.
        self._check_pixels(*_webp_size(file), source)
        image = Image.open(file, formats=FORMATS)
        self._check_pixels(image.width, image.height, source)
        return image

    def _check_pixels(self, width: int, height: int, source: str) -> None:
        most, num_pixels = self.rules.max_pixels, width * height
        if num_pixels > most:
            remedy = f"shrink the image, or raise {self.rules.keys}max_image_pixels"
            raise media_error(source, f"{width}x{height} = {num_pixels} pixels", f"at most {most}", remedy)


# ---- rule ----------------------------------------------------------------------------------------------------------


def _way_of(source: str, folder: Path = Path()) -> Way:
    """Return which of the five ways a string uses. Only the first bytes of base64 are checked."""
    start = source[:8].lower()
    if start.startswith("data:"):
        return "data"
    if start.startswith(("http://", "https://")):
        return "http"
    if start.startswith("file://"):
        return "file"
    if _looks_like_image(source) and not (len(source) < _LONGEST_PATH and is_file(folder / source)):
        return "base64"
    return "path"


def _looks_like_image(text: str) -> bool:
    """Return True if the text is base64 whose first bytes are those of an image."""
    head = "".join(text[: 2 * _SIGNATURE_CHARS].split())[:_SIGNATURE_CHARS]
    try:
        return _SIGNATURE.match(base64.b64decode(head, validate=True)) is not None
    except (binascii.Error, ValueError):
        return False


def _paths_in(source: str) -> tuple[str, ...]:
    """Return a `file://` URL's path, with and without percent-decoding; any other string as it is."""
    if source[:7].lower() != "file://":
        return (source,) if len(source) < _LONGEST_PATH else ()
    path = source[7:].removeprefix("localhost") if source[7:].startswith("localhost/") else source[7:]
    return (unquote(path), path)


def _num_bytes(file: IO[bytes]) -> int:
    num_bytes = file.seek(0, io.SEEK_END)
    file.seek(0)
    return num_bytes


def _webp_size(file: IO[bytes]) -> tuple[int, int]:
    """Return (width, height) of a WebP's canvas; zeros for another format."""
    head = file.read(30).ljust(30, b"\0")
    file.seek(0)
    if head[:4] != b"RIFF" or head[8:12] != b"WEBP":
        return 0, 0
    if head[12:16] == b"VP8X":
        return 1 + int.from_bytes(head[24:27], "little"), 1 + int.from_bytes(head[27:30], "little")
    if head[12:16] == b"VP8L":
        bits = int.from_bytes(head[21:25], "little")
        return 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
    width, height = struct.unpack("<HH", head[26:30])
    return width & 0x3FFF, height & 0x3FFF


# ---- pixels --------------------------------------------------------------------------------------------------------


def _orientation(image: Image.Image) -> int:
    try:
        value = image.getexif().get(_ORIENTATION, 1)
    except _DECODING_ERRORS:  # an image with broken EXIF counts as not turned
        return 1
    return value if isinstance(value, int) else 1


def _upright(image: Image.Image) -> Image.Image:
    """Return a loaded image, turned by its EXIF orientation. (Loading a TIFF already turns it.)"""
    method = _TRANSPOSE.get(_orientation(image))
    return image if method is None else image.transpose(method)


def _upright_size(image: Image.Image, file: IO[bytes]) -> tuple[int, int]:
    """Return `_upright(image).size`, without decoding if the header is enough."""
    if image.format == "PNG" and "exif" not in image.info and not _png_has_exif(file):
        # The orientation is not read here: Pillow would decode the whole image to look for an EXIF chunk.
        return image.size
    turned = 5 <= _orientation(image) <= 8
    # Versions of Pillow give different sizes of a turned TIFF before the image is loaded.
    if turned and image.format == "TIFF":
        image.load()
        return image.size
    return (image.height, image.width) if turned else image.size


def _png_has_exif(file: IO[bytes]) -> bool:
    place = file.tell()
    file.seek(8)
    found = False
    while not found and len(head := file.read(8)) == 8:
        length, name = struct.unpack(">I4s", head)
        found = name == b"eXIf"
        file.seek(length + 4, io.SEEK_CUR)
    file.seek(place)
    return found


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I"):  # 16-bit grey; some versions of Pillow clip it at 255 when converting
        wide = image.convert("I")
        _, most = wide.getextrema()
        if isinstance(most, int | float) and most > 0xFFFF:
            raise ValueError(f"grey values up to {most}, more than 16 bits")
        image = wide.point(lambda value: value * (1 / 257) + 0.5).convert("L")
    elif image.mode == "F":
        raise ValueError("floating-point pixels, whose range is unknown")
    elif "A" in image.getbands() or "transparency" in image.info:
        # The stored color of transparent pixels is mostly black, which would hide a dark drawing from the model.
        seen = image.convert("RGBA")
        if seen.getchannel("A").getextrema() != (255, 255):
            image = Image.alpha_composite(Image.new("RGBA", seen.size, "white"), seen)
    return image.convert("RGB")
