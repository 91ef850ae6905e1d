"""How many programs share the keys of a request, and what they leave for their merge.

The number is frozen into a graph, so it depends on padded sizes alone; how many of the splits have
work is decided on the device, from the lengths.
"""

from collections.abc import Collection
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from paceline.kernels._check import reject
from paceline.kernels.paged_attention.shared_prefix import sharing_rule
from paceline.kernels.stand_in import multiprocessors

_PROGRAMS_PER_SM = 2
_MOST_PROGRAMS_PER_SM = 4  # of a decode, whose tiles are small
_ONE_WARP_PROGRAMS_PER_SM = 8
_MAX_SPLITS = 64
_MANY_SPLITS = 16  # so many hide the latency of memory with two programs to a multiprocessor
_WORTHWHILE_SPLITS = 3  # fewer cost their merge
_MOST_BY_LENGTH = 4  # splits for each request: where there are more, a program knows its first tile
_ONE_WARP_GROUP, _ONE_WARP_DIMS, _ONE_WARP_BYTES = 16, (64, 128), 2  # heads one warp attends to
_MAX_CHUNKS = 8  # of a shared prefix
_MIN_KEYS = 64  # of a split: fewer are not worth a merge
FEW_ROWS = 64  # of a KV head, query tokens times heads of its group: tiles as small as a decode's
SHORT_ROWS = 16  # of a request among longer ones: one small tile, as of a decode
_MOST_SPLIT_ROWS = 256  # an extend of more has work for every program without splits
_ROW_TILES = (16, 32)  # of them in one program
WIDE_ROWS = 64  # of them where each is wide: a whole tile of the matrix units
_FEW_PROGRAMS = 64  # so many leave processors idle
_MANY_WIDE = 65  # programs of few wide rows, too many to have splits of their own: dealt in pairs
_MANY_SCALED = 16  # the same of latents in float8


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SplitWorkspace:
    """What the splits of a launch leave for their merge; rows is the most tokens * splits, or
    `short_places` * splits."""

    partial_out: Tensor  # [rows, heads, v_head_dim]  float32
    partial_lse: Tensor  # [rows, heads]  float32  log2 units
    finished: Tensor  # [>= max_reqs, heads]  int32  splits done; 0 between launches


def decode_splits(
    num_reqs: int, num_kv_heads: int, *, max_keys: int | None = None, device: torch.device
) -> int:
    """How many splits a decode of `num_reqs` padded requests uses on `device`, 1..64.

    As many as let every multiprocessor hold two programs, or four where that gives few splits,
    whatever the lengths turn out to be, and no more than a request of `max_keys` can keep busy.
    """
    splits = _decode_splits(num_reqs * num_kv_heads, multiprocessors(device))
    return splits if max_keys is None else min(splits, _worthwhile(max_keys))


def _decode_splits(programs: int, num_sms: int) -> int:
    """Of each of so many programs, whatever the keys."""
    splits = _shares(programs, _PROGRAMS_PER_SM * num_sms)
    denser = min(_MANY_SPLITS, _shares(programs, _MOST_PROGRAMS_PER_SM * num_sms))
    return max(splits, denser) if denser >= _WORTHWHILE_SPLITS else splits


def decode_slots(
    num_reqs: int,
    num_kv_heads: int,
    *,
    max_keys: int,
    in_one_warp: bool,
    device: torch.device,
) -> tuple[int, int] | None:
    """(splits that are worked on at once, the most of all requests) of a decode whose requests have
    theirs by length; None where they are so few that each has as many.

    The most: as few turns as hold the requests, and one more, but no more than one for each.
    """
    num_sms = multiprocessors(device)
    splits = _decode_splits(num_reqs * num_kv_heads, num_sms)
    if splits > _MOST_BY_LENGTH or num_reqs == 0 or _worthwhile(max_keys) == 1:
        return None
    return _slots(num_reqs, num_kv_heads, num_sms, in_one_warp=in_one_warp)


