"""A decoder with its language-model head: what the runner calls and the loader fills."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from paceline.core.model.config import ModelConfig
from paceline.core.modes import End
from paceline.core.parallel import Parallel
from paceline.layers.attention import StepContext
from paceline.layers.embedding import LMHead, OverlaidRows
from paceline.layers.mixers.latent_attention import LatentAttention
from paceline.layers.mixers.self_attention import SelfAttention
from paceline.layers.weights.parameter import Placement
from paceline.layers.weights.weight_format import Named
from paceline.models.cross_attention import CrossAttention
from paceline.models.decoder import Decoder, Hidden
from paceline.models.pooled_head import PooledHead

if TYPE_CHECKING:
    from paceline.models.audio_encoder import AudioEncoder
    from paceline.models.encoder import Encoder
    from paceline.models.whisper_stack import WhisperDecoder


class CausalLM(nn.Module):
    """Every architecture's result.  Inference only; forward is device-only and recordable."""

    def __init__(
        self,
        config: ModelConfig,
        decoder: "Decoder | Encoder | WhisperDecoder",
        *,
        parallel: Parallel,
        placement: Placement,
        encoder: "AudioEncoder | None" = None,
    ) -> None:
        """encoder: makes the rows that layers read of what requests bring; None: they bring rows,
        or no layer reads any."""
        super().__init__()
        self.decoder = decoder
        self.pooled_head = PooledHead(config, placement) if config.pooled_head else None
        self.encoder = encoder
        self.head: LMHead | None = None  # of one that only makes vectors
        if End.GENERATE in config.ends:
            self.head = LMHead(
                config.vocab_size,
                config.hidden_size,
                tied=decoder.embedding if config.tie_word_embeddings else None,
                soft_cap=config.logit_soft_cap,
                divisor=1.0 if config.multipliers is None else config.multipliers.logit_divisor,
                parallel=parallel,
                placement=placement,
            )

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        ctx: StepContext,
        taps: tuple[str, ...] = (),
        overlaid: OverlaidRows | None = None,
        read: Tensor | None = None,
    ) -> Hidden:
        """input_ids [tokens], positions [tokens] or [axes, tokens] int64, of rope -> Hidden.

        read: [rows] int64, the tokens of which `Hidden.hidden` is read, in that order; None: all.
        Taps are of all tokens.  Raises ModelError for an unknown tap.
        """
        result: Hidden = self.decoder(input_ids, positions, ctx, taps, overlaid, read)
        return result

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [rows, hidden] -> [rows, vocab] in hidden's dtype, float32 where capped."""
        assert self.head is not None, "who has no head ends in no token"
        logits: Tensor = self.head(hidden)
        return logits

    def attention_sinks(self) -> tuple[Tensor | None, ...]:
        """[layers that attend over a cache] of [num_heads] float32; None: it has no sinks."""
        found = [
            module
            for module in self.decoder.modules()
            if isinstance(module, LatentAttention)
            or (isinstance(module, SelfAttention) and not module.spec.reads_whole)
        ]
        found.sort(key=lambda attention: attention.layer_id)
        return tuple(None if layer.sinks is None else layer.sinks.float() for layer in found)

    def encoder_kv(self, given: Any) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Of what a request brings for its encoder (`EncoderInputConfig`), the (layer id, K, V) of
        every layer that reads it: [encoder_len, num_kv_heads, head_dim] each."""
        rows = given if self.encoder is None else self.encoder(given)
        for module in self.decoder.modules():
            if isinstance(module, CrossAttention):
                yield module.layer_id, *module.keys_and_values(rows)

    def destinations(self) -> Named:
        """What a checkpoint fills."""
        named = self.decoder.destinations("model")
        if self.pooled_head is not None:
            named |= self.pooled_head.destinations()
        if self.encoder is not None:
            named |= self.encoder.destinations("model.encoder")
        if self.head is None or self.head.held is None:
            return named
        return named | self.head.held.fill("lm_head")
