"""Random passes of a drafter for derive_rows; what the pass is to write starts as rubbish."""

import random
from dataclasses import dataclass, replace

import torch
from step_cases import RUBBISH, rubbish_view
from torch import Tensor

from paceline.core.modes import MaskKind
from paceline.core.padding import PAD_ROW
from paceline.kernels.derive import PassRows
from paceline.kernels.step_view import StepView

MAX_PAGES = 80  # a request's 57 rows behind 16 tokens, at page size 1


@dataclass(frozen=True)
class PassShape:
    """A pass over so many requests, the last of which is padded."""

    reqs: int
    rows: int
    is_tree: bool
    advance: int = 0
    page_sizes: tuple[int, ...] = (4,)


@dataclass(frozen=True)
class Base:
    """What a pass stands on."""

    row_ids: Tensor  # [reqs]  int64
    page_tables: list[Tensor]  # [num_groups] of [reqs, max_pages]  int32
    source: PassRows


def make_base(shape: PassShape, *, seed: int) -> Base:
    """Page ids that need 64-bit slots; trees with rows that hang on the prefix."""
    source = random.Random(seed)
    live = shape.reqs - (shape.reqs > 1)
    rows = [*source.sample(range(1, 30), live), *[PAD_ROW] * (shape.reqs - live)]
    tables = torch.randint(
        1, 2**31 - 1, (len(shape.page_sizes), shape.reqs, MAX_PAGES), dtype=torch.int32
    )
    tables[:, live:] = 0
    parents = [[source.randrange(-1, row) for row in range(shape.rows)] for _ in range(shape.reqs)]
    return Base(
        row_ids=torch.tensor(rows),
        page_tables=[*tables],
        source=PassRows(
            committed=torch.tensor([source.randrange(15) if row else 1 for row in rows]).int(),
            advance=shape.advance,
            parents=torch.tensor(parents).int() if shape.is_tree else None,
        ),
    )


def make_view(shape: PassShape, base: Base) -> StepView:
    """The row ids and page tables of `base`; everything else is rubbish."""
    device, tokens = base.row_ids.device, shape.reqs * shape.rows
    view = rubbish_view(shape.reqs, tokens, [MAX_PAGES] * len(shape.page_sizes), device)
    pairs = zip(view.groups, base.page_tables, strict=True)
    tree_mask = torch.full((tokens, shape.rows), RUBBISH, dtype=torch.bool, device=device)
    return replace(
        view,
        row_ids=base.row_ids,
        groups=tuple(replace(group, page_table=table) for group, table in pairs),
        mask=MaskKind.TREE if shape.is_tree else MaskKind.CAUSAL,
        tree_mask=tree_mask if shape.is_tree else None,
        max_extend_len=shape.rows,
        kv_len_bound=MAX_PAGES,
    )


def on_device(base: Base, device: str | torch.device) -> Base:
    """The same on a device."""
    source, parents = base.source, base.source.parents
    return Base(
        row_ids=base.row_ids.to(device),
        page_tables=[table.to(device) for table in base.page_tables],
        source=source._replace(
            committed=source.committed.to(device),
            parents=None if parents is None else parents.to(device),
        ),
    )
