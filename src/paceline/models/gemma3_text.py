"""Gemma 3, text only (model_type gemma3_text, and the text_config of gemma3): per-head norms of Q
and K, and a rope of their own for windowed layers, which are all but each sixth.  EmbeddingGemma is
one whose tokens see one another in both directions."""

from typing import Any

from paceline.core.model.config import QKNorm
from paceline.core.modes import POOLS, Pooling
from paceline.models.architecture import COMPUTED, SEEING, Architecture, sandwich
from paceline.models.config_gemma import DEFAULTS, read_sandwich
from paceline.models.config_rope import context_limit, read_dual_rope
from paceline.models.config_windows import read_windows
from paceline.models.fields import Fields

_WHOLE: dict[str, Any] = {
    "causal": False,
    "ends": POOLS,
    "pooling": Pooling.MEAN,
}


def _read(fields: Fields) -> dict[str, Any]:
    remedy = "Gemma 3 was trained without a cap on scores, and transformers applies none: remove it"
    fields.refuse("attn_logit_softcapping", remedy)
    pattern = fields.integer("sliding_window_pattern", 6)
    is_whole = fields.flag("use_bidirectional_attention", False)
    window = fields.integer("sliding_window", None)
    if is_whole and window is not None:
        window = window // 2 + 1  # a width, of which half lies on each side, its ends left out
    windows = read_windows(
        fields,
        window=window,
        default=lambda layer: (layer + 1) % pattern != 0,
    )
    full, sliding = read_dual_rope(fields, full_theta=1_000_000.0, sliding_theta=10_000.0)
    differs = sliding != full and any(window is not None for window in windows)
    return read_sandwich(fields) | {
        "max_position": context_limit(full, fields.integer("max_position_embeddings")),
        "rope": full,
        "rope_local": sliding if differs else None,
        "layer_windows": windows,
        "logit_soft_cap": fields.number("final_logit_softcapping", None),
        "qk_norm": QKNorm.HEAD,
        **(_WHOLE if is_whole else {}),
    }


ARCHITECTURE = Architecture(
    read=_read,
    build=sandwich,
    defaults=DEFAULTS | {"vocab_size": 262_208, "max_position_embeddings": 131_072},
    ignored=COMPUTED + SEEING,
    text_of="gemma3",
)
