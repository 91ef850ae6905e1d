"""What ranks and their leader tell each other beside steps; see `llm.ranks` for when."""

from collections.abc import Iterator
from typing import IO, Any

import msgspec
from msgspec import Struct

from paceline.core.frames import receive, send
from paceline.core.step import FinishCode, Step, StepOutputs
from paceline.runner.recording.graphs import CapturePolicy


class Started(Struct, frozen=True, kw_only=True, tag=0):
    versions: dict[str, str | None]
    layout: int  # of steps


class Planned(Struct, frozen=True, kw_only=True, tag=1):
    options: dict[str, Any]
    weights: str
    num_pages: tuple[int, ...]
    box: bytes  # how others reach its box on a GPU, see kernels.peer_memory; of a CPU none


class Loaded(Struct, frozen=True, kw_only=True, tag=4):
    pass


class RankReady(Struct, frozen=True, kw_only=True, tag=2):
    pass


class RankFailed(Struct, frozen=True, kw_only=True, tag=3):
    text: str


class Agreed(Struct, frozen=True, kw_only=True):
    """The leader's first frame."""

    num_pages: tuple[int, ...]  # [num_groups] the least of all ranks
    boxes: tuple[bytes, ...]  # [ranks] of each
    capture: CapturePolicy | None
    poison_graphs: bool
    staging_depth: int


class RankSaid(Struct, frozen=True, kw_only=True, tag=5):
    """What came of a step that ranks compare."""

    epoch: int
    token_ids: tuple[tuple[int, ...], ...]  # as of StepOutputs
    finish: tuple[int, ...]  # [num_reqs] FinishCode


Told = Started | Planned | Loaded | RankReady | RankFailed | RankSaid


def said(outputs: StepOutputs) -> RankSaid:
    """Of one rank."""
    return RankSaid(
        epoch=outputs.epoch,
        token_ids=outputs.token_ids,
        finish=tuple(int(code) for code in outputs.finish),
    )


def difference(ours: RankSaid, theirs: RankSaid) -> str:
    """The first row of which they say something else, in words."""
    assert theirs.epoch == ours.epoch, "each rank tells of each step that is compared, in order"
    pairs = zip(ours.token_ids, ours.finish, strict=True)
    others = zip(theirs.token_ids, theirs.finish, strict=True)
    row, (mine, other) = next(
        (row, both)
        for row, both in enumerate(zip(pairs, others, strict=True))
        if both[0] != both[1]
    )
    words = [f"tokens {list(ids)} with {FinishCode(code).name}" for ids, code in (other, mine)]
    return f"{words[0]}, not {words[1]}, of row {row}"


def is_compared(step: Step, every: int | None) -> bool:
    """Whether ranks tell what they said in this step; every: `compare_ranks_every`."""
    return every is not None and step.epoch % every == 0


def tell(file: IO[bytes], told: Told) -> None:
    """From a rank to its leader."""
    send(file, msgspec.msgpack.encode(told))


def hear(file: IO[bytes]) -> Iterator[Told]:
    """What a rank tells, to its end."""
    while (frame := receive(file)) is not None:
        told: Told = msgspec.msgpack.decode(frame, type=Told)
        yield told
