"""Frames on a pipe: what was sent comes out whole, and an end within one is an end."""

import io
import os

import pytest

from paceline.core.frames import receive, send


def test_frames_come_as_they_went():
    file = io.BytesIO()
    send(file, b"one", b" and two")
    send(file)
    send(file, b"\0" * 70_000)
    file.seek(0)
    assert [receive(file) for _ in range(4)] == [b"one and two", b"", b"\0" * 70_000, None]


@pytest.mark.parametrize("kept", [0, 3, 8, 10])
def test_an_end_within_a_frame_is_an_end(kept):
    file = io.BytesIO()
    send(file, b"three")
    assert receive(io.BytesIO(file.getvalue()[:kept])) is None


def test_nobody_who_reads_is_an_error():
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "wb", buffering=0) as file, pytest.raises(BrokenPipeError):
        send(file, b"lost")
