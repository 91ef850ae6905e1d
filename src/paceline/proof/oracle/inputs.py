"""Inputs of a batch: keys, values, and queries that find a known few of the keys.

NEEDLE: keys are random signs; a long request's keys that no query wants share a few directions,
to which queries are blind.  RANDOM: all is normal, and the wanted keys share the softmax with the
bulk of all others.  UNEVEN: as NEEDLE, but every other row and head asks so loudly that the rest
would vanish beside it.
"""

from dataclasses import dataclass
from random import Random
from zlib import crc32

import torch
from torch import Tensor

from paceline.proof.oracle.batch_data import BatchData
from paceline.proof.oracle.needles import STEPS, Key, Levels, Wish, find_queries, levels, wishes
from paceline.proof.rig.placement import shared_pages
from paceline.proof.suite.case import Batch, Case, Inputs

SCALE_FACTOR = 1.25  # on head_dim ** -0.5: a kernel that has a scale of its own is wrong
BULK = 1.5  # standard deviation of a random key's score
HUSH = 4.0  # a key that nobody chose may come this near to the winners
CODES = 4  # directions that unwanted keys of a long request share
K_SCALES = (0.25, 2.0, 0.5)  # of an fp8 cache, layer by layer
V_SCALES = (0.5, 0.25, 4.0)
LOUDER = 16.0  # times the scores of a loud row: e to their difference is no float32
SINK_STEPS = (0.5, -0.5, 1.25, 0.0, 0.75)  # a head's sink above the best winner


@dataclass(frozen=True, slots=True, eq=False)
class _Keys:
    """All keys of one layer in a row: request after request, then codes, then the bait."""

    table: Tensor  # [num_keys + codes + 1, kv_heads, head_dim]  float64
    starts: tuple[int, ...]  # [num_reqs] where each request begins
    codes: tuple[int, ...]  # rows of `table`

    @property
    def bait(self) -> int:
        return self.table.shape[0] - 1

    @property
    def stored(self) -> Tensor:
        """[num_keys + 1, kv_heads, head_dim] without codes."""
        return torch.cat((self.table[: self.bait - CODES], self.table[self.bait :]))


def make_inputs(case: Case, index: int) -> BatchData:
    """The numbers of batch `index`; the same at every call, others for every batch and layer."""
    batch = case.batches[index]
    name = f"{case.method} {case.mode.value} {case.name} {case.seed} {index}"
    random = Random(name)
    generator = torch.Generator().manual_seed(crc32(name.encode()))
    k_scales, v_scales = _cache_scales(case)
    scale = SCALE_FACTOR * case.head_dim**-0.5
    layers = []
    for layer in range(len(case.layers)):
        wanted = wishes(case, batch, layer, random)
        k_factor = 1.0 if k_scales is None else float(k_scales[layer])
        v_factor = 1.0 if v_scales is None else float(v_scales[layer])
        keys = _make_keys(case, batch, wanted, k_factor, generator)
        queries = _make_queries(case, batch, wanted, keys, scale, generator)
        if case.v_in_k:
            values = keys.stored[..., : case.v_head_dim]
        else:
            values = _make_values(case, batch, v_factor, generator)
        layers.append((queries, keys, values))
    key_lens = batch.key_lens
    bases = layers[0][1].starts
    return BatchData(
        queries=_by_request([queries for queries, _, _ in layers], batch.extend_lens),
        keys=tuple(
            torch.stack([keys.table[base : base + key_len] for _, keys, _ in layers])
            for base, key_len in zip(bases, key_lens, strict=True)
        ),
        values=_by_request([values[:-1] for _, _, values in layers], key_lens),
        bait_keys=torch.stack([keys.table[keys.bait] for _, keys, _ in layers]),
        bait_values=torch.stack([values[-1] for _, _, values in layers]),
        sinks=_make_sinks(case) if case.sinks else None,
        k_scales=k_scales,
        v_scales=v_scales,
        scale=scale,
    )


def _by_request(layers: list[Tensor], lens: tuple[int, ...]) -> tuple[Tensor, ...]:
    """[num_reqs] [layers, len, heads, dim] of one [sum of lens, heads, dim] per layer."""
    return torch.split(torch.stack(layers), list(lens), dim=1)


