"""The pools of a rig: what they hold before a step, and what they must hold after it.

Every slot but those of the live prefixes holds poison, and padded tokens bring another poison, so
that a stray write is seen wherever it goes.  Which parts a group has, its spec says; a part that is
of another has no slots of its own.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.cache.pool import KVPool
from paceline.core.model.config import ROW_SCALES, TURNED
from paceline.proof.oracle.batch_data import BatchData
from paceline.proof.rig.placement import slots
from paceline.proof.rig.prepared import PreparedCase
from paceline.runner.sanitizer.poison import bits_of

# Quiet NaNs that no arithmetic makes, as bits, by bytes: of float8_e4m3fn the only other one.
_ODD_NAN = {1: 0xFF, 2: 0xFFE5 - (1 << 16), 4: 0xFFE5A5A5 - (1 << 32)}
_BROUGHT = ("k", "v")
_FACTOR = 8.0  # of a padded token's bait on the pools': exact in every format, and no cache's scale


@dataclass(frozen=True, slots=True, eq=False)
class _Layer:
    """One layer's share of its group's pool."""

    number: int  # of the layer
    group: int  # of the step's view
    parts: Mapping[str, Tensor]  # of [num_pages, page_size, *part.shape]
    stored: tuple[str, ...]  # those with memory of their own
    scales: Mapping[str, Tensor]  # of [1]  float32; none unless stored as float8

    def held(self, part: str, brought: Mapping[str, Tensor]) -> Tensor:
        """What the cache holds of a part; brought: K and V of tokens."""
        cache, scale = self.parts[part], self.scales.get(part)
        if ROW_SCALES in self.stored:
            values = _scaled(part, brought["k"], self.parts["v"].shape[-1])
        else:
            values = brought[part] if scale is None else brought[part] / scale.double().cpu()
        return values.to(cache.device).to(cache.dtype)


class Pools:
    """Fills and audits the caches of every layer; slot 0, which padded rows write, aside.

    loads_dead: poison is finite: a key that every query prefers, and its value.
    """

    def __init__(
        self, prepared: PreparedCase, pools: Sequence[KVPool], *, loads_dead: bool
    ) -> None:
        """pools: [num_groups]"""
        self._prepared = prepared
        layers = [
            _Layer(
                number,
                group,
                (pages := pool.layer(number)).parts,
                tuple(part.name for part in pool.spec.stored),
                pages.scales,
            )
            for group, pool in enumerate(pools)
            for number in pool.spec.layer_ids
        ]
        self._layers = sorted(layers, key=lambda layer: layer.number)
        self._loads_dead = loads_dead

    def fill(self, index: int) -> None:
        """Poison every slot, then write what each live prefix of a batch has there."""
        data = self._prepared.data[index]
        for layer in self._layers:
            baits = {part: data.bait(part)[layer.number] for part in _BROUGHT}
            for part in layer.stored:
                cache = layer.parts[part]
                if self._loads_dead:
                    cache.copy_(layer.held(part, baits))
                else:
                    bits_of(cache).fill_(_ODD_NAN[cache.element_size()])
            if self._prepared.case.step_only:
                continue  # nobody reads a prefix
            for loc, rows in self._rows(index, layer, is_prefix=True):
                for part in layer.stored:
                    layer.parts[part].flatten(0, 1)[loc] = rows[part]

    def dead_token(self, data: BatchData, layer: int) -> Tensor:
        """[width of the probe's table] float64  what padded and frozen rows compute with."""
        case = self._prepared.case
        queries = torch.zeros(case.num_heads * case.head_dim, dtype=torch.float64)
        baits = [data.bait(part)[layer] for part in case.brought]
        row = torch.cat((queries, *(_FACTOR * bait.flatten() for bait in baits)))
        return row if self._loads_dead else torch.full_like(row, float("nan"))

    def snapshot(self) -> list[dict[str, Tensor]]:
        """[num_layers] copies of what is stored, by part."""
        return [{part: each.parts[part].clone() for part in each.stored} for each in self._layers]

    def wrong_writes(self, index: int, before: Sequence[Mapping[str, Tensor]]) -> list[str]:
        """What differs from `before` with the batch's own new tokens written.  Mutates `before`."""
        faults = []
        for layer, wanted in zip(self._layers, before, strict=True):
            if not self._prepared.case.is_part:
                for loc, rows in self._rows(index, layer, is_prefix=False):
                    for part, held in wanted.items():
                        held.flatten(0, 1)[loc] = rows[part]
            for part, held in wanted.items():
                changed = _differing_slots(held, layer.parts[part])
                if changed:
                    faults.append(
                        f"{part.upper()} of layer {layer.number}: slots {changed[:4]} do not hold "
                        "what the step was to leave there"
                    )
        return faults

    def written(self, index: int) -> Iterator[Tensor]:
        """[new tokens, *part.shape] each: what the caches hold where a batch's live requests have
        their new tokens, under every name."""
        for layer in self._layers:
            for loc, _ in self._rows(index, layer, is_prefix=False):
                for cache in layer.parts.values():
                    yield cache.flatten(0, 1)[loc]

    def _rows(
        self, index: int, layer: _Layer, *, is_prefix: bool
    ) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
        """(slots, what the cache holds there, by stored part) of each live request's prefix or new
        tokens; of a frozen one the pages may be anybody's."""
        batch, data = self._prepared.case.batches[index], self._prepared.data[index]
        placement = self._prepared.places[index]
        device = layer.parts[layer.stored[0]].device
        for request, prefix in enumerate(batch.prefix_lens):
            if request in batch.frozen:
                continue
            if batch.encoder_lens is not None:
                prefix = 0  # its rows are written when it joins
            loc = torch.tensor(slots(placement, layer.group, request), dtype=torch.int64)
            positions = torch.arange(len(loc))
            chosen = (positions < prefix) == is_prefix
            chosen &= (positions < batch.key_lens[request]) & (loc >= 0)
            taken = positions[chosen]
            brought = {part: data.rows(part, request)[layer.number][taken] for part in _BROUGHT}
            yield (
                loc[chosen].to(device),
                {part: layer.held(part, brought) for part in layer.stored},
            )


def _scaled(part: str, rows: Tensor, rank: int) -> Tensor:
    """A part of rows [..., rank + turned] whose latents are codes: the least power of two is their
    scale with which none exceeds 448."""
    latents, turned = rows[..., :rank], rows[..., rank:]
    scales = (latents.abs().amax(-1, keepdim=True) / 448).log2().ceil().exp2()
    return {"k": latents / scales, TURNED: turned, ROW_SCALES: scales}[part]


def _differing_slots(wanted: Tensor, cache: Tensor) -> list[int]:
    """Slots whose bytes differ, but for slot 0, which padded rows write."""
    pairs = (tensor.flatten(0, 1).flatten(1).contiguous() for tensor in (wanted, cache))
    one, other = (tensor.view(torch.uint8) for tensor in pairs)
    changed = (one != other).any(dim=1)
    changed[0] = False
    return [int(slot) for slot in changed.nonzero().flatten()]
