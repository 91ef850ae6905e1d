"""accept_and_commit: how far the target agrees with a request's drafts, and what a round emits.

The walk starts at row 0, the root, and goes on to the first child whose token is what the target
sampled; it emits what was sampled at each row it stood on.  A row is frozen as by `commit`: at an
end token or a stop id (emitted), at its length limit (emitted), or where logits are not finite (not
emitted); the first token at which one of these happens is the last.

Worked example: 7 tokens committed.

    tokens    [a b c d]  parents [-1 0 0 1]      b and c follow a, d follows b
    sampled   [c x y z]                          the target's token behind each
    path      [0 2 2]                            a, c; behind them an entry is its own index
    results   [2 0 c y 0]                        two tokens, still running; 9 tokens committed
    last      1                                  c's row, once the path lies together
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from paceline.core.padding import PAD_PREFIX_LEN, PAD_ROW
from paceline.core.step import FinishCode
from paceline.kernels._check import reject
from paceline.kernels.commit import CommittedRows, EndRules
from paceline.kernels.custom_op import define_op

FORCED_BITS = 16  # a forced length is a multiple of 2**-16
FORCED_SPREAD = 40503  # 2**16 over the golden ratio: requests are spread over a forced length


class Drafts(NamedTuple):
    """What a round drafted for its requests, and what the target sampled behind each row."""

    row_ids: Tensor  # [padded_reqs]  int64  padding: PAD_ROW
    prefix_lens: Tensor  # [padded_reqs]  int32  tokens committed before the round
    tokens: Tensor  # [padded_reqs, n]  int64  column 0: the root
    parents: Tensor | None  # [padded_reqs, n]  int32  an earlier row, or -1; None: a chain
    sampled: Tensor  # [padded_reqs, n]  int64
    finite: Tensor  # [padded_reqs, n]  bool  False: the row's logits held NaN or inf
    max_drafts: Tensor  # [table rows]  int64  most drafts a request accepts; 0: it does not draft


class Accepted(NamedTuple):
    """What a round accepted."""

    path: Tensor  # [padded_reqs, max_path]  int64  rows that emitted, the root first; behind them
    # each entry's own index
    last: Tensor  # [padded_reqs]  int64  row of the step, in chain order: the last that emitted
    results: Tensor  # [padded_reqs, 2 + max_path]  int32  tokens emitted, FinishCode, their ids, 0s


class _Walk(NamedTuple):
    """The way down each request's tree, before anything ends it."""

    nodes: Tensor  # [padded_reqs, max_path]  int64  the row it stands on; any row when it has ended
    reached: Tensor  # [padded_reqs, max_path]  bool
    said: Tensor  # [padded_reqs, max_path]  int64  the token emitted there


