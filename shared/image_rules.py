"""The rules for images, and the error for an image that breaks them (D13)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from shared.errors import MediaError
from shared.masking import bare_url

SHOWN_CHARS = 200


@dataclass(frozen=True, kw_only=True)
class ImageRules:
    """Where images may come from, and how large they may be. `keys`: the prefix of configuration keys in messages."""

    roots: tuple[Path, ...] | None = None  # folders of local images; (): no local images; None: any folder
    hosts: tuple[str, ...] = ()  # hosts from which images may be fetched
    timeout_s: float = 10.0  # max seconds for fetching one image
    max_bytes: int = 32 << 20  # max bytes of one encoded (compressed) image
    max_pixels: int = 64_000_000  # max width x height of one image
    cache_bytes: int = 0  # max bytes of fetched images kept in memory
    keys: str = "data."


def short(source: str) -> str:
    """Return an image string as messages show it: shortened, and a URL without user, password and query."""
    if source[:8].lower().startswith(("http://", "https://")):
        source = bare_url(source)
    return source if len(source) <= SHOWN_CHARS else f"{source[:60]}... ({len(source)} characters)"


def media_error(source: str, found: str, wanted: str, remedy: str) -> MediaError:
    return MediaError(f"image {short(source)!r} can't be used", found=found, wanted=wanted, remedy=remedy)


def check_bytes(num_bytes: int, source: str, rules: ImageRules) -> None:
    """Raises MediaError if the encoded image is too large."""
    if num_bytes > rules.max_bytes:
        found, wanted = f"more than {rules.max_bytes} bytes", f"at most {rules.max_bytes} bytes"
        raise media_error(source, found, wanted, "shrink the image")
