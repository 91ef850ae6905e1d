"""A stand-in for the engine's attention: one request, K and V kept in lists, explicit masks."""

import torch
from torch import Tensor

from paceline.core.model_config import ModelConfig
from paceline.kernels.latent_rows import LatentNorm, LatentSlots, latent_rows_reference
from paceline.kernels.rms_norm import rms_norm_reference
from paceline.kernels.rope import Rope, rope_reference
from paceline.kernels.rope_write_kv import HeadNorms


class FakeContext:
    """`attend` over everything appended so far, under causal and window masks, in float32 or the
    model's dtype, by the textbook formula."""

    def __init__(self, config: ModelConfig, sinks: tuple[Tensor | None, ...] | None = None) -> None:
        self._config = config
        self._sinks = sinks or (None,) * config.num_layers  # [num_layers] of [num_heads]
        self._keys: list[list[Tensor]] = [[] for _ in range(config.num_layers)]
        self._values: list[list[Tensor]] = [[] for _ in range(config.num_layers)]

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
        """q [tokens, heads, dim], k and v [tokens, kv_heads, dim] -> [tokens, heads, dim]."""
        layer = self._config.layers[layer_id]
        if norms is not None:
            offset = norms.unit_offset
            q = rms_norm_reference(q, norms.q, norms.eps, unit_offset=offset)
            k = rms_norm_reference(k, norms.k, norms.eps, unit_offset=offset)
        if rope is not None:
            q, k = rope_reference(q, *rope), rope_reference(k, *rope)
        self._keys[layer_id].append(k.clone())
        self._values[layer_id].append(
            (k[..., : layer.heads.v_head_dim] if v is None else v).clone()
        )
        group = layer.heads.num_heads // layer.heads.num_kv_heads
        keys = torch.cat(self._keys[layer_id]).repeat_interleave(group, dim=1)
        values = torch.cat(self._values[layer_id]).repeat_interleave(group, dim=1)
        scores = torch.einsum("qhd,khd->hqk", q, keys) * layer.scale
        if layer.soft_cap is not None:
            scores = layer.soft_cap * torch.tanh(scores / layer.soft_cap)
        query_at = torch.arange(keys.shape[0] - q.shape[0], keys.shape[0])[:, None]
        key_at = torch.arange(keys.shape[0])[None, :]
        visible = key_at <= query_at
        if layer.window is not None:
            visible &= key_at > query_at - layer.window
        scores = scores.masked_fill(~visible, float("-inf"))
        weights = _weights(scores.float(), self._sinks[layer_id]).to(q.dtype)
        return torch.einsum("hqk,khd->qhd", weights, values)

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
    ) -> Tensor:
        """As of `StepContext`; the pool that is written is forgotten."""
        into = LatentSlots(row.new_empty(len(row), 1, 1, row.shape[1]), torch.arange(len(row)))
        rows = latent_rows_reference(
            turning, row, queries, norm=norm, rope=rope, pairs=pairs, into=into
        )
        return self.attend(layer_id, queries, rows, None, rope=None)


def _weights(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """softmax of [heads, queries, keys]; a sink is one more key, whose weight is lost."""
    if sinks is None:
        return scores.softmax(-1)
    extra = sinks.float()[:, None, None].expand(-1, scores.shape[1], 1)
    return torch.cat((scores, extra), dim=-1).softmax(-1)[..., :-1]