def _slots(num_reqs: int, num_kv_heads: int, num_sms: int, *, in_one_warp: bool) -> tuple[int, int]:
    per_sm = _ONE_WARP_PROGRAMS_PER_SM if in_one_warp else _MOST_PROGRAMS_PER_SM
    turn = max(1, per_sm * num_sms // num_kv_heads)
    return turn, -(-num_reqs // turn) * turn + min(num_reqs, turn)


def takes_one_warp(q: Tensor, k_cache: Tensor, v_cache: Tensor) -> bool:
    """Whether programs of a decode are of one warp each: more than fit at once of two, of the heads
    that were measured.  The same for all numbers of requests up to the next power of two, so that
    kernels are compiled ahead.

    q: [reqs, heads, head_dim]; k_cache, v_cache: [pages, page_size, kv_heads, their head_dim].
    """
    num_reqs, num_heads, _ = q.shape
    kv_heads = k_cache.shape[2]
    return (
        _has_many(num_reqs, kv_heads, multiprocessors(q.device))
        and num_heads // kv_heads <= _ONE_WARP_GROUP
        and k_cache.shape[3] == v_cache.shape[3]
        and v_cache.shape[3] in _ONE_WARP_DIMS
        and k_cache.dtype == v_cache.dtype == q.dtype
        and q.dtype.itemsize == _ONE_WARP_BYTES
    )


def _has_many(num_reqs: int, num_kv_heads: int, num_sms: int) -> bool:
    most = 1 << max(num_reqs - 1, 0).bit_length()
    return most * num_kv_heads > _MOST_PROGRAMS_PER_SM * num_sms


def shared_chunks(num_reqs: int, num_heads: int, num_kv_heads: int, device: torch.device) -> int:
    """Among how many programs of each tile the keys of a shared prefix are dealt: as many as let
    every multiprocessor hold two where all requests share one."""
    return _shared_chunks(num_reqs, num_heads, num_kv_heads, multiprocessors(device))


def _shared_chunks(num_reqs: int, num_heads: int, num_kv_heads: int, num_sms: int) -> int:
    tile_reqs = sharing_rule(num_heads // num_kv_heads, 1).tile_reqs
    programs = -(-num_reqs // tile_reqs) * num_kv_heads
    return max(1, min(_MAX_CHUNKS, _PROGRAMS_PER_SM * num_sms // programs))


def extend_splits(
    tokens: int,
    num_reqs: int,
    num_kv_heads: int,
    *,
    group: int,
    max_rows: int,
    max_keys: int,
    dtype: torch.dtype,
    workspace: SplitWorkspace,
    is_wide: bool = False,
    is_scaled: bool = False,
) -> int:
    """How many splits an extend uses: some where rows are few, 1 where they are many.

    group: query heads of a KV head; `max_rows` is its query rows: tokens of the longest request
    times the group.
    is_wide: rows are so wide that a multiprocessor holds one program, or two of few keys;
    is_scaled: of these, latents in float8.
    """
    if max_rows > _MOST_SPLIT_ROWS:
        return 1
    rows = row_tile(num_reqs, num_kv_heads, max_rows, dtype=dtype, is_wide=is_wide)
    tiles = num_reqs * -(-max_rows // rows)
    if not is_wide:
        tiles = min(tiles, tile_slots(tokens * group, num_reqs, rows))
    programs = tiles * num_kv_heads
    per_sm = _PROGRAMS_PER_SM if not is_wide or in_pairs(rows, programs, is_scaled=is_scaled) else 1
    splits = _shares(programs, per_sm * multiprocessors(workspace.partial_out.device))
    has_counters = programs <= workspace.finished.numel()
    affordable = workspace.partial_lse.shape[0] // tokens if has_counters else 1
    return max(1, min(splits, _worthwhile(max_keys), affordable))


def tile_slots(rows: int, num_reqs: int, tile_rows: int) -> int:
    """Tiles that hold so many rows, whichever request each is of, at most."""
    return rows // tile_rows + num_reqs


def short_splits(
    num_reqs: int, group: int, num_kv_heads: int, *, max_keys: int, workspace: SplitWorkspace
) -> int:
    """How many splits requests of SHORT_ROWS rows or less have in a launch beside longer ones: as
    many as let every multiprocessor hold four programs, as many rows of a graph are nobody's.

    group: query heads of a KV head, at most SHORT_ROWS.
    """
    programs = num_reqs * num_kv_heads
    most = _MOST_PROGRAMS_PER_SM * multiprocessors(workspace.partial_out.device)
    has_counters = programs <= workspace.finished.numel()
    affordable = workspace.partial_lse.shape[0] // short_places(num_reqs, group)
    splits = min(_shares(programs, most), _worthwhile(max_keys), affordable)
    return max(1, splits) if has_counters else 1


def short_places(num_reqs: int, group: int) -> int:
    """Tokens whose partial results such requests have room for, wherever in the step these are."""
    return num_reqs * (SHORT_ROWS // group)


def _shares(programs: int, most: int) -> int:
    """Splits of each of `programs` such that all together are at most `most`."""
    return max(1, min(_MAX_SPLITS, most // max(1, programs)))


def _worthwhile(max_keys: int) -> int:
    """The most splits that a request of so many keys can keep busy."""
    return max(1, -(-max_keys // _MIN_KEYS))


def row_tile(
    num_reqs: int,
    num_kv_heads: int,
    max_rows: int,
    *,
    dtype: torch.dtype,
    is_wide: bool = False,
) -> int:
    """Query rows of one program of an extend of few: fewer where that employs more processors.

    Programs of one request read the same keys.  Products in float32 hold 16 rows in registers.
    is_wide: as of `extend_splits`.
    """
    small, large = _ROW_TILES
    programs = num_reqs * num_kv_heads * -(-max_rows // small)
    if is_wide:
        return small if max_rows < WIDE_ROWS or programs <= _FEW_PROGRAMS else WIDE_ROWS
    is_small = max_rows <= small or programs <= _FEW_PROGRAMS or dtype == torch.float32
    return small if is_small else large


def in_pairs(rows: int, programs: int, *, is_scaled: bool) -> bool:
    """Whether a multiprocessor is to hold two of `programs` with so many wide rows each: few rows
    of many programs.  Two wait for less than one that has as many keys in flight; codes, which
    warps make numbers of, are half the bytes to wait for."""
    return rows < WIDE_ROWS and programs >= (_MANY_SCALED if is_scaled else _MANY_WIDE)


def most_keys(page_table: Tensor, k_cache: Tensor, most: int | None) -> int:
    """No query of a single token sees more keys, however long its request becomes.

    most: that its window or chunk shows; None: all."""
    reach = page_table.shape[1] * k_cache.shape[1]
    return reach if most is None else min(most, reach)


def split_workspace(
    max_reqs: int,
    heads: Collection[tuple[int, int]],
    *,
    v_head_dim: int,
    device: torch.device,
    shares_prefixes: bool = False,
) -> SplitWorkspace:
    """Buffers for any decode of up to `max_reqs` requests, and an extend of few rows, of layers
    with any of `heads`: (query heads, KV heads).

    Few requests have many splits and many have few.  shares_prefixes: of shared prefixes, too.
    """
    num_heads = max(of_queries for of_queries, _ in heads)
    num_sms = multiprocessors(device)
    rows = max(_rows(max_reqs, *each, num_sms, shares_prefixes) for each in heads)
    counters = max(max_reqs, -(-num_sms // min(of_queries for of_queries, _ in heads)))
    shape = (rows, num_heads, v_head_dim)
    return SplitWorkspace(
        partial_out=torch.empty(shape, dtype=torch.float32, device=device),
        partial_lse=torch.empty(shape[:2], dtype=torch.float32, device=device),
        finished=torch.zeros((counters, num_heads), dtype=torch.int32, device=device),
    )


@cache
def _rows(
    max_reqs: int, num_heads: int, num_kv_heads: int, num_sms: int, shares_prefixes: bool
) -> int:
    decode_rows = max(
        num_reqs * _decode_splits(num_reqs * num_kv_heads, num_sms)
        for num_reqs in range(1, max_reqs + 1)
    )
    is_many = _has_many(max_reqs, num_kv_heads, num_sms)
    slots = max(
        _slots(max_reqs, num_kv_heads, num_sms, in_one_warp=in_one_warp)[1]
        for in_one_warp in {False, is_many}
    )
    if shares_prefixes:
        slots += max(
            num_reqs * _shared_chunks(num_reqs, num_heads, num_kv_heads, num_sms)
            for num_reqs in range(1, max_reqs + 1)
        )
    return max(decode_rows, slots, _extend_rows(num_heads, num_sms))


def _extend_rows(num_heads: int, num_sms: int) -> int:
    """tokens * splits of an extend that splits: a program has a row tile of tokens * heads."""
    return _PROGRAMS_PER_SM * num_sms * _ROW_TILES[-1] // num_heads


def check_workspace(
    workspace: SplitWorkspace, rows: int, counters: int, num_heads: int, v_head_dim: int
) -> None:
    """Contiguous, of the right dtypes, and large enough for `rows` partial results."""
    wanted = (
        ("partial_out", workspace.partial_out, torch.float32, rows * num_heads * v_head_dim),
        ("partial_lse", workspace.partial_lse, torch.float32, rows * num_heads),
        ("finished", workspace.finished, torch.int32, counters * num_heads),
    )
    for name, tensor, dtype, elements in wanted:
        if tensor.dtype != dtype or tensor.numel() < elements or not tensor.is_contiguous():
            reject(
                f"workspace.{name}",
                expected=f"contiguous {dtype} with at least {elements} elements",
                got=tensor,
                remedy="allocate it with split_workspace for the largest number of requests",
            )
