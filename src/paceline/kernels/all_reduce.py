"""all_reduce and all_gather: what the ranks of one model tell each other, through memory that all
of them see.

The definition is an ordered sum: parts are added in float32, rank 0's first, and rounded once, so
every rank has the same bits, whoever came last.  Ranks call the same operations in the same order,
with the same shapes.

On a CPU a rank writes its part into its place of the box, says that it has sent one more message,
waits until all have sent as many, and reads all parts.  The box has two sides, used in turns: who
sends message m + 2 has seen everybody send m + 1, and so has everybody read message m.

On GPUs every rank has a box of its own, into which the others write (`_triton.all_reduce`).  There
a message goes in slices through channels, each with turns of its own, so that any size passes.
Beside it lie rows for short messages (`_triton.all_reduce_norm`), which nobody announces: what has
not come is `ABSENT`.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from paceline.core.errors import PacelineError, message
from paceline.kernels._check import reject
from paceline.kernels.custom_op import define_op
from paceline.kernels.stand_in import device_type

WAIT_S = 60.0  # for ranks that have not sent theirs, before a step fails
_SPIN_S = 2e-4  # on a CPU: who is further behind has no core, and gets ours sooner while we sleep
_NAP_S = 5e-5
CHANNELS = 528  # of a box on a GPU: programs that send side by side, four to a processor
SLICE_BYTES = 16384  # of a message, that a channel takes in one turn
POLLED = 256  # rows of a message that is not announced, of a slice each
WORDS = CHANNELS + POLLED  # of a rank: turns of channels, then of rows
ABSENT = -1  # bits of a number of `Exchange.rows` that has not come: no rank sends this NaN
GONE = -1  # in place of a rank's number of messages: it has ended, and nobody waits for it
RELEASED = 1 << 62  # on a GPU in place of all words of a rank, which waits for nobody any more


@dataclass(frozen=True, slots=True, eq=False)
class Exchange:
    """One rank's way to the others."""

    rank: int
    # On a CPU box and sent are memory that all ranks see; on a GPU this rank's, which all write.
    box: Tensor  # [2, ranks, capacity]  the activations' dtype; an even capacity, for float32 too
    sent: Tensor  # int64 messages of each rank: on a CPU [ranks], or GONE; else [WORDS, ranks]
    rows: Tensor  # [2, ranks, POLLED, slice]  the box's dtype, as the box; on a CPU [0]
    peers: Tensor  # [ranks, 3] int64 addresses of each rank's box, sent and rows; on a CPU [0, 3]

    @property
    def ranks(self) -> int:
        return self.box.shape[1]


class ExchangeMemory(NamedTuple):
    """Of an `Exchange`, where it lies."""

    box: Tensor
    sent: Tensor
    rows: Tensor

    @property
    def addresses(self) -> tuple[int, ...]:
        return tuple(tensor.data_ptr() for tensor in self)


def exchange_memory(
    ranks: int, capacity: int, *, dtype: torch.dtype, device: torch.device
) -> ExchangeMemory:
    """New memory in which nothing was sent.  capacity: numbers of one rank's largest message; a
    GPU's box is as large for any."""
    words: tuple[int, ...] = (ranks,)
    places: tuple[int, ...] = (0,)
    if device_type(device) != "cpu":
        piece = SLICE_BYTES // dtype.itemsize
        capacity, words, places = CHANNELS * piece, (WORDS, ranks), (2, ranks, POLLED, piece)
    box = torch.zeros(2, ranks, capacity, dtype=dtype, device=device)
    sent = torch.zeros(words, dtype=torch.int64, device=device)
    rows = torch.empty(places, dtype=dtype, device=device)
    rows.view(torch.int8).fill_(ABSENT)
    return ExchangeMemory(box, sent, rows)


def peer_table(addresses: Sequence[tuple[int, ...]], device: torch.device) -> Tensor:
    """`Exchange.peers`.  addresses: [ranks] of `ExchangeMemory.addresses`, as `device` sees
    them."""
    return torch.tensor(addresses, dtype=torch.int64, device=device).view(-1, 3)


