"""Published attacks on vLLM, SGLang, LMDeploy, Ray, PyTorch and the libraries below them, made against this server
(R13, R16, R42). Each test bears the attack's ids and does what was done there, in our server's words.

The app, the renderer with a real processor, the group's port and the checkpoint's reader are real; the engine behind
them is a fake. What needs vLLM's own processes is in `tests/integration/test_server.py`.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import functools
import hmac
import http.server
import io
import json
import os
import pickle
import shutil
import socket
import struct
import threading
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from PIL import Image

from bench.tiny_models import build_qwen3_vl
from rollout_server.app import create_app
from rollout_server.config import ServerConfig, load_server_config
from rollout_server.prompts import Renderer
from rollout_server.service import RolloutService
from shared.addresses import free_port
from shared.config.model import ConfigErrors
from shared.errors import RequestError
from shared.generation import Generation
from shared.images import FORMATS
from shared.sync.group import start_join
from shared.sync.meeting import HELLO_BYTES, num_strangers
from shared.wire import ErrorBody, Message, RequestConfig, RolloutInferRequest
from tests.unit.rollout_server.fakes import FakeEngine
from tests.unit.rollout_server.test_fuzz import JSON, RIGHT, check

LOOPBACK = "127.0.0.1"
TEXT = [{"role": "user", "content": "a"}]


def ids(*advisories: str) -> Any:
    """The test runs once, under these ids: the attacks are one to this server."""
    return pytest.mark.parametrize("advisories", [advisories], ids=["+".join(advisories)])


class ReadingEngine(FakeEngine):
    """Renders each request as the real engine does: fetches and decodes its images, fills the chat template."""

    def __init__(self, model: Path, config: ServerConfig) -> None:
        super().__init__()
        self._renderer = Renderer(str(model), config)

    async def generate(self, request: RolloutInferRequest, config: RequestConfig, seed: int | None) -> list[Generation]:
        with contextlib.closing(self._renderer.decoders.share()) as share:
            await asyncio.to_thread(self._renderer.render, request, share)
        return await super().generate(request, config, seed)


def ask(
    method: str,
    path: str,
    body: Any = None,
    *,
    engine: FakeEngine | None = None,
    token: str | None = None,
    headers: dict[str, str] | None = None,
    config: ServerConfig | None = None,
) -> httpx.Response:
    """Make one call to a server of its own. `body`: bytes, or anything to be sent as JSON."""
    content = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()

    async def run() -> httpx.Response:
        app = create_app(RolloutService(engine or FakeEngine(), config or ServerConfig(model="fake")), token)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url=f"http://{LOOPBACK}") as http:
            sent = http.request(method, path, content=content, headers={**JSON, **(headers or {})})
            return await asyncio.wait_for(sent, 30)

    reply = asyncio.run(run())
    check(reply)
    return reply


def infer(**fields: Any) -> dict[str, Any]:
    """Return an `/infer/` body of one request with these fields."""
    return {"infer_requests": [{"messages": TEXT, **fields}]}


@pytest.fixture(autouse=True)
def _no_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollout_server.service._versions", dict)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("advisories") / "model"
    build_qwen3_vl(path)
    return path


class Bomb:
    """Makes a folder where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.mkdir, (str(self.path),)


@pytest.fixture
def bomb(tmp_path: Path) -> Iterator[bytes]:
    """Yield a pickle; the test fails if anything unpickles it."""
    path, control = tmp_path / "unpickled", tmp_path / "control"
    pickle.loads(pickle.dumps(Bomb(control)))
    assert control.is_dir(), "the pickle does nothing: the test shows nothing"
    yield pickle.dumps(Bomb(path))
    assert not path.exists(), "the pickle was read"


# ---- pickles and open ports ------------------------------------------------------------------------------------------


def zmtp(message: bytes) -> bytes:
    """Return a ZeroMQ peer's greeting, its READY, and a message."""
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
    ready = b"\x05READY\x0bSocket-Type\0\0\0\x04PUSH"
    return greeting + b"\x04" + bytes([len(ready)]) + ready + b"\x02" + struct.pack(">Q", len(message)) + message


