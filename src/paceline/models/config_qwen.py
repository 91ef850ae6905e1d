"""What the Qwens' config.json files have in common."""

from typing import Any

from paceline.core.model.config import MoEConfig
from paceline.models.config_moe import SILU, experts_per_token, num_experts
from paceline.models.config_windows import read_windows, switched_window
from paceline.models.fields import Fields

DEFAULTS: dict[str, Any] = {
    "max_position_embeddings": 32_768,
    "num_key_value_heads": 32,
    "sliding_window": 4096,
    "max_window_layers": 28,
}


def upper_windows(fields: Fields) -> tuple[int | None, ...]:
    """Layers from max_window_layers on have the window that `switched_window` finds."""
    window = switched_window(fields)
    first = fields.integer("max_window_layers", 28, minimum=0)
    return read_windows(
        fields, window=window, default=lambda layer: window is not None and layer >= first
    )


def read_experts(fields: Fields) -> MoEConfig | None:
    """Each decoder_sparse_step-th layer has experts, but those of mlp_only_layers."""
    num_layers = fields.integer("num_hidden_layers")
    step = fields.integer("decoder_sparse_step", 1)
    dense = fields.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(type(layer) is int for layer in dense):
        fields.fail("mlp_only_layers", "a list of layer numbers", dense)
    layers = tuple(layer not in dense and (layer + 1) % step == 0 for layer in range(num_layers))
    fields.choice("hidden_act", SILU, "silu")
    moe = MoEConfig(
        layers=layers,
        num_experts=num_experts(fields),
        experts_per_token=experts_per_token(fields),
        intermediate_size=fields.integer("moe_intermediate_size"),
        renormalize=fields.flag("norm_topk_prob", False),
        bias=False,
    )
    return moe if any(layers) else None
