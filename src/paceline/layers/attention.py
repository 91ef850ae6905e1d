"""StepContext: what a step gives its blocks.  Attention through it: rotate, write K and V to the
pool, in one place, then call the backend."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paceline.attention.contract import (
    AttentionBackend,
    AttentionSpec,
    LayerCache,
    Limits,
    Part,
)
from paceline.attention.expanded import Expand, ExpandedPlan, attend_expanded
from paceline.attention.ragged.contract import RaggedLimits
from paceline.attention.states import StateGroupPlan
from paceline.cache.pool import KVPool
from paceline.core.expansion import most_pieces
from paceline.core.model.cache_groups import CacheGroupSpec
from paceline.core.model.config import ROW_SCALES, TURNED, LayerSpec, ModelConfig
from paceline.core.model.lookback import Chunk
from paceline.kernels.gated_norm import Gate, GatedRows
from paceline.kernels.latent_rows import LatentNorm, LatentSlots, latent_rows
from paceline.kernels.ragged_attention import ragged_attention
from paceline.kernels.rope import Rope
from paceline.kernels.rope_write_kv import HeadNorms, KVSlots, rope_write_kv
from paceline.kernels.scaled_latents import ScaledLatents
from paceline.kernels.step_view import StepView

# Fills [tokens, num_heads, rank], whose rows may lie apart: queries times W_UK of their heads.
Absorb = Callable[[Tensor], None]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EncoderPlan:
    """The layers that read the rows of an encoder, in a step."""

    backend: AttentionBackend
    layers: Mapping[int, LayerCache]  # by layer id of the model
    plan: Any  # the backend's, whose prefixes are the encoder's rows
    is_read: Tensor  # [padded_tokens, 1]  bool  whether the token's request has rows


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepContext:
    """What every block of one step may read; an explicit argument of a model's forward."""

    view: StepView  # its first groups are those of the model's layers
    backend: AttentionBackend
    plan: Any  # the backend's frozen plan, of the tokens that are not expanded; None: all are
    layers: tuple[LayerCache | None, ...]  # [num_layers]; None: a layer that does not attend
    states: tuple[StateGroupPlan, ...] = ()  # [num_state_groups] of layers that mix otherwise
    encoder: EncoderPlan | None = None  # of layers that read an encoder's rows
    expanded: ExpandedPlan | None = None  # of layers of latents, the step's last rows

    def attend(
        self,
        layer_id: int,
        q: Tensor,
        k: Tensor,
        v: Tensor | None,
        *,
        rope: Rope | None,
        norms: HeadNorms | None = None,
    ) -> Tensor:
        """Attention of one layer over its cache.

        q: [padded_tokens, num_heads, head_dim]; k, v: [padded_tokens, num_kv_heads, *head_dim]; v
        is None where the cache has V in K, and is k's leading columns then.
        Returns [padded_tokens, num_heads, v_head_dim].  Normalises and rotates q and k in place,
        where asked, and writes K and V to the layer's pool.
        """
        layer = self._layer(layer_id)
        assert layer.beside is None, "rows of latents come with their norm, to attend_latents"
        loc = self.view.groups[layer.spec.group].out_cache_loc
        v_cache = None if v is None else layer.v_cache
        into = KVSlots(layer.k_cache, v_cache, loc, layer.k_scale, layer.v_scale)
        values = k[..., : layer.spec.v_head_dim] if v is None else v
        rope_write_kv(q, k, v, into=into, rope=rope, norms=norms)
        out, _ = self.backend.forward(q, k, values, layer, self.plan, Part.ALL)
        return out

    def attend_latents(
        self,
        layer_id: int,
        queries: Tensor,
        turning: Tensor,
        row: Tensor,
        *,
        norm: LatentNorm,
        rope: Rope,
        pairs: bool,
        absorb: Absorb,
    ) -> Tensor:
        """Latent attention of one layer over its cache, absorbed, of the tokens that are not
        expanded: `tokens`, the step's first.

        queries: [tokens, num_heads, rank + rope_dim], empty: `absorb` fills the first columns, and
        `turning` [tokens, num_heads, rope_dim] becomes the last; row: [tokens, rank + rope_dim] as
        projected.  See `latent_rows`.  Returns [tokens, num_heads, rank].  Mutates queries, and
        writes rows to the layer's pool.
        """
        layer = self._layer(layer_id)
        loc = self.view.groups[layer.spec.group].out_cache_loc[: row.shape[0]]
        into = LatentSlots(layer.k_cache, loc, layer.beside)
        rows = latent_rows(turning, row, queries, norm=norm, rope=rope, pairs=pairs, into=into)
        absorb(queries[..., : layer.spec.v_head_dim])  # its weight is read beside the rows
        values = rows[..., : layer.spec.v_head_dim]
        out, _ = self.backend.forward(queries, rows, values, layer, self.plan, Part.ALL)
        return out

    def attend_expanded(
        self,
        layer_id: int,
        nope: Tensor,
        turning: Tensor,
        row: Tensor,
        *,
        norm: LatentNorm,
        rope: Rope,
        pairs: bool,
        expand: Expand,
    ) -> Tensor:
        """Latent attention of one layer, with keys and values of every head, of the tokens that are
        expanded: `tokens`, the step's last.

        nope: [tokens, num_heads, nope_dim], the columns of queries that do not turn; turning:
        [tokens, num_heads, rope_dim], those that do; row: [tokens, rank + rope_dim] as projected.
        Returns [tokens, num_heads, v_dim].  Writes rows to the layer's pool.
        """
        assert self.expanded is not None, "nothing of the step is expanded"
        layer = self._layer(layer_id)
        loc = self.view.groups[layer.spec.group].out_cache_loc[self.expanded.first_token :]
        turned = torch.empty_like(turning, memory_format=torch.contiguous_format)
        rows = latent_rows(
            turning,
            row,
            turned,
            norm=norm,
            rope=rope,
            pairs=pairs,
            into=LatentSlots(layer.k_cache, loc),
        )
        return attend_expanded(nope, turned, rows.squeeze(1), layer, self.expanded, expand)

    def attend_encoder(self, layer_id: int, q: Tensor) -> Tensor:
        """Cross attention of one layer: every token to all rows of its request's encoder.

        q: [padded_tokens, num_heads, head_dim], as it is.  Returns [padded_tokens, num_heads,
        v_head_dim]; 0 for a request that brings none.
        """
        encoder = self._encoder()
        layer, none = encoder.layers[layer_id], q[:0]  # the step has no keys of its own
        out, _ = encoder.backend.forward(q, none, none, layer, encoder.plan, Part.PREFIX)
        return out

    def of_readers(self, x: Tensor, rows: Tensor | None = None) -> Tensor:
        """x [padded_tokens, hidden] -> the same, 0 where the token's request brings no rows: such
        a one passes over what its layers make of them, biases too.

        rows: [rows] int64, which tokens x [rows, hidden] is of; None: all.
        """
        is_read = self._encoder().is_read
        if rows is not None:
            is_read = is_read.index_select(0, rows)
        # A product would make NaN of what overflowed there.
        return torch.where(is_read, x, 0)

    def attend_whole(
        self,
        spec: LayerSpec,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        rope: Rope | None = None,
        norms: HeadNorms | None = None,
        by_triton: bool = False,
    ) -> Tensor:
        """Attention of a layer that caches nothing: to the step's own rows, in both directions
        unless it is causal.

        Nothing is written and nothing read but q, k and v: such a layer is in no cache group, so
        it has no pool to read by mistake.  Each request's text is whole in the step.
        q: [padded_tokens, num_heads, head_dim]; k, v: [padded_tokens, num_kv_heads, *head_dim].
        by_triton: on a CPU too.  Returns [padded_tokens, num_heads, v_head_dim].  Normalises and
        rotates q and k in place, where asked.
        """
        assert spec.reads_whole, "a layer that caches rows attends over its cache"
        assert not isinstance(spec.window, Chunk), "plan/cache_free.py leaves chunks their cache"
        if rope is not None or norms is not None:
            rope_write_kv(q, k, None, into=None, rope=rope, norms=norms)
        cu = self.view.cu_seqlens_q
        out, _ = ragged_attention(
            q,
            k,
            v,
            cu,
            cu,
            causal=spec.causal,
            scale=spec.scale,
            window=spec.window,
            soft_cap=spec.soft_cap,
            by_triton=by_triton,
        )
        return out

    def _encoder(self) -> EncoderPlan:
        assert self.encoder is not None, "no layer reads an encoder"
        return self.encoder

    def _layer(self, layer_id: int) -> LayerCache:
        layer = self.layers[layer_id]
        assert layer is not None, f"layer {layer_id} does not attend"
        return layer

    def mix(self, layer_id: int, inputs: Any) -> Tensor:
        """A layer that keeps a state per request, over the step's rows.  inputs: as its backend
        takes them."""
        group = self._keeper(layer_id)
        return group.backend.extend(inputs, group.layers[layer_id], group.plan)

    def mix_gated(self, layer_id: int, inputs: Any, gate: Gate) -> GatedRows | None:
        """`mix` and a gate behind it at once; None: the backend has none here, and did nothing."""
        group = self._keeper(layer_id)
        return group.backend.extend_gated(inputs, gate, group.layers[layer_id], group.plan)

    def _keeper(self, layer_id: int) -> StateGroupPlan:
        for group in self.states:
            if layer_id in group.layers:
                return group
        raise AssertionError(f"layer {layer_id} is in no STATE group")


