"""One rule for image strings (D13, R13): what is read, what is refused, and that pixels are upright and 8-bit."""

from __future__ import annotations

import asyncio
import base64
import collections
import contextlib
import io
import itertools
import os
import pickle
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from shared.errors import MediaError
from shared.images import FORMATS, ImageRules, Images
from tests.waits import DEADLINE_S

ROOT = Path(__file__).parents[3]
LOSSLESS = ("PNG", "BMP", "TIFF")
TURNED = {1: (30, 20), 2: (30, 20), 3: (30, 20), 4: (30, 20), 5: (20, 30), 6: (20, 30), 7: (20, 30), 8: (20, 30)}


def encoded(size: tuple[int, int] = (5, 3), form: str = "PNG", orientation: int = 1) -> bytes:
    """Red, with a blue corner at the top left of the stored pixels."""
    image = Image.new("RGB", size, (255, 0, 0))
    image.paste((0, 0, 255), (0, 0, size[0] // 3, size[1] // 3))
    exif = Image.Exif()
    exif[0x0112] = orientation
    out = io.BytesIO()
    image.save(out, form, **({} if orientation == 1 else {"exif": exif}))
    return out.getvalue()


def text(data: bytes) -> str:
    return base64.b64encode(data).decode()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.png").write_bytes(encoded())
    (tmp_path / "in" / "a b#1.png").write_bytes(encoded())
    (tmp_path / "outside.png").write_bytes(encoded())
    (tmp_path / "in-the-neighbourhood").mkdir()
    (tmp_path / "in-the-neighbourhood" / "b.png").write_bytes(encoded())
    (tmp_path / "in" / "link.png").symlink_to(tmp_path / "outside.png")
    (tmp_path / "in" / "fine.png").symlink_to(tmp_path / "in" / "a.png")
    return tmp_path


def fenced(folder: Path, **rules: object) -> Images:
    """Return images as a server has them: local ones below one folder only."""
    return Images(ImageRules(roots=(folder / "in",), **rules))  # type: ignore[arg-type]


# ---- the five ways -------------------------------------------------------------------------------------------------


def test_every_way_to_name_an_image_gives_the_same_pixels(folder: Path) -> None:
    path = folder / "in" / "a.png"
    body = text(encoded())
    ways = [
        str(path),
        f"file://{path}",
        f"file://localhost{path}",
        f"file://{folder}/in/a%20b%231.png",
        f"file://{folder}/in/a b#1.png",
        str(folder / "in" / "fine.png"),
        body,
        "\n".join(body[i : i + 76] for i in range(0, len(body), 76)),  # mail and `base64` wrap it so
        f"data:image/png;base64,{body}",
        f"DATA:image/png;base64,{body}",
    ]
    for images in (fenced(folder), Images(ImageRules())):
        for source in ways:
            image = images.load(source)
            assert (image.size, image.mode, image.getpixel((4, 2))) == ((5, 3), "RGB", (255, 0, 0))
            assert images.size(source) == (5, 3)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("size", [(2, 2), (300, 200)])
def test_base64_of_any_length_and_form_is_an_image(form: str, size: tuple[int, int]) -> None:
    """A smallest GIF has 60 characters: no length tells a path from base64."""
    source = text(encoded(size, form))
    images = Images(ImageRules())
    assert images.resolve(source) == source
    assert images.load(source).size == images.size(source) == size


def test_a_path_wins_where_a_file_of_that_name_exists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = text(encoded((1, 1), "BMP")).replace("/", "A")[:40]
    (tmp_path / source).write_bytes(encoded((7, 7)))
    monkeypatch.chdir(tmp_path)
    assert Images(ImageRules()).load(source).size == (7, 7)
    assert Images(ImageRules()).resolve(source, tmp_path) == str(tmp_path / source)


def test_paths_are_made_absolute_and_the_rest_stays(folder: Path) -> None:
    images = Images(ImageRules(hosts=("host",)))
    assert images.resolve("in/a.png", folder) == str(folder / "in/a.png")
    assert images.resolve(str(folder / "outside.png"), folder / "in") == str(folder / "outside.png")
    assert images.resolve(f"file://{folder}/in/a.png") == str(folder / "in/a.png")
    for source in ("https://host/a.png", "data:image/png;base64,iVBO", text(encoded())):
        assert images.resolve(source, folder) == source


@pytest.mark.parametrize("source", ["images/2.png", "", "x" * 500, "A" * 5000, text(b"no image" * 20), "\0", "host/a"])
def test_what_is_none_of_them_is_refused_with_all_five(folder: Path, source: str) -> None:
    for images in (Images(ImageRules()), fenced(folder), Images(ImageRules(roots=()))):
        for use in (images.load, images.size, images.resolve):
            with pytest.raises(MediaError) as raised:
                use(source)
            error = raised.value
            assert all(way in error.wanted for way in ("data:", "http(s)://", "file://", "path", "base64"))
            assert error.found
            assert error.remedy
            assert len(str(error)) < 900


@pytest.mark.parametrize("source", ["data:image/png,", "data:x", "data:image/png;base64,????", "data:;base64,AAAA"])
def test_a_data_url_without_an_image_is_refused(source: str) -> None:
    with pytest.raises(MediaError, match="can't be used"):
        Images(ImageRules()).load(source)


# ---- what may be read ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    ["outside.png", "in/../outside.png", "in/link.png", "in-the-neighbourhood/b.png", "in", "in/none.png", "in/\0"],
)
@pytest.mark.parametrize("scheme", ["", "file://"])
def test_nothing_outside_the_folders_is_read(folder: Path, name: str, scheme: str) -> None:
    """The message is the same as for a file that does not exist."""

    def message(path: str) -> tuple[str, str, str]:
        """Return all but the string itself, which the client sent."""
        with pytest.raises(MediaError) as raised:
            fenced(folder).load(path)
        return raised.value.found, raised.value.wanted, raised.value.remedy

    assert message(f"{scheme}{folder}/{name}") == message(f"{scheme}{folder}/in/certainly-not-there")


def test_a_link_that_changes_meanwhile_gains_nothing(folder: Path) -> None:
    """It leads inside and outside in turn, as a file and as a folder on the way."""
    (folder / "outside.png").write_bytes(encoded((9, 9)))
    (folder / "in" / "way").mkdir()
    (folder / "in" / "way" / "b.png").write_bytes(encoded())
    (folder / "in-the-neighbourhood" / "b.png").write_bytes(encoded((9, 9)))
    images, stop = fenced(folder), threading.Event()
    turned = {"a": ("a.png", "../outside.png"), "d": ("way", "../in-the-neighbourhood")}

    def turn() -> None:
        for i in itertools.count():
            for name, goals in turned.items():
                (folder / "new").symlink_to(goals[i % 2])
                (folder / "new").rename(folder / "in" / name)
            if stop.is_set():
                return

    turning = threading.Thread(target=turn)
    turning.start()
    found: collections.Counter[object] = collections.Counter()
    deadline = time.monotonic() + DEADLINE_S
    while len(found) < 2 or found.total() < 2000:
        assert time.monotonic() < deadline, found
        for name in ("a", "d/b.png"):
            try:
                found[images.load(str(folder / "in" / name)).size] += 1
            except MediaError:
                found["refused"] += 1
    stop.set()
    turning.join()
    assert found.keys() == {(5, 3), "refused"}, found


def test_what_is_no_file_or_may_not_be_read_is_not_opened(folder: Path) -> None:
    """A pipe would wait for its writer."""
    os.mkfifo(folder / "in" / "pipe.png")
    (folder / "in" / "dev").symlink_to("/dev/zero")
    for name in ("pipe.png", "dev"):
        for images in (fenced(folder), Images(ImageRules())):
            with pytest.raises(MediaError):
                images.load(str(folder / "in" / name))


def test_without_folders_there_are_no_paths(folder: Path) -> None:
    with pytest.raises(MediaError, match="allowed_image_roots"):
        Images(ImageRules(roots=())).load(str(folder / "in" / "a.png"))


def test_sizes_are_checked_before_decoding(folder: Path) -> None:
    body, header_only = text(encoded((300, 300))), text(encoded((300, 300))[:60])
    for use in ("load", "size"):
        with pytest.raises(MediaError, match=r"300x300 = 90000 pixels.*max_image_pixels"):
            getattr(fenced(folder, max_pixels=89_999), use)(body)
        with pytest.raises(MediaError, match=r"more than 100 bytes.*at most 100 bytes"):
            getattr(fenced(folder, max_bytes=100), use)(body)
        with pytest.raises(MediaError, match="more than 10 bytes"):
            getattr(fenced(folder, max_bytes=10), use)(str(folder / "in" / "a.png"))
        with pytest.raises(MediaError, match="300x300"):
            getattr(fenced(folder, max_pixels=1000), use)(header_only)


def test_a_form_outside_the_list_is_refused(tmp_path: Path) -> None:
    """Pillow opens some 40 formats, some through other programs."""
    Image.new("RGB", (4, 4)).save(tmp_path / "a.ppm")
    Image.new("RGB", (4, 4)).save(tmp_path / "a.eps")
    for name in ("a.ppm", "a.eps"):
        with pytest.raises(MediaError, match="not an image"):
            Images(ImageRules()).load(str(tmp_path / name))


@pytest.mark.parametrize(
    "data",
    [
        b"\0\0\0\x1cftypavif" + bytes(200),
        b"BLP2" + bytes(200),
        b"BLP1\0\0\0\0" + b"\xff" * 200,
        b"DDS " + b"\xff" * 200,
        b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n",
        b"8BPS" + bytes(200),
    ],
)
def test_broken_images_of_other_forms_are_the_senders_fault(tmp_path: Path, data: bytes) -> None:
    """They may be sent in any way. Their readers raise what they like: none of them runs."""
    (tmp_path / "a.png").write_bytes(data)
    for source in (str(tmp_path / "a.png"), f"data:image/png;base64,{text(data)}", text(data)):
        for use in (Images(ImageRules()).load, Images(ImageRules()).size):
            with pytest.raises(MediaError):
                use(source)


# ---- pixels --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP", "TIFF"])
@pytest.mark.parametrize("orientation", list(TURNED))
def test_images_come_upright(form: str, orientation: int) -> None:
    """EXIF orientation 6: the stored top left corner is the upright picture's top right one."""
    source = text(encoded((30, 20), form, orientation))
    image = Images(ImageRules()).load(source)
    assert image.size == TURNED[orientation] == Images(ImageRules()).size(source)
    right, low = orientation in (2, 3, 6, 7), orientation in (3, 4, 7, 8)
    blue = np.asarray(image)[..., 2] > 128
    rows, columns = np.nonzero(blue)
    assert (columns.mean() > image.width / 2, rows.mean() > image.height / 2) == (right, low)
    assert Images(ImageRules()).load(text(_saved(image))).size == image.size  # turned once, not twice


def _saved(image: Image.Image) -> bytes:
    out = io.BytesIO()
    image.save(out, "PNG")
    return out.getvalue()


def test_a_png_may_say_its_orientation_behind_its_pixels() -> None:
    data = encoded((30, 20), "PNG", 6)
    at = data.index(b"eXIf") - 4
    chunk = data[at : at + 12 + int.from_bytes(data[at : at + 4], "big")]
    moved = data.replace(chunk, b"").replace(b"\0\0\0\0IEND", chunk + b"\0\0\0\0IEND")
    assert moved.index(b"IDAT") < moved.index(b"eXIf")
    images = Images(ImageRules())
    assert images.load(text(moved)).size == images.size(text(moved)) == (20, 30)


def test_broken_exif_says_nothing() -> None:
    data = encoded((30, 20), "JPEG", 6)
    broken = data.replace(b"Exif\0\0MM", b"Exif\0\0??").replace(b"Exif\0\0II", b"Exif\0\0??")
    assert broken != data
    assert Images(ImageRules()).load(text(broken)).size == Images(ImageRules()).size(text(broken)) == (30, 20)


@pytest.mark.parametrize("form", ["PNG", "TIFF"])
def test_16_bit_grey_is_scaled_not_cut_off(form: str) -> None:
    grey = np.linspace(0, 65535, 64 * 64).astype(np.uint16).reshape(64, 64)
    out = io.BytesIO()
    Image.fromarray(grey).save(out, form)
    found = np.asarray(Images(ImageRules()).load(text(out.getvalue())))
    assert np.abs(found[..., 0] - grey / 257).max() <= 1
    assert (found[..., 0] == found[..., 1]).all()


@pytest.mark.parametrize(
    ("mode", "form"), [("RGBA", "PNG"), ("RGBA", "WEBP"), ("LA", "PNG"), ("P", "PNG"), ("P", "GIF")]
)
def test_what_is_transparent_is_white(mode: str, form: str) -> None:
    """As people see it. The colour that a tool left there, mostly black, is no part of the picture."""
    picture = Image.new("RGBA", (60, 20), (0, 0, 0, 0))
    picture.paste((200, 200, 200, 255), (20, 0, 40, 20))
    if mode == "P":
        indexed = Image.new("P", (60, 20), 0)
        indexed.putpalette([0, 0, 0, 200, 200, 200])
        indexed.paste(1, (20, 0, 40, 20))
        picture = indexed
    elif mode == "RGBA":
        picture.paste((0, 0, 0, 128), (40, 0, 60, 20))
    out = io.BytesIO()
    (picture if mode == "P" else picture.convert(mode)).save(
        out, form, lossless=True, exact=True, **({"transparency": 0} if mode == "P" else {})
    )
    found = Images(ImageRules()).load(text(out.getvalue()))
    left, middle, right = (found.getpixel((x, 10)) for x in (10, 30, 50))
    assert (found.mode, left, middle) == ("RGB", (255, 255, 255), (200, 200, 200))
    assert right == ((127, 127, 127) if mode == "RGBA" else (255, 255, 255))


def test_an_opaque_picture_keeps_its_pixels() -> None:
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 256, (20, 30, 3), dtype=np.uint8))
    out = io.BytesIO()
    picture.convert("RGBA").save(out, "PNG")
    assert Images(ImageRules()).load(text(out.getvalue())).tobytes() == picture.tobytes()


