"""What a step must move and multiply, by role, from the configuration alone; for profile_decode.py.

Bytes are weights and cache once, activations in and out.  The experts of a routed model have no
row: which of them a step reads depends on its tokens.
"""

from dataclasses import dataclass

from paceline.core.dtypes import ELEMENT_BYTES, KV_ELEMENT_BYTES
from paceline.core.model.config import ModelConfig
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
    hidden = config.hidden_size
    moved = {
        "attention": _cache_bytes(config, work) + layers * tokens * (q + out) * e,
        "norm": (2 * layers + 1) * 4 * tokens * hidden * e,
        "rope": layers * 2 * tokens * (q + kv) * e,
        "act": _dense_layers(config) * 3 * tokens * config.intermediate_size * e,
        "sample": work.requests * config.vocab_size * e,
    }
    for role, (count, inner, outer) in _products(config).items():
        rows = work.requests if role == "head" else tokens
        weight = work.weight_bytes(role, outer, inner)
        moved[role] = count * (weight + e * rows * (inner + outer))
    return moved


def role_flops(config: ModelConfig, work: Work) -> dict[str, int]:
    """Multiplications and additions of the matrix products of one step."""
    found = {
        role: 2 * count * inner * outer * (work.requests if role == "head" else work.tokens)
        for role, (count, inner, outer) in _products(config).items()
    }
    extend = work.tokens // work.requests
    pairs = 0
    for layer in config.layers:
        for position in range(work.kv_len - extend, work.kv_len):
            pairs += position + 1 - first_visible(layer.window, position)
    (heads,) = config.heads
    width = heads.num_heads * (heads.head_dim + heads.v_head_dim)
    return {**found, "attention": 2 * width * pairs * work.requests}


def step_limit_us(
    config: ModelConfig, work: Work, *, bandwidth: float | None, flops: float | None
) -> float | None:
    """The least time of a step: the weights it multiplies by and its cache, or its products."""
    if bandwidth is None or config.moe is not None:
        return None
    table = config.vocab_size * config.hidden_size * ELEMENT_BYTES[work.dtype]
    unread = 0 if config.tie_word_embeddings else table
    moved = weights_bytes(config, work.dtype) - unread + _cache_bytes(config, work)
    for role, (count, inner, outer) in _products(config).items():
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


def _widths(config: ModelConfig) -> tuple[int, int, int]:
    """Elements of a token's queries, of its keys and values, and of its attention output."""
    (heads,) = config.heads
    kv = heads.num_kv_heads * (heads.head_dim + heads.v_head_dim)
    return heads.num_heads * heads.head_dim, kv, heads.num_heads * heads.v_head_dim


def _dense_layers(config: ModelConfig) -> int:
    routed = sum(config.moe.layers) if config.moe is not None else 0
    return config.num_layers - routed


def _products(config: ModelConfig) -> dict[str, tuple[int, int, int]]:
    """role -> (how many, elements in, elements out)."""
    q, kv, out = _widths(config)
    hidden, layers, dense = config.hidden_size, config.num_layers, _dense_layers(config)
    return {
        "qkv": (layers, hidden, q + kv),
        "o": (layers, out, hidden),
        "gate_up": (dense, hidden, 2 * config.intermediate_size),
        "down": (dense, config.intermediate_size, hidden),
        "head": (1, hidden, config.vocab_size),
    }


def _cache_bytes(config: ModelConfig, work: Work) -> int:
    """K and V that the step reads, in all layers."""
    _, kv, _ = _widths(config)
    last = work.kv_len - 1
    keys = sum(last + 1 - first_visible(layer.window, last) for layer in config.layers)
    return work.requests * keys * kv * KV_ELEMENT_BYTES[work.kv_dtype]
