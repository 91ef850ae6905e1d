"""Footprint: how many bytes each part of a running model takes, by formula.  No torch.

KV pages are exact.  Everything else is an upper bound of the tensors the engine holds or makes,
with the allowances named below; a CPU kernel's private scratch is not counted.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from paceline.core.draft_shape import NO_DRAFTS, DraftShape
from paceline.core.model_config import CacheGroupSpec, ModelConfig, MoEConfig
from paceline.core.sampling_params import (
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    MAX_STOP_IDS,
    PROMPT_BLOCK_ENTRIES,
)

GRAPH_NODE_BYTES = 1 << 20  # allowance: instantiated graph nodes, per layer
POOL_ROUNDING_BYTES = 22 << 20  # of a CUDA pool: it grows by 2 MiB for small tensors, 20 for others
LOGITS_BYTES = 6  # per row and vocabulary entry: the head's output, and it in float32
PROMPT_ENTRY_BYTES = LOGITS_BYTES + 12  # of scored prompt tokens: softmax, and a sort's scratch
NODE_TOKEN_BYTES = 4  # per draft verified and token known: what each knows, its own path included
PLUG_IN_ROW_BYTES = 1 << 14  # allowance: columns of plug-in logits processors, per request


@dataclass(frozen=True, slots=True)
class SamplerCost:
    """Bytes of the widest sampler's temporaries."""

    per_entry: int  # of a row's vocabulary
    per_token: int  # of a row's token history, which penalties read

    def of(self, rows: int, vocab_size: int, length: int) -> int:
        """Bytes for `rows`; the indices of the history are shared, and count as one row more."""
        return rows * self.per_entry * vocab_size + (rows + 1) * self.per_token * length


# What layers.sampling allocates at its peak, and 16 per entry for the scratch of a GPU's sort.
SAMPLER_PEAK = SamplerCost(per_entry=56, per_token=24)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLimits:
    """The largest step an engine builds."""

    rows: int  # requests
    tokens: int
    length: int  # tokens of one request, those in flight behind its limit included
    plug_ins: bool = False  # logits processors beside the built-in ones
    drafts: DraftShape = NO_DRAFTS  # of a round
    max_drafting: int | None = None  # requests of a round; None: all

    @property
    def sampled(self) -> int:
        """Rows of logits that one step samples at."""
        return decode_rows(self.rows, self.max_drafting, self.drafts)


def decode_rows(requests: int, max_drafting: int | None, drafts: DraftShape) -> int:
    """Rows of the largest step that is no prefill: plain, or a round of at most `max_drafting`."""
    drafting = requests if max_drafting is None else min(requests, max_drafting)
    return max(requests, drafting * drafts.num_draft_tokens)


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
    """Live activations of a layer: residual, normed, q|k|v, attention out, feed-forward block."""
    q = config.num_heads * config.head_dim
    kv = config.num_kv_heads * (config.head_dim + config.v_head_dim)
    out = config.num_heads * config.v_head_dim
    width = 2 * config.hidden_size + q + kv + out
    dense, experts = 3 * config.intermediate_size * element, 0  # gate|up, product
    if config.moe is not None:
        dense *= not all(config.moe.layers)
        experts = _experts_bytes(config.hidden_size, config.moe, element)
    return tokens * (width * element + max(dense, experts))


def _experts_bytes(hidden: int, moe: MoEConfig, element: int) -> int:
    """Of one token: router logits, its pairs' products, results and places, and their sum."""
    pairs = moe.experts_per_token
    width = moe.num_experts + pairs * (moe.intermediate_size + hidden) + hidden
    places = 8 * pairs + 4 * pairs + 12 * pairs  # weights and ids, order, blocks
    return width * element + places


def sampler_bytes(config: ModelConfig, rows: int, length: int, *, cost: SamplerCost) -> int:
    """Logits and the widest sampler over them; `length` is the width of the token history."""
    logits = rows * LOGITS_BYTES * config.vocab_size
    return logits + cost.of(rows, config.vocab_size, length)


def step_bytes(config: ModelConfig, element: int, limits: StepLimits) -> int:
    """What the largest eager step allocates and gives back."""
    sampling = sampler_bytes(config, limits.sampled, limits.length, cost=SAMPLER_PEAK)
    if limits.drafts.has_drafts:
        sampling += limits.sampled * limits.length * NODE_TOKEN_BYTES
    entries = min(PROMPT_BLOCK_ENTRIES, limits.tokens * config.vocab_size)
    scoring = max(entries, config.vocab_size) * PROMPT_ENTRY_BYTES
    return activation_bytes(config, limits.tokens, element) + max(sampling, scoring)


def graph_bytes(
    config: ModelConfig,
    element: int,
    *,
    rows: int,
    tokens: int,
    length: int,
    device_type: str,
    reserve: int,
) -> int:
    """What captured graphs may hold.  rows: of the decode step, of a round those it verifies;
    tokens: of the ragged step, 0 for none.

    CUDA graphs share one pool, which is as large as the largest step, and reuse storage between
    operations: `reserve` times the largest greedy graphs, of a decode and of a ragged step, and one
    graph of the widest sampler that may pass its end.  Recorded graphs share an arena, which is as
    large as all that the largest greedy one allocates; what needs more runs without a graph.
    """
    shapes = 2 if tokens else 1
    logits = rows * config.vocab_size * LOGITS_BYTES
    if device_type == "cuda":
        nodes = config.num_layers * GRAPH_NODE_BYTES
        shared = activation_bytes(config, max(rows, tokens), element) + logits
        shared += POOL_ROUNDING_BYTES
        widest = nodes + sampler_bytes(config, rows, length, cost=SAMPLER_PEAK)
        return reserve * (shared + shapes * nodes) + widest
    forward = config.num_layers * 2 * activation_bytes(config, rows + tokens, element)
    return forward + shapes * logits


def workspace_bytes(
    config: ModelConfig, specs: Sequence[CacheGroupSpec], limits: StepLimits
) -> int:
    """What stays allocated beside weights, KV and graphs: the request table, the step's buffers
    and the rope tables; the attention backend's buffers are its own to count."""
    widths = [-(-limits.length // spec.page_size) for spec in specs]
    page_rows = 4 * sum(widths)
    sampling_row = 12 * (MAX_LOGIT_BIAS + 16) + 8 * MAX_STOP_IDS
    sampling_row += PLUG_IN_ROW_BYTES if limits.plug_ins else 0
    table = (limits.rows + 1) * (8 + 4 * limits.length + page_rows + sampling_row)
    step_row = 64 + page_rows + 4 + 12 * MAX_LOGPROBS
    step = limits.rows * step_row + limits.tokens * (28 + 8 * len(specs)) + 4
    if limits.drafts.has_drafts:
        path = limits.drafts.max_path
        step += limits.rows * (4 * (2 + path) + path * (4 + 12 * MAX_LOGPROBS))
        step += (
            0 if limits.drafts.is_chain else limits.tokens * (limits.drafts.num_draft_tokens + 4)
        )
    tables = 1 if config.rope_local is None else 2
    rope = tables * limits.length * config.rotary_dim * 4
    return table + step + rope


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


def longest_request(fits: Callable[[int], bool], *, limit: int) -> int:
    """The longest request, up to `limit` tokens, that `fits`; 0 when none does."""
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        if fits(middle):
            low = middle
        else:
            high = middle - 1
    return low
