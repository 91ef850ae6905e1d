"""What of the step buffers, the request table and a backend's buffers a step may not read."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.core.padding import PAD_ROW
from paceline.core.step import StepLayout
from paceline.runner.buffers import PaddedSize
from paceline.runner.dead_slots import LiveRow
from paceline.runner.poison import Piece, Region, bits_of, poison_bits

_PER_TOKEN = ("req_ids", "positions", "input_ids", "out_cache_loc", "parents")
_STAGED = ("facts", "parents")  # by the host: what of them is in use is read


@dataclass(frozen=True, slots=True)
class Extent:
    """How far a step's buffers are in use."""

    layout: StepLayout
    size: PaddedSize

    def of(self, field: str) -> int:
        """Leading entries of a step buffer that the step uses."""
        size = self.size
        if field == "arange":
            return size.tokens
        if field == "tree_mask":
            return size.tokens * size.max_extend_len if self.layout.has_tree else 0
        if field == "parents" and not self.layout.has_tree:
            return 0
        if field.startswith(_PER_TOKEN):
            return size.tokens
        return size.reqs + (field == "cu_seqlens_q")


def step_regions(named: Mapping[str, Tensor], extent: Extent) -> list[Region]:
    """Tails behind the padded size, and what derive and commit must write anew.

    named: StepBuffers.named_tensors().
    """
    regions = []
    for name, tensor in named.items():
        field = name.partition(".")[2]
        end = extent.of(field)
        if field != "arange" and end < tensor.shape[0]:
            regions.append(
                Region(
                    name=f"{name}[{end}:], behind the padded step",
                    pieces=(_whole(tensor[end:]),),
                    remedy="read no further than the padded step reaches",
                    is_foreign=True,
                )
            )
        begin = 1 if field == "cu_seqlens_q" else 0  # its leading 0 is a constant
        if field not in (*_STAGED, "arange") and begin < end:
            regions.append(
                Region(
                    name=f"{name}[{begin}:{end}], of the step before",
                    pieces=(_whole(tensor[begin:end]),),
                    remedy="write it in every step before it is read",
                )
            )
    return regions


def backend_regions(named: Mapping[str, Tensor], kept: frozenset[str]) -> list[Region]:
    """Every buffer of the backend but those whose last name is in `kept`."""
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


def table_regions(
    named: Mapping[str, Tensor],
    layout: StepLayout,
    live: Sequence[LiveRow],
    *,
    known_behind: int,
) -> list[Region]:
    """Rows that are not in the step, and tokens that its rows do not know yet.

    named: RequestTable.named_tensors(), page tables aside; known_behind: tokens behind kv_len that
    the step may read.
    """
    rows = {row.row for row in live}
    regions = []
    for name, tensor in named.items():
        if name.startswith("table.page_table"):
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
    lens = torch.tensor([[row.kv_len] for row in live], dtype=torch.int64, device=tokens.device)
    if live:
        piece = Piece(
            tensor=tokens,
            index=index,
            dead=columns >= lens + known_behind,
            poison=poison_bits(tokens[index]),
        )
        regions.append(
            Region(
                name="table.token_ids, behind kv_len",
                pieces=(piece,),
                remedy="read a request's tokens up to kv_len",
            )
        )
    return regions


def page_table_region(
    group: int,
    table: Tensor,
    live: Sequence[LiveRow],
    *,
    page_size: int,
    window: int | None,
    dead_page: int,
) -> Region:
    """A group's page-table entries outside what the step may see; they stay valid page ids.

    table: [rows, max_pages] int32; dead_page: a page whose slots are poisoned.
    """
    is_dead = torch.ones(table.shape, dtype=torch.bool)
    is_dead[PAD_ROW] = False
    for row in live:
        low = 0 if window is None else max(0, row.prefix_len - window + 1)
        is_dead[row.row, low // page_size : -(-row.kv_len // page_size)] = False
    poison = torch.where(table == dead_page, 0, dead_page).to(table.dtype)
    piece = Piece(tensor=table, index=None, dead=is_dead.to(table.device), poison=bits_of(poison))
    return Region(
        name=f"table.page_table.{group}, outside the visible pages",
        pieces=(piece,),
        remedy="use the entries from the first visible page to the last live one",
        is_foreign=True,
    )


def _whole(tensor: Tensor) -> Piece:
    return Piece(tensor=tensor, index=None, dead=None, poison=poison_bits(tensor))


def _rows(tensor: Tensor, used: set[int]) -> Piece:
    """Every row but those used."""
    index = torch.tensor(sorted(set(range(tensor.shape[0])) - used), device=tensor.device)
    index = index.to(torch.int64)
    poison = poison_bits(tensor)
    return Piece(
        tensor=tensor,
        index=index,
        dead=None,
        poison=poison if poison.dim() == 0 else poison[index],
    )