FRAMES = {
    # vLLM's PyNcclPipe took pickles from torch's TCPStore: magic, then "set KEY VALUE".
    "CVE-2025-47277": lambda p: b"\x09" + struct.pack("<I", 0x3C85F7CE) + b"\x00\x01\x00\x00\x00\x00\x00\x00\x00k" + p,
    "CVE-2025-32444": zmtp,  # vLLM's Mooncake pipe, ZeroMQ on all interfaces
    "CVE-2025-30165+CVE-2024-11041": lambda p: zmtp(b"\x01" + p),  # vLLM's message queue between hosts
    "CVE-2026-3059+CVE-2026-3060": lambda p: zmtp(p) + zmtp(p),  # SGLang's ZeroMQ broker and encoder receiver
    "CVE-2024-48063": lambda p: struct.pack("<Q", len(p)) + p,  # PyTorch's remote modules
    "this server's own hello": lambda p: p.ljust(HELLO_BYTES, b"\0")[:HELLO_BYTES],
}


@pytest.mark.parametrize("advisory", FRAMES)
def test_a_pickle_at_the_group_s_port_is_dropped(advisory: str, bomb: bytes) -> None:
    """The members meet all the same."""
    port, before = free_port(), num_strangers()
    worker = start_join("tcp", LOOPBACK, port, 0, 2, 20.0, secret=b"of this group")
    for _ in range(100):
        with suppress(ConnectionRefusedError), socket.create_connection((LOOPBACK, port), timeout=5) as stranger:
            stranger.sendall(FRAMES[advisory](bomb).ljust(HELLO_BYTES, b"\0"))
            break
        worker.done(0.05)
    learner = start_join("tcp", LOOPBACK, port, 1, 2, 20.0, secret=b"of this group")
    for one in (worker.result(), learner.result()):
        one.close()
    assert num_strangers() == before + 1


@ids("CVE-2025-30202", "CVE-2026-7301")
def test_the_group_s_port_is_open_at_its_own_address_only(advisories: Any) -> None:
    """vLLM's and SGLang's ZeroMQ sockets were bound to every interface."""
    port = free_port()
    worker = start_join("tcp", LOOPBACK, port, 0, 2, 20.0, secret=b"of this group")
    learner = start_join("tcp", LOOPBACK, port, 1, 3, 20.0, secret=b"of another group")
    assert not worker.done(0.3)  # it listens
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", port), timeout=5).close()
    socket.create_connection((LOOPBACK, port), timeout=5).close()
    for one in (worker, learner):
        one.cancel(RequestError("the test is over"))


PICKLED_BODIES = {
    "CVE-2026-86793": ("/update_weights_from_tensor", "serialized_named_tensors"),  # SGLang
    "CVE-2026-15969": ("/load_lora_adapter_from_tensors", "serialized_tensors"),  # SGLang
    "CVE-2026-7304": ("/generate", "custom_logit_processor"),  # SGLang
    "CVE-2026-115912": ("/update_weights/", "shared_memory_handle"),  # vLLM
}


@pytest.mark.parametrize("advisory", PICKLED_BODIES)
def test_a_pickle_in_a_body_is_no_field(advisory: str, bomb: bytes) -> None:
    path, field = PICKLED_BODIES[advisory]
    text = base64.b64encode(bomb).decode()
    for ours in ("/update_weights/", "/infer/"):
        assert ask("POST", ours, {**RIGHT[ours], field: [text]}).status_code == 400
        assert ask("POST", ours, bomb).status_code == 400
        assert ask("POST", ours, bomb, headers={"Content-Type": "application/octet-stream"}).status_code == 415
    assert ask("POST", path, {field: text}).status_code in (400, 404)


@ids("CVE-2026-15976")
def test_no_call_names_a_file_of_weights(advisories: Any, bomb: bytes, tmp_path: Path) -> None:
    """SGLang read the checkpoint that `/update_weights_from_disk` named, pickles too."""
    (tmp_path / "pytorch_model.bin").write_bytes(bomb)
    assert ask("POST", "/update_weights_from_disk", {"model_path": str(tmp_path)}).status_code == 404
    for field in ("model_path", "path", "load_format"):
        assert ask("POST", "/update_weights/", {**RIGHT["/update_weights/"], field: str(tmp_path)}).status_code == 400


