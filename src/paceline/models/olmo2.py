"""OLMo 2 (model_type olmo2): norms behind attention and feed-forward instead of before them, norms
of Q and K over all heads, and norms whose product is taken in float32."""

from typing import Any

from paceline.core.model.config import NormKind, QKNorm
from paceline.models.architecture import Architecture, postnorm
from paceline.models.config_prenorm import attention_biases, read_prenorm
from paceline.models.config_windows import uniform_windows
from paceline.models.fields import Fields


def _read(fields: Fields) -> dict[str, Any]:
    fields.refuse("clip_qkv", "OLMo 2 has norms of Q and K in its place")
    shared = read_prenorm(fields)
    return shared | {
        **attention_biases(fields),
        "layer_windows": uniform_windows(shared, None),
        "norm": NormKind.WIDE,
        "qk_norm": QKNorm.ROW,
    }


ARCHITECTURE = Architecture(
    read=_read,
    build=postnorm,
    defaults={"max_position_embeddings": 2048, "rms_norm_eps": 1e-5},
)
