"""KeyGuard: refuses clients without a key."""

import hmac
from collections.abc import Sequence

from starlette.types import ASGIApp, Receive, Scope, Send

from paceline.server.errors import ApiError
from paceline.server.playground.page import FILES

_OPEN = {"/health", "/ready", *FILES}


class KeyGuard:
    """ASGI middleware: refuses clients without a key before their body is read.

    Probes and who opens a page bring none, so what they ask is open: the page's files say nothing
    of this server.  Of several keys each is a client: `key1`, ...
    """

    def __init__(self, app: ASGIApp, *, api_keys: Sequence[str]) -> None:
        self._app = app
        self._wanted = [key.encode() for key in api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in _OPEN:
            await self._app(scope, receive, send)
            return
        number = self._number(scope)
        if number is None:
            text = (
                "Authorization must be 'Bearer <a key the server was started with>', "
                "or x-api-key that key"
            )
            headers = {"WWW-Authenticate": "Bearer"}
            error = ApiError(401, text, code="invalid_api_key", headers=headers)
            await error.response(scope["path"])(scope, receive, send)
            return
        if len(self._wanted) > 1:
            scope["client"] = (f"key{number}", 0)
        await self._app(scope, receive, send)

    def _number(self, scope: Scope) -> int | None:
        """Of the key that was brought, from 1; every key is compared, whichever it is."""
        headers = dict(scope["headers"])
        scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
        # Clients of the Anthropic API bring it in a header of its own.
        given = key.lstrip(b" ") if scheme.lower() == b"bearer" else headers.get(b"x-api-key", b"")
        same = [hmac.compare_digest(given, wanted) for wanted in self._wanted]
        return same.index(True) + 1 if any(same) else None
