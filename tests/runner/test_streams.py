"""Streams: a CUDA stream is made current once for the pieces of a step."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from paceline.runner.streams import CudaStream


def test_pieces_within_a_block_enter_the_stream_once(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []

    @contextmanager
    def current(stream: object) -> Iterator[None]:
        events.append("in")
        yield
        events.append("out")

    monkeypatch.setattr(torch.cuda, "Stream", lambda device: object())
    monkeypatch.setattr(torch.cuda, "stream", current)
    stream = CudaStream(torch.device("cuda", 0))

    def work() -> None:
        events.append("work")

    with stream.entered():
        stream.run(work)
        stream.run(work)
    stream.run(work)
    assert events == ["in", "work", "work", "out", "in", "work", "out"]
    with pytest.raises(ValueError, match="half-way"), stream.entered():
        raise ValueError("half-way")
    events.clear()
    stream.run(work)
    assert events == ["in", "work", "out"]
