"""What of the step buffers, the request table and a backend's buffers a step may not read."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from paceline.core.model.lookback import Lookback, first_visible
from paceline.core.padding import PAD_ROW
from paceline.core.step import StepLayout
from paceline.runner.buffers import StepBuffers
from paceline.runner.extents import Extent, StepUse
from paceline.runner.sanitizer.live_rows import LiveRow
from paceline.runner.sanitizer.poison import (
    LARGE,
    Poisoned,
    Region,
    bits_of,
    float_bits,
    poison_bits,
)
from paceline.runner.table.overlay import Overlay


def step_regions(buffers: StepBuffers, use: StepUse, layout: StepLayout) -> list[Region]:
    """Tails behind the padded size, and what derive and commit must write anew."""
    regions = []
    for name, (tensor, extent) in buffers.extents().items():
        if extent is Extent.CONSTANT:
            continue
        end = min(use.entries(extent), tensor.shape[0])  # what is not needed has no size
        if end < tensor.shape[0]:
            regions.append(
                Region(
                    name=f"{name}[{end}:], behind the padded step",
                    pieces=(_whole(tensor[end:]),),
                    remedy="read no further than the padded step reaches",
                    is_foreign=True,
                )
            )
        begin = 1 if extent is Extent.BOUND else 0  # its leading 0 is a constant
        if not _is_staged(name, layout) and begin < end:
            regions.append(
                Region(
                    name=f"{name}[{begin}:{end}], of the step before",
                    pieces=(_whole(tensor[begin:end]),),
                    remedy="write it in every step before it is read",
                )
            )
    return regions


def _is_staged(name: str, layout: StepLayout) -> bool:
    """Whether the host wrote what of it is in use."""
    if name == "step.parents":
        return layout.parents is not None
    return name == "step.facts" or name.startswith(("step.mask_", "step.given_"))


def backend_regions(named: Mapping[str, Tensor], kept: frozenset[str]) -> list[Region]:
    """Every buffer of a backend, or a proposer's own, but those whose last name is in `kept`."""
    return [
        Region(
            name=name,
            pieces=(_whole(tensor),),
            remedy="let plan write what forward reads, or name the field in the backend's "
            "kept_fields when its contents must last",
        )
        for name, tensor in named.items()
        if name.rpartition(".")[2] not in kept and tensor.numel()
    ]


def feature_regions(
    name: str, features: Tensor, live: Sequence[LiveRow], *, is_round: bool
) -> list[Region]:
    """Rows of what a proposer keeps per request that a step may not read.

    features: [table rows, hidden]; a round drafts from them, any other step writes them anew.
    """
    rows = {row.row for row in live}
    every = set(range(features.shape[0]))
    padding = float_bits(LARGE, features)
    regions = [
        Region(
            name=f"{name}, rows outside the step",
            pieces=(_rows(features, rows | {PAD_ROW}),),
            remedy="index what is kept per request by the step's row_ids",
            is_foreign=True,
        ),
        Region(
            name=f"{name}, of padded rows",
            pieces=(Poisoned(tensor=features[:1], index=None, dead=None, poison=padding),),
            remedy="let no row depend on another one",
            is_padding=True,
        ),
    ]
    if rows and not is_round:
        regions.append(
            Region(
                name=f"{name}, of the step before",
                pieces=(_rows(features, every - rows),),
                remedy="write it in every step that is observed",
            )
        )
    return regions