def test_floating_point_pixels_are_refused() -> None:
    out = io.BytesIO()
    Image.fromarray(np.ones((4, 4), np.float32)).save(out, "TIFF")
    with pytest.raises(MediaError, match="floating-point"):
        Images(ImageRules()).load(text(out.getvalue()))


# ---- URLs ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("use", ["load", "resolve", "size"])
def test_a_url_is_shown_without_what_may_be_secret(use: str) -> None:
    """User, password and query, whatever is wrong: another host, no answer, no URL, a character that none may have."""
    images = Images(ImageRules(hosts=("127.0.0.1",), timeout_s=5.0))
    for url in (
        "http://u:geheim@elsewhere/a.png?token=geheim",
        "http://u:geheim@127.0.0.1:x/a.png?token=geheim",
        "http://u:geheim@127.0.0.1:1/a.png?token=geheim",
        "http://u:geheim\u2100@127.0.0.1/a.png",
        "http://127.0.0.1:1/\x7fa.png?token=geheim",
        "http://[::1/a.png?token=geheim",
    ):
        if use == "resolve" and ":1/" in url:
            continue  # this one asks nobody
        with pytest.raises(MediaError) as raised:
            getattr(images, use)(url)
        assert "eheim" not in str(raised.value)
        assert "http://" in str(raised.value)