def _cache_scales(case: Case) -> tuple[Tensor | None, Tensor | None]:
    if case.kv_dtype is None or case.v_in_k:
        return None, None
    count = range(len(case.layers))
    k_scales = [K_SCALES[layer % len(K_SCALES)] for layer in count]
    v_scales = [V_SCALES[layer % len(V_SCALES)] for layer in count]
    double = torch.float64
    return torch.tensor(k_scales, dtype=double), torch.tensor(v_scales, dtype=double)


def _make_sinks(case: Case) -> Tensor:
    """[layers, heads] near the winners' scores."""
    best = round(4 * levels(case).winner) / 4
    rows = [
        [best + SINK_STEPS[(head + layer) % len(SINK_STEPS)] for head in range(case.num_heads)]
        for layer in range(len(case.layers))
    ]
    return torch.tensor(rows, dtype=torch.float64)


def _make_values(case: Case, batch: Batch, factor: float, generator: torch.Generator) -> Tensor:
    """[sum of key_lens + 1, kv_heads, v_head_dim] normal, the bait last; a request's own."""
    count = sum(batch.key_lens) + 1
    made = torch.randn(
        count, case.num_kv_heads, case.v_head_dim, generator=generator, dtype=torch.float64
    )
    return _share_prefix(case, batch, _stored(case, made, factor))


def _make_keys(
    case: Case,
    batch: Batch,
    wanted: list[list[Wish]],
    factor: float,
    generator: torch.Generator,
) -> _Keys:
    """The keys of a layer.  Keys that nobody chose share directions where they are many.

    factor: of stored keys, with an fp8 cache.
    """
    starts = tuple(sum(batch.key_lens[:request]) for request in range(batch.num_reqs))
    total = sum(batch.key_lens)
    shape = (total + CODES + 1, case.num_kv_heads, case.head_dim)
    made = torch.randn(shape, generator=generator, dtype=torch.float64)
    if case.inputs is Inputs.RANDOM:
        rounded = _stored(case, made, factor)
        return _Keys(_share_prefix(case, batch, rounded), starts, ())
    table = torch.where(made > 0, 1.0, -1.0).double()
    codes = tuple(range(total, total + CODES))
    chosen = {
        starts[key.request] + key.index
        for row in wanted
        for wish in row
        for key in (*wish.winners, *wish.forbidden)
    }
    if case.has_scaled_latents:
        assert total - len(chosen) <= case.head_dim, f"{case.name}: rows that share directions"
        _sparsen(table[:total, :, : case.v_head_dim], generator)
    if total - len(chosen) <= case.head_dim:
        return _Keys(_share_prefix(case, batch, table), starts, ())
    is_free = torch.ones(total, dtype=torch.bool)
    is_free[torch.tensor(sorted(chosen), dtype=torch.int64)] = False
    free = is_free.nonzero().flatten()
    drawn = torch.randint(CODES, (len(free),), generator=generator)
    table[free] = table[total + drawn]
    return _Keys(_share_prefix(case, batch, table), starts, codes)


def _sparsen(latents: Tensor, generator: torch.Generator) -> None:
    """Give rows the length of 1s in all columns, 2s in a quarter, or 4s in a sixteenth: what is
    normalised is what it was, and scales of neighbours differ.  Mutates latents [keys, heads,
    rank], which are signs."""
    rank = latents.shape[2]
    for row, kind in zip(
        latents, torch.randint(3, (len(latents),), generator=generator), strict=True
    ):
        kept = torch.randperm(rank, generator=generator)[: rank >> 2 * int(kind)]
        sparse = torch.zeros_like(row)
        sparse[:, kept] = row[:, kept] * 2 ** int(kind)
        row.copy_(sparse)


def _stored(case: Case, numbers: Tensor, factor: float) -> Tensor:
    """The nearest numbers, in float64, that a cache whose scale is `factor` can hold."""
    if case.kv_dtype is None or case.v_in_k:
        return numbers.to(_dtype(case)).double()
    return (numbers / factor).to(torch.float8_e4m3fn).double() * factor


def _share_prefix(case: Case, batch: Batch, table: Tensor) -> Tensor:
    """Gives every request the first one's prefix, as far as they share pages; in place."""
    shared = shared_pages(case, batch) * case.page_size
    start = 0
    for key_len in batch.key_lens:
        table[start : start + shared] = table[:shared].clone()
        start += key_len
    return table


