"""What must hold after every plan, whatever the layout: derived here again, in plain Python.

The step view and each layout a plan holds are compared with host integers that are computed from
the case alone.  Nothing of the runner, the kernels or the layouts computes anything here.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass

import torch
from torch import Tensor

from paceline.attention.contract import StepView
from paceline.attention.layouts.csr import CsrPlan
from paceline.attention.layouts.page_table import PageTablePlan
from paceline.conformance.case import Batch, Case
from paceline.conformance.placement import Placement
from paceline.conformance.watched import Watched
from paceline.core.padding import PAD_PAGE, PAD_PREFIX_LEN, PAD_ROW, PAD_SLOT


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """A padded step in host integers."""

    rows: list[int]  # [padded_reqs]
    prefix_lens: list[int]  # [padded_reqs]
    extend_lens: list[int]  # [padded_reqs]
    parents: list[list[int]] | None  # [padded_reqs][extend]
    input_ids: list[int]  # [padded_tokens]
    pages: list[list[list[int]]]  # [num_groups][padded_reqs] page ids of kv_len

    @property
    def kv_lens(self) -> list[int]:
        return [p + e for p, e in zip(self.prefix_lens, self.extend_lens, strict=True)]

    @property
    def offsets(self) -> list[int]:
        """[padded_reqs + 1] tokens before each request."""
        found = [0]
        for extend in self.extend_lens:
            found.append(found[-1] + extend)
        return found


def broken_invariants(
    case: Case,
    batch: Batch,
    placement: Placement,
    *,
    ids: Sequence[Sequence[int]],
    watched: Watched,
) -> list[str]:
    """Every invariant the last step broke, by name.  ids: [num_reqs] token ids of each request."""
    assert watched.planned is not None, "no step was planned"
    view, plan = watched.planned
    wanted = _wanted(batch, placement, ids, view)
    faults = _lens(wanted, view)
    if faults:
        return faults  # what follows is derived from the lengths
    faults = [*_tokens(wanted, view), *_slots(case, wanted, view), *_tree(wanted, view)]
    for name, layout in _layouts("plan", plan):
        if isinstance(layout, PageTablePlan):
            faults += _page_table(name, wanted, layout)
        else:
            faults += _csr(name, case, wanted, layout)
    return faults


def _wanted(
    batch: Batch, placement: Placement, ids: Sequence[Sequence[int]], view: StepView
) -> Wanted:
    """The live rows, then the padding rule: prefix 1 and the stride, or what is left over."""
    num_pad = view.padded_reqs - batch.num_reqs
    left = view.padded_tokens - batch.num_tokens
    pad = [view.max_extend_len] * num_pad
    if sum(pad) != left:
        pad = [left] + [0] * (num_pad - 1) if num_pad else []
    new = [
        token
        for request, prefix in enumerate(batch.prefix_lens)
        for token in ids[request][prefix:]
    ]
    parents = None
    if batch.parents is not None:
        parents = [list(tree) for tree in batch.parents] + [[-1] * extend for extend in pad]
    return Wanted(
        rows=[*placement.rows, *[PAD_ROW] * num_pad],
        prefix_lens=[*batch.prefix_lens, *[PAD_PREFIX_LEN] * num_pad],
        extend_lens=[*batch.extend_lens, *pad],
        parents=parents,
        input_ids=new + [0] * left,
        pages=[
            [*map(list, pages), *[[] for _ in range(num_pad)]] for pages in placement.pages
        ],
    )


def _differs(name: str, got: Tensor | list[int], wanted: object) -> list[str]:
    found = got.tolist() if isinstance(got, Tensor) else got
    return [] if found == wanted else [f"{name} must be {wanted}, got {found}"]


def _lens(wanted: Wanted, view: StepView) -> list[str]:
    offsets = wanted.offsets
    faults = [
        *_differs("row_ids", view.row_ids, wanted.rows),
        *_differs("prefix_lens", view.prefix_lens, wanted.prefix_lens),
        *_differs("extend_lens", view.extend_lens, wanted.extend_lens),
        *_differs("kv_lens", view.kv_lens, wanted.kv_lens),
        *_differs("cu_seqlens_q", view.cu_seqlens_q, offsets),
    ]
    if offsets[-1] != view.padded_tokens:
        faults.append(f"the step must have {view.padded_tokens} tokens, got {offsets[-1]}")
    if max(wanted.extend_lens) > view.max_extend_len:
        faults.append(f"max_extend_len must cover {wanted.extend_lens}, got {view.max_extend_len}")
    if max(wanted.kv_lens) > view.kv_len_bound:
        faults.append(f"kv_len_bound must cover {wanted.kv_lens}, got {view.kv_len_bound}")
    return faults


def _tokens(wanted: Wanted, view: StepView) -> Iterator[str]:
    requests = [r for r, extend in enumerate(wanted.extend_lens) for _ in range(extend)]
    positions = [
        prefix + step
        for r, prefix in enumerate(wanted.prefix_lens)
        for step in _depths(wanted, r)
    ]
    last = [end - 1 for end in wanted.offsets[1:]]
    yield from _differs("req_ids", view.req_ids, requests)
    yield from _differs("positions", view.positions, positions)
    yield from _differs("input_ids", view.input_ids, wanted.input_ids)
    yield from _differs("logits_loc", view.logits_loc, last)


def _slots(case: Case, wanted: Wanted, view: StepView) -> Iterator[str]:
    """Where each new token is written; live rows never share a slot."""
    for group, pages in enumerate(wanted.pages):
        found = view.groups[group]
        loc: list[int] = []
        for r, (prefix, extend) in enumerate(
            zip(wanted.prefix_lens, wanted.extend_lens, strict=True)
        ):
            for at in range(prefix, prefix + extend):
                if wanted.rows[r] == PAD_ROW:
                    loc.append(PAD_SLOT)
                    continue
                page, offset = divmod(at, case.page_size)
                loc.append(pages[r][page] * case.page_size + offset)
        live = [slot for slot in loc if slot != PAD_SLOT]
        assert len(live) == len(set(live)), "the case itself writes a slot twice"
        yield from _differs(f"out_cache_loc of group {group}", found.out_cache_loc, loc)
        width = found.page_table.shape[1]
        table = [row + [PAD_PAGE] * (width - len(row)) for row in pages]
        for r, row in enumerate(found.page_table.tolist()):
            used = -(-wanted.kv_lens[r] // case.page_size) if wanted.rows[r] != PAD_ROW else width
            if used > width:
                yield f"page table of group {group} must be {used} wide, got {width}"
            elif row[:used] != table[r][:used]:
                yield f"page table row {r} of group {group} must be {table[r][:used]}, got {row}"


def _tree(wanted: Wanted, view: StepView) -> Iterator[str]:
    if (view.tree_mask is None) != (wanted.parents is None):
        yield f"tree_mask must be {'absent' if wanted.parents is None else 'present'}"
    if view.tree_mask is None or wanted.parents is None:
        return
    rows = []
    for tree in wanted.parents:
        for node in range(len(tree)):
            path = [node]
            while tree[path[-1]] >= 0:
                path.append(tree[path[-1]])
            rows.append([column in path for column in range(view.max_extend_len)])
    yield from _differs("tree_mask", view.tree_mask, rows)


def _page_table(name: str, wanted: Wanted, plan: PageTablePlan) -> Iterator[str]:
    yield from _differs(f"{name}.cu_seqlens_q", plan.cu_seqlens_q, wanted.offsets)
    yield from _differs(f"{name}.prefix_lens", plan.prefix_lens, wanted.prefix_lens)
    yield from _differs(f"{name}.extend_lens", plan.extend_lens, wanted.extend_lens)
    yield from _differs(f"{name}.kv_lens", plan.kv_lens, wanted.kv_lens)
    if plan.max_extend_len < max(wanted.extend_lens):
        yield f"{name}.max_extend_len must cover {wanted.extend_lens}, got {plan.max_extend_len}"
    for table in plan.page_tables:
        if table.dtype != torch.int32 or table.stride(1) != 1:
            yield f"{name}.page_tables must be int32 with contiguous rows, got {table.dtype}"


def _csr(name: str, case: Case, wanted: Wanted, plan: CsrPlan) -> Iterator[str]:
    """The pages of all requests in one list."""
    lens = wanted.prefix_lens if plan.is_prefix else wanted.kv_lens
    counts = [-(-kv_len // case.page_size) for kv_len in lens]
    indptr = [0]
    for count in counts:
        indptr.append(indptr[-1] + count)
    yield from _differs(f"{name}.kv_indptr", plan.kv_indptr, indptr)
    last = [
        kv_len - max(count - 1, 0) * case.page_size
        for kv_len, count in zip(lens, counts, strict=True)
    ]
    yield from _differs(f"{name}.last_page_len", plan.last_page_len, last)
    pages = [
        row[:count] if wanted.rows[r] != PAD_ROW else [PAD_PAGE] * count
        for r, (row, count) in enumerate(zip(wanted.pages[plan.group], counts, strict=True))
    ]
    found = plan.kv_indices[: indptr[-1]]
    yield from _differs(f"{name}.kv_indices", found, [page for row in pages for page in row])


def _depths(wanted: Wanted, request: int) -> list[int]:
    if wanted.parents is None:
        return list(range(wanted.extend_lens[request]))
    depths: list[int] = []
    for parent in wanted.parents[request]:
        depths.append(0 if parent < 0 else depths[parent] + 1)
    return depths


def _layouts(name: str, plan: object) -> Iterator[tuple[str, PageTablePlan | CsrPlan]]:
    """The layouts a plan holds, by the way to them."""
    if isinstance(plan, PageTablePlan | CsrPlan):
        yield name, plan
    elif isinstance(plan, tuple):
        for index, item in enumerate(plan):
            yield from _layouts(f"{name}.{index}", item)
    elif is_dataclass(plan):
        for field in fields(plan):
            yield from _layouts(f"{name}.{field.name}", getattr(plan, field.name))
