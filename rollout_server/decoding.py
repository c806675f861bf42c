"""Decodes images in separate processes, which can be killed (R16).

Decoding runs C code on untrusted bytes: it may take minutes, or crash its process. In: image strings. Out: decoded
images. `python -m rollout_server.decoding FD MAX_PIXELS` starts a decoding process. A decoding process has neither the
token nor the engine, and its memory is limited.

Invariants:
- a request is decoded only if the sum of pixels times scans over its images is at most MOST_COST;
- decoded images of all calls together have at most MOST_PIXELS pixels; a request's images count until its `PixelShare`
  is closed;
- a request is decoded within DECODE_S, not counting pauses of the server. After that, or when its `PixelShare` is
  closed, the decoding process is killed;
- each thread that decodes uses one process, which is started when it is first needed.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import resource
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from PIL import Image

from shared.errors import MediaError, RequestError, ServerBusyError
from shared.images import ImageRules, Images, media_error
from shared.waits import SLICE_S, Deadline

if TYPE_CHECKING:
    from rollout_server.config import ServerConfig

MOST_COST = 256_000_000  # max pixels times scans of one request's images: a measure of decoding time
MOST_PIXELS = 2_000_000_000  # max pixels in the images of all running requests; a pixel takes 4 bytes
DECODE_S = 20.0  # max seconds for decoding one request's images
_HEAD = struct.Struct("<cQ")  # header of a message: its kind (see below), and the number of bytes that follow
_LOOK, _DECODE, _ERROR = b"l", b"d", b"e"
_NUMBERS = struct.Struct("<QQ")
# environment variables that are passed on, because Python may not start without them
_VARIABLES = ("PATH", "LD_LIBRARY_PATH", "PYTHONHOME", "LANG")
_CHUNK_BYTES = 1 << 20
_BYTES_PER_PIXEL = 24  # max memory per pixel of an image, with all copies made by decoding, rotating and converting
_OTHER_BYTES = 1 << 30


class PixelShare:
    """The pixels of one request's decoded images, counted by a `Budget`. Closing the share gives these pixels back to
    the budget, and stops the request's decoding."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self._num_pixels = 0
        self.closed = threading.Event()

    def take(self, num_pixels: int) -> None:
        """Wait until `num_pixels` more are free. Raises ServerBusyError if that takes too long, RequestError if the
        share is closed."""
        self._budget.take(num_pixels, self.closed)
        self._num_pixels += num_pixels
        # If the share was closed during the wait, these pixels would never be given back.
        if self.closed.is_set():
            self.close()

    def close(self) -> None:
        self.closed.set()
        num_pixels, self._num_pixels = self._num_pixels, 0
        self._budget.give_back(num_pixels)


class Budget:
    """Counts the pixels of all decoded images. `take` waits while the sum would exceed `most`, but not if there is no
    other image."""

    def __init__(self, most: int, timeout_s: float) -> None:
        self._most, self._timeout_s = most, timeout_s
        self.num_held = 0
        self._changed = threading.Condition()

    def take(self, num_pixels: int, closed: threading.Event) -> None:
        deadline = Deadline(self._timeout_s)
        with self._changed:
            # A request waits only while there are other images. Without other images, waiting would make no room.
            while self.num_held and self.num_held + num_pixels > self._most:
                check_open(closed)
                if deadline.is_over():
                    raise ServerBusyError(
                        "images of the calls under way hold too much memory",
                        found=f"{self.num_held} pixels after {self._timeout_s:g} s",
                        wanted=f"at most {self._most} together, with the {num_pixels} of this request",
                        remedy="try again later, or send smaller images",
                    )
                self._changed.wait(SLICE_S)
            self.num_held += num_pixels

    def give_back(self, num_pixels: int) -> None:
        with self._changed:
            self.num_held -= num_pixels
            self._changed.notify_all()


