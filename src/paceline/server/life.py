"""Life: whether a server takes requests, and how many it has; Doorkeeper: who turns them away.

A server that stops still listens: probes and clients hear that they are to go elsewhere.
"""

from starlette.types import ASGIApp, Receive, Scope, Send

from paceline.server.border.messages import STOPPING
from paceline.server.errors import ApiError
from paceline.server.limits import CLOSE


class Life:
    """Owned by the server; `stop` may be called by a signal's handler."""

    def __init__(self) -> None:
        self.is_stopping = False
        self.is_hurried = False  # told to stop twice: nothing is waited for
        self.num_active = 0  # requests that are read or answered; of the loop

    def stop(self) -> None:
        """Take no more requests; called once more, wait for none."""
        self.is_hurried = self.is_stopping
        self.is_stopping = True

    def require(self) -> None:
        """Raise ApiError, 503, once it stops."""
        if self.is_stopping:
            raise ApiError(503, STOPPING, code="stopping", headers={"Retry-After": "1", **CLOSE})


class Doorkeeper:
    """ASGI middleware: counts what a server has to do, and turns away what comes when it stops."""

    def __init__(self, app: ASGIApp, *, life: Life) -> None:
        self._app = app
        self._life = life

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        try:
            self._life.require()
        except ApiError as error:
            await error.response(scope["path"])(scope, receive, send)
            return
        self._life.num_active += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._life.num_active -= 1