def _make_queries(
    case: Case,
    batch: Batch,
    wanted: list[list[Wish]],
    keys: _Keys,
    scale: float,
    generator: torch.Generator,
) -> Tensor:
    """[num_tokens, heads, head_dim] exact in the case's dtype."""
    aims = levels(case)
    group = case.num_heads // case.num_kv_heads
    found = []
    for kv_head in range(case.num_kv_heads):
        table = keys.table[:, kv_head]  # [num_keys, head_dim]
        heads = range(kv_head * group, (kv_head + 1) * group)
        start = torch.zeros(group, len(wanted), case.head_dim, dtype=torch.float64)
        if case.inputs is Inputs.RANDOM:
            start = torch.randn(start.shape, generator=generator, dtype=torch.float64)
            start *= BULK / (scale * case.head_dim**0.5)
        index, targets = _constraints(wanted, heads, keys, aims)
        queries = find_queries(table, index, targets, start, scale)
        if case.inputs is not Inputs.RANDOM:
            limit = aims.uncapped(aims.winner - HUSH) / scale
            for _ in range(2):
                near = _near_by_chance(batch, table, keys.starts, queries, index, limit)
                index = torch.cat((index, near), 2)
                targets = torch.cat((targets, torch.zeros(near.shape, dtype=torch.float64)), 2)
                queries = find_queries(table, index, targets, start, scale)
        found.append(queries)
    made = torch.cat(found).transpose(0, 1).to(_dtype(case)).double()
    if case.inputs is Inputs.UNEVEN:
        token, head = (torch.arange(size) for size in made.shape[:2])
        made[(token.unsqueeze(1) + head) % 2 == 0] *= LOUDER
    return made


def _constraints(
    wanted: list[list[Wish]], heads: range, keys: _Keys, aims: Levels
) -> tuple[Tensor, Tensor]:
    """(index, targets) [heads, tokens, chosen] rows of the key table, -1: none, and the scores
    they shall have."""
    rows: list[list[int]] = []
    targets: list[list[float]] = []

    def place_of(key: Key) -> int:
        return keys.starts[key.request] + key.index

    lead = aims.uncapped(aims.forbidden)
    steps = [aims.uncapped(aims.winner - step) for step in STEPS]
    for head in heads:
        for token, row_wishes in enumerate(wanted):
            wish = row_wishes[head]
            row = [place_of(key) for key in (*wish.winners, *wish.forbidden)]
            target = [steps[(head + token + n) % len(STEPS)] for n in range(len(wish.winners))]
            rows.append([*row, keys.bait, *keys.codes])
            hidden = [lead] * (len(wish.forbidden) + 1)
            targets.append([*target, *hidden, *[0.0] * len(keys.codes)])
    width = max(map(len, rows))
    index = torch.tensor([row + [-1] * (width - len(row)) for row in rows])
    padded = [target + [0.0] * (width - len(target)) for target in targets]
    shape = (len(heads), len(wanted), width)
    return index.view(shape), torch.tensor(padded, dtype=torch.float64).view(shape)


def _near_by_chance(
    batch: Batch,
    table: Tensor,
    starts: tuple[int, ...],
    queries: Tensor,
    index: Tensor,
    limit: float,
) -> Tensor:
    """[heads, tokens, some] keys of each query's own request whose product with it exceeds the
    limit though they are not in `index`, the greatest first; -1: none."""
    count = max(1, table.shape[1] // 8)
    found = torch.full((*queries.shape[:2], count), -1, dtype=torch.int64)
    token = 0
    for start, extend, key_len in zip(starts, batch.extend_lens, batch.key_lens, strict=True):
        rows = slice(token, token + extend)
        token += extend
        if not key_len:
            continue
        products = queries[:, rows] @ table[start : start + key_len].T  # [heads, extend, key_len]
        local = index[:, rows] - start
        is_own = (local >= 0) & (local < key_len)
        bounds = torch.where(is_own, -torch.inf, torch.inf).double()
        products.scatter_reduce_(2, local.clamp(0, key_len - 1), bounds, "amin")
        top = products.topk(min(count, key_len), 2)
        near = torch.where(top.values > limit, top.indices + start, -1)
        found[:, rows, : near.shape[2]] = near
    return found


def _dtype(case: Case) -> torch.dtype:
    return {
        "float32": torch.float32,
        "bfloat16": torch.bfloat16,
        "float16": torch.float16,
    }[case.dtype]
