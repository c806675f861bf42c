"""Images are decoded in processes that can be ended, within budgets (R16)."""

from __future__ import annotations

import base64
import functools
import io
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from rollout_server import decoding
from rollout_server.config import ServerConfig
from rollout_server.decoding import Decoders
from rollout_server.processes import cpu_seconds
from shared.errors import MediaError, RequestError, ServerBusyError
from shared.images import FORMATS, ImageRules, Images
from shared.processes import descendants
from tests.waits import wait_until

ROOT = Path(__file__).parents[3]


def text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def encoded(size: tuple[int, int], form: str = "PNG", **how: Any) -> bytes:
    out = io.BytesIO()
    Image.linear_gradient("L").resize(size).convert("RGB").save(out, form, **how)
    return out.getvalue()


@functools.cache
def with_scans(size: tuple[int, int], num_scans: int) -> bytes:
    """Return a progressive JPEG whose last scan comes again and again."""
    data = encoded(size, "JPEG", progressive=True)
    last = data[data.rindex(b"\xff\xda") : -2]
    return data[:-2] + last * (num_scans - data.count(b"\xff\xda")) + data[-2:]


@pytest.fixture
def start() -> Iterator[Callable[..., Decoders]]:
    started: list[Decoders] = []

    def start(**settings: Any) -> Decoders:
        started.append(Decoders(ServerConfig(model="m", **settings)))
        return started[-1]

    yield start
    for decoders in started:
        decoders.close()


@pytest.mark.parametrize("form", FORMATS)
def test_the_pixels_are_the_same(start: Callable[..., Decoders], form: str) -> None:
    source = text(encoded((37, 21), form))
    decoders = start()
    with_process = decoders.load([source, source], decoders.share())
    assert {image.tobytes() for image in with_process} == {Images(ImageRules()).load(source).tobytes()}


def test_packages_in_the_working_directory_are_not_imported(
    start: Callable[..., Decoders], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "rollout_server").mkdir()
    (tmp_path / "rollout_server" / "__init__.py").write_text("raise RuntimeError")
    monkeypatch.chdir(tmp_path)
    decoders = start()
    (image,) = decoders.load([text(encoded((4, 4)))], decoders.share())
    assert image.size == (4, 4)


def test_errors_name_the_string_and_the_process_goes_on(start: Callable[..., Decoders]) -> None:
    decoders = start(max_image_pixels=1000)
    for data, found in {
        b"\x89PNG\r\n\x1a\n" + bytes(20): "not an image",
        encoded((100, 100)): "100x100 = 10000 pixels",
        encoded((20, 20))[:-30]: "not an image",
    }.items():
        source = text(data)
        with pytest.raises(MediaError, match=found) as raised:
            decoders.load([source], decoders.share())
        assert source[:30] in str(raised.value)
    before = descendants(os.getpid())
    decoders.load([text(encoded((4, 4)))], decoders.share())
    assert descendants(os.getpid()) == before


def test_thousands_of_scans_are_not_decoded(start: Callable[..., Decoders]) -> None:
    decoders = start()
    source, others = text(with_scans((1000, 1000), 1000)), descendants(os.getpid())
    decoders.load([text(encoded((4, 4)))], decoders.share())
    (process,) = descendants(os.getpid()) - others
    before = cpu_seconds([process])[process]
    with pytest.raises(MediaError, match="too long to decode"):
        decoders.load([source], decoders.share())
    assert cpu_seconds([process])[process] - before < 1.0
    decoders.load([text(with_scans((100, 100), 20))], decoders.share())


def test_the_pixels_of_a_request_have_a_limit_together(
    start: Callable[..., Decoders], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decoding, "MOST_COST", 20_000)
    decoders = start()
    source = text(encoded((100, 100)))
    assert len(decoders.load([source] * 2, decoders.share())) == 2
    with pytest.raises(MediaError, match="found 30000 pixels"):
        decoders.load([source] * 3, decoders.share())


