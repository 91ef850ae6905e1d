"""Frames come through a ring in their order, whole, whatever their length; an exchange through the
same memory; and who does not take is not waited for without end."""

import os
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest
import torch

from paceline.kernels.all_reduce import all_reduce
from paceline.runner import shared_memory
from paceline.runner.shared_memory import (
    RING_BYTES,
    BoxShape,
    FrameReader,
    FrameWriter,
    SharedMemory,
)

SHAPE = BoxShape(ranks=3, capacity=8, dtype=torch.bfloat16)
LENGTHS = (0, 1, 7, RING_BYTES - 8, 5, RING_BYTES, 3 * RING_BYTES + 13, 2)


@pytest.fixture
def maps() -> list[SharedMemory]:
    """[ranks] of one memory."""
    fd = SharedMemory.create(SHAPE)
    found = [SharedMemory(fd, SHAPE) for _ in range(SHAPE.ranks)]
    os.close(fd)
    return found


class Bells:
    """A pipe to each rank but the leader."""

    def __init__(self) -> None:
        pipes = [os.pipe() for _ in range(1, SHAPE.ranks)]
        self.ears = [ear for ear, _ in pipes]
        self.ropes = [rope for _, rope in pipes]
        for rope in self.ropes:
            os.set_blocking(rope, False)

    def ring(self) -> None:
        for rope in self.ropes:
            with suppress(BlockingIOError):
                os.write(rope, b"\0")

    def close(self) -> None:
        for rope in self.ropes:
            os.close(rope)


@pytest.fixture
def bells() -> Iterator[Bells]:
    made = Bells()
    yield made
    for ear in made.ears:
        os.close(ear)


def test_frames_of_any_length_come_whole_and_in_order(
    maps: list[SharedMemory], bells: Bells
) -> None:
    rng = random.Random(0)
    lengths = [*LENGTHS, *(rng.randrange(100_000) for _ in range(60))]
    frames = [rng.randbytes(length) for length in lengths]

    def read(rank: int) -> list[bytes]:
        reader = FrameReader(maps[rank], rank, bells.ears[rank - 1])
        found = [reader.read() for _ in frames]
        with pytest.raises(EOFError):
            reader.read()
        return found

    writer = FrameWriter(maps[0], told=bells.ring)
    with ThreadPoolExecutor(2) as threads:
        ranks = [threads.submit(read, rank) for rank in (1, 2)]
        for frame in frames:
            writer.write(frame)
        bells.close()
        for rank in ranks:
            assert rank.result() == frames


def test_ranks_meet_in_the_box(maps: list[SharedMemory]) -> None:
    parts = torch.randn(3, 2, 4).bfloat16()
    with ThreadPoolExecutor(3) as threads:
        sums = list(threads.map(lambda r: all_reduce(parts[r], maps[r].exchange(r)), range(3)))
    assert all(torch.equal(each, sums[0]) for each in sums)
    assert torch.allclose(sums[0].float(), parts.float().sum(0), atol=0.05)
    assert maps[0].sent.tolist() == [1, 1, 1]


def test_a_rank_that_takes_nothing_is_waited_for_no_longer_than_stated(
    maps: list[SharedMemory], bells: Bells, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_memory, "WAIT_S", 0.05)
    writer = FrameWriter(maps[0], told=bells.ring)
    FrameWriter(maps[0], told=bells.ring).write(b"x")
    with pytest.raises(TimeoutError) as caught:
        writer.write(bytes(RING_BYTES))
    assert str(caught.value) == (
        "bytes of steps that each rank has taken after 0.05 s must be more than 0, got [0, 0]; the "
        "rank with the fewest hangs: look at its log"
    )
    bells.close()


def test_who_waits_for_room_hears_that_there_will_be_none(maps: list[SharedMemory]) -> None:
    def told() -> None:
        raise RuntimeError("it has ended")

    with pytest.raises(RuntimeError, match="it has ended"):
        FrameWriter(maps[0], told=told).write(bytes(2 * RING_BYTES))