def accept_reference(
    rows: CommittedRows, ends: EndRules, drafts: Drafts, out: Accepted, *, forced: float | None
) -> None:
    """The definition, and the CPU's path; arguments and mutation as `accept_and_commit`."""
    walk = _walk(drafts, out.path.shape[1], forced)
    (reqs, max_path), device = out.path.shape, out.path.device
    steps = torch.arange(max_path, device=device)
    is_live = drafts.row_ids != PAD_ROW
    finite = drafts.finite.gather(1, walk.nodes)
    stop_ids = ends.stop_ids.index_select(0, drafts.row_ids).unsqueeze(1)
    known = drafts.prefix_lens.unsqueeze(1) + 2 + steps
    at_limit = known >= ends.max_len.index_select(0, drafts.row_ids).unsqueeze(1)
    codes = at_limit.int().mul_(int(FinishCode.LENGTH))
    is_stop = (stop_ids == walk.said.unsqueeze(2)).any(2)
    codes.masked_fill_(is_stop, int(FinishCode.STOP_TOKEN))
    codes.masked_fill_(~finite, int(FinishCode.NON_FINITE))
    ended = (codes != 0).int()
    goes_on = walk.reached & (ended.cumsum(1) == ended) & is_live.unsqueeze(1)
    emits = goes_on & finite

    num_emitted = emits.sum(1, dtype=torch.int32)
    emitted = walk.said * emits
    finish = (codes * goes_on).amax(1)
    out.path.copy_(torch.where(emits, walk.nodes, steps))
    first_rows = torch.arange(reqs, device=device) * drafts.tokens.shape[1]
    torch.add(first_rows, (num_emitted - 1).clamp_(min=0), out=out.last)
    out.results[:, 0].copy_(num_emitted)
    out.results[:, 1].copy_(finish)
    out.results[:, 2:].copy_(emitted)

    kv_committed = (drafts.prefix_lens + num_emitted).where(is_live, PAD_PREFIX_LEN)
    rows.kv_committed.index_copy_(0, drafts.row_ids, kv_committed)
    rows.finish.index_copy_(0, drafts.row_ids, finish)
    # What emits nothing writes token 0 at [PAD_ROW, 0], all of them the same value.
    flat_rows = (drafts.row_ids * rows.token_ids.shape[1]).unsqueeze(1)
    index = (flat_rows + known - 1) * emits
    rows.token_ids.view(-1).index_copy_(0, index.view(-1), emitted.int().view(-1))


def _walk(drafts: Drafts, max_path: int, forced: float | None) -> _Walk:
    """From the root, from child to child."""
    reqs, n = drafts.tokens.shape
    columns = torch.arange(n, device=drafts.tokens.device)
    parents = (columns - 1).expand(reqs, n) if drafts.parents is None else drafts.parents
    is_child = parents.unsqueeze(1) == columns.unsqueeze(1)  # [padded_reqs, parent, child]
    most = drafts.max_drafts.index_select(0, drafts.row_ids)
    if forced is None:
        fits = is_child & (drafts.tokens.unsqueeze(1) == drafts.sampled.unsqueeze(2))
    else:
        wanted = torch.minimum(_forced_drafts(drafts, forced), most)
        fits = is_child & _forced_rows(parents, wanted, max_path).unsqueeze(1)
    next_rows = columns.expand(reqs, n, n).where(fits, n).amin(2)  # n: there is none
    next_rows = torch.nn.functional.pad(next_rows, (0, 1), value=n)
    nodes = [drafts.row_ids.new_zeros(reqs, 1)]
    for _ in range(max_path):
        nodes.append(next_rows.gather(1, nodes[-1]))
    path = torch.cat(nodes[:-1], dim=1)
    reached = (path < n) & (torch.arange(max_path, device=path.device) <= most.unsqueeze(1))
    path = path.clamp_(max=n - 1)
    said = drafts.sampled.gather(1, path)
    if forced is not None:  # a draft is emitted whatever was sampled
        below = torch.cat(nodes[1:], dim=1)
        drafted = drafts.tokens.gather(1, below.clamp(max=n - 1))
        said = drafted.where(below < n, said)
    return _Walk(path, reached, said)


def _forced_drafts(drafts: Drafts, forced: float) -> Tensor:
    """[padded_reqs]  int64  drafts to accept, such that `forced` tokens are emitted on average.

    Round k of a request would end at floor(k * forced + phase); from the one before which the
    request stands it goes as far as from there to the next.
    """
    length = round(forced * 2**FORCED_BITS)
    phase = (drafts.row_ids * FORCED_SPREAD) & (2**FORCED_BITS - 1)
    ends_before = (((drafts.prefix_lens.long() + 1) << FORCED_BITS) - phase - 1) // length
    reach = ends_before * length + phase
    emitted: Tensor = ((reach + length) >> FORCED_BITS) - (reach >> FORCED_BITS)
    return emitted - 1


