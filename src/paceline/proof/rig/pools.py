"""The KV pools of a rig: what they hold before a step, and what they must hold after it.

Every slot but those of the live prefixes holds poison, and padded tokens bring another poison, so
that a stray write is seen wherever it goes.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from paceline.attention.contract import LayerCache
from paceline.proof.oracle.batch_data import BatchData
from paceline.proof.rig.placement import slots
from paceline.proof.rig.prepared import PreparedCase
from paceline.runner.sanitizer.poison import bits_of

# Quiet NaNs that no arithmetic makes, as bits, by bytes: of float8_e4m3fn the only other one.
_ODD_NAN = {1: 0xFF, 2: 0xFFE5 - (1 << 16), 4: 0xFFE5A5A5 - (1 << 32)}
_FACTOR = 8.0  # of a padded token's bait on the pools': exact in every format, and no cache's scale


class Pools:
    """Fills and audits the caches of every layer; slot 0, which padded rows write, aside.

    loads_dead: poison is finite: a key that every query prefers, and its value.
    """

    def __init__(
        self, prepared: PreparedCase, layers: Sequence[LayerCache], *, loads_dead: bool
    ) -> None:
        self._prepared = prepared
        self._layers = layers
        self._loads_dead = loads_dead

    def fill(self, index: int) -> None:
        """Poison every slot, then write the keys and values of each live prefix of a batch."""
        data = self._prepared.data[index]
        for layer in self._layers:
            number = layer.spec.layer_id
            for cache, scale, bait in (
                (layer.k_cache, layer.k_scale, data.bait_keys[number]),
                (layer.v_cache, layer.v_scale, data.bait_values[number]),
            ):
                if self._loads_dead:
                    cache.copy_(_quantised(bait, cache, scale))
                else:
                    bits_of(cache).fill_(_ODD_NAN[cache.element_size()])
            for loc, keys, values in self._stored(index, layer, is_prefix=True):
                layer.k_cache.flatten(0, 1)[loc] = keys
                layer.v_cache.flatten(0, 1)[loc] = values

    def dead_token(self, data: BatchData, layer: int) -> Tensor:
        """[width of the probe's table] float64  what padded and frozen rows compute with."""
        case = self._prepared.case
        queries = torch.zeros(case.num_heads * case.head_dim, dtype=torch.float64)
        baits = (data.bait_keys, data.bait_values)[: 1 if case.v_in_k else 2]
        row = torch.cat((queries, *(_FACTOR * bait[layer].flatten() for bait in baits)))
        return row if self._loads_dead else torch.full_like(row, float("nan"))

    def snapshot(self) -> list[tuple[Tensor, Tensor]]:
        """[num_layers] copies of both caches."""
        return [(layer.k_cache.clone(), layer.v_cache.clone()) for layer in self._layers]

    def wrong_writes(self, index: int, before: Sequence[tuple[Tensor, Tensor]]) -> list[str]:
        """What differs from `before` with the batch's own new tokens written.  Mutates `before`."""
        faults = []
        for layer, (k, v) in zip(self._layers, before, strict=True):
            if not self._prepared.case.prefix_only:
                for loc, keys, values in self._stored(index, layer, is_prefix=False):
                    k.flatten(0, 1)[loc] = keys
                    v.flatten(0, 1)[loc] = values
            for name, wanted, cache in (("K", k, layer.k_cache), ("V", v, layer.v_cache)):
                changed = _differing_slots(wanted, cache)
                if changed:
                    faults.append(
                        f"{name} of layer {layer.spec.layer_id}: slots {changed[:4]} do not hold "
                        "what the step was to leave there"
                    )
        return faults

    def written(self, index: int) -> Iterator[Tensor]:
        """[new tokens, num_kv_heads, head_dim] each: what the caches hold where a batch's live
        requests have their new tokens."""
        for layer in self._layers:
            for loc, _, _ in self._stored(index, layer, is_prefix=False):
                yield layer.k_cache.flatten(0, 1)[loc]
                yield layer.v_cache.flatten(0, 1)[loc]

    def _stored(
        self, index: int, layer: LayerCache, *, is_prefix: bool
    ) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """(slots, keys, values as the cache holds them) of each live request's prefix or new
        tokens; of a frozen one the pages may be anybody's."""
        batch, data = self._prepared.case.batches[index], self._prepared.data[index]
        placement = self._prepared.places[index]
        device = layer.k_cache.device
        for request, prefix in enumerate(batch.prefix_lens):
            if request in batch.frozen:
                continue
            loc = torch.tensor(slots(placement, layer.spec.group, request))
            positions = torch.arange(len(loc))
            chosen = (positions < prefix) == is_prefix
            chosen &= (positions < batch.kv_lens[request]) & (loc >= 0)
            taken = positions[chosen]
            keys = data.keys[request][layer.spec.layer_id][taken]
            values = data.values[request][layer.spec.layer_id][taken]
            yield (
                loc[chosen].to(device),
                _quantised(keys, layer.k_cache, layer.k_scale),
                _quantised(values, layer.v_cache, layer.v_scale),
            )


def _quantised(values: Tensor, cache: Tensor, scale: Tensor | None) -> Tensor:
    """`values` as the cache holds them."""
    divided = values if scale is None else values / scale.double().cpu()
    return divided.to(cache.device).to(cache.dtype)


def _differing_slots(wanted: Tensor, cache: Tensor) -> list[int]:
    """Slots whose bytes differ, but for slot 0, which padded rows write."""
    pairs = (tensor.flatten(0, 1).flatten(1).contiguous() for tensor in (wanted, cache))
    one, other = (tensor.view(torch.uint8) for tensor in pairs)
    changed = (one != other).any(dim=1)
    changed[0] = False
    return [int(slot) for slot in changed.nonzero().flatten()]
