"""The web page at /ui: files of static/, read once, under a policy that lets nothing else in."""

import hashlib
from pathlib import Path
from typing import NamedTuple

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

FOLDER = Path(__file__).with_name("static")
INDEX = "index.html"
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
HEADERS = {
    # Scripts, styles and data from this gateway alone; no frames, no forms that leave the page.
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-cache",
}


class Page(NamedTuple):
    """A file as it goes out."""

    body: bytes
    media_type: str
    etag: str


def read_pages(folder: Path = FOLDER) -> dict[str, Page]:
    """Every file of the folder, by its name."""
    pages: dict[str, Page] = {}
    for path in sorted(folder.iterdir()):
        if path.suffix in TYPES:
            body = path.read_bytes()
            etag = f'"{hashlib.sha256(body).hexdigest()[:16]}"'
            pages[path.name] = Page(body, TYPES[path.suffix], etag)
    return pages


def routes() -> list[Route]:
    """`/ui/` and its files. They hold no data: what they show is asked for with an API key."""
    pages = read_pages()

    async def to_folder(request: Request) -> Response:
        # Relative, so that the page also works behind a proxy that puts a path before ours.
        return Response(status_code=307, headers={"location": "ui/"})

    async def page(request: Request) -> Response:
        found = pages.get(request.path_params.get("name", INDEX))
        if found is None:
            return Response("no such file\n", 404, headers=HEADERS, media_type="text/plain")
        headers = {**HEADERS, "etag": found.etag}
        if request.headers.get("if-none-match") == found.etag:
            return Response(status_code=304, headers=headers)
        return Response(found.body, headers=headers, media_type=found.media_type)

    return [Route("/ui", to_folder), Route("/ui/", page), Route("/ui/{name}", page)]