def _forced_rows(parents: Tensor, wanted: Tensor, max_path: int) -> Tensor:
    """[padded_reqs, n]  bool  the way to the first of the rows that are `wanted` deep, or deepest.

    parents: [padded_reqs, n] integers; wanted: [padded_reqs] int64.
    """
    reqs, n = parents.shape
    columns = torch.arange(n, device=parents.device)
    padded = torch.nn.functional.pad(parents.long(), (1, 0), value=-1)  # row -1 hangs nowhere
    padded[:, 1].zero_()
    nodes, depths = columns.expand(reqs, n), torch.zeros_like(padded[:, 1:])
    for _ in range(max_path - 1):
        depths = depths + (nodes > 0)
        nodes = padded.gather(1, nodes + 1)
    depths = depths.masked_fill(nodes != 0, -1)  # not below the root, or too deep
    depth = torch.minimum(wanted, depths.amax(1))
    leaf = columns.where(depths == depth.unsqueeze(1), n).amin(1, keepdim=True)
    is_on_way = columns == leaf
    for _ in range(max_path - 1):
        leaf = padded.gather(1, leaf + 1)
        is_on_way = is_on_way | (columns == leaf)
    return is_on_way


def _accept_cuda(*fields: Any) -> None:
    from paceline.kernels._triton.accept import launch_accept

    rows, ends = CommittedRows(*fields[:3]), EndRules(*fields[3:5])
    drafts, out = Drafts(*fields[5:12]), Accepted(*fields[12:15])
    launch_accept(rows, ends, drafts, out, forced=fields[15])


_ACCEPT = define_op(
    "accept(Tensor(a!) kv_committed, Tensor(b!) finish, Tensor(c!) history, Tensor stop_ids, "
    "Tensor max_len, Tensor row_ids, Tensor prefix_lens, Tensor tokens, Tensor? parents, "
    "Tensor sampled, Tensor finite, Tensor max_drafts, Tensor(d!) path, Tensor(e!) last, "
    "Tensor(f!) results, float? forced) -> ()",
    cpu=None,
    cuda=_accept_cuda,
)


def accept_and_commit(
    rows: CommittedRows,
    ends: EndRules,
    drafts: Drafts,
    out: Accepted,
    *,
    forced: float | None = None,
) -> None:
    """Accept what the target agrees with, emit it, and advance every live row by as much.

    forced: None, or how many tokens a round emits on average, whatever was sampled (to compare
    machines; a graph holds it fast): the drafts on the way to the first row that is deep enough.
    Mutates `rows` and `out`; row 0 keeps the padding facts.  A live row is in a round once.  On a
    CPU these are torch's operators, which a recorded graph replays on fixed storages.  Graph-safe:
    the grid depends on shapes only.  Raises KernelArgumentError.
    """
    _check_drafts(drafts, out)
    if out.results.device.type == "cpu":
        accept_reference(rows, ends, drafts, out, forced=forced)
        return
    _ACCEPT(*rows, *ends, *drafts, *out, forced)


def _check_drafts(drafts: Drafts, out: Accepted) -> None:
    reqs, max_path = out.path.shape
    nodes = (reqs, drafts.tokens.shape[-1])
    wanted = (
        ("tokens", drafts.tokens, torch.int64, nodes),
        ("parents", drafts.parents, torch.int32, nodes),
        ("sampled", drafts.sampled, torch.int64, nodes),
        ("finite", drafts.finite, torch.bool, nodes),
        ("path", out.path, torch.int64, (reqs, max_path)),
        ("last", out.last, torch.int64, (reqs,)),
        ("results", out.results, torch.int32, (reqs, 2 + max_path)),
    )
    for name, tensor, dtype, shape in wanted:
        if tensor is None:  # parents of a chain
            continue
        if tensor.dtype != dtype or tensor.shape != shape or not tensor.is_contiguous():
            reject(
                name,
                expected=f"contiguous {dtype} {list(shape)}",
                got=tensor,
                remedy="every request of a round brings as many rows; take the round's buffers",
            )
