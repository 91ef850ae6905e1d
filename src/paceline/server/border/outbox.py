"""Outbox: what the engine has to say and has not said; nobody waits for who reads it."""

import select
import socket
from contextlib import suppress
from threading import Lock

from paceline.server.border.messages import BorderMessage, framed


class Outbox:
    """Owns the messages; safe to share between threads."""

    def __init__(self, end: socket.socket) -> None:
        """end: is not waited for from now on."""
        end.setblocking(False)
        self._end = end
        self._lock = Lock()  # of these two
        self._waiting: list[BorderMessage] = []
        self._unsent = memoryview(b"")

    @property
    def has_room(self) -> bool:
        """Whether all was taken that was sent."""
        return not self._unsent

    def put(self, *messages: BorderMessage) -> None:
        """For the next `send`."""
        with self._lock:
            self._waiting += messages

    def send(self) -> None:
        """As much as the socket takes.  Raises OSError when nobody reads it any more."""
        with self._lock, suppress(BlockingIOError):
            while self._unsent or self._waiting:
                if not self._unsent:
                    self._unsent = memoryview(framed(self._waiting))
                    self._waiting.clear()
                self._unsent = self._unsent[self._end.send(self._unsent) :]

    def send_all(self) -> None:
        """Waits for its reader.  Raises OSError when there is none."""
        self.send()
        while not self.has_room:
            select.select([], [self._end], [])
            self.send()
