"""The probe: a model that is nothing but attention, with queries, keys and values from a table.

It looks up each token's row by its id, so wrong input ids show as wrong answers, and keeps what
every layer's attention returned at fixed addresses, where a replayed graph leaves it too.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from paceline.attention.contract import Part
from paceline.core.model.config import LayerSpec, ModelConfig
from paceline.core.model.rope import RopeConfig
from paceline.kernels.latent_rows import LatentNorm
from paceline.kernels.rope import Rope
from paceline.kernels.step_view import StepView
from paceline.layers.attention import StepContext
from paceline.layers.embedding import OverlaidRows
from paceline.models.decoder import Hidden, read_rows
from paceline.proof.suite.case import Case

POISON_ID = 0  # of padded rows and of tokens whose keys are in the cache already
_LOGITS = 8  # the vocabulary that is sampled from; the table's has an id per token


class ProbeModel(nn.Module):
    """Stands where a CausalLM stands.

    table: [num_layers, ids, q + k + v of all heads]  in the case's dtype; no v where it is in k,
    and neither where they are of an encoder's rows
    outs: [num_layers, max_tokens, num_heads, v_head_dim]  in the case's dtype
    positions: [max_tokens] or [axes, max_tokens]  int64  as derived
    """

    def __init__(
        self,
        case: Case,
        *,
        max_tokens: int,
        sinks: Tensor | None,
        scale: float,
        by_triton: bool,
        device: torch.device,
    ) -> None:
        super().__init__()
        dtype: torch.dtype = getattr(torch, case.dtype)
        layers, heads = len(case.layers), case.num_heads
        self._case = case
        self._sinks = sinks  # [num_layers, num_heads]  float32
        self._specs = layer_specs(case, scale)
        self._by_triton = by_triton  # layers that cache nothing, which have no backend
        self.view: StepView | None = None  # of the last call
        dims = {"k": case.head_dim, "v": case.v_head_dim}
        self._widths = [heads * case.head_dim] + [
            case.num_kv_heads * dim if part in case.brought else 0 for part, dim in dims.items()
        ]
        ids = max_tokens + 1
        self.table = torch.zeros(layers, ids, sum(self._widths), dtype=dtype, device=device)
        shape = (layers, max_tokens, heads, case.v_head_dim)
        self.outs = torch.zeros(shape, dtype=dtype, device=device)
        axes = () if case.rope_axes == 1 else (case.rope_axes,)
        self.positions = torch.zeros(*axes, max_tokens, dtype=torch.int64, device=device)
        self._latents: LatentRows | None = None
        if case.has_scaled_latents or case.latent_expand_from:
            self._latents = LatentRows(case, max_tokens, device=device)

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        ctx: StepContext,
        taps: tuple[str, ...] = (),
        overlaid: OverlaidRows | None = None,
        read: Tensor | None = None,
    ) -> Hidden:
        """input_ids, positions [tokens] int64; the hidden state is the first layer's answer."""
        assert overlaid is None, "no cell brings input rows"
        tokens, case = input_ids.shape[0], self._case
        self.view = ctx.view
        self.positions[..., :tokens].copy_(positions)
        for index in range(len(case.layers)):
            fused = self.table[index].index_select(0, input_ids)
            q, k, v = fused.split_with_sizes(self._widths, dim=1)
            q = q.view(tokens, case.num_heads, case.head_dim)
            if case.reads_encoder:
                self.outs[index, :tokens].copy_(ctx.attend_encoder(index, q))
                continue
            if self._latents is not None:
                self.outs[index, :tokens].copy_(self._latents.attend(index, q, k, ctx))
                continue
            k = k.view(tokens, case.num_kv_heads, case.head_dim)
            own = None if case.v_in_k else v.view(tokens, case.num_kv_heads, case.v_head_dim)
            if case.both_ways:
                assert own is not None, "layers of latents have a cache"
                out = ctx.attend_whole(self._specs[index], q, k, own, by_triton=self._by_triton)
            elif case.is_part:
                part = Part.STEP if case.step_only else Part.PREFIX
                layer, given = ctx.layers[index], k[..., : case.v_head_dim] if own is None else own
                assert layer is not None, "every layer of a probe attends"
                out, _ = ctx.backend.forward(q, k, given, layer, ctx.plan, part)
            else:
                out = ctx.attend(index, q, k, own, rope=None)
            self.outs[index, :tokens].copy_(out)
        return Hidden(read_rows(self.outs[0, :tokens].flatten(1)[:, :_LOGITS], read), {})

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [rows, 8] -> the same: what is sampled does not matter here."""
        return hidden

    def encoder_kv(self, given: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
        """given: [num_layers, rows, num_kv_heads, head_dim + v_head_dim] K and V as they are."""
        for index, rows in enumerate(given):
            k, v = rows.split_with_sizes([self._case.head_dim, self._case.v_head_dim], dim=2)
            yield index, k.contiguous(), v.contiguous()

    def attention_sinks(self) -> tuple[Tensor | None, ...]:
        """[num_layers] of [num_heads] float32, or None; none of layers without rows of tokens."""
        if self._case.reads_encoder or self._case.both_ways:
            return ()
        if self._sinks is None:
            return (None,) * len(self._case.layers)
        return tuple(self._sinks.unbind())


class LatentRows:
    """How the probe attends to rows that a latent layer makes of its inputs: a norm that leaves the
    rows of a case as they are, since their latents have length 1 a column, and a rope by 0.

    Expanded, heads have the latent itself as key and value: what they attend to is what an absorbed
    query finds, so the right answers are the same.
    """

    def __init__(self, case: Case, max_tokens: int, *, device: torch.device) -> None:
        dtype: torch.dtype = getattr(torch, case.dtype)
        self._rank, turned = case.v_head_dim, case.head_dim - case.v_head_dim
        self._norm = LatentNorm(torch.ones(self._rank, dtype=dtype, device=device), 0.0)
        self._cos_sin = torch.cat((torch.ones(1, turned // 2), torch.zeros(1, turned // 2)), 1)
        self._cos_sin = self._cos_sin.to(device)  # [1, turned]  float32
        self._positions = torch.zeros(max_tokens, dtype=torch.int64, device=device)

    def attend(self, layer: int, q: Tensor, row: Tensor, ctx: StepContext) -> Tensor:
        """q [tokens, heads, head_dim], row [tokens, head_dim] -> [tokens, heads, v_head_dim]."""
        rank, tokens = self._rank, row.shape[0]
        first = tokens if ctx.expanded is None else ctx.expanded.first_token
        how: dict[str, Any] = {"norm": self._norm, "pairs": False}
        parts = []
        if first:
            rope = Rope(self._cos_sin, self._positions[:first])
            own = (torch.empty_like(q[:first]), q[:first, :, rank:], row[:first])

            def absorb(into: Tensor) -> None:
                into.copy_(q[:first, :, :rank])

            parts.append(ctx.attend_latents(layer, *own, rope=rope, absorb=absorb, **how))
        if first < tokens:
            rope = Rope(self._cos_sin, self._positions[first:tokens])
            given = (q[first:, :, :rank], q[first:, :, rank:], row[first:])
            heads = q.shape[1]

            def expand(latents: Tensor) -> tuple[Tensor, Tensor]:
                each = latents.unsqueeze(1).expand(-1, heads, -1)
                return each, each.contiguous()  # a backend may write to values

            parts.append(ctx.attend_expanded(layer, *given, rope=rope, expand=expand, **how))
        return torch.cat(parts)


def probe_config(case: Case, scale: float, *, max_position: int) -> ModelConfig:
    """The model shape of a case.  The probe rotates nothing: of rope it has the positions."""
    return ModelConfig(
        model_type="probe",
        vocab_size=_LOGITS,
        hidden_size=_LOGITS,
        intermediate_size=1,
        max_position=max_position,
        rms_norm_eps=1e-6,
        layers=layer_specs(case, scale),
        max_encoder_len=max(max(batch.encoder_lens or (0,)) for batch in case.batches),
        hidden_act="silu",
        tie_word_embeddings=False,
        eos_token_ids=(),
        dtype=case.dtype,
    )


def layer_specs(case: Case, scale: float) -> tuple[LayerSpec, ...]:
    """[num_layers] scale: multiplies q.k."""
    rope = RopeConfig(sections=(1,) * case.rope_axes) if case.rope_axes > 1 else None
    return tuple(
        LayerSpec(
            heads=case.heads,
            scale=scale,
            window=layer.window,
            soft_cap=case.soft_cap,
            sinks=case.sinks,
            rope=rope,
            rotary_dim=2 * case.rope_axes if rope else 0,
            reads_encoder=case.reads_encoder,
            causal=not case.both_ways,
        )
        for layer in case.layers
    )
