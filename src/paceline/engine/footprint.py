"""Footprint: how many bytes each part of a running model takes, by formula.  No torch.

KV pages are exact.  Activations, sampler rows and graphs are upper estimates: a graph or an
allocator may share storage between operations that the formulas count twice.
"""

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


def request_pages(spec: CacheGroupSpec, length: int, *, chunk: int) -> int:
    """Pages one request of `length` tokens holds in a group at its worst moment.

    A windowed group holds its window and the chunk in flight, and cuts both ends off pages.
    """
    tokens = length
    if spec.window is not None:
        tokens = min(length, spec.window + chunk + spec.page_size)
    return -(-tokens // spec.page_size)


def request_bytes(
    specs: tuple[CacheGroupSpec, ...], length: int, element: int, *, chunk: int
) -> int:
    """KV bytes of one request of `length` tokens over all groups."""
    return sum(request_pages(s, length, chunk=chunk) * s.page_bytes(element) for s in specs)


def longest_request(
    specs: tuple[CacheGroupSpec, ...], kv_bytes: int, element: int, *, chunk: int, limit: int
) -> int:
    """The longest request, up to `limit` tokens, that alone fits `kv_bytes`; 0 when none does."""
    room = kv_bytes - reserved_bytes(specs, element)
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        if request_bytes(specs, middle, element, chunk=chunk) <= room:
            low = middle
        else:
            high = middle - 1
    return low


def split_kv(
    specs: tuple[CacheGroupSpec, ...], kv_bytes: int, element: int, *, chunk: int, max_len: int
) -> tuple[GroupBudget, ...]:
    """Divide the KV budget: one longest request in every group first, the rest in the proportion
    of a request of PLANNING_LEN tokens, so that every group fills up at about the same time."""
    base = [request_pages(s, max_len, chunk=chunk) for s in specs]
    typical = [request_pages(s, min(max_len, PLANNING_LEN), chunk=chunk) for s in specs]
    rest = kv_bytes - reserved_bytes(specs, element)
    rest -= sum(n * s.page_bytes(element) for n, s in zip(base, specs, strict=True))
    per_request = sum(n * s.page_bytes(element) for n, s in zip(typical, specs, strict=True))
    budgets = []
    for spec, least, share in zip(specs, base, typical, strict=True):
        pages = 1 + least + max(0, rest) * share // per_request
        budgets.append(
            GroupBudget(
                name=spec.name,
                window=spec.window,
                num_layers=len(spec.layer_ids),
                page_size=spec.page_size,
                page_bytes=spec.page_bytes(element),
                num_pages=pages,
                bytes=pages * spec.page_bytes(element),
            )
        )
    return tuple(budgets)


def reserved_bytes(specs: tuple[CacheGroupSpec, ...], element: int) -> int:
    """The reserved page of every group."""
    return sum(spec.page_bytes(element) for spec in specs)
