"""A stand-in for the engine's attention: one request, K and V kept in lists, explicit masks."""

import torch
from torch import Tensor

from paceline.core.model_config import ModelConfig


class FakeContext:
    """`attend` over everything appended so far, under causal and window masks, in float32 or the
    model's dtype, by the textbook formula."""

    def __init__(self, config: ModelConfig) -> None:
        self._config = config
        self._keys: list[list[Tensor]] = [[] for _ in range(config.num_layers)]
        self._values: list[list[Tensor]] = [[] for _ in range(config.num_layers)]

    def attend(self, layer_id: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [tokens, heads, dim], k and v [tokens, kv_heads, dim] -> [tokens, heads, dim]."""
        config = self._config
        self._keys[layer_id].append(k.clone())
        self._values[layer_id].append(v.clone())
        group = config.num_heads // config.num_kv_heads
        keys = torch.cat(self._keys[layer_id]).repeat_interleave(group, dim=1)
        values = torch.cat(self._values[layer_id]).repeat_interleave(group, dim=1)
        scores = torch.einsum("qhd,khd->hqk", q, keys) * config.attention_scale
        if config.attention_soft_cap is not None:
            cap = config.attention_soft_cap
            scores = cap * torch.tanh(scores / cap)
        query_at = torch.arange(keys.shape[0] - q.shape[0], keys.shape[0])[:, None]
        key_at = torch.arange(keys.shape[0])[None, :]
        visible = key_at <= query_at
        window = config.layer_windows[layer_id]
        if window is not None:
            visible &= key_at > query_at - window
        scores = scores.masked_fill(~visible, float("-inf"))
        weights = scores.float().softmax(-1).to(q.dtype)
        return torch.einsum("hqk,khd->qhd", weights, values)