def attention_specs(
    config: ModelConfig, groups: tuple[CacheGroupSpec, ...]
) -> tuple[AttentionSpec, ...]:
    """One spec per layer that attends within `groups`, in order."""
    group_of = {layer: index for index, group in enumerate(groups) for layer in group.layer_ids}
    return tuple(
        AttentionSpec(
            layer_id=layer_id,
            group=group_of[layer_id],
            num_heads=layer.heads.num_heads,
            num_kv_heads=layer.heads.num_kv_heads,
            head_dim=layer.heads.head_dim,
            v_head_dim=layer.heads.v_head_dim,
            scale=layer.scale,
            window=layer.window,
            soft_cap=layer.soft_cap,
            v_in_k=layer.heads.v_in_k,
        )
        for layer_id, layer in enumerate(config.layers)
        if layer.attends and layer_id in group_of
    )


def layer_caches(
    config: ModelConfig,
    groups: Sequence[CacheGroupSpec],
    pools: Sequence[KVPool],
    *,
    sinks: Sequence[Tensor | None],
) -> tuple[LayerCache | None, ...]:
    """[num_layers] each layer's pages of its group's pool, with the sinks its model brings; None
    for a layer that does not attend within `groups`.

    pools: [num_groups]; sinks: of each such layer, [num_heads] float32, or None.
    """
    specs = attention_specs(config, tuple(groups))
    caches = [pools[spec.group].layer(spec.layer_id) for spec in specs]
    attending = {
        spec.layer_id: LayerCache(
            spec=spec,
            k_cache=pages.parts["k"],
            v_cache=pages.parts["v"],
            k_scale=pages.scales.get("k"),
            v_scale=pages.scales.get("v"),
            sinks=sink,
            beside=_beside(pages.parts),
        )
        for spec, pages, sink in zip(specs, caches, sinks, strict=True)
    }
    return tuple(attending.get(layer_id) for layer_id in range(config.num_layers))


