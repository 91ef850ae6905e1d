"""What must hold after every plan, whatever the layout.

The step view, what the model was given and each layout a plan holds are compared with lists of host
integers (proof/rig/wanted.py).
"""

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from itertools import accumulate, chain

import torch
from torch import Tensor

from paceline.attention.layouts.chunks import VirtualRequests
from paceline.attention.layouts.csr import CsrPlan
from paceline.attention.layouts.page_table import PageTablePlan
from paceline.core.padding import PAD_PAGE, PAD_ROW, PAD_SLOT
from paceline.kernels.step_view import StepView
from paceline.proof.rig.placement import BatchPlacement
from paceline.proof.rig.wanted import Cut, Ids, Wanted, wanted_step
from paceline.proof.rig.watched import Watched
from paceline.proof.suite.case import Batch, Case

Layout = PageTablePlan | CsrPlan | VirtualRequests
_SHOWN = 12  # entries of a list that a reason spells out
_BEFORE = 3  # of them before the first that differs


def broken_invariants(
    case: Case,
    batch: Batch,
    placement: BatchPlacement,
    *,
    ids: Ids,
    watched: Watched,
    positions: Tensor,
) -> list[str]:
    """Every invariant the last step broke, by name.

    ids: [num_reqs] token ids of each request; positions: [at least padded_tokens] int64 as the
    model was given them.
    """
    assert watched.planned is not None, "no step was planned"
    view, plan = watched.planned
    wanted = wanted_step(batch, placement, ids, view)
    held = wanted.of_encoder if case.reads_encoder else wanted
    faults = list(_lens(held, view))
    if faults:
        return faults  # what follows is derived from the lengths
    faults = [*_tokens(wanted, view, positions), *_masks(held, view), *_slots(case, held, view)]
    for name, layout in _layouts("plan", plan):
        match layout:
            case PageTablePlan():
                faults += _page_table(name, case, held, layout)
            case VirtualRequests():
                faults += _virtual(name, case, held, layout)
            case CsrPlan():
                faults += _csr(name, case, held, layout)
    return faults


def broken_step(wanted: Wanted, view: StepView, positions: Tensor) -> list[str]:
    """Likewise, of all that does not depend on a cache."""
    behind = _tokens(wanted, view, positions), _masks(wanted, view)
    return list(_lens(wanted, view)) or [*chain.from_iterable(behind)]


def differences(name: str, got: Tensor | list[int], wanted: list[int]) -> Iterator[str]:
    """At most one: that two lists differ, and the entries around the first difference."""
    found = got.tolist() if isinstance(got, Tensor) else got
    if found == wanted:
        return
    if len(found) != len(wanted):
        yield f"{name} must have {len(wanted)} entries, got {len(found)}"
        return
    begin, end = 0, len(wanted)
    if end > _SHOWN:
        first = next(i for i, pair in enumerate(zip(found, wanted, strict=True)) if _differ(pair))
        begin = max(0, first - _BEFORE)
        end = min(end, begin + _SHOWN)
        name = f"{name}[{begin}:{end}]"
    yield f"{name} must be {wanted[begin:end]}, got {found[begin:end]}"


def _differ(pair: tuple[int, int]) -> bool:
    return pair[0] != pair[1]


def _lens(wanted: Wanted, view: StepView) -> Iterator[str]:
    offsets = wanted.offsets
    yield from differences("row_ids", view.row_ids, wanted.rows)
    yield from differences("prefix_lens", view.prefix_lens, wanted.prefix_lens)
    yield from differences("extend_lens", view.extend_lens, wanted.extend_lens)
    yield from differences("kv_lens", view.kv_lens, wanted.kv_lens)
    yield from differences("cu_seqlens_q", view.cu_seqlens_q, offsets)
    if offsets[-1] != view.padded_tokens:
        yield f"the step must have {offsets[-1]} tokens, got {view.padded_tokens}"
    yield from _covers("max_extend_len", view.max_extend_len, wanted.extend_lens)
    yield from _covers("kv_len_bound", view.kv_len_bound, wanted.kv_lens)


def _covers(name: str, bound: int, lens: list[int]) -> Iterator[str]:
    if max(lens) > bound:
        yield f"{name} must be at least {max(lens)}, got {bound}"