class Decoders:
    """Reads and decodes the images of requests. All methods block, so call them on threads."""

    def __init__(self, config: ServerConfig) -> None:
        self._config = config
        self._images = Images(config.image_rules)
        self._budget = Budget(MOST_PIXELS, config.queue_timeout_s)
        self._idle: queue.LifoQueue[_Process] = queue.LifoQueue()

    def share(self) -> PixelShare:
        return PixelShare(self._budget)

    def load(self, sources: Sequence[str], share: PixelShare) -> list[Image.Image]:
        """Return the decoded images. Raises MediaError, ServerBusyError, and RequestError if `share` was closed."""
        self._check_number(len(sources))
        encoded = [(source, self._images.read(source)) for source in sources]
        deadline = Deadline(DECODE_S)
        # Sizes come first, because decoded images may only take memory that the budget has granted.
        looks = [_NUMBERS.unpack(self._ask(_LOOK, data, source, share, deadline)) for source, data in encoded]
        # A progressive JPEG with thousands of scans takes minutes to decode.
        self._check_cost(sum(num_pixels * num_scans for num_pixels, num_scans in looks))
        share.take(sum(num_pixels for num_pixels, _ in looks))
        # The wait for free pixels does not count as decoding time.
        deadline = Deadline(DECODE_S)
        answers = (self._ask(_DECODE, data, source, share, deadline) for source, data in encoded)
        return [
            Image.frombytes("RGB", _NUMBERS.unpack_from(answer), memoryview(answer)[_NUMBERS.size :])
            for answer in answers
        ]

    def close(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                self._idle.get_nowait().kill()

    def _check_number(self, number: int) -> None:
        most = self._config.max_images_per_request
        if number > most:
            raise MediaError(
                "a request has too many images",
                found=str(number),
                wanted=f"at most {most}",
                remedy="raise the server's max_images_per_request",
            )

    def _check_cost(self, cost: int) -> None:
        if cost > MOST_COST:
            raise MediaError(
                "the images of a request take too long to decode",
                found=f"{cost} pixels, each scan of a progressive JPEG counted",
                wanted=f"at most {MOST_COST}",
                remedy="shrink the images, or save them without progression",
            )

    def _ask(self, what: bytes, data: bytes, source: str, share: PixelShare, deadline: Deadline) -> bytearray:
        def check() -> None:
            check_open(share.closed)
            if deadline.is_over():
                found, wanted = f"no end of decoding after {DECODE_S:g} s", "an image that decodes soon"
                raise media_error(source, found, wanted, "shrink the image")

        with self._process() as process:
            kind, answer = process.ask(what, data, check)
        if kind == _ERROR:
            # The bytes may be broken because the host's reply was cut off, so the cache must not keep them.
            self._images.forget(source)
            found, wanted, remedy = json.loads(answer)
            raise media_error(source, found, wanted, remedy)
        return answer

    @contextlib.contextmanager
    def _process(self) -> Iterator[_Process]:
        try:
            process = self._idle.get_nowait()
        except queue.Empty:
            process = _Process(self._images.rules)
        try:
            yield process
        except BaseException:
            # A late answer of this process would be taken for the answer about the next image.
            process.kill()
            raise
        self._idle.put(process)


class _Process:
    """A decoding process as the server sees it: the connection to it, and the process itself."""

    def __init__(self, rules: ImageRules) -> None:
        self._link, theirs = socket.socketpair()
        # The timeout is short, so that `check` runs while nothing comes.
        self._link.settimeout(SLICE_S)
        with theirs:
            argv = [sys.executable, "-m", __spec__.name, str(theirs.fileno()), str(rules.max_pixels)]
            # The process gets no other environment variables, because the server's token is among them.
            env = {name: os.environ[name] for name in _VARIABLES if name in os.environ}
            # The decoding process imports from the same folders as the server. `-m` alone would search the working
            # directory.
            folders = os.pathsep.join(str(Path(folder).absolute()) for folder in sys.path)
            env |= {"PYTHONPATH": folders, "PYTHONSAFEPATH": "1"}
            self._popen = subprocess.Popen(
                argv,
                pass_fds=[theirs.fileno()],
                env=env,
                stdin=subprocess.DEVNULL,
                # In its own session the process does not get the terminal's Ctrl-C, which only the server must get.
                start_new_session=True,
            )

    def ask(self, what: bytes, data: bytes, check: Callable[[], None]) -> tuple[bytes, bytearray]:
        """Send a request, and return the kind and bytes of the answer. `check` raises an error when the wait must
        end."""
        try:
            _send(self._link, _HEAD.pack(what, len(data)), check)
            _send(self._link, data, check)
            kind, num_bytes = _HEAD.unpack(_receive(self._link, _HEAD.size, check))
            return kind, _receive(self._link, num_bytes, check)
        except (ConnectionError, EOFError):
            return self._ended()

    def kill(self) -> None:
        self._link.close()
        self._popen.kill()
        self._popen.wait()

    def _ended(self) -> tuple[bytes, bytearray]:
        raise MediaError(
            "an image has ended the process that decodes it",
            found=f"exit code {self._popen.wait()}",
            wanted="an image that can be decoded",
            remedy="repair or replace the image",
        )


def check_open(closed: threading.Event) -> None:
    if closed.is_set():
        raise RequestError("the client hung up", found="a closed connection", wanted="a client that waits")


def _send(link: socket.socket, data: bytes, check: Callable[[], None] = lambda: None) -> None:
    view = memoryview(data)
    while view:
        check()
        with contextlib.suppress(TimeoutError):
            view = view[link.send(view[:_CHUNK_BYTES]) :]


def _receive(link: socket.socket, num_bytes: int, check: Callable[[], None] = lambda: None) -> bytearray:
    """Return `num_bytes` bytes. Bytes that have arrived are read before `check` may raise. Raises EOFError."""
    data = bytearray(num_bytes)
    view = memoryview(data)
    while view:
        with contextlib.suppress(TimeoutError):
            num_new = link.recv_into(view)
            if not num_new:
                raise EOFError
            view = view[num_new:]
        if view:
            check()
    return data


# ---- process ---------------------------------------------------------------------------------------------------------


def work(link: socket.socket, max_pixels: int) -> None:
    """Decode images for the server until it closes the link. The body of a decoding process."""
    limit = _OTHER_BYTES + _BYTES_PER_PIXEL * max_pixels
    # The limits keep an image from using up the machine's memory, and a crash from writing a core dump.
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    images = Images(ImageRules(roots=(), max_pixels=max_pixels, keys="the server's "))
    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            what, num_bytes = _HEAD.unpack(_receive(link, _HEAD.size))
            kind, answer = _answer(images, what, bytes(_receive(link, num_bytes)))
            _send(link, _HEAD.pack(kind, len(answer)))
            _send(link, answer)


def _answer(images: Images, what: bytes, data: bytes) -> tuple[bytes, bytes]:
    try:
        if what == _LOOK:
            return what, _NUMBERS.pack(*images.look(data, ""))
        image = images.decode(data, "")
        return what, _NUMBERS.pack(*image.size) + image.tobytes()
    except MediaError as error:
        return _ERROR, json.dumps([error.found, error.wanted, error.remedy]).encode()
    # A broken image may reach the limit of RLIMIT_AS. The process continues with the next image.
    except MemoryError:
        return _ERROR, json.dumps(["more memory than its pixels take", "a sound image", "save it again"]).encode()


if __name__ == "__main__":
    work(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]))
