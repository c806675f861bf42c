"""Serves a command's page to a browser: the live view, the review of suggestions, the audit.

A page is a web application with a few paths. Its links and fetches are relative to the page's URL:

    app = page_app(body_bytes=4096)  # the largest request body; 0: requests have no body
    app.get("/")(lambda: html(TEMPLATES.get_template("audit.html"), title="cells"))  # with <script nonce="{{ nonce }}">
    app.get("/image/{place}")(lambda place: photograph(sources[int(place)], Images(ImageRules())))
    return serve_page(app, name="audit", port=port)  # prints the URL, ends with Ctrl-C

Invariants: only those who know the URL can open a page, because its path begins with 128 random bits. Other web sites
cannot read a page through the user's browser: requests must name this machine as `Host`, and no other origin is
allowed. Every answer, also an error, has HEADERS, so that browsers run no file as a script, and show no page in a frame
of another site. Images are the only files that are sent. Tests call an application without the random path, at the base
URL http://127.0.0.1.
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
# Media types of the image formats that browsers show; the keys are Pillow's names. An MPO file begins with a JPEG.
_SHOWN = {name: f"image/{name.lower()}" for name in ("JPEG", "PNG", "GIF", "WEBP", "BMP")} | {"MPO": "image/jpeg"}


def page_app(*, host: str = LOOPBACK, body_bytes: int = 0) -> FastAPI:
    """Return an application without routes. `host`: the address at which the application will listen. A request whose
    body is larger than `body_bytes` is refused (413), and at most `body_bytes` of it are read."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(TrustedHostMiddleware, allowed_hosts=[*_NAMES, host], www_redirect=False)
    # The middleware added last is the outermost one. So `_Guard` also adds its headers to error responses of the other
    # middleware.
    app.add_middleware(_Guard, body_bytes=body_bytes)
    return app


def html(template: jinja2.Template, **values: object) -> Response:
    """Return a rendered page with headers that restrict it: browsers run only scripts with the template's `nonce`, and
    show only images from the page's own paths or from data URIs."""
    nonce = secrets.token_urlsafe(12)
    policy = f"{_NOTHING};img-src 'self' data:;style-src 'unsafe-inline';connect-src 'self';script-src 'nonce-{nonce}'"
    text = template.render(nonce=nonce, **values)
    return Response(text, media_type="text/html", headers={"Content-Security-Policy": policy})


def photograph(source: str, images: Images) -> Response:
    """Return the bytes of an image file, or a JPEG of it if browsers do not show its format. Raises HTTPException (404)
    if the file cannot be decoded as an image; the error does not show its content."""
    try:
        data = images.read(source)
        pixels = images.decode(data, source)
    except (MediaError, OSError) as error:
        raise HTTPException(404, "there is no image that can be shown") from error
    with Image.open(io.BytesIO(data), formats=FORMATS) as header:
        media_type = _SHOWN.get(header.format or "")
    # Browsers do not show TIFF.
    if media_type is None:
        file = io.BytesIO()
        pixels.save(file, "JPEG")
        data, media_type = file.getvalue(), "image/jpeg"
    return Response(data, media_type=media_type)


def serve_page(app: FastAPI, *, name: str, host: str = LOOPBACK, port: int, note: str = "") -> int:
    """Serve `app` until Ctrl-C, below a random path, and print the URL. Returns the exit code. `note` is added to the
    printed line. Raises ServerError if the port is taken."""
    # The port is taken before its address is printed.
    listener = listen(host, port, what=f"the {name.partition(' of ')[0]}")
    shown, path = f"[{host}]" if ":" in host else host, f"/{secrets.token_urlsafe(16)}"
    url = f"http://{shown}:{listener.getsockname()[1]}{path}/"
    print(f"{name}: {url} (Ctrl-C ends it{note})", flush=True)
    uvicorn.Server(uvicorn.Config(_Behind(app, path), log_level="warning", lifespan="off")).run(sockets=[listener])
    return 0


class _Behind:
    """Serves an application below `path`, and answers 404 to requests with any other path."""

    def __init__(self, app: ASGIApp, path: str) -> None:
        self.app, self.path = app, path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        first, slash, _ = str(scope["path"])[1:].partition("/")
        # The comparison takes equally long for every wrong path, so its time says nothing about the right path.
        if not (slash and secrets.compare_digest(f"/{first}".encode(), self.path.encode())):
            await Response("Not Found", 404, dict(HEADERS))(scope, receive, send)
            return
        await self.app({**scope, "root_path": self.path}, receive, send)


class _Guard:
    """Adds HEADERS to each answer that lacks them, and refuses requests whose body is larger than `body_bytes`."""

    def __init__(self, app: ASGIApp, body_bytes: int) -> None:
        self.app, self.body_bytes = app, body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # Other scope types are not requests, but the start and the end of the application.
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        told = Headers(scope=scope).get("content-length", "0")
        num_bytes = 0

        async def bounded() -> Message:
            nonlocal num_bytes
            message = await receive()
            # The header may be missing or wrong, so the bytes are counted.
            num_bytes += len(message.get("body", b""))
            if num_bytes > self.body_bytes:
                raise HTTPException(413, f"more than {self.body_bytes} bytes")
            return message

        async def headed(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    # A header that the response has already stays, because a page has a content policy of its own, for
                    # its script.
                    headers.setdefault(name, value)
            await send(message)

        # `int` refuses texts of thousands of digits.
        if told.isdecimal() and int(told[:20]) > self.body_bytes:
            await Response(f"more than {self.body_bytes} bytes", 413)(scope, receive, headed)
            return
        await self.app(scope, bounded, headed)
