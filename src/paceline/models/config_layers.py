"""The layers of a model whose file says once what all of them have."""

from inspect import signature
from typing import Any

from paceline.core.model.config import Heads, LayerSpec
from paceline.core.model.lookback import Lookback
from paceline.core.model.rope import RopeConfig


def with_layers(shared: dict[str, Any]) -> dict[str, Any]:
    """`shared`, what a reader found, with `layers` in place of the words that describe them all.

    A reader whose file tells layers apart gives `layers` itself.
    """
    if "layers" in shared:
        return shared
    words = {name: value for name, value in shared.items() if name in _WORDS}
    others = {name: value for name, value in shared.items() if name not in _WORDS}
    return others | {"layers": alike(**words)}


def alike(
    *,
    num_layers: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,  # of Q and K
    v_head_dim: int,
    v_in_k: bool = False,
    rotary_dim: int,  # leading dimensions of each head of Q and K that rope turns
    rope: RopeConfig,
    rope_local: RopeConfig | None = None,  # of windowed layers where it differs (gemma3)
    unrotated_layers: tuple[int, ...] = (),  # whose Q and K no rope turns
    layer_windows: tuple[Lookback | None, ...],  # [num_layers]
    attention_scale: float,
    attention_soft_cap: float | None = None,
    attention_sinks: bool = False,
    causal: bool = True,
) -> tuple[LayerSpec, ...]:
    """[num_layers] of equal heads; windows and ropes may differ."""
    heads = Heads(num_heads, num_kv_heads, head_dim, v_head_dim, v_in_k)

    def turning(layer_id: int) -> RopeConfig | None:
        is_local = rope_local is not None and layer_windows[layer_id] is not None
        return None if layer_id in unrotated_layers else rope_local if is_local else rope

    return tuple(
        LayerSpec(
            heads=heads,
            scale=attention_scale,
            window=layer_windows[layer_id],
            soft_cap=attention_soft_cap,
            sinks=attention_sinks,
            rope=turning(layer_id),
            rotary_dim=rotary_dim,
            causal=causal,
        )
        for layer_id in range(num_layers)
    )


_WORDS = frozenset(signature(alike).parameters)