def test_decoding_ends_at_its_deadline_and_when_nobody_waits(
    start: Callable[..., Decoders], monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = text(with_scans((4000, 4000), 900))
    monkeypatch.setattr(decoding, "MOST_COST", 10**12)
    decoders = start()
    with monkeypatch.context() as hasty:
        hasty.setattr(decoding, "DECODE_S", 0.4)
        with pytest.raises(MediaError, match="no end of decoding"):
            decoders.load([slow], decoders.share())
    decoders, others = start(), descendants(os.getpid())
    share = decoders.share()
    threading.Timer(0.4, share.close).start()
    with pytest.raises(RequestError, match="hung up"):
        decoders.load([slow], share)
    assert descendants(os.getpid()) <= others  # it is gone
    decoders.load([text(encoded((4, 4)))], decoders.share())


PAUSED = """
import os, signal, sys
from rollout_server import decoding
from rollout_server.config import ServerConfig
from shared.processes import descendants
from tests.pauses import pause_soon

decoding.DECODE_S = 2.0
decoders, source = decoding.Decoders(ServerConfig(model="m")), sys.stdin.read()
decoders.load([source], decoders.share())
(process,) = descendants(os.getpid())
os.kill(process, signal.SIGSTOP)
pause_soon(0.2, 2.5, wake=process)
print(*decoders.load([source], decoders.share())[0].size)
decoders.close()
"""


@pytest.mark.slow
def test_a_pause_of_the_server_is_not_the_pictures_fault() -> None:
    """It is decoded while the server stands still, for longer than decoding may take."""
    command = [sys.executable, "-c", PAUSED]
    source = text(encoded((1000, 900)))
    done = subprocess.run(command, cwd=ROOT, input=source, capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("1000 900\n", "")


def test_an_image_that_ends_its_process_ends_no_other(
    start: Callable[..., Decoders], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decoding, "MOST_COST", 10**12)
    decoders, others = start(), descendants(os.getpid())
    decoders.load([text(encoded((4, 4)))], decoders.share())
    (process,) = descendants(os.getpid()) - others
    before = cpu_seconds([process])[process]

    def kill_it() -> None:
        wait_until(lambda: cpu_seconds([process])[process] > before + 0.1)  # it decodes
        os.kill(process, signal.SIGSEGV)

    killing = threading.Thread(target=kill_it)
    killing.start()
    with pytest.raises(MediaError, match="exit code -11"):
        decoders.load([text(with_scans((4000, 4000), 900))], decoders.share())
    killing.join()
    decoders.load([text(encoded((4, 4)))], decoders.share())


def test_decoded_images_have_a_limit_together(start: Callable[..., Decoders], monkeypatch: pytest.MonkeyPatch) -> None:
    source = text(encoded((100, 100)))
    monkeypatch.setattr(decoding, "MOST_PIXELS", 15_000)
    hasty = start(queue_timeout_s=0.3)
    hasty.load([source], hasty.share())
    with pytest.raises(ServerBusyError, match="hold too much memory"):
        hasty.load([source], hasty.share())
    decoders = start(queue_timeout_s=60.0)
    first, second = decoders.share(), decoders.share()
    decoders.load([source], first)
    threading.Timer(0.1, first.close).start()
    decoders.load([source], second)
    second.close()
    second.close()
    decoders.load([source], decoders.share())


def test_a_process_knows_no_secret_and_hears_no_ctrl_c(
    start: Callable[..., Decoders], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROLLOUT_SERVER_TOKEN", "secret")
    decoders, others = start(), descendants(os.getpid())
    decoders.load([text(encoded((4, 4)))], decoders.share())
    (process,) = descendants(os.getpid()) - others
    assert b"secret" not in Path(f"/proc/{process}/environ").read_bytes()
    assert os.getpgid(process) != os.getpgid(0)


@pytest.mark.parametrize("lossless", [False, True])
def test_the_size_of_a_webp_is_checked_before_its_decoder_runs(monkeypatch: pytest.MonkeyPatch, lossless: bool) -> None:
    """Pillow takes memory for all of its pixels on opening it."""
    source = text(encoded((300, 200), "WEBP", lossless=lossless))
    assert Images(ImageRules(max_pixels=60_000)).load(source).size == (300, 200)
    monkeypatch.setattr(Image, "open", lambda *args, **kwargs: pytest.fail("opened"))
    with pytest.raises(MediaError, match="300x200 = 60000 pixels"):
        Images(ImageRules(max_pixels=59_999)).load(source)
