"""What a step must move and multiply, by role, from the configuration alone; for profile_decode.py.

Bytes are weights and cache once, activations in and out.  The experts of a routed model have no
row: which of them a step reads depends on its tokens.
"""

from collections import Counter
from dataclasses import dataclass
from math import prod

from paceline.attention.linear.shape import GDN, LinearShape
from paceline.core.dtypes import ELEMENT_BYTES, KV_ELEMENT_BYTES
from paceline.core.model.config import NO_HEADS, Heads, ModelConfig
from paceline.core.model.lookback import first_visible
from paceline.kernels.packed_weight import Packing
from paceline.models.size import weights_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What a step computes."""

    phase: str  # "decode" or "prefill"
    requests: int
    tokens: int  # computed in the step, over all requests
    kv_len: int  # keys of a request, new ones included
    dtype: str
    kv_dtype: str
    packing: Packing | None = None  # of linear layers but the head; None: plain numbers

    def weight_bytes(self, role: str, rows: int, columns: int) -> int:
        """Of a product's weight."""
        if self.packing is None or role == "head":
            return rows * columns * ELEMENT_BYTES[self.dtype]
        packing = self.packing
        words, groups = packing.num_words(columns), packing.num_groups(columns)
        return rows * (4 * words + packing.scale_dtype.itemsize * groups)


def role_bytes(config: ModelConfig, work: Work) -> dict[str, int]:
    """Bytes a role must move in one step: weights and cache once, activations in and out."""
    e, layers, tokens = ELEMENT_BYTES[work.dtype], config.num_layers, work.tokens
    q, kv, out = _widths(config)
    hidden, attending = config.hidden_size, sum(layer.attends for layer in config.layers)
    moved = {
        "attention": _cache_bytes(config, work) + attending * tokens * (q + out) * e,
        "states": _state_bytes(config, work),
        "norm": (2 * layers + 1) * 4 * tokens * hidden * e,
        "rope": attending * 2 * tokens * (q + kv) * e,
        "act": _dense_layers(config) * 3 * tokens * config.intermediate_size * e,
        "sample": work.requests * config.vocab_size * e,
    }
    for role, products in _products(config).items():
        rows = work.requests if role == "head" else tokens
        moved[role] = sum(
            count * (work.weight_bytes(role, outer, inner) + e * rows * (inner + outer))
            for count, inner, outer in products
        )
    return moved


def role_flops(config: ModelConfig, work: Work) -> dict[str, int]:
    """Multiplications and additions of the matrix products of one step."""
    found = {
        role: 2
        * sum(count * inner * outer for count, inner, outer in products)
        * (work.requests if role == "head" else work.tokens)
        for role, products in _products(config).items()
    }
    extend = work.tokens // work.requests
    pairs = 0
    for layer in config.layers:
        for position in range(work.kv_len - extend, work.kv_len) if layer.attends else ():
            pairs += position + 1 - first_visible(layer.window, position)
    heads = _heads(config)
    width = heads.num_heads * (heads.head_dim + heads.v_head_dim)
    return {**found, "attention": 2 * width * pairs * work.requests}


def step_limit_us(
    config: ModelConfig, work: Work, *, bandwidth: float | None, flops: float | None
) -> float | None:
    """The least time of a step: the weights it multiplies by, its cache and its states, or its
    products."""
    if bandwidth is None or config.moe is not None:
        return None
    table = config.vocab_size * config.hidden_size * ELEMENT_BYTES[work.dtype]
    unread = 0 if config.tie_word_embeddings else table
    moved = weights_bytes(config, work.dtype) - unread + _cache_bytes(config, work)
    moved += _state_bytes(config, work)
    for role, products in _products(config).items():
        for count, inner, outer in products:
            plain = inner * outer * ELEMENT_BYTES[work.dtype]
            moved -= count * (plain - work.weight_bytes(role, outer, inner))
    return least_us(moved, sum(role_flops(config, work).values()), bandwidth, flops)


def least_us(
    size: int | None, count: int | None, bandwidth: float | None, flops: float | None
) -> float | None:
    """The least time for `size` bytes and `count` operations; None where it is not known."""
    if size is None or bandwidth is None:
        return None
    return 1e6 * max(size / bandwidth, count / flops if count and flops else 0.0)


def _heads(config: ModelConfig) -> Heads:
    """Of all layers that attend."""
    if not config.heads:
        return NO_HEADS
    (heads,) = config.heads
    return heads


def _widths(config: ModelConfig) -> tuple[int, int, int]:
    """Elements of a token's queries, of its keys and values, and of its attention output."""
    heads = _heads(config)
    kv = heads.num_kv_heads * (heads.head_dim + heads.v_head_dim)
    return heads.num_heads * heads.head_dim, kv, heads.num_heads * heads.v_head_dim


def _dense_layers(config: ModelConfig) -> int:
    routed = sum(config.moe.layers) if config.moe is not None else 0
    return config.num_layers - routed


def _products(config: ModelConfig) -> dict[str, tuple[tuple[int, int, int], ...]]:
    """role -> (how many, elements in, elements out) of each kind of layer."""
    q, kv, out = _widths(config)
    hidden, dense = config.hidden_size, _dense_layers(config)
    attending = sum(layer.attends for layer in config.layers)
    states = Counter(_state_widths(config))
    return {
        "qkv": (
            (attending, hidden, q + kv),
            *((count, hidden, wide) for (wide, _), count in states.items()),
        ),
        "o": (
            (attending, out, hidden),
            *((count, values, hidden) for (_, values), count in states.items()),
        ),
        "gate_up": ((dense, hidden, 2 * config.intermediate_size),),
        "down": ((dense, config.intermediate_size, hidden),),
        "head": ((1, hidden, config.vocab_size),),
    }


def _state_widths(config: ModelConfig) -> list[tuple[int, int]]:
    """(what is projected, what is read) of a token, of each layer that keeps states: queries, keys,
    values and their gates, and a rate, or two, of each value head."""
    found = []
    for layer in config.layers:
        if layer.state:
            shape = LinearShape.of({part.name: part.shape for part in layer.state})
            rates = (2 if layer.mixer == GDN else 1) * shape.value_heads
            found.append((shape.channels + shape.value_size + rates, shape.value_size))
    return found


def _state_bytes(config: ModelConfig, work: Work) -> int:
    """States and windows that the step reads and writes, in all layers."""
    each = [part for layer in config.layers for part in layer.state]
    size = sum(prod(part.shape) * ELEMENT_BYTES[part.dtype or work.dtype] for part in each)
    return 2 * work.requests * size


def _cache_bytes(config: ModelConfig, work: Work) -> int:
    """K and V that the step reads, in all layers."""
    _, kv, _ = _widths(config)
    last = work.kv_len - 1
    attending = [layer for layer in config.layers if layer.attends]
    keys = sum(last + 1 - first_visible(layer.window, last) for layer in attending)
    return work.requests * keys * kv * KV_ELEMENT_BYTES[work.kv_dtype]
