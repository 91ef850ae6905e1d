"""The page at / over HTTP: its files, as they are, open to everybody; what it shows it asks for."""

from collections.abc import Awaitable, Callable
from functools import cache
from pathlib import Path
from types import MappingProxyType

from fastapi import FastAPI, Response

_FOLDER = Path(__file__).parent
_KINDS = {
    ".html": "text/html",
    ".css": "text/css",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
}
# By path; what is not here is not served.
FILES = MappingProxyType(
    {"/": "index.html"}
    | {
        f"/playground/{path.name}": path.name
        for path in sorted(_FOLDER.iterdir())
        if path.suffix in _KINDS and path.name != "index.html"
    }
)
# Nothing but these files and this server: no inline script or style, no frame around it.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = MappingProxyType(
    {
        "Content-Security-Policy": _POLICY,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }
)


def add_page(app: FastAPI) -> None:
    """GET and HEAD / and what it is made of."""
    for path, name in FILES.items():
        app.add_api_route(path, _endpoint(name), methods=["GET", "HEAD"], include_in_schema=False)


def _endpoint(name: str) -> Callable[[], Awaitable[Response]]:
    async def part() -> Response:
        kind = f"{_KINDS[Path(name).suffix]}; charset=utf-8"
        return Response(_content(name), headers=HEADERS, media_type=kind)

    return part


@cache
def _content(name: str) -> bytes:
    return (_FOLDER / name).read_bytes()