def table_regions(
    named: Mapping[str, Tensor], layout: StepLayout, live: Sequence[LiveRow]
) -> list[Region]:
    """Rows that are not in the step, and tokens that its rows do not know yet.

    named: RequestTable.named_tensors(); page tables and the overlay have regions of their own.
    """
    rows = {row.row for row in live}
    regions = []
    for name, tensor in named.items():
        if name.startswith(("table.page_table", "table.overlay")):
            continue
        # A frozen row is read to find out that it is.
        used = rows | set(layout.rows) if name == "table.state" else rows
        regions.append(
            Region(
                name=f"{name}, rows outside the step",
                pieces=(_rows(tensor, used | {PAD_ROW}),),
                remedy="index the request table by the step's row_ids",
                is_foreign=True,
            )
        )
    tokens = named["table.token_ids"]
    columns = torch.arange(tokens.shape[1], device=tokens.device)
    index = torch.tensor([row.row for row in live], dtype=torch.int64, device=tokens.device)
    lens = torch.tensor([[row.known_len] for row in live], dtype=torch.int64, device=tokens.device)
    if live:
        piece = Poisoned(
            tensor=tokens,
            index=index,
            dead=columns >= lens,
            poison=poison_bits(tokens[index]),
        )
        regions.append(
            Region(
                name="table.token_ids, behind what is known",
                pieces=(piece,),
                remedy="read a request's tokens up to kv_len; in a round up to the root",
            )
        )
    return regions


def overlay_regions(
    overlay: Overlay, live: Sequence[LiveRow], *, has_overlay: bool
) -> list[Region]:
    """Input rows that no token of the step takes, and slots of tokens outside it.

    has_overlay: the step reads the overlay; otherwise all of it is dead.
    """
    is_dead = torch.ones_like(overlay.slots, dtype=torch.bool)
    is_free = torch.ones(overlay.rows.shape[0], 1, dtype=torch.bool, device=overlay.rows.device)
    if has_overlay:
        is_dead[PAD_ROW] = False
        for row in live:
            is_dead[row.row, row.prefix_len : row.kv_len] = False
            is_free[overlay.slots[row.row, row.prefix_len : row.kv_len].long()] = False
        is_free[0] = True  # what stands for no row is selected, and never taken
    poison = bits_of((overlay.slots != 1).to(overlay.slots.dtype))  # 0 or 1: a slot that there is
    slots = Poisoned(tensor=overlay.slots, index=None, dead=is_dead, poison=poison)
    rows = Poisoned(tensor=overlay.rows, index=None, dead=is_free, poison=poison_bits(overlay.rows))
    remedy = "take an overlay's row where overlay_slot of the step's own tokens says so"
    return [
        Region(name=name, pieces=(piece,), remedy=remedy, is_foreign=True)
        for name, piece in (
            ("table.overlay.slots, of tokens outside the step", slots),
            ("table.overlay.rows, that no token of the step takes", rows),
        )
    ]


def page_table_region(
    group: int,
    table: Tensor,
    live: Sequence[LiveRow],
    *,
    page_size: int,
    window: Lookback | None,
    dead_page: int,
) -> Region:
    """A group's page-table entries outside what the step may see; they stay valid page ids.

    table: [rows, max_pages] int32; dead_page: a page whose slots are poisoned.
    """
    is_dead = torch.ones(table.shape, dtype=torch.bool)
    is_dead[PAD_ROW] = False
    for row in live:
        low = first_visible(window, row.prefix_len)
        is_dead[row.row, low // page_size : -(-row.kv_len // page_size)] = False
    poison = torch.where(table == dead_page, 0, dead_page).to(table.dtype)
    piece = Poisoned(
        tensor=table, index=None, dead=is_dead.to(table.device), poison=bits_of(poison)
    )
    return Region(
        name=f"table.page_table.{group}, outside the visible pages",
        pieces=(piece,),
        remedy="use the entries from the first visible page to the last live one",
        is_foreign=True,
    )


def _whole(tensor: Tensor) -> Poisoned:
    return Poisoned(tensor=tensor, index=None, dead=None, poison=poison_bits(tensor))


def _rows(tensor: Tensor, used: set[int]) -> Poisoned:
    """Every row but those used."""
    index = torch.tensor(sorted(set(range(tensor.shape[0])) - used), device=tensor.device)
    index = index.to(torch.int64)
    poison = poison_bits(tensor)
    return Poisoned(
        tensor=tensor,
        index=index,
        dead=None,
        poison=poison if poison.dim() == 0 else poison[index],
    )
