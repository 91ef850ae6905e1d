"""A stand-in for the engine's attention: one request, K and V kept in lists, explicit masks."""

from typing import Any

import torch
from torch import Tensor

from paceline.attention.mixers import load_state_backend
from paceline.attention.states import StateLayer, StateLimits
from paceline.core.model.config import ModelConfig
from paceline.core.model.lookback import Chunk
from paceline.core.modes import MaskKind
from paceline.kernels.gated_norm import Gate, GatedRows, gated_rows_reference
from paceline.kernels.latent_rows import LatentNorm, LatentSlots, latent_rows_reference
from paceline.kernels.rms_norm import rms_norm_reference
from paceline.kernels.rope import Rope, rope_reference
from paceline.kernels.rope_write_kv import HeadNorms
from paceline.kernels.step_view import GroupView, StepView
from paceline.layers.attention import Absorb


class FakeContext:
    """`attend` over everything appended so far, under causal and window masks, in float32 or the
    model's dtype, by the textbook formula."""

    expanded = None

    def __init__(self, config: ModelConfig, sinks: tuple[Tensor | None, ...] | None = None) -> None:
        self._config = config
        attending = [at for at, layer in enumerate(config.layers) if layer.attends]
        given = sinks or (None,) * len(attending)
        self._sinks = dict(zip(attending, given, strict=True))  # by layer, of [num_heads]
        self._keys: list[list[Tensor]] = [[] for _ in range(config.num_layers)]
        self._values: list[list[Tensor]] = [[] for _ in range(config.num_layers)]
        self._slots: dict[int, dict[str, Tensor]] = {}  # by layer: of two slots, parts by name

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
        if isinstance(layer.window, Chunk):
            visible &= key_at // layer.window.size == query_at // layer.window.size
        elif layer.window is not None:
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
        absorb: Absorb,
    ) -> Tensor:
        """As of `StepContext`; the pool that is written is forgotten."""
        absorb(queries[..., : -turning.shape[2]])
        into = LatentSlots(row.new_empty(len(row), 1, 1, row.shape[1]), torch.arange(len(row)))
        rows = latent_rows_reference(
            turning, row, queries, norm=norm, rope=rope, pairs=pairs, into=into
        )
        return self.attend(layer_id, queries, rows, None, rope=None)

    def mix(self, layer_id: int, inputs: Any) -> Tensor:
        """A layer with states, by the backend `torch` of its kind; what comes goes on behind what
        came."""
        spec = self._config.layers[layer_id]
        backend, rows = load_state_backend("torch", kind=spec.mixer), inputs[0]
        slots = self._slots.get(layer_id)
        group, view = _one_request(rows.shape[0], begins=slots is None)
        if slots is None:
            slots = {
                part.name: torch.full(
                    (2, *part.shape),
                    float("nan"),
                    dtype=rows.dtype if part.dtype is None else getattr(torch, part.dtype),
                )
                for part in spec.state
            }
            self._slots[layer_id] = slots
        limits = StateLimits(
            device=rows.device,
            dtype=rows.dtype,
            num_layers=1,
            parts={part.name: part.shape for part in spec.state},
            max_reqs=1,
            max_tokens=rows.shape[0],
            max_round_tokens=0,
        )
        plan = backend.plan(view, group, backend.make_buffers(limits), is_round=False)
        return backend.extend(inputs, StateLayer(layer_id=layer_id, index=0, parts=slots), plan)

    def mix_gated(self, layer_id: int, inputs: Any, gate: Gate) -> GatedRows | None:
        """As of `StepContext`; single tokens are gated at once."""
        if gate.z.shape[0] > 1:
            return None
        return gated_rows_reference(self.mix(layer_id, inputs).flatten(1), gate)


def _one_request(tokens: int, *, begins: bool) -> tuple[GroupView, StepView]:
    """A step of so many tokens of a request whose state is in slot 1."""
    slots = torch.tensor([[0 if begins else 1, 1, 0]], dtype=torch.int32)
    prefix, lens = torch.tensor([0], dtype=torch.int32), torch.tensor([tokens], dtype=torch.int32)
    group = GroupView(
        page_table=slots,
        out_cache_loc=torch.empty(0, dtype=torch.int64),
        prefix_lens=prefix,
        kv_lens=lens,
    )
    positions = torch.arange(tokens)
    view = StepView(
        row_ids=torch.ones(1, dtype=torch.int64),
        prefix_lens=prefix,
        extend_lens=lens,
        kv_lens=lens,
        cu_seqlens_q=torch.tensor([0, tokens], dtype=torch.int32),
        req_ids=torch.zeros(tokens, dtype=torch.int64),
        positions=positions,
        rope_positions=positions,
        input_ids=positions,
        logits_loc=torch.tensor([tokens - 1]),
        groups=(group,),
        mask=MaskKind.CAUSAL,
        tree_mask=None,
        max_extend_len=tokens,
        kv_len_bound=tokens,
    )
    return group, view


def _weights(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """softmax of [heads, queries, keys]; a sink is one more key, whose weight is lost."""
    if sinks is None:
        return scores.softmax(-1)
    extra = sinks.float()[:, None, None].expand(-1, scores.shape[1], 1)
    return torch.cat((scores, extra), dim=-1).softmax(-1)[..., :-1]
