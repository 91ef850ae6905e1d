"""MtpHead: a model's own layer behind its last, which drafts from its hidden states.

    x = fc([norm(embedding of t[p + 1]), norm(h[p])]);  h' = norm(layer(x));  logits = head(h')

DeepSeek-V3, section 2.2 (arXiv:2412.19437); as transformers' MtpModel does, what is fed back is h'.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.core.model.config import ModelConfig, NormKind
from paceline.core.parallel import Parallel, whole
from paceline.kernels.eagle_input import HalfNorms, eagle_input
from paceline.layers.attention import StepContext
from paceline.layers.linear import Linear
from paceline.layers.rms_norm import hidden_norm
from paceline.layers.weights.parameter import Placement
from paceline.layers.weights.weight_format import Named, wholly
from paceline.models.causal_lm import CausalLM
from paceline.models.decoder import Decoder
from paceline.models.registry import architecture
from paceline.models.tensor_names import name_linear
from paceline.speculate.feature_proposer import FeatureHead
from paceline.speculate.mtp.layout import LAYER


class MtpHead(FeatureHead):
    """The layer on its target's embedding and language-model head.  Inference only.

    Its attention is layer 0 of the context it is called with.
    """

    d2t = None

    def __init__(
        self, config: ModelConfig, target: CausalLM, own: CausalLM, *, placement: Placement
    ) -> None:
        """config: of the layer; own: a model of it alone, beside the target's embedding."""
        super().__init__()
        self.hidden_size = config.hidden_size
        decoder = own.decoder
        assert isinstance(decoder, Decoder), "an encoder predicts nothing"
        [self.layer] = decoder.layers
        self.norm = decoder.norm
        self.embedding_norm = hidden_norm(config, placement)
        self.feature_norm = hidden_norm(config, placement)
        self.fc = Linear(
            whole(2 * config.hidden_size),
            whole(config.hidden_size),
            bias=False,
            placement=placement,
        )
        self._is_fused = config.norm is NormKind.ROUNDED  # the norms of `eagle_input`
        self._name_layer = decoder.name_layer
        # The target's parameters stay the target's: a view of its table and a bound method.
        self._table = target.decoder.embedding.table()  # [vocab, hidden]
        self._target_logits = target.logits

    def fuse(self, taps: Sequence[Tensor]) -> Tensor:
        [hidden] = taps
        return hidden

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        features: Tensor,
        ctx: StepContext,
        read: Tensor | None = None,
    ) -> Tensor:
        residual = self.fc(self._input(input_ids, features))
        delta, residual = self.layer(None, residual, positions, ctx, read)
        normed: Tensor = self.norm.add(delta, residual)
        return normed

    def _input(self, input_ids: Tensor, features: Tensor) -> Tensor:
        """[tokens, 2 * hidden]"""
        left, right = self.embedding_norm, self.feature_norm
        if self._is_fused:
            norms = HalfNorms(left.weight, right.weight, left.eps)
            return eagle_input(input_ids, self._table, features, norms)
        return torch.cat((left(F.embedding(input_ids, self._table)), right(features)), dim=-1)

    def logits(self, features: Tensor) -> Tensor:
        return self._target_logits(features)

    def destinations(self) -> Named:
        """What a checkpoint fills."""
        norms = {
            "embedding_norm": self.embedding_norm,
            "feature_norm": self.feature_norm,
            "norm": self.norm,
        }
        named = {f"{name}.weight": wholly(norm.weight) for name, norm in norms.items()}
        return named | name_linear(self.fc, "fc") | self._name_layer(self.layer, LAYER)


def build_mtp_head(
    config: ModelConfig,
    target: CausalLM,
    *,
    parallel: Parallel,
    placement: Placement,
    max_positions: int,
) -> MtpHead:
    """The head with uninitialised weights; config: as of `read_next_token`."""
    own = architecture(config.model_type).build(
        config,
        parallel=parallel,
        placement=placement,
        max_positions=max_positions,
        embedding=target.decoder.embedding,
    )
    return MtpHead(config, target, own, placement=placement)