class Handler(BaseHTTPRequestHandler):
    asked: list[str] = []

    def do_GET(self) -> None:
        self.asked.append(self.path)
        if self.path in ("/elsewhere", "/near", "/round"):
            goal = {"/elsewhere": "http://localhost:1/secret.png", "/near": "/a.png", "/round": "/round"}[self.path]
            self.send_response(302)
            self.send_header("Location", goal)
            self.end_headers()
        elif self.path in ("/a.png", "/a%20b.png", "/late.png"):
            time.sleep(0.5 if self.path == "/late.png" else 0)
            self.send_response(200)
            self.end_headers()
            self.wfile.write(encoded())
        elif self.path == "/cut.png":
            self.cut(len(encoded()))
        elif self.path == "/cut-without-length.png":
            self.cut(None)
        else:
            self.send_error(404)

    def log_message(self, *args: object) -> None:
        pass

    def cut(self, length: int | None) -> None:
        """The first answer has half of the image, later ones all of it."""
        data = encoded()
        self.send_response(200)
        if length is not None:
            self.send_header("Content-Length", str(length))
        self.end_headers()
        self.wfile.write(data if self.asked.count(self.path) > 1 else data[: len(data) // 2])


@pytest.fixture
def url() -> Iterator[str]:
    server = HTTPServer(("127.0.0.1", 0), Handler)
    Handler.asked.clear()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join(5)
    server.server_close()


def test_urls_of_allowed_hosts_only_and_no_way_around(url: str) -> None:
    allowed = Images(ImageRules(hosts=("127.0.0.1",)))
    for path in ("/a.png", "/near", "/a b.png", "/a%20b.png"):
        assert allowed.load(url + path).size == (5, 3)
    for bad, found in {
        f"{url}/elsewhere": "host 'localhost'",
        f"{url}/round": "redirects",
        f"{url}/none.png": "HTTP 404",
        url.replace("127.0.0.1", "localhost") + "/a.png": "host 'localhost'",
        "http://127.0.0.1:1/a.png": "refused",
        f"{url.replace('127.0.0.1', 'user@127.0.0.1')}/none.png": "HTTP 404",
        "http://127.0.0.1:x/a.png": "no URL",
        "http://[::1/a.png": "no URL",
    }.items():
        with pytest.raises(MediaError, match=found):
            allowed.load(bad)
    with pytest.raises(MediaError, match="more than 20 bytes"):
        Images(ImageRules(hosts=("127.0.0.1",), max_bytes=20)).load(f"{url}/a.png")
    for use in ("load", "resolve"):
        with pytest.raises(MediaError, match=r"one of: none.*data\.allowed_image_hosts"):
            getattr(Images(ImageRules()), use)(f"{url}/a.png")


def test_a_url_is_fetched_where_an_event_loop_runs(url: str) -> None:
    """A notebook calls everything inside its own event loop."""

    async def cell() -> Image.Image:
        return Images(ImageRules(hosts=("127.0.0.1",))).load(f"{url}/a.png")

    assert asyncio.run(cell()).size == (5, 3)


SLOW = {
    "nothing": b"",
    "headers": b"HTTP/1.1 200 OK\r\nX: ",
    "a body": b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n",
    "a redirect": b"HTTP/1.1 302 Found\r\nLocation: /\r\nContent-Length: 100000\r\n\r\n",
}


@pytest.mark.parametrize("what", SLOW)
def test_the_whole_fetch_has_a_deadline(what: str) -> None:
    """Though every byte comes soon after the one before."""
    listener = socket.create_server(("127.0.0.1", 0))
    stop = threading.Event()

    def answer() -> None:
        links = []
        while not stop.is_set():
            with contextlib.suppress(OSError):
                links.append(listener.accept()[0])
                links[-1].sendall(SLOW[what])
                while what != "nothing":
                    links[-1].sendall(b"x")
                    time.sleep(0.05)

    thread = threading.Thread(target=answer, daemon=True)
    thread.start()
    images = Images(ImageRules(hosts=("127.0.0.1",), timeout_s=0.5))
    begin = time.monotonic()
    with pytest.raises(MediaError, match=r"network|redirects"):
        images.load(f"http://127.0.0.1:{listener.getsockname()[1]}/a.png")
    assert time.monotonic() - begin < DEADLINE_S
    stop.set()
    listener.close()


PAUSED = """
import sys
from shared.images import ImageRules, Images
from tests.pauses import pause_soon

images = Images(ImageRules(hosts=("127.0.0.1",), timeout_s=1.5))
pause_soon(0.2, 2.0)
print(*images.load(sys.argv[1]).size)
"""


@pytest.mark.slow
def test_a_pause_of_the_process_does_not_end_a_fetch(url: str) -> None:
    """The bytes come while it stands still, for longer than a fetch may take."""
    command = [sys.executable, "-c", PAUSED, f"{url}/late.png"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("5 3\n", "")


def test_the_environments_proxy_sees_no_image(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    assert Images(ImageRules(hosts=("127.0.0.1",))).load(f"{url}/a.png").size == (5, 3)


def test_an_image_is_fetched_once_while_the_cache_holds_it(url: str) -> None:
    size = len(encoded())
    images = Images(ImageRules(hosts=("127.0.0.1",), cache_bytes=size))
    for path in ("/a.png", "/a.png", "/near", "/near", "/a.png"):  # there is room for one
        images.load(url + path)
    assert Handler.asked == ["/a.png", "/near", "/a.png", "/a.png"]
    images.resolve(f"{url}/a.png")
    assert len(Handler.asked) == 4
    pickle.loads(pickle.dumps(images)).load(f"{url}/a.png")  # goes to a data worker: with the rules, without the cache
    assert len(Handler.asked) == 5


@pytest.mark.parametrize("use", ["load", "size"])
@pytest.mark.parametrize("path", ["/cut.png", "/cut-without-length.png"])
def test_an_image_that_came_in_part_is_fetched_again(url: str, path: str, use: str) -> None:
    """It was served cut for the rest of the process. Without a length only decoding finds it."""
    images = Images(ImageRules(hosts=("127.0.0.1",), cache_bytes=1 << 20))
    refused = pytest.raises(MediaError, match=r"ended after \d+ of \d+" if path == "/cut.png" else "not an image")
    with refused if use == "load" or path == "/cut.png" else contextlib.nullcontext():
        getattr(images, use)(url + path)
    if use == "size" and path != "/cut.png":  # its header was there
        with pytest.raises(MediaError):
            images.load(url + path)
    assert images.load(url + path).size == (5, 3)
