"""all_reduce and all_gather: what the ranks of one model tell each other, through memory that all
of them see.

The definition is an ordered sum: parts are added in float32, rank 0's first, and rounded once, so
every rank has the same bits, whoever came last.  Ranks call the same operations in the same order,
with the same shapes.

On a CPU a rank writes its part into its place of the box, says that it has sent one more message,
waits until all have sent as many, and reads all parts.  The box has two sides, used in turns: who
sends message m + 2 has seen everybody send m + 1, and so has everybody read message m.
"""

import time
from dataclasses import dataclass
from typing import NoReturn

import torch
from torch import Tensor

from paceline.core.errors import PacelineError, message
from paceline.kernels._check import reject
from paceline.kernels.custom_op import define_op

WAIT_S = 60.0  # for ranks that have not sent theirs, before a step fails
GONE = -1  # in place of a rank's number of messages: it has ended, and nobody waits for it


@dataclass(frozen=True, slots=True, eq=False)
class Exchange:
    """One rank's way to the others."""

    rank: int
    box: Tensor  # [2, ranks, capacity]  the activations' dtype; memory that all ranks see; of an
    # even capacity, so that float32 lies in it too
    sent: Tensor  # [ranks]  int64  messages that each rank has sent, or GONE; likewise

    @property
    def ranks(self) -> int:
        return self.box.shape[1]


def open_exchange(
    ranks: int, capacity: int, *, dtype: torch.dtype, device: torch.device
) -> tuple[Exchange, ...]:
    """[ranks] ways through new memory of this process.  capacity: numbers of one rank's largest
    message."""
    box = torch.zeros(2, ranks, capacity, dtype=dtype, device=device)
    sent = torch.zeros(ranks, dtype=torch.int64, device=device)
    return tuple(Exchange(rank, box, sent) for rank in range(ranks))


def all_reduce_reference(parts: Tensor) -> Tensor:
    """The definition.  parts: [ranks, ...]; returns [...] in their dtype."""
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    return total.to(parts.dtype)


def _all_reduce_cpu(x: Tensor, rank: int, box: Tensor, sent: Tensor, out: Tensor) -> None:
    parts = _exchanged(x, rank, box, sent)[:, : x.numel()]
    out.copy_(all_reduce_reference(parts).view(out.shape))


def _all_gather_cpu(x: Tensor, rank: int, box: Tensor, sent: Tensor, out: Tensor) -> None:
    parts = _exchanged(x, rank, box, sent)
    most = -(-out.shape[1] // parts.shape[0])
    for part, columns in zip(parts, out.split(most, dim=1), strict=False):
        columns.copy_(part[: columns.numel()].view(columns.shape))


def _exchanged(x: Tensor, rank: int, box: Tensor, sent: Tensor) -> Tensor:
    """[ranks, capacity, in x's dtype] the messages of this turn, x among them."""
    turn = int(sent[rank])
    side = box[turn % 2].view(x.dtype)
    side[rank, : x.numel()].copy_(x.reshape(-1))
    sent[rank] = turn + 1
    deadline = time.monotonic() + WAIT_S
    while (least := int(sent.min())) <= turn:
        if least == GONE:
            _lack(sent)
        if time.monotonic() > deadline:
            _miss(sent, turn + 1)
        time.sleep(0)
    return side


def _lack(sent: Tensor) -> NoReturn:
    ended = [rank for rank, count in enumerate(sent.tolist()) if count == GONE]
    raise PacelineError.about(
        "ranks of the model", expected="running", got=f"{ended} ended", remedy="load it again"
    )


def _miss(sent: Tensor, wanted: int) -> NoReturn:
    raise TimeoutError(
        message(
            f"messages of each rank after {WAIT_S:g} s",
            expected=f"{wanted}",
            got=sent.tolist(),
            remedy="the rank with the fewest hangs or has ended: look at its log",
        )
    )


_ALL_REDUCE = define_op(
    "all_reduce(Tensor x, int rank, Tensor(b!) box, Tensor(c!) sent, Tensor(a!) out) -> ()",
    cpu=_all_reduce_cpu,
)
_ALL_GATHER = define_op(
    "all_gather(Tensor x, int rank, Tensor(b!) box, Tensor(c!) sent, Tensor(a!) out) -> ()",
    cpu=_all_gather_cpu,
)


def all_reduce(x: Tensor, exchange: Exchange) -> Tensor:
    """The sum of every rank's x, in a new tensor of its shape and dtype.

    x: [tokens, hidden], the box's dtype or float32.  Mutates the exchange.  Recordable: each run
    sends anew.  Raises KernelArgumentError, TimeoutError where a rank sends nothing, PacelineError
    where one has ended.
    """
    _check(x, exchange)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    _ALL_REDUCE(x, exchange.rank, exchange.box, exchange.sent, out)
    return out


def all_gather(x: Tensor, columns: int, exchange: Exchange) -> Tensor:
    """Every rank's columns side by side, [rows, columns]; as `all_reduce`.

    x: [rows, this rank's columns], as of `Parallel.share_rows(columns)`.
    """
    _check(x, exchange)
    out = x.new_empty(x.shape[0], columns)
    _ALL_GATHER(x, exchange.rank, exchange.box, exchange.sent, out)
    return out


def _check(x: Tensor, exchange: Exchange) -> None:
    box = exchange.box
    is_kind = x.dtype in (box.dtype, torch.float32) and x.device == box.device
    if x.dim() != 2 or not is_kind or x.nbytes > box.shape[2] * box.itemsize:
        reject(
            "x",
            expected=f"{box.dtype} or float32 [rows, columns] of at most "
            f"{box.shape[2] * box.itemsize} bytes on {box.device}",
            got=x,
            remedy="open the exchange for the largest step",
        )
