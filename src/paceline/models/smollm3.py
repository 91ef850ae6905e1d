"""SmolLM 3 (model_type smollm3): Llama in which every fourth layer has no rope, and has the window
where one is switched on."""

from typing import Any

from paceline.models.architecture import Architecture
from paceline.models.config_prenorm import read_plain
from paceline.models.config_windows import read_windows, switched_window
from paceline.models.fields import Fields


def _read(fields: Fields) -> dict[str, Any]:
    shared = read_plain(fields.without("layer_types"))
    num_layers, every = shared["num_layers"], fields.integer("no_rope_layer_interval", 4)
    rotated = fields.get("no_rope_layers")  # 1: the layer has rope
    if rotated is None:
        rotated = [int((layer + 1) % every != 0) for layer in range(num_layers)]
    if not isinstance(rotated, list) or len(rotated) < num_layers or not {*rotated} <= {0, 1}:
        fields.fail("no_rope_layers", f"a list of {num_layers} times 0 or 1", rotated)
    plain = tuple(layer for layer in range(num_layers) if not rotated[layer])
    window = switched_window(fields)
    windows = read_windows(
        fields, window=window, default=lambda layer: window is not None and layer in plain
    )
    return shared | {"unrotated_layers": plain, "layer_windows": windows}


ARCHITECTURE = Architecture(
    read=_read,
    defaults={
        "max_position_embeddings": 32_768,
        "num_key_value_heads": 4,
        "rope_theta": 2_000_000.0,
        "tie_word_embeddings": True,
    },
)