@ids("CVE-2026-116176")
def test_no_call_names_an_address_to_connect_to(advisories: Any) -> None:
    """vLLM's P2P connector connected to the address in X-Request-Id."""
    with socket.create_server((LOOPBACK, 0)) as listener:
        listener.settimeout(0.2)
        port = listener.getsockname()[1]
        address = f"___prefill_addr_{LOOPBACK}:{port}___decode_addr_{LOOPBACK}:{port}_0"
        assert ask("POST", "/infer/", infer(uuid=address), headers={"X-Request-Id": address}).status_code == 200
        for field in ("host", "group_host", "address"):
            body = {**RIGHT["/init_communicator/"], "group_port": port, field: LOOPBACK}
            assert ask("POST", "/init_communicator/", body).status_code == 400
        with pytest.raises(TimeoutError):
            listener.accept()


# ---- who may call ----------------------------------------------------------------------------------------------------


@ids("CVE-2025-59425")
def test_the_token_is_compared_whole(advisories: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's comparison ended at the first wrong character, and its time told where."""
    compared: list[tuple[Any, Any]] = []
    true_compare = hmac.compare_digest

    def spy(a: Any, b: Any) -> bool:
        compared.append((a, b))
        return true_compare(a, b)

    monkeypatch.setattr(hmac, "compare_digest", spy)
    for guess in ("", "s", "secre", "secret2", "SECRET"):
        reply = ask("GET", "/status/", token="secret", headers={"Authorization": f"Bearer {guess}"})
        assert reply.status_code == 401
    assert [pair for pair in compared if b"Bearer secret" in pair and b"Bearer secre" in pair]
    assert len(compared) == 5


@ids("CVE-2026-48746", "CVE-2026-48710")
@pytest.mark.parametrize("host", ["a/health/?x=", f"{LOOPBACK}/health/#", f"{LOOPBACK}/ready?", "a@b/health/"])
def test_the_host_header_opens_no_path(advisories: Any, host: str) -> None:
    """Starlette built the URL from the Host header, and vLLM asked that URL whether the path is open."""
    for method, path in (("GET", "/status/"), ("POST", "/infer/"), ("GET", "/health/../status/"), ("GET", "//status/")):
        reply = ask(method, path, infer() if method == "POST" else None, token="secret", headers={"Host": host})
        assert reply.status_code == 401


@ids("CVE-2025-62593")
def test_a_web_page_can_t_call_a_laptop_s_server(advisories: Any) -> None:
    """Ray told browsers by their User-Agent, which a page can set; DNS rebinding did the rest."""
    engine = FakeEngine()
    pages = [{"Host": "page.example"}, {"Origin": "http://page.example"}, {"Origin": "null"}]
    pages += [{"Content-Type": kind} for kind in ("text/plain", "application/x-www-form-urlencoded", "")]
    for headers in pages:
        reply = ask("POST", "/infer/", infer(), engine=engine, headers={"User-Agent": "curl/8", **headers})
        assert reply.status_code in (403, 415), headers
    assert engine.generated == []


@ids("CVE-2023-48022")
@pytest.mark.parametrize("key", ["host", "communicator_host"])
def test_without_a_token_nobody_else_is_served(advisories: Any, key: str, tmp_path: Path) -> None:
    """Ray's job API asked for nothing, at every interface."""
    (tmp_path / "server.yaml").write_text(f"model: {tmp_path}\n{key}: 192.0.2.1\n")
    with pytest.raises(ConfigErrors, match=f"{key}.*token"):
        load_server_config(tmp_path / "server.yaml", has_token=False)
    job = {"entrypoint": "id", "submission_id": "1"}
    assert ask("POST", "/api/jobs/", job).status_code == 404
    assert ask("POST", "/api/jobs/", job, token="secret").status_code == 401


# ---- files -----------------------------------------------------------------------------------------------------------

TRAVERSALS = {
    "CVE-2023-6020+CVE-2026-32981": "/static/js/../../../../../../../../etc/passwd",
    "CVE-2023-6021": "/api/v0/logs/file?node_id=1&filename=../../../../../etc%2fpasswd&lines=50000",
    "this server's own probe": "/health/..%2f..%2fetc%2fpasswd",
}


@pytest.mark.parametrize("advisory", TRAVERSALS)
def test_no_path_is_a_file(advisory: str) -> None:
    """Ray's dashboard served any file of the machine."""
    reply = ask("GET", TRAVERSALS[advisory])
    assert reply.status_code == 404
    assert "root:" not in reply.text


@ids("CVE-2023-6021", "CVE-2026-7302")
def test_no_name_in_a_request_leads_out_of_the_image_folder(advisories: Any, model: Path, tmp_path: Path) -> None:
    """Ray and SGLang joined names with `../` in them to a folder, to read and to write."""
    (tmp_path / "images").mkdir()
    for path in (tmp_path / "images" / "in.png", tmp_path / "out.png"):
        Image.new("RGB", (64, 64)).save(path)
    (tmp_path / "images" / "link.png").symlink_to(tmp_path / "out.png")
    config = ServerConfig(model=str(model), allowed_image_roots=[tmp_path / "images"])
    engine = ReadingEngine(model, config)
    before = sorted(tmp_path.rglob("*"))
    inside = f"{tmp_path}/images"
    assert ask("POST", "/infer/", infer(images=[f"{inside}/in.png"]), engine=engine, config=config).status_code == 200
    for name in (
        f"{inside}/../out.png",
        f"{inside}/link.png",
        f"file://{inside}/%2e%2e/out.png",
        f"file://{inside}/..%2fout.png",
        f"{tmp_path}/out.png",
        "/etc/passwd",
        "/proc/self/environ",
    ):
        reply = ask("POST", "/infer/", infer(images=[name]), engine=engine, config=config)
        assert reply.status_code == 422, name
        assert "root:" not in reply.text
    name = f"{inside}/../../written"
    assert ask("POST", "/infer/", infer(uuid=name), engine=engine, config=config).status_code == 200
    assert sorted(tmp_path.rglob("*")) == before


# ---- URLs ------------------------------------------------------------------------------------------------------------


class Target(http.server.ThreadingHTTPServer):
    """A server that nobody may reach; `hits` are the paths that somebody asked for. `location`: it redirects there."""

    def __init__(self) -> None:
        super().__init__((LOOPBACK, 0), Answer)
        self.hits: list[str] = []
        self.location = ""
        self.num_bytes = 0  # sent so far, if it was asked for an endless image


class Answer(http.server.BaseHTTPRequestHandler):
    server: Target

    def do_GET(self) -> None:
        self.server.hits.append(self.path)
        self.send_response(302 if self.server.location else 200)
        if self.server.location:
            self.send_header("Location", self.server.location)
        self.end_headers()
        with suppress(OSError):
            while self.path == "/endless" and self.server.num_bytes < 1 << 30:
                self.wfile.write(bytes(1 << 16))
                self.server.num_bytes += 1 << 16

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def target() -> Iterator[Target]:
    with Target() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


URLS = {
    "CVE-2026-33626+CVE-2023-48023+CVE-2026-34753": ["http://{inner}/", "https://{inner}/", "HTTP://{inner}/"],
    "CVE-2026-24779+CVE-2026-25960": [
        "http://{inner}\\@allowed.test/",
        "http://allowed.test\\@{inner}/",
        "http://allowed.test@{inner}/",
        "http://{inner}#@allowed.test/",
        "http://{inner}?@allowed.test/",
        "http://{inner}%2f@allowed.test/",
        "http://{inner}\t@allowed.test/",
        "http://{inner} allowed.test/",
        "http:\\\\{inner}/",
        "http:///{inner}/",
    ],
}


@pytest.mark.parametrize("advisory", URLS)
def test_a_url_reaches_no_host_that_is_not_allowed(advisory: str, model: Path) -> None:
    """vLLM checked the host that one library read out of a URL, and fetched the one that another read; LMDeploy and Ray
    checked nothing."""
    config = ServerConfig(model=str(model), allowed_image_hosts=["allowed.test"])
    engine = ReadingEngine(model, config)
    with target() as inner:
        for url in URLS[advisory]:
            source = url.format(inner=f"{LOOPBACK}:{inner.server_port}")
            reply = ask("POST", "/infer/", infer(images=[source]), engine=engine, config=config)
            assert reply.status_code in (400, 422), source
        assert inner.hits == []


@ids("CVE-2026-63764")
def test_a_redirect_reaches_no_host_that_is_not_allowed(advisories: Any, model: Path) -> None:
    """LMDeploy checked the first URL only."""
    config = ServerConfig(model=str(model), allowed_image_hosts=["localhost"])
    with target() as inner, target() as outer:
        outer.location = f"http://{LOOPBACK}:{inner.server_port}/latest/meta-data"
        url = f"http://localhost:{outer.server_port}/image.png"
        reply = ask("POST", "/infer/", infer(images=[url]), engine=ReadingEngine(model, config), config=config)
        assert (reply.status_code, outer.hits, inner.hits) == (422, ["/image.png"], [])


@ids("CVE-2026-100650")
def test_media_is_not_read_beyond_the_limits(advisories: Any, model: Path) -> None:
    """vLLM read the whole answer and fetched every item, and looked at the limits then."""
    config = ServerConfig(model=str(model), allowed_image_hosts=["localhost"])
    engine = ReadingEngine(model, config)
    with target() as server:
        url = f"http://localhost:{server.server_port}"
        many = [f"{url}/{i}" for i in range(config.max_images_per_request + 1)]
        assert ask("POST", "/infer/", infer(images=many), engine=engine, config=config).status_code == 422
        assert server.hits == []
        assert ask("POST", "/infer/", infer(images=[f"{url}/endless"]), engine=engine, config=config).status_code == 422
        assert server.num_bytes < 64 << 20  # the limit, and what the sockets' buffers take


# ---- fields ----------------------------------------------------------------------------------------------------------

LOOP = "{% for i in range(10**9) %}{% endfor %}"
FIELDS: dict[str, dict[str, Any]] = {
    "CVE-2026-115911": {"chat_template": LOOP},
    "CVE-2025-62164+CVE-2026-56340+CVE-2026-73557": {"prompt_embeds": base64.b64encode(b"PK\x03\x04").decode()},
    "CVE-2026-105754": {"features": {"mm_hashes": ["0"], "kwargs_data": [], "mm_placeholders": [[0, -1]]}},
    "CVE-2026-55574": {"structured_outputs": {"regex": "(a+)+b" * 50}},
    "GHSA-vrq3-r879-7m65": {"tools": [{"type": "function", "function": {"parameters": {"pattern": "("}}}]},
    "CVE-2025-29770": {"guided_decoding_backend": "outlines", "guided_json": {"type": "object"}},
    "CVE-2026-105757": {"structured_outputs": {}},
    "CVE-2026-105756": {"cache_salt": "a/b" * 1000},
    "CVE-2026-105760+CVE-2026-105758": {"media_io_kwargs": {"video": {"fps": 1e9, "max_frames": 10**9}}},
    "CVE-2026-34756": {"n": 10**9},
    "CVE-2026-114051": {"min_tokens": 10**9},
    "PYSEC-2026-4350": {"logprobs": 10**6, "logprob_token_ids": list(range(129))},
    "CVE-2026-54235": {"temperature": float("nan")},
}


@pytest.mark.parametrize("advisory", FIELDS)
def test_a_field_that_cost_others_their_engine_is_refused(advisory: str) -> None:
    """Templates, grammars, tensors and unbounded counts: here they are no fields, or have bounds."""
    engine = FakeEngine()
    for body in (
        {**infer(), "request_config": FIELDS[advisory]},
        infer(**FIELDS[advisory]),
        {**infer(), **FIELDS[advisory]},
        {"infer_requests": [{"messages": [{**TEXT[0], **FIELDS[advisory]}]}]},
    ):
        assert ask("POST", "/infer/", body, engine=engine).status_code == 400
    assert engine.generated == []


@ids("CVE-2026-54235")
@pytest.mark.parametrize("text", ["NaN", "Infinity", "-Infinity", "1e999", "-1", "2.1"])
def test_decoding_settings_are_finite(advisories: Any, text: str) -> None:
    for field in ("temperature", "repetition_penalty") if text != "2.1" else ("temperature",):
        body = b'{"infer_requests":[],"request_config":{"%s":%s}}' % (field.encode(), text.encode())
        assert ask("POST", "/infer/", body).status_code == 400, field


@ids("CVE-2026-73559")
def test_one_call_has_so_many_requests_only(advisories: Any) -> None:
    engine = FakeEngine()
    body = {"infer_requests": [{"messages": TEXT}] * 5000}
    assert ask("POST", "/infer/", body, engine=engine).status_code == 413
    assert engine.generated == []


# ---- images ----------------------------------------------------------------------------------------------------------


def data_url(content: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


def encoded(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


def bomb_png() -> bytes:
    """Return a few KB that say to be 100,000 x 100,000 pixels."""

    def chunk(name: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))

    header = struct.pack(">IIBBBBB", 100_000, 100_000, 8, 2, 0, 0, 0)
    pixels = zlib.compress(bytes(4_000_000), 9)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")


def fits() -> bytes:
    """Return a picture of 64 x 64 grey pixels as FITS."""
    cards = ["SIMPLE  = T", "BITPIX  = 8", "NAXIS   = 2", "NAXIS1  = 64", "NAXIS2  = 64", "END"]
    return "".join(card.ljust(80) for card in cards).encode().ljust(2880) + bytes(64 * 64).ljust(2 * 2880)


EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%BeginBinary: -9\n"
JPEG2000 = b"\x00\x00\x00\x0cjP  \r\n\x87\n" + bytes(64)
AVIF = b"\0\0\0\x1cftypavif" + bytes(200)
PICTURES = {
    "CVE-2026-34755": lambda: "data:video/jpeg;base64," + ",".join([base64.b64encode(b"\xff\xd8\xff").decode()] * 9999),
    "EPS": lambda: data_url(EPS, "image/eps"),
    "JPEG 2000": lambda: data_url(JPEG2000, "image/jp2"),
    "AVIF": lambda: data_url(AVIF, "image/avif"),
    "BLP": lambda: data_url(b"BLP1\0\0\0\0" + b"\xff" * 200, "image/x-blp"),
    "DDS": lambda: data_url(b"DDS " + b"\xff" * 200, "image/x-dds"),
}
BAD_URLS = (
    "http://[::1/a.png",
    "http://127.0.0.1:x/a.png",
    "http://127.0.0.1:99999/a.png",
    "http:///a.png",
    "http://\ud800/a.png",
    "https://",
    "ftp://127.0.0.1/a.png",
    "data:image/png;base64",
    "data:image/png;base64,%",
    "file://[",
)


@functools.cache
def reading_engine(model: Path) -> tuple[ReadingEngine, ServerConfig]:
    config = ServerConfig(model=str(model))
    return ReadingEngine(model, config), config


def refusal(source: str, model: Path) -> ErrorBody:
    engine, config = reading_engine(model)
    reply = ask("POST", "/infer/", infer(images=[source]), engine=engine, config=config)
    assert reply.status_code == 422
    return ErrorBody.model_validate_json(reply.content)


@pytest.mark.parametrize("advisory", PICTURES)
def test_a_picture_that_no_decoder_should_see(advisory: str, model: Path) -> None:
    refusal(PICTURES[advisory](), model)


def test_a_bad_url_is_its_sender_s_fault(model: Path) -> None:
    config = ServerConfig(model=str(model), allowed_image_hosts=["127.0.0.1"])
    engine = ReadingEngine(model, config)
    for source in BAD_URLS:
        reply = ask("POST", "/infer/", infer(images=[source]), engine=engine, config=config)
        assert (source, reply.status_code in (400, 422)) == (source, True), reply.text


@ids("CVE-2026-109229")
def test_a_picture_too_large_is_refused_by_its_header(advisories: Any, model: Path) -> None:
    """SGLang switched Pillow's own limit off. Here the server's own limit refuses, before Pillow's."""
    assert str(ServerConfig(model="m").max_image_pixels) in refusal(data_url(bomb_png()), model).wanted


@ids("CVE-2026-40192")
@pytest.mark.parametrize("kind", ["FITS", "JPEG2000", "PPM", "TGA"])
def test_only_few_of_pillows_decoders_are_reached(advisories: Any, kind: str, model: Path) -> None:
    """Pillow's FITS decoder had a hole. Others may have one too: each of these pictures is whole, and refused."""
    content = fits() if kind == "FITS" else encoded(Image.new("RGB", (64, 64)), kind)
    Image.open(io.BytesIO(content)).load()
    wanted = refusal(data_url(content), model).wanted
    assert all(name in wanted for name in FORMATS)


@ids("CVE-2026-22778", "CVE-2026-54236")
def test_the_error_for_a_broken_picture_names_no_address(advisories: Any, model: Path) -> None:
    """vLLM's said where the bytes lie in memory, which is half of an exploit."""
    engine, config = reading_engine(model)
    whole = encoded(Image.new("RGB", (64, 64)))
    for content in (b"", b"no image", whole[:40], whole[:-20], JPEG2000, b"GIF89a", b"II*\x00" + bytes(30)):
        reply = ask("POST", "/infer/", infer(images=[data_url(content)]), engine=engine, config=config)
        assert reply.status_code == 422
        assert " at 0x" not in reply.text


@ids("CVE-2026-12491")
def test_a_picture_is_seen_as_people_see_it(advisories: Any, model: Path) -> None:
    """vLLM left out the EXIF orientation."""
    exif = Image.Exif()
    exif[0x0112] = 6
    turned = data_url(encoded(Image.new("RGB", (64, 32)), "JPEG", exif=exif))
    renderer = Renderer(str(model), ServerConfig(model=str(model)))
    request = RolloutInferRequest(messages=[Message(role="user", content="a")], images=[turned])
    assert renderer.render(request, renderer.decoders.share()).images[0].size == (32, 64)


# ---- checkpoints -----------------------------------------------------------------------------------------------------


def poisoned(model: Path, folder: Path, marker: Path) -> Path:
    """Return the checkpoint, with code of its own for every class."""
    shutil.copytree(model, folder)
    (folder / "evil.py").write_text(f"import os\nos.mkdir({str(marker)!r})\nclass Evil: pass\n")
    for name in ("config.json", "tokenizer_config.json", "preprocessor_config.json", "processor_config.json"):
        if (path := folder / name).exists():
            kinds = ("AutoConfig", "AutoProcessor", "AutoTokenizer", "AutoImageProcessor", "AutoModel")
            path.write_text(json.dumps(json.loads(path.read_text()) | {"auto_map": dict.fromkeys(kinds, "evil.Evil")}))
    return folder


@ids("CVE-2025-66448", "CVE-2026-22807", "CVE-2026-27893")
def test_a_checkpoint_s_code_does_not_run_without_trust_remote_code(
    advisories: Any, model: Path, tmp_path: Path
) -> None:
    """Classes of vLLM ran what `auto_map` named, whatever `trust_remote_code` said."""
    for trusted in (True, False):
        folder, marker = tmp_path / f"model-{trusted}", tmp_path / f"ran-{trusted}"
        config = ServerConfig(model=str(poisoned(model, folder, marker)), trust_remote_code=trusted)
        with suppress(Exception):  # the code has no class that works
            Renderer(str(folder), config)
        assert marker.exists() == trusted


@ids("CVE-2026-5760")
def test_a_checkpoint_s_template_runs_nothing(advisories: Any, model: Path, tmp_path: Path) -> None:
    """SGLang rendered a model's template outside Jinja's sandbox."""
    shutil.copytree(model, tmp_path / "model")
    hostile = '{{ lipsum.__globals__["os"].mkdir("%s") }}' % (tmp_path / "ran")
    (tmp_path / "model" / "chat_template.jinja").write_text(hostile)
    config = ServerConfig(model=str(tmp_path / "model"))
    reply = ask("POST", "/infer/", infer(), engine=ReadingEngine(tmp_path / "model", config), config=config)
    assert reply.status_code == 400
    assert not (tmp_path / "ran").exists()
