"""Exchanged: what the ranks of one model hold, and what they tell each other in a step."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass

import torch

from paceline.core.model.config import ModelConfig, QKNorm
from paceline.core.parallel import Parallel, of_rank
from paceline.models.packed_layers import Packings
from paceline.models.size import expert_shares

_SQUARES = 2 * torch.float32.itemsize  # of Q and K, of a token


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchanged:
    """Of each rank.  Bytes are what it sends, once, for all others to read."""

    ranks: int
    sums: int  # all-reduces of a step, whatever it holds
    sum_bytes: int  # of all of them, per token of the step
    gather_bytes: int  # of the all-gather of logits, per row that is sampled or scored
    heads: int  # at most, of a layer
    kv_heads: int | None  # likewise; None: latents, which every rank has whole
    whole: tuple[str, ...]  # what every rank has all of
    experts: Mapping[str, int]  # what it has of the experts of a layer, and in how many layers

    def to_json(self) -> dict[str, object]:
        return asdict(self)

    def __str__(self) -> str:
        cached = "all of the latents" if self.kv_heads is None else f"{self.kv_heads} KV heads"
        experts = [f"\n  of {count} layers it holds {what}" for what, count in self.experts.items()]
        return (
            f"{self.ranks} ranks, planned as the first, which holds most: the others have its "
            f"pages\n  each holds {self.heads} heads and {cached} of a layer, and all of "
            f"{', '.join(self.whole)}{''.join(experts)}\n"
            f"  a step has {self.sums} all-reduces, in which each sends "
            f"{self.sum_bytes} bytes per token, and an all-gather of logits, "
            f"{self.gather_bytes} bytes per row that is sampled"
        )


def exchanged(
    config: ModelConfig, ranks: int, dtype: torch.dtype, packings: Packings
) -> Exchanged | None:
    """config, packings: of the model; None: one process tells nobody.  Raises ConfigError for a
    number of ranks that cannot share it."""
    if ranks == 1:
        return None
    seen = of_rank(config, Parallel(0, ranks))
    attends = [layer for layer in seen.layers if layer.attends]
    has_latents = config.latent is not None
    by_row = config.qk_norm is QKNorm.ROW
    blocks = 2 * len(config.layers)
    kv = [layer.heads.num_kv_heads for layer in attends]
    held = max(kv, default=0)
    is_again = not has_latents and held * ranks > max(each.num_kv_heads for each in config.heads)
    whole = ["the embedding", "norms", *(["routers"] if config.moe is not None else [])]
    whole += ["projections to latents"] if has_latents else []
    whole += ["KV heads that ranks side by side share"] if is_again else []
    sum_bytes = blocks * config.hidden_size * dtype.itemsize
    return Exchanged(
        ranks=ranks,
        sums=blocks + (len(attends) if by_row else 0),
        sum_bytes=sum_bytes + (len(attends) * _SQUARES if by_row else 0),
        gather_bytes=Parallel(0, ranks).share_rows(config.vocab_size).size * dtype.itemsize,
        heads=max((layer.heads.num_heads for layer in attends), default=0),
        kv_heads=None if has_latents else held,
        whole=tuple(whole),
        experts=expert_shares(config, Parallel(0, ranks), packings),
    )