def open_exchange(
    ranks: int, capacity: int, *, dtype: torch.dtype, device: torch.device
) -> tuple[Exchange, ...]:
    """[ranks] ways through new memory of this process; see `exchange_memory`."""
    new = partial(exchange_memory, ranks, capacity, dtype=dtype, device=device)
    if device_type(device) == "cpu":
        memory = new()
        return tuple(Exchange(rank, *memory, peer_table((), device)) for rank in range(ranks))
    memories = [new() for _ in range(ranks)]
    peers = peer_table([memory.addresses for memory in memories], device)
    return tuple(Exchange(rank, *memory, peers) for rank, memory in enumerate(memories))


def all_reduce_reference(parts: Tensor) -> Tensor:
    """The definition.  parts: [ranks, ...]; returns [...] in their dtype."""
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    return total.to(parts.dtype)


def _all_reduce_cpu(
    x: Tensor, rank: int, box: Tensor, sent: Tensor, peers: Tensor, out: Tensor
) -> None:
    parts = _exchanged(x, rank, box, sent)[:, : x.numel()]
    out.copy_(all_reduce_reference(parts).view(out.shape))


def _all_gather_cpu(
    x: Tensor, rank: int, box: Tensor, sent: Tensor, peers: Tensor, out: Tensor
) -> None:
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
    began = time.monotonic()
    while (least := int(sent.min())) <= turn:
        if least == GONE:
            _lack(sent)
        waited = time.monotonic() - began
        if waited > WAIT_S:
            _miss(sent, turn + 1)
        time.sleep(0 if waited < _SPIN_S else _NAP_S)
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


def _all_reduce_cuda(*arguments: Any) -> None:
    from paceline.kernels._triton.all_reduce import launch_all_reduce

    launch_all_reduce(*arguments)


def _all_gather_cuda(*arguments: Any) -> None:
    from paceline.kernels._triton.all_reduce import launch_all_gather

    launch_all_gather(*arguments)


_WAY = "Tensor x, int rank, Tensor(b!) box, Tensor(c!) sent, Tensor peers, Tensor(a!) out"
_ALL_REDUCE = define_op(f"all_reduce({_WAY}) -> ()", cpu=_all_reduce_cpu, cuda=_all_reduce_cuda)
_ALL_GATHER = define_op(f"all_gather({_WAY}) -> ()", cpu=_all_gather_cpu, cuda=_all_gather_cuda)


def all_reduce(x: Tensor, exchange: Exchange) -> Tensor:
    """The sum of every rank's x, in a new tensor of its shape and dtype.

    x: [tokens, hidden], the box's dtype or float32.  Mutates the exchange.  Recordable: each run
    sends anew.  Raises KernelArgumentError, TimeoutError where a rank sends nothing, PacelineError
    where one has ended.
    """
    check_message(x, exchange)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    _ALL_REDUCE(x, exchange.rank, exchange.box, exchange.sent, exchange.peers, out)
    return out


def all_gather(x: Tensor, columns: int, exchange: Exchange) -> Tensor:
    """Every rank's columns side by side, [rows, columns]; as `all_reduce`.

    x: [rows, this rank's columns], as of `Parallel.share_rows(columns)`.
    """
    check_message(x, exchange)
    out = x.new_empty(x.shape[0], columns)
    _ALL_GATHER(x, exchange.rank, exchange.box, exchange.sent, exchange.peers, out)
    return out


def check_message(x: Tensor, exchange: Exchange) -> None:
    """Raise KernelArgumentError for what the exchange does not carry."""
    box = exchange.box
    is_kind = x.dtype in (box.dtype, torch.float32) and x.device == box.device
    fits = device_type(box.device) != "cpu" or x.nbytes <= box.shape[2] * box.itemsize
    if x.dim() != 2 or not is_kind or not fits:
        reject(
            "x",
            expected=f"{box.dtype} or float32 [rows, columns] of at most "
            f"{box.shape[2] * box.itemsize} bytes on {box.device}",
            got=x,
            remedy="open the exchange for the largest step",
        )
