"""EagleHead: the draft model that continues the target's hidden states."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from paceline.core.model.config import QKNorm
from paceline.core.parallel import Parallel
from paceline.layers.attention import StepContext
from paceline.layers.decoders.decoder_layer import HiddenStream
from paceline.layers.decoders.prenorm_layer import PreNormLayer
from paceline.layers.embedding import Embedding, LMHead
from paceline.layers.mixers.self_attention import SelfAttention
from paceline.layers.rank_sum import add_
from paceline.layers.rms_norm import RMSNorm
from paceline.layers.weights.parameter import Placement
from paceline.layers.weights.weight_format import Named, wholly
from paceline.models.causal_lm import CausalLM
from paceline.models.decoder import rope_tables
from paceline.models.tensor_names import name_prenorm
from paceline.speculate.eagle.config import EagleConfig
from paceline.speculate.eagle.layers import (
    Eagle1Layer,
    Eagle3Layer,
    Fusion,
    head_attention,
)
from paceline.speculate.feature_proposer import FeatureHead


class EagleHead(FeatureHead):
    """An EAGLE-1 (or 2) or EAGLE-3 head.  Inference only.

    Attention layers are 0 to num_layers - 1 of the context it is called with.
    """

    def __init__(
        self,
        config: EagleConfig,
        target: CausalLM,
        first: Eagle1Layer | Eagle3Layer,
        later: Sequence[PreNormLayer],
        *,
        parallel: Parallel,
        placement: Placement,
    ) -> None:
        super().__init__()
        layer = config.layer
        self.config = config
        self.hidden_size = config.hidden_size
        self.fusion: Fusion | None = None
        if config.fuses_taps:
            self.fusion = Fusion(config, placement=placement)
        self.first = first
        self.later = tuple(later)
        self.owned = nn.ModuleList(later)
        self.norm: RMSNorm | None = None
        if config.version == 3:
            self.norm = RMSNorm(layer.hidden_size, layer.rms_norm_eps, placement=placement)
        self.embedding: Embedding | None = None
        if config.has_own_embedding:
            self.embedding = Embedding(
                layer.vocab_size,
                layer.hidden_size,
                scale=None,
                placement=placement,
            )
        self.head: LMHead | None = None
        self.register_buffer("d2t", None, persistent=False)
        if config.draft_vocab_size is not None:
            self.head = LMHead(
                config.draft_vocab_size,
                layer.hidden_size,
                tied=None,
                soft_cap=None,
                parallel=parallel,
                placement=placement,
            )
            self.d2t = torch.zeros(
                config.draft_vocab_size, dtype=torch.int64, device=placement.device
            )
        # The target's parameters stay the target's: a view of its table and a bound method.
        embedding = target.decoder.embedding if self.embedding is None else self.embedding
        self._table = embedding.table()  # [vocab, its hidden]
        self._target_logits = target.logits

    def fuse(self, taps: Sequence[Tensor]) -> Tensor:
        assert len(taps) == self.config.num_taps, (len(taps), self.config.num_taps)
        if self.fusion is None:
            return taps[0] if len(taps) == 1 else torch.cat(tuple(taps), dim=-1)
        fused: Tensor = self.fusion(taps)
        return fused

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        features: Tensor,
        ctx: StepContext,
        read: Tensor | None = None,
    ) -> Tensor:
        last = len(self.later)
        rows = read if last == 0 else None
        stream: HiddenStream = self.first(input_ids, self._table, features, positions, ctx, rows)
        for index, layer in enumerate(self.later, start=1):
            stream = layer(*stream, positions, ctx, read if index == last else None)
        delta, residual = stream
        if self.norm is not None and self.config.norm_output:
            normed: Tensor = self.norm.add(delta, residual)
            return normed
        return add_(residual, delta)

    def logits(self, features: Tensor) -> Tensor:
        if self.norm is not None and not self.config.norm_output:
            features = self.norm(features)
        if self.head is None:
            return self._target_logits(features)
        logits: Tensor = self.head(features)
        return logits

    def destinations(self) -> Named:
        """What a checkpoint fills; d2t is read apart."""
        named: Named = {} if self.fusion is None else self.fusion.destinations()
        named |= self.first.destinations("layers.0")
        for index, layer in enumerate(self.later, start=1):
            named |= name_prenorm(layer, f"layers.{index}")
        if self.norm is not None:
            named["norm.weight"] = wholly(self.norm.weight)
        if self.embedding is not None:
            named |= self.embedding.held.fill("embed_tokens")
        if self.head is not None and self.head.held is not None:
            named |= self.head.held.fill("lm_head")
        return named


def build_eagle_head(
    config: EagleConfig,
    target: CausalLM,
    *,
    parallel: Parallel,
    placement: Placement,
    max_positions: int,
) -> EagleHead:
    """The head with uninitialised weights, on `target`'s embedding and language-model head where it
    has none of its own.

    `max_positions` sizes the rope tables: a head's own context limit is that of its training texts.
    """
    layer = config.layer
    tables = rope_tables(layer, max_positions=max_positions, device=placement.device)

    def attention(index: int) -> SelfAttention:
        return head_attention(
            config,
            index,
            cos_sin=tables[index],
            qk_norm=layer.qk_norm is QKNorm.HEAD,
            parallel=parallel,
            placement=placement,
        )

    kind = Eagle3Layer if config.version == 3 else Eagle1Layer
    first = kind(config, attention(0), parallel=parallel, placement=placement)
    later = [
        PreNormLayer(layer, attention(index), parallel=parallel, placement=placement)
        for index in range(1, layer.num_layers)
    ]
    return EagleHead(config, target, first, later, parallel=parallel, placement=placement)
