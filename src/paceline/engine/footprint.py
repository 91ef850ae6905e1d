"""Footprint: how many bytes each part of a running model takes, by formula.  No torch.

KV pages are exact.  Activations, sampler rows and graphs are upper estimates: a graph or an
allocator may share storage between operations that the formulas count twice.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.core.model_config import CacheGroupSpec, ModelConfig

GRAPH_NODE_BYTES = 1 << 20  # allowance: instantiated graph nodes, per layer
SAMPLER_COPIES = 6  # float32 [rows, vocab]: logits, processed, noise, sorted values, int64 indices
PLANNING_LEN = 8192  # tokens; cache groups are balanced for requests of at most this length


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupBudget:
    """One cache group's share of the KV budget."""

    name: str
    window: int | None  # keys visible; None = all
    num_layers: int
    page_size: int  # tokens
    page_bytes: int  # of one page over all layers of the group
    num_pages: int  # the reserved page included
    bytes: int

    @property
    def tokens(self) -> int:
        """Tokens the group can hold."""
        return (self.num_pages - 1) * self.page_size


def activation_bytes(config: ModelConfig, tokens: int, element: int) -> int:
    """Live activations of a layer: residual, normed, q|k|v, attention out, gate|up, product."""
    q = config.num_heads * config.head_dim
    kv = config.num_kv_heads * (config.head_dim + config.v_head_dim)
    out = config.num_heads * config.v_head_dim
    width = 2 * config.hidden_size + q + kv + out + 3 * config.intermediate_size
    return tokens * width * element


def graph_bytes(config: ModelConfig, rows: int, element: int) -> int:
    """Pool of a decode graph of `rows` requests: activations, sampler rows and graph nodes."""
    logits = rows * config.vocab_size * 4 * SAMPLER_COPIES
    return activation_bytes(config, rows, element) + logits + config.num_layers * GRAPH_NODE_BYTES


def workspace_bytes(
    config: ModelConfig, element: int, *, tokens: int, rows: int, max_model_len: int
) -> int:
    """The largest eager step, the request table and the rope tables."""
    logits = rows * config.vocab_size * 4 * SAMPLER_COPIES
    history = (rows + 1) * max_model_len * 4
    tables = 1 if config.rope_local is None else 2
    rope = tables * max_model_len * config.head_dim * 4
    return activation_bytes(config, tokens, element) + logits + history + rope


def request_pages(spec: CacheGroupSpec, length: int) -> int:
    """Pages a request of `length` tokens holds in a group between steps.

    A windowed group keeps its window, whose ends need not fall on page borders.
    """
    tokens = length if spec.window is None else min(length, spec.window + spec.page_size)
    return -(-tokens // spec.page_size)


def standing_pages(spec: CacheGroupSpec, step_tokens: int) -> int:
    """Pages a group needs besides those of its requests: the reserved page, and in a windowed one
    the tokens of two steps, because pages behind a window return only once a step has retired."""
    if spec.window is None:
        return 1
    return 1 + -(-2 * step_tokens // spec.page_size)


def request_bytes(specs: Sequence[CacheGroupSpec], length: int, element: int) -> int:
    """KV bytes of one request of `length` tokens over all groups."""
    return sum(request_pages(spec, length) * spec.page_bytes(element) for spec in specs)


def standing_bytes(specs: Sequence[CacheGroupSpec], element: int, step_tokens: int) -> int:
    """KV bytes that no request owns for long; see `standing_pages`."""
    return sum(standing_pages(spec, step_tokens) * spec.page_bytes(element) for spec in specs)


def longest_request(specs: Sequence[CacheGroupSpec], room: int, element: int, *, limit: int) -> int:
    """The longest request, up to `limit` tokens, whose pages fit `room` bytes; 0 when none does."""
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        if request_bytes(specs, middle, element) <= room:
            low = middle
        else:
            high = middle - 1
    return low


def split_kv(
    specs: Sequence[CacheGroupSpec],
    kv_bytes: int,
    element: int,
    *,
    step_tokens: int,
    max_len: int,
) -> tuple[GroupBudget, ...]:
    """Divide the KV budget: standing pages and one longest request in every group first, the rest
    in the proportion of a request of PLANNING_LEN tokens, so that groups fill up together."""
    least = [standing_pages(s, step_tokens) + request_pages(s, max_len) for s in specs]
    shares = [request_pages(s, min(max_len, PLANNING_LEN)) for s in specs]
    sizes = [spec.page_bytes(element) for spec in specs]
    taken = sum(count * size for count, size in zip(least, sizes, strict=True))
    rest = max(0, kv_bytes - taken)
    per_request = sum(share * size for share, size in zip(shares, sizes, strict=True))
    pages = [base + rest * share // per_request for base, share in zip(least, shares, strict=True)]
    return tuple(
        GroupBudget(
            name=spec.name,
            window=spec.window,
            num_layers=len(spec.layer_ids),
            page_size=spec.page_size,
            page_bytes=size,
            num_pages=count,
            bytes=count * size,
        )
        for spec, size, count in zip(specs, sizes, pages, strict=True)
    )