def _tokens(wanted: Wanted, view: StepView, given: Tensor) -> Iterator[str]:
    requests = [r for r, extend in enumerate(wanted.extend_lens) for _ in range(extend)]
    yield from differences("req_ids", view.req_ids, requests)
    yield from differences("positions", view.positions, wanted.positions)
    yield from differences("input_ids", view.input_ids, wanted.input_ids)
    yield from differences("logits_loc", view.logits_loc, [end - 1 for end in wanted.offsets[1:]])
    given = given[..., : view.padded_tokens]
    if given.dim() == 1:
        yield from differences("positions the model was given", given, wanted.positions)
        return
    for axis, got in enumerate(given):
        name = f"positions the model was given on axis {axis}"
        yield from differences(name, got, wanted.rope_positions(axis))


def _masks(wanted: Wanted, view: StepView) -> Iterator[str]:
    yield from _tree(wanted, view)
    yield from _ends("visible_end", wanted, view.visible_end)


def _slots(case: Case, wanted: Wanted, view: StepView) -> Iterator[str]:
    """Where each new token is written; live rows never share a slot."""
    for number, group in enumerate(view.groups):
        if case.reads_encoder:  # a step writes none of its rows
            yield from _pages(f"of group {number}", case, wanted, number, group.page_table)
            continue
        slots = wanted.slots(number, case.page_size)
        live = [slot for slot in slots if slot is not None]
        assert len(live) == len(set(live)), "the case itself writes a slot twice"
        loc = [PAD_SLOT if slot is None else slot for slot in slots]
        yield from differences(f"out_cache_loc of group {number}", group.out_cache_loc, loc)
        yield from _pages(f"of group {number}", case, wanted, number, group.page_table)


