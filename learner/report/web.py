"""How a command serves pages to a browser: the live view, the review of suggestions, the audit.

A page is an application with paths of its own. Its links and fetches are relative to the page's URL:

    app = page_app(body_bytes=4096)  # the largest request body; 0: requests have no body
    app.get("/")(lambda: html(TEMPLATES.get_template("audit.html"), title="cells"))  # with <script nonce="{{ nonce }}">
    app.get("/image/{place}")(lambda place: photograph(sources[int(place)], Images(ImageRules())))
    return serve_page(app, name="audit", port=port)  # prints the URL, ends with Ctrl-C

Invariants: only who was told the URL reaches a page, because its path begins with 128 random bits. Web pages of other
sites reach nothing: requests must name this machine as `Host`, and no other origin is allowed. Every answer, also an
error, has the headers below, so that browsers run no file as a script and show none in a frame. Of all files, only
images are sent. Tests call an application without its random path, at the base URL http://127.0.0.1.
"""

from __future__ import annotations

import io
import secrets
from collections.abc import Mapping

import jinja2
import uvicorn
from fastapi import FastAPI, HTTPException, Response
from PIL import Image
from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from shared.addresses import listen
from shared.errors import MediaError
from shared.images import FORMATS, Images

LOOPBACK = "127.0.0.1"
_NAMES = ("localhost", LOOPBACK, "[::1]")
_NOTHING = "default-src 'none';base-uri 'none';form-action 'none';frame-ancestors 'none'"
HEADERS: Mapping[str, str] = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": _NOTHING,
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}
# These are the formats that browsers show, by Pillow's names. The first image of an MPO file is a JPEG.
_SHOWN = {name: f"image/{name.lower()}" for name in ("JPEG", "PNG", "GIF", "WEBP", "BMP")} | {"MPO": "image/jpeg"}


def page_app(*, host: str = LOOPBACK, body_bytes: int = 0) -> FastAPI:
    """Return an application without routes. `host`: the address at which it will listen. Bodies larger than
    `body_bytes` are refused (413) before they are read into memory."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(TrustedHostMiddleware, allowed_hosts=[*_NAMES, host], www_redirect=False)
    app.add_middleware(_Guard, body_bytes=body_bytes)
    return app


def html(template: jinja2.Template, **values: object) -> Response:
    """Return a rendered page. Only scripts with the template's `nonce` run. Images come from the page's own paths or
    are data URIs."""
    nonce = secrets.token_urlsafe(12)
    policy = f"{_NOTHING};img-src 'self' data:;style-src 'unsafe-inline';connect-src 'self';script-src 'nonce-{nonce}'"
    text = template.render(nonce=nonce, **values)
    return Response(text, media_type="text/html", headers={"Content-Security-Policy": policy})


def photograph(source: str, images: Images) -> Response:
    """Return an image as it is, with its media type; as JPEG if browsers do not show its format. Raises HTTPException
    (404) if the file does not decode as an image; the error says nothing of its content."""
    try:
        data = images.read(source)
        pixels = images.decode(data, source)
    except (MediaError, OSError) as error:
        raise HTTPException(404, "there is no image that can be shown") from error
    with Image.open(io.BytesIO(data), formats=FORMATS) as header:
        media_type = _SHOWN.get(header.format or "")
    if media_type is None:
        file = io.BytesIO()
        pixels.save(file, "JPEG")
        data, media_type = file.getvalue(), "image/jpeg"
    return Response(data, media_type=media_type)


def serve_page(app: FastAPI, *, name: str, host: str = LOOPBACK, port: int, note: str = "") -> int:
    """Serve until Ctrl-C at a random path, which is only printed. Returns the exit code. Raises ServerError if the port
    is taken."""
    listener = listen(host, port, what=f"the {name.partition(' of ')[0]}")
    shown, path = f"[{host}]" if ":" in host else host, f"/{secrets.token_urlsafe(16)}"
    url = f"http://{shown}:{listener.getsockname()[1]}{path}/"
    print(f"{name}: {url} (Ctrl-C ends it{note})", flush=True)
    uvicorn.Server(uvicorn.Config(_Behind(app, path), log_level="warning", lifespan="off")).run(sockets=[listener])
    return 0


class _Behind:
    """Serves an application below a path, and answers 404 to any other path."""

    def __init__(self, app: ASGIApp, path: str) -> None:
        self.app, self.path = app, path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        first, slash, _ = str(scope["path"])[1:].partition("/")
        if not (slash and secrets.compare_digest(f"/{first}".encode(), self.path.encode())):
            await Response("Not Found", 404, dict(HEADERS))(scope, receive, send)
            return
        await self.app({**scope, "root_path": self.path}, receive, send)


class _Guard:
    """Adds the missing headers to each answer, and bounds the body of a request."""

    def __init__(self, app: ASGIApp, body_bytes: int) -> None:
        self.app, self.body_bytes = app, body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":  # the event of starting or ending the application
            await self.app(scope, receive, send)
            return
        told = Headers(scope=scope).get("content-length", "0")
        num_bytes = 0

        async def bounded() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > self.body_bytes:
                raise HTTPException(413, f"more than {self.body_bytes} bytes")
            return message

        async def headed(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        if told.isdecimal() and int(told[:20]) > self.body_bytes:
            await Response(f"more than {self.body_bytes} bytes", 413)(scope, receive, headed)
            return
        await self.app(scope, bounded, headed)
