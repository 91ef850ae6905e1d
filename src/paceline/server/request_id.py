"""X-Request-Id: the name by which a client and the server speak of one request."""

import re
import uuid

from starlette.types import ASGIApp, Message, Receive, Scope, Send

_HEADER = b"x-request-id"
_PLAIN = re.compile(rb"[\x21-\x7e]{1,128}")


class RequestIds:
    """ASGI middleware: says in every answer the id that came with the request, or a new one where
    none came, or one that is no plain word of at most 128 characters.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        came = dict(scope["headers"]).get(_HEADER, b"")
        name = came if _PLAIN.fullmatch(came) else uuid.uuid4().hex.encode()
        scope["request_id"] = name.decode()

        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), (_HEADER, name)]}
            await send(message)

        await self._app(scope, receive, named)