def _pages(name: str, case: Case, wanted: Wanted, group: int, table: Tensor) -> Iterator[str]:
    """The entries of a page table up to each request's length; all of a padded row's are 0."""
    width = table.shape[1]
    lens = wanted.prefix_lens if case.reads_encoder else wanted.kv_lens
    for request, (row, kv_len) in enumerate(zip(wanted.rows, lens, strict=True)):
        pages = wanted.pages[group][request]
        used = width if row == PAD_ROW else -(-kv_len // case.page_size)
        if used > width:
            yield f"page table {name} must be at least {used} wide, got {width}"
            return
        right = [*pages, *[PAD_PAGE] * (used - len(pages))][:used]
        yield from differences(f"page table row {request} {name}", table[request, :used], right)


def _ends(name: str, wanted: Wanted, visible_end: Tensor | None) -> Iterator[str]:
    """Of each token, the position behind the last key it sees; where prompts have blocks."""
    if (visible_end is None) != (wanted.blocks is None):
        yield f"{name} must be {'absent' if wanted.blocks is None else 'present'}"
    elif visible_end is not None:
        yield from differences(name, visible_end, wanted.visible_end)


def _tree(wanted: Wanted, view: StepView) -> Iterator[str]:
    if (view.tree_mask is None) != (wanted.parents is None):
        yield f"tree_mask must be {'absent' if wanted.parents is None else 'present'}"
    if view.tree_mask is not None and wanted.parents is not None:
        yield from _tree_rows("tree_mask", wanted, view.tree_mask)


def _tree_rows(name: str, wanted: Wanted, mask: Tensor) -> Iterator[str]:
    right = wanted.tree_rows(mask.shape[1])
    for token, (got, row) in enumerate(zip(mask.int().tolist(), right, strict=True)):
        yield from differences(f"{name} of token {token}", got, [int(seen) for seen in row])


def _page_table(name: str, case: Case, wanted: Wanted, plan: PageTablePlan) -> Iterator[str]:
    """A layout is held to the same, whoever made it."""
    yield from differences(f"{name}.cu_seqlens_q", plan.cu_seqlens_q, wanted.offsets)
    yield from differences(f"{name}.prefix_lens", plan.prefix_lens, wanted.prefix_lens)
    yield from differences(f"{name}.extend_lens", plan.extend_lens, wanted.extend_lens)
    yield from differences(f"{name}.kv_lens", plan.kv_lens, wanted.kv_lens)
    yield from _covers(f"{name}.max_extend_len", plan.max_extend_len, wanted.extend_lens)
    yield from _covers(f"{name}.kv_len_bound", plan.kv_len_bound, wanted.kv_lens)
    yield from _ends(f"{name}.visible_end", wanted, plan.visible_end)
    if plan.tree_mask is not None and wanted.parents is not None:
        yield from _tree_rows(f"{name}.tree_mask", wanted, plan.tree_mask)
    for group, table in enumerate(plan.page_tables):
        if table.dtype != torch.int32 or table.stride(1) != 1:
            yield (
                f"{name}.page_tables must be int32 with a last stride of 1, got {table.dtype} "
                f"with {table.stride(1)}"
            )
        yield from _pages(f"{name}.{group}", case, wanted, group, table)


def _csr(name: str, case: Case, wanted: Wanted, plan: CsrPlan) -> Iterator[str]:
    """The pages of all requests in one list, by the lengths of the host plan."""
    cuts = _cuts(wanted, plan, by_host=True)
    cuts += [Cut(0, 0, 0, 0)] * (len(plan.last_page_len) - len(cuts))
    pages = [_pages_of(cut, case, wanted, plan.group) for cut in cuts]
    indptr = [0, *accumulate(map(len, pages))]
    yield from differences(f"{name}.kv_indptr", plan.kv_indptr, indptr)
    last = [
        cut.keys - max(len(ids) - 1, 0) * case.page_size
        for cut, ids in zip(cuts, pages, strict=True)
    ]
    yield from differences(f"{name}.last_page_len", plan.last_page_len, last)
    listed = plan.kv_indices[: indptr[-1]]
    yield from differences(f"{name}.kv_indices", listed, [*chain.from_iterable(pages)])


def _virtual(name: str, case: Case, wanted: Wanted, plan: VirtualRequests) -> Iterator[str]:
    """Where chunks cut a step, by the device's lengths; behind the last cut nobody has a token."""
    cuts, size = _cuts(wanted, plan, by_host=False), plan.chunk.size
    offsets = [0, *accumulate(cut.tokens for cut in cuts)]
    offsets += [offsets[-1]] * (len(plan.keys_used) - len(cuts))
    yield from differences(f"{name}.cu_seqlens_q", plan.cu_seqlens_q, offsets)
    yield from _covers(f"{name}.max_extend_len", plan.max_extend_len, [cut.tokens for cut in cuts])
    used = [max(cut.keys, 1) for cut in cuts]
    yield from differences(f"{name}.keys_used", plan.keys_used[: len(cuts)], used)
    for row, cut in enumerate(cuts):
        pages = _pages_of(cut, case, wanted, plan.group)
        yield from differences(
            f"{name}.page_table row {row}", plan.page_table[row, : len(pages)], pages
        )
    prefixes = [
        p for p, e in zip(wanted.prefix_lens, wanted.extend_lens, strict=True) for _ in range(e)
    ]
    tokens = zip(wanted.positions, prefixes, strict=True)
    lacks = [int(at - at % size >= prefix) for at, prefix in tokens]
    yield from differences(f"{name}.lacks_prefix", plan.lacks_prefix.int(), lacks)


def _cuts(wanted: Wanted, plan: CsrPlan | VirtualRequests, *, by_host: bool) -> list[Cut]:
    """The requests of a plan's layers, virtual ones where they have chunks."""
    if plan.chunk is not None:
        find = wanted.prefix_in_chunks if plan.is_prefix else wanted.in_chunks
        return find(plan.chunk.size, by_host=by_host)
    lens = wanted.host_prefix_lens if plan.is_prefix else wanted.host_kv_lens
    return [Cut(r, e, 0, n) for r, (e, n) in enumerate(zip(wanted.extend_lens, lens, strict=True))]


def _pages_of(cut: Cut, case: Case, wanted: Wanted, group: int) -> list[int]:
    """The pages of its keys; of a padded or frozen row the reserved one."""
    begin, count = cut.first // case.page_size, -(-cut.keys // case.page_size)
    if wanted.rows[cut.request] == PAD_ROW:
        return [PAD_PAGE] * count
    return wanted.pages[group][cut.request][begin : begin + count]


def _layouts(name: str, plan: object) -> Iterator[tuple[str, Layout]]:
    """The layouts a plan holds, by the way to them."""
    if isinstance(plan, Layout):
        yield name, plan
    elif isinstance(plan, tuple):
        for index, item in enumerate(plan):
            yield from _layouts(f"{name}.{index}", item)
    elif is_dataclass(plan):
        for field in fields(plan):
            yield from _layouts(f"{name}.{field.name}", getattr(plan, field.name))