def _beside(parts: Mapping[str, Tensor]) -> ScaledLatents | None:
    """What of a layer's pages lies beside codes; None: there are none."""
    return ScaledLatents(parts[TURNED], parts[ROW_SCALES]) if ROW_SCALES in parts else None


def attention_limits(
    config: ModelConfig,
    groups: tuple[CacheGroupSpec, ...],
    *,
    device: torch.device,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    max_reqs: int,
    max_tokens: int,
    length: int,
) -> Limits:
    """What a backend allocates for.  length: tokens of one request, those in flight included."""
    return Limits(
        device=device,
        dtype=dtype,
        kv_dtype=kv_dtype,
        layers=attention_specs(config, groups),
        max_reqs=max_reqs,
        max_tokens=max_tokens,
        max_pages=tuple(-(-length // group.page_size) for group in groups),
        windows=tuple(group.window for group in groups),
        page_size=groups[0].page_size if groups else 0,
    )


def ragged_limits(
    config: ModelConfig,
    *,
    device: torch.device,
    dtype: torch.dtype,
    max_reqs: int,
    max_tokens: int,
    kv_len_bound: int,
) -> RaggedLimits:
    """What a ragged backend allocates for, where the layers of `config` are of latents.

    kv_len_bound: tokens of a request, at most.
    """
    layer = next(layer for layer in config.layers if layer.heads.v_in_k)
    head_dim, v_head_dim = config.expanded_dims
    return RaggedLimits(
        device=device,
        dtype=dtype,
        max_reqs=max_reqs,
        max_tokens=max_tokens,
        max_pieces=most_pieces(kv_len_bound, reqs=max_reqs, most_rows=max_tokens),
        num_heads=layer.heads.num_heads,
        head_dim=head_dim,
        v_head_dim=v_head_dim,
        scale=layer.scale,
    )
