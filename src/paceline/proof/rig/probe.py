"""The probe: a model that is nothing but attention, with queries, keys and values from a table.

It looks up each token's row by its id, so wrong input ids show as wrong answers, and keeps what
every layer's attention returned at fixed addresses, where a replayed graph leaves it too.
"""

import torch
from torch import Tensor, nn

from paceline.attention.contract import Part
from paceline.core.model_config import LayerSpec, ModelConfig
from paceline.layers.attention import StepContext
from paceline.layers.embedding import OverlaidRows
from paceline.models.decoder import Hidden
from paceline.proof.suite.case import Case

POISON_ID = 0  # of padded rows and of tokens whose keys are in the cache already
_LOGITS = 8  # the vocabulary that is sampled from; the table's has an id per token


class ProbeModel(nn.Module):
    """Stands where a CausalLM stands.

    table: [num_layers, ids, q + k + v of all heads]  in the case's dtype; no v where it is in k
    outs: [num_layers, max_tokens, num_heads, v_head_dim]  in the case's dtype
    positions: [max_tokens]  int64  as derived
    """

    def __init__(
        self, case: Case, *, max_tokens: int, sinks: Tensor | None, device: torch.device
    ) -> None:
        super().__init__()
        dtype: torch.dtype = getattr(torch, case.dtype)
        layers, heads = len(case.layers), case.num_heads
        self._case = case
        self._sinks = sinks  # [num_layers, num_heads]  float32
        self._widths = [
            heads * case.head_dim,
            case.num_kv_heads * case.head_dim,
            0 if case.v_in_k else case.num_kv_heads * case.v_head_dim,
        ]
        ids = max_tokens + 1
        self.table = torch.zeros(layers, ids, sum(self._widths), dtype=dtype, device=device)
        shape = (layers, max_tokens, heads, case.v_head_dim)
        self.outs = torch.zeros(shape, dtype=dtype, device=device)
        self.positions = torch.zeros(max_tokens, dtype=torch.int64, device=device)

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        ctx: StepContext,
        taps: tuple[str, ...] = (),
        overlaid: OverlaidRows | None = None,
    ) -> Hidden:
        """input_ids, positions [tokens] int64; the hidden state is the first layer's answer."""
        assert overlaid is None, "no cell brings input rows"
        tokens, case = input_ids.shape[0], self._case
        self.positions[:tokens].copy_(positions)
        for index in range(len(case.layers)):
            fused = self.table[index].index_select(0, input_ids)
            q, k, v = fused.split_with_sizes(self._widths, dim=1)
            q = q.view(tokens, case.num_heads, case.head_dim)
            k = k.view(tokens, case.num_kv_heads, case.head_dim)
            own = None if case.v_in_k else v.view(tokens, case.num_kv_heads, case.v_head_dim)
            if case.prefix_only:
                layer, given = ctx.layers[index], k[..., : case.v_head_dim] if own is None else own
                assert layer is not None, "every layer of a probe attends"
                out, _ = ctx.backend.forward(q, k, given, layer, ctx.plan, Part.PREFIX)
            else:
                out = ctx.attend(index, q, k, own, rope=None)
            self.outs[index, :tokens].copy_(out)
        return Hidden(self.outs[0, :tokens].flatten(1)[:, :_LOGITS], {})

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [rows, 8] -> the same: what is sampled does not matter here."""
        return hidden

    def attention_sinks(self) -> tuple[Tensor | None, ...]:
        """[num_layers] of [num_heads] float32, or None."""
        if self._sinks is None:
            return (None,) * len(self._case.layers)
        return tuple(self._sinks.unbind())


def probe_config(case: Case, scale: float, *, max_position: int) -> ModelConfig:
    """The model shape of a case."""
    return ModelConfig(
        model_type="probe",
        vocab_size=_LOGITS,
        hidden_size=_LOGITS,
        intermediate_size=1,
        max_position=max_position,
        rms_norm_eps=1e-6,
        layers=tuple(
            LayerSpec(
                heads=case.heads,
                scale=scale,
                window=layer.window,
                soft_cap=case.soft_cap,
                sinks=case.sinks,
            )
            for layer in case.layers
        ),
        hidden_act="silu",
        tie_word_embeddings=False,
        eos_token_ids=(),
        dtype=case.dtype,
    )
