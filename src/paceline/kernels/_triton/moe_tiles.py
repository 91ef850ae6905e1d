"""Tile sizes of the grouped products of moe_experts."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class ProductTile:
    """One grouped product's tile sizes and launch options."""

    cols: int
    inner: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class ExpertTiles:
    """Tiles of both products; they share the rows of a block."""

    rows: int
    gate_up: ProductTile
    down: ProductTile


def expert_tiles(num_pairs: int, num_experts: int, dtype: torch.dtype) -> ExpertTiles:
    """Static tile table: few rows per expert read weights at the speed of memory, many compute."""
    if dtype == torch.float32:
        return ExpertTiles(16, ProductTile(64, 32, 4, 3), ProductTile(64, 32, 4, 3))
    rows_per_expert = num_pairs / num_experts
    if rows_per_expert <= 16:
        return ExpertTiles(16, ProductTile(64, 128, 4, 4), ProductTile(64, 128, 4, 4))
    if rows_per_expert <= 64:
        return ExpertTiles(64, ProductTile(128, 64, 4, 4), ProductTile(128, 64, 4, 4))
    return ExpertTiles(128, ProductTile(128, 64, 8, 4), ProductTile(128, 64, 8, 4))
