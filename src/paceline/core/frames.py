"""Frames: bytes with an end, on a pipe between two processes."""

import struct
from typing import IO

_LENGTH = struct.Struct("<Q")


def send(file: IO[bytes], *parts: bytes) -> None:
    """All parts as one frame, and flush.  Raises BrokenPipeError where nobody reads."""
    file.write(_LENGTH.pack(sum(map(len, parts))))
    for part in parts:
        file.write(part)
    file.flush()


def receive(file: IO[bytes]) -> bytes | None:
    """The next frame; waits for it.  None: the pipe ended, perhaps within a frame.  file: buffered,
    so that a read is short at the end alone."""
    head = file.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    (length,) = _LENGTH.unpack(head)
    frame = file.read(length)
    return frame if len(frame) == length else None
