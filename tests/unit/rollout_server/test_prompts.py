"""Which images a request may name (R13)."""

from __future__ import annotations

import base64
import io
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from PIL import Image

from rollout_server.config import ServerConfig
from rollout_server.prompts import load_image, load_images
from shared.errors import MediaError


def png(size: tuple[int, int] = (5, 3)) -> bytes:
    out = io.BytesIO()
    Image.new("RGBA", size, (255, 0, 0, 255)).save(out, "PNG")
    return out.getvalue()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.png").write_bytes(png())
    (tmp_path / "outside.png").write_bytes(png())
    (tmp_path / "in-the-neighbourhood").mkdir()
    (tmp_path / "in-the-neighbourhood" / "b.png").write_bytes(png())
    (tmp_path / "in" / "link.png").symlink_to(tmp_path / "outside.png")
    (tmp_path / "in" / "fine.png").symlink_to(tmp_path / "in" / "a.png")
    return tmp_path


def config(folder: Path, **settings: object) -> ServerConfig:
    return ServerConfig(model="m", allowed_image_roots=[folder / "in"], **settings)  # type: ignore[arg-type]


def test_paths_base64_and_data_urls_give_the_same_image(folder: Path) -> None:
    text = base64.b64encode(png()).decode()
    path = folder / "in" / "a.png"
    for source in (str(path), f"file://{path}", str(folder / "in" / "fine.png"), text, f"data:image/png;base64,{text}"):
        image = load_image(source, config(folder))
        assert (image.size, image.mode, image.getpixel((0, 0))) == ((5, 3), "RGB", (255, 0, 0))


@pytest.mark.parametrize(
    "name",
    ["outside.png", "in/../outside.png", "in/link.png", "in-the-neighbourhood/b.png", "in", "in/none.png", "in/\0"],
)
def test_nothing_outside_the_folders_is_read(folder: Path, name: str) -> None:
    """Also told apart from what does not exist by nothing."""
    with pytest.raises(MediaError, match="no such file in an allowed folder"):
        load_image(f"{folder}/{name}", config(folder))


def test_without_folders_there_are_no_paths(folder: Path) -> None:
    with pytest.raises(MediaError, match="allowed_image_roots"):
        load_image(str(folder / "in" / "a.png"), ServerConfig(model="m"))


def test_sizes_are_checked_before_decoding(folder: Path) -> None:
    text = base64.b64encode(png((300, 300))).decode()
    with pytest.raises(MediaError, match="300x300 = 90000 pixels"):
        load_image(text, config(folder, max_image_pixels=89_999))
    with pytest.raises(MediaError, match="more than 100 bytes"):
        load_image(text, config(folder, max_image_bytes=100))
    with pytest.raises(MediaError, match="more than 10 bytes"):
        load_image(str(folder / "in" / "a.png"), config(folder, max_image_bytes=10))
    header_only = png((300, 300))[:60]
    with pytest.raises(MediaError, match="300x300"):
        load_image(base64.b64encode(header_only).decode(), config(folder, max_image_pixels=1000))


@pytest.mark.parametrize(
    "source", ["x" * 500, base64.b64encode(b"no image" * 20).decode(), "data:image/png,", "data:x"]
)
def test_what_is_no_image_is_named_in_short(folder: Path, source: str) -> None:
    with pytest.raises(MediaError, match="can't be used") as error:
        load_image(source, config(folder))
    assert len(str(error.value)) < 500


def test_too_many_images(folder: Path) -> None:
    with pytest.raises(MediaError, match="at most 2"):
        load_images(["a.png"] * 3, config(folder, max_images_per_request=2))


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        if self.path == "/elsewhere":
            self.send_response(302)
            self.send_header("Location", "http://localhost:1/secret.png")
            self.end_headers()
        elif self.path == "/near":
            self.send_response(302)
            self.send_header("Location", "/a.png")
            self.end_headers()
        elif self.path == "/a.png":
            self.send_response(200)
            self.end_headers()
            self.wfile.write(png())
        else:
            self.send_error(404)

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join(5)
    server.server_close()


def test_urls_of_allowed_hosts_only_and_no_way_around(folder: Path, url: str) -> None:
    allowed = config(folder, allowed_image_hosts=["127.0.0.1"])
    assert load_image(f"{url}/a.png", allowed).size == (5, 3)
    assert load_image(f"{url}/near", allowed).size == (5, 3)
    for bad, found in {
        f"{url}/elsewhere": "host 'localhost'",
        f"{url}/none.png": "HTTP 404",
        url.replace("127.0.0.1", "localhost") + "/a.png": "host 'localhost'",
    }.items():
        with pytest.raises(MediaError, match=found):
            load_image(bad, allowed)
    with pytest.raises(MediaError, match="more than 20 bytes"):
        load_image(f"{url}/a.png", config(folder, allowed_image_hosts=["127.0.0.1"], max_image_bytes=20))
    with pytest.raises(MediaError, match="one of: none"):
        load_image(f"{url}/a.png", config(folder))
