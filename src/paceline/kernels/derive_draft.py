"""derive_draft: lengths, positions and slots of one pass of the drafter, in the same pages.

Worked example: page size 4; one request, 6 tokens committed, page-table row [7, 2, 5]; the pass
computes 3 rows, two children of the prefix and a child of the first.

    parents        [-1, -1, 0]
    prefix_lens    [6]          committed + advance
    kv_lens        [9]
    positions      [6, 6, 7]    prefix + depth; a chain: prefix + row
    out_cache_loc  [10, 11, 20]  the slots of 6, 7, 8: rows lie one behind the other
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from paceline.core.padding import PAD_PREFIX_LEN, PAD_ROW
from paceline.kernels._check import reject
from paceline.kernels.custom_op import define_op
from paceline.kernels.derive_tree import derive_tree_reference


class DraftBase(NamedTuple):
    """What a pass stands on."""

    row_ids: Tensor  # [padded_reqs]  int64  padding: PAD_ROW
    prefix_lens: Tensor  # [padded_reqs]  int32  tokens committed
    page_tables: Sequence[Tensor]  # [draft groups] of [padded_reqs, max_pages]  int32
    parents: Tensor | None  # [padded_reqs, rows]  int32  an earlier row, or -1; None: a chain


class DraftRows(NamedTuple):
    """What derive_draft writes; meanings and padding as in step_view.StepView."""

    prefix_lens: Tensor  # [padded_reqs]  int32
    extend_lens: Tensor  # [padded_reqs]  int32
    kv_lens: Tensor  # [padded_reqs]  int32
    cu_seqlens_q: Tensor  # [padded_reqs + 1]  int32  the leading 0 too
    req_ids: Tensor  # [padded_reqs * rows]  int64
    positions: Tensor  # [padded_reqs * rows]  int64
    logits_loc: Tensor  # [padded_reqs]  int64
    out_cache_locs: Sequence[Tensor]  # [draft groups] of [padded_reqs * rows]  int64
    tree_mask: Tensor | None  # [padded_reqs * rows, rows]  bool  None: a chain


def derive_draft_reference(
    base: DraftBase, out: DraftRows, *, advance: int, page_sizes: Sequence[int]
) -> None:
    """The definition, and the CPU's path; arguments and mutation as `derive_draft`."""
    reqs, device = base.row_ids.shape[0], base.row_ids.device
    rows = out.positions.shape[0] // reqs
    is_live = base.row_ids != PAD_ROW
    out.prefix_lens.copy_((base.prefix_lens + advance).where(is_live, PAD_PREFIX_LEN))
    out.extend_lens.fill_(rows)
    torch.add(out.prefix_lens, rows, out=out.kv_lens)
    torch.arange(0, (reqs + 1) * rows, rows, out=out.cu_seqlens_q)
    torch.sub(out.cu_seqlens_q[1:], 1, out=out.logits_loc)
    out.req_ids.view(reqs, rows).copy_(torch.arange(reqs, device=device).unsqueeze(1))
    offsets = torch.arange(rows, device=device)
    places = out.positions.view(reqs, rows)
    torch.add(out.prefix_lens.unsqueeze(1), offsets, out=places)
    for table, loc, page_size in zip(base.page_tables, out.out_cache_locs, page_sizes, strict=True):
        pages = table.gather(1, places // page_size).long()
        slots = pages * page_size + places % page_size
        torch.mul(slots, is_live.unsqueeze(1), out=loc.view(reqs, rows))
    if base.parents is not None:
        assert out.tree_mask is not None
        derive_tree_reference(
            base.parents.view(-1), out.prefix_lens, out.positions, tree_mask=out.tree_mask
        )


def _derive_draft_cuda(*fields: Any) -> None:
    from paceline.kernels._triton.derive_draft import launch_derive_draft

    base, out = DraftBase(*fields[:4]), DraftRows(*fields[4:13])
    launch_derive_draft(base, out, advance=fields[13], page_sizes=fields[14])


_DERIVE_DRAFT = define_op(
    "derive_draft(Tensor row_ids, Tensor committed, Tensor[] page_tables, Tensor? parents, "
    "Tensor(a!) prefix_lens, Tensor(b!) extend_lens, Tensor(c!) kv_lens, Tensor(d!) cu_seqlens_q, "
    "Tensor(e!) req_ids, Tensor(f!) positions, Tensor(g!) logits_loc, "
    "Tensor(h!)[] out_cache_locs, Tensor(i!)? tree_mask, int advance, int[] page_sizes) -> ()",
    cpu=None,
    cuda=_derive_draft_cuda,
)


def derive_draft(
    base: DraftBase, out: DraftRows, *, advance: int, page_sizes: Sequence[int]
) -> None:
    """Fill `out` in place; every request brings as many rows, and its positions say how many.

    advance: tokens between those committed and the pass's rows; page_sizes: [draft groups] tokens.
    A padded row has prefix 1 and slot 0.  parents are trusted: they live on the device.  On a CPU
    these are torch's operators, which a recorded graph replays on fixed storages.  Graph-safe: the
    grid depends on shapes only.  Raises KernelArgumentError.
    """
    _check_pass(base, out)
    if out.positions.device.type == "cpu":
        derive_draft_reference(base, out, advance=advance, page_sizes=page_sizes)
        return
    _DERIVE_DRAFT(*base, *out, advance, page_sizes)


def _check_pass(base: DraftBase, out: DraftRows) -> None:
    reqs = base.row_ids.shape[0]
    rows = out.positions.shape[0] // reqs
    tokens = reqs * rows
    wanted: list[tuple[str, Tensor | None, torch.dtype, tuple[int, ...]]] = [
        ("cu_seqlens_q", out.cu_seqlens_q, torch.int32, (reqs + 1,)),
        ("req_ids", out.req_ids, torch.int64, (tokens,)),
        ("positions", out.positions, torch.int64, (tokens,)),
    ]
    wanted += [
        (f"out_cache_locs[{index}]", loc, torch.int64, (tokens,))
        for index, loc in enumerate(out.out_cache_locs)
    ]
    if base.parents is not None or out.tree_mask is not None:
        wanted += [
            ("parents", base.parents, torch.int32, (reqs, rows)),
            ("tree_mask", out.tree_mask, torch.bool, (tokens, rows)),
        ]
    for name, tensor, dtype, shape in wanted:
        fits = tensor is not None and tensor.dtype == dtype and tensor.shape == shape
        if tensor is None or not fits or not tensor.is_contiguous():
            reject(
                name,
                expected=f"contiguous {dtype} {list(shape)}",
                got=tensor,
                remedy="every request of a pass brings as many rows; a tree has parents and a mask",
            )
