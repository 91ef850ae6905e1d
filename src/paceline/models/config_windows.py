"""Which layers of a config.json see how many keys."""

from collections.abc import Callable, Mapping
from typing import Any

from paceline.models.config_rope import LAYER_TYPES
from paceline.models.fields import Fields


def unless_reaching_all(window: int | None, max_position: int) -> int | None:
    """A window that no context exceeds is none."""
    return None if window is not None and window >= max_position else window


def uniform_windows(shared: Mapping[str, Any], window: int | None) -> tuple[int | None, ...]:
    """[num_layers] the same for every layer."""
    num_layers: int = shared["num_layers"]
    return (unless_reaching_all(window, shared["max_position"]),) * num_layers


def switched_window(fields: Fields) -> int | None:
    """Qwen: sliding_window, unless null, where use_sliding_window switches it on; elsewhere files
    hold any number, 0 too."""
    if not fields.flag("use_sliding_window", False):
        return None
    window: int | None = fields.integer("sliding_window", None)
    return window


def read_windows(
    fields: Fields, *, window: int | None, default: Callable[[int], bool]
) -> tuple[int | None, ...]:
    """[num_layers] keys visible, itself included: the same count as Hugging Face's, whose mask is
    key > query - sliding_window.  `default` says which layers slide when layer_types is absent."""
    num_layers = fields.integer("num_hidden_layers")
    types = fields.get("layer_types")
    if types is None:
        types = [LAYER_TYPES[default(layer)] for layer in range(num_layers)]
    if not isinstance(types, list) or len(types) != num_layers:
        fields.fail("layer_types", f"a list of {num_layers} names", types)
    for kind in types:
        if kind not in LAYER_TYPES:
            expected = f"made of {', '.join(LAYER_TYPES)}"
            fields.fail("layer_types", expected, kind, remedy="this attention is not supported")
    if window is None and "sliding_attention" in types:
        fields.fail("sliding_window", "set for sliding_attention layers", None)
    return tuple(window if kind == "sliding_attention" else None for kind in types)
