"""Mistral and Ministral (model_type mistral, and the text_config of mistral3): Llama with a window
in all layers, or in those that layer_types names."""

from typing import Any

from paceline.models.architecture import COMPUTED, SEEING, Architecture
from paceline.models.config_prenorm import read_prenorm
from paceline.models.config_windows import read_windows, unless_reaching_all
from paceline.models.fields import Fields


def _read(fields: Fields) -> dict[str, Any]:
    shared, window = read_prenorm(fields), fields.integer("sliding_window", None)
    windows = read_windows(fields, window=window, default=lambda _: window is not None)
    longest = shared["max_position"]
    return shared | {"layer_windows": tuple(unless_reaching_all(each, longest) for each in windows)}


ARCHITECTURE = Architecture(
    read=_read,
    defaults={
        "max_position_embeddings": 131_072,
        "num_key_value_heads": 8,
        "sliding_window": 4096,
    },
    ignored=COMPUTED + SEEING,
    text_of="mistral3",
)
