"""ModelConfig: the shape of a model, as every architecture file understands it.  No torch."""

from collections import Counter
from dataclasses import dataclass
from enum import Enum, StrEnum
from typing import NamedTuple

from paceline.core.model.encoder import EncoderConfig, EncoderInputConfig, HeadStage
from paceline.core.model.lookback import Lookback
from paceline.core.model.rope import RopeConfig
from paceline.core.modes import End, Pooling

HIDDEN_ACTS = {  # config.json's name of a gated activation -> the kernel's
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}
SIGMOID, IDENTITY = "sigmoid", "identity"  # what scores of labels go through


class NormKind(Enum):
    """How RMS norms take their weight."""

    ROUNDED = "rounded"  # times weight, once the normalised row is rounded (Llama)
    WIDE = "wide"  # times weight in float32, rounded once (gpt-oss)
    UNIT_OFFSET = "unit_offset"  # times 1 + weight in float32, rounded once (Gemma)


class QKNorm(Enum):
    """Norms of Q and K before rope."""

    NONE = "none"
    HEAD = "head"  # over each head
    ROW = "row"  # over all heads of a token
    UNIT = "unit"  # over each head, without a weight; where Q and K turn


@dataclass(frozen=True, slots=True, kw_only=True)
class MoEConfig:
    """The routed experts of a model: gated feed-forward blocks of which each token takes a few.

    Their gate is min(g, limit) * sigmoid(alpha * min(g, limit)), and it multiplies
    clamp(u, -limit, limit) + up_offset; the defaults make it SiLU.
    """

    layers: tuple[bool, ...]  # [num_layers] which have experts in place of the one dense block
    num_experts: int
    experts_per_token: int
    intermediate_size: int  # of one expert
    renormalize: bool  # the weights of a token's experts sum to 1
    bias: bool  # biases on the router and on the experts' projections
    shared_size: int | None = None  # intermediate size of the expert every token takes
    shared_gate: bool = True  # that expert is weighed by the sigmoid of a gate of its own
    choice: "ExpertChoice | None" = None  # None: those with the largest softmax
    swiglu_alpha: float = 1.0
    swiglu_limit: float | None = None
    swiglu_up_offset: float = 0.0
    weighs_input: bool = False  # a token's weight multiplies what its one expert takes, not what it
    # returns


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertChoice:
    """How DeepSeek's routers choose: within the best of the groups that experts are in.

    A group counts as much as the sum of its `best_of_group` best experts.
    """

    num_groups: int = 1
    groups_per_token: int = 1
    best_of_group: int = 1
    sigmoid: bool = False  # scores are sigmoids of the logits, not their softmax
    biased: bool = False  # each expert has a bias that counts for the choice, not for its weight
    scale: float = 1.0  # of the weights


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentConfig:
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434): what is cached of a token is one
    row of rank + rope_dim numbers, from which every head's key and value are made."""

    rank: int  # of the latent
    rope_dim: int  # dimensions of a head that turn, the same key for all heads
    nope_dim: int  # the others
    v_dim: int  # of a head
    q_rank: int | None  # of the latent that queries are made of; None: of the hidden state
    pairs: bool  # dimensions that turn against each other are stored as neighbours, not as halves

    @property
    def expand_from(self) -> int:
        """Tokens of one request in one step from which its keys and values, expanded for every
        head, take fewer products than attention to latents, however long its prefix; 0: never.

        A query and a key take 2 rank + rope_dim products of a head, or nope_dim + rope_dim + v_dim
        behind rank (nope_dim + v_dim) for each key.  The step's own rows cost the same either way.
        """
        saved = 2 * self.rank - self.nope_dim - self.v_dim
        return -(-self.rank * (self.nope_dim + self.v_dim) // saved) if saved > 0 else 0


class GateOrder(Enum):
    """What Mamba-2 layers make of their output y and the gate z."""

    GATE = "gate"  # y * silu(z)
    GATE_NORM = "gate_norm"  # the norm of y * silu(z)
    NORM_GATE = "norm_gate"  # the norm of y, times silu(z)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba2Config:
    """What Mamba-2 layers (arXiv:2405.21060) have beside the shape of their states."""

    conv_bias: bool
    in_bias: bool
    out_bias: bool
    step_limits: tuple[float, float]  # of the time step
    order: GateOrder
    scales: tuple[float, float, float, float, float] | None  # of z, x, B, C, dt as projected


@dataclass(frozen=True, slots=True, kw_only=True)
class Multipliers:
    """Constants of a model that scales more than its attention scores (Granite)."""

    embedding: float
    residual: float  # of what a block adds to the stream
    logit_divisor: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SideMultipliers:
    """Constants of layers that mix in two ways at once (Falcon-H1)."""

    attention: float  # of what attention adds to the stream
    state: float  # of what the other mixer adds
    gate: float  # of the feed-forward block's gate, before its activation
    down: float  # of what that block adds


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryGrowth:
    """Queries that grow with their position p, by 1 + factor * ln(1 + floor((p + 1) / every)), so
    that scores stay as sharp over a longer context (Llama 4)."""

    every: int  # tokens
    factor: float


class CacheKind(StrEnum):
    """How a cache group grows, is found again, and is undone."""

    TOKENS = "tokens"  # paged, a row per token; undone by a shorter length
    STATE = "state"  # a slot per request, whatever its length; undone by not having been written
    ENCODER = "encoder"  # paged, a row for each of an encoder; written once, when the request joins


@dataclass(frozen=True, slots=True)
class RowPart:
    """What a cache group holds of one token, or in one slot, in one layer under one name."""

    name: str  # "k", "v"
    shape: tuple[int, ...]  # of one token: num_kv_heads, dim; of a STATE group: of one slot
    of: str | None = None  # the part whose leading columns it is: nothing of its own is stored
    dtype: str | None = None  # torch's name of it; None: the cache's
    by_heads: bool = True  # ranks share it by its first dimension; else each has all of it


def kv_parts(
    num_kv_heads: int, head_dim: int, v_head_dim: int, *, v_in_k: bool = False
) -> tuple[RowPart, ...]:
    """The rows of softmax attention: K and V, or K alone with V in it."""
    of, by_heads = "k" if v_in_k else None, not v_in_k  # a latent is of all heads
    v = RowPart("v", (num_kv_heads, v_head_dim), of=of, by_heads=by_heads)
    return (RowPart("k", (num_kv_heads, head_dim), by_heads=by_heads), v)


TURNED, ROW_SCALES = "turned", "row_scales"  # parts of latents in float8


def scaled_latent_parts(rank: int, turned: int, dtype: str) -> tuple[RowPart, ...]:
    """The rows of latents in float8: K, which is V too, is codes in the cache's format; beside it
    lie what turned, in `dtype`, and the scale of the row (kernels/scaled_latents.py)."""
    return (
        RowPart("k", (1, rank), by_heads=False),
        RowPart("v", (1, rank), of="k", by_heads=False),
        RowPart(TURNED, (1, turned), dtype=dtype, by_heads=False),
        RowPart(ROW_SCALES, (1, 1), dtype="float32", by_heads=False),
    )


SOFTMAX = "softmax"  # the mixer kind that is attention


@dataclass(frozen=True, slots=True)
class Heads:
    """The heads of one layer: what of its shape a cache and a kernel see."""

    num_heads: int  # of queries
    num_kv_heads: int  # 0: the layer caches no rows
    head_dim: int  # of Q and K
    v_head_dim: int
    v_in_k: bool = False  # V is the leading v_head_dim columns of K: absorbed latent attention

    def __str__(self) -> str:
        if self.v_in_k:
            behind = self.head_dim - self.v_head_dim
            return f"{self.num_heads} heads over latents of {self.v_head_dim} + {behind}"
        dims = f"{self.head_dim}"
        if self.v_head_dim != self.head_dim:
            dims += f", V of {self.v_head_dim}"
        return f"{self.num_heads}/{self.num_kv_heads} heads of {dims}"


NO_HEADS = Heads(0, 0, 0, 0)


class Cached(NamedTuple):
    """What a layer caches in one group: layers of equal ones share it."""

    kind: CacheKind
    mixer: str
    window: Lookback | None  # None: all keys are visible
    parts: tuple[RowPart, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec:
    """How one layer mixes the tokens of a request, and what it caches of them."""

    mixer: str = SOFTMAX  # beside another kind a layer may attend too: then it has heads
    heads: Heads = NO_HEADS
    scale: float = 1.0  # multiplies q.k
    window: Lookback | None = None  # keys visible; None = all
    soft_cap: float | None = None  # cap * tanh(score / cap)
    sinks: bool = False  # one more score per head, which adds no value
    rope: RopeConfig | None = None  # None: nothing turns Q and K
    rotary_dim: int = 0  # dimensions of a head that rope turns
    state: tuple[RowPart, ...] = ()  # of another mixer than attention: what it keeps of a request
    causal: bool = True  # False: the tokens of a text see one another in both directions, so that
    # none is known before all are
    cache_free: bool = False  # nothing of a text is kept for later steps (plan/cache_free.py)
    reads_encoder: bool = False  # cross attention: K and V are made of the rows of an encoder

    @property
    def attends(self) -> bool:
        return self.mixer == SOFTMAX or self.heads != NO_HEADS

    @property
    def reads_whole(self) -> bool:
        """Whether a step must hold every text whole: the layer caches nothing, so it is in no cache
        group, and attends to the step's own rows alone."""
        return self.cache_free or not self.causal

    @property
    def rows(self) -> tuple[RowPart, ...]:
        """What attention caches of a token; none: nothing."""
        heads = self.heads
        if not heads.num_kv_heads or self.reads_whole:
            return ()
        dims = heads.head_dim, heads.v_head_dim
        return kv_parts(heads.num_kv_heads, *dims, v_in_k=heads.v_in_k)

    @property
    def caches(self) -> tuple[Cached, ...]:
        """In each cache group that it belongs to."""
        kind = CacheKind.ENCODER if self.reads_encoder else CacheKind.TOKENS
        rows = Cached(kind, SOFTMAX, self.window, self.rows)
        state = Cached(CacheKind.STATE, self.mixer, None, self.state)
        return tuple(cached for cached in (rows, state) if cached.parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Everything the engine needs to know of a checkpoint before it reads a weight."""

    model_type: str  # Hugging Face model_type; names the architecture file
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    max_position: int  # context limit in tokens
    rms_norm_eps: float
    layers: tuple[LayerSpec, ...]  # [num_layers]
    logit_soft_cap: float | None = None
    attention_bias: bool = False  # biases on q, k, v
    attention_out_bias: bool = False
    mlp_bias: bool = False
    hidden_act: str  # a key of HIDDEN_ACTS
    tie_word_embeddings: bool
    eos_token_ids: tuple[int, ...]
    dtype: str  # as stored: "bfloat16", "float16", "float32"
    moe: MoEConfig | None = None
    norm: NormKind = NormKind.ROUNDED
    qk_norm: QKNorm = QKNorm.NONE
    multipliers: Multipliers | None = None
    stored_vocab_size: int | None = None  # rows of the checkpoint's tables; None: vocab_size
    latent: LatentConfig | None = None
    mamba2: Mamba2Config | None = None
    side_multipliers: SideMultipliers | None = None
    ends: frozenset[End] = frozenset({End.GENERATE, End.SCORE})  # of its requests
    pooling: Pooling | None = None  # of those that end in a vector; None: none may
    normalizes: bool = True  # vectors have length 1, unless a request says otherwise
    pooled_head: tuple[HeadStage, ...] = ()  # what a pooled row goes through, in order
    label_act: str | None = None  # of a classifier, whose pooled rows are scores of labels: what it
    # makes of them unasked, SIGMOID or IDENTITY.  None: they are vectors
    encoder: EncoderConfig | None = None  # of a model that is one
    usual_context: int | None = None  # tokens of a text unless a limit is asked for, less than
    # max_position; None: that
    vector_prompt: str = ""  # put before every text whose vector is asked for
    lowers: bool = False  # texts, before they are tokenized
    max_encoder_len: int = 0  # rows that an encoder makes of what a request brings, at most
    encoder_input: EncoderInputConfig | None = None  # what that is; None: requests bring nothing
    position_rows: int = 0  # of a decoder's table of learned positions; 0: there is none
    query_growth: QueryGrowth | None = None  # of layers without rope

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def pooled_width(self) -> int:
        """Numbers of what a request that pools ends in."""
        return self.pooled_head[-1].width if self.pooled_head else self.hidden_size

    def prompt_told(self) -> str | None:
        """For people; None: texts stand alone."""
        before = self.vector_prompt
        return f"{before!r} is put before each text, the model's default prompt" if before else None

    @property
    def tells_types(self) -> bool:
        """Whether the tokens of a pair's second text are of another type than its first's."""
        own = self.encoder
        return self.label_act is not None and own is not None and own.token_types > 1

    @property
    def reads_whole(self) -> bool:
        """Whether a step must hold every text whole."""
        return any(layer.reads_whole for layer in self.layers)

    @property
    def looks_ahead(self) -> bool:
        """Whether tokens see what comes behind them."""
        return any(not layer.causal for layer in self.layers)

    @property
    def heads(self) -> tuple[Heads, ...]:
        """Of the layers that attend over a cache, each once, those of most layers first."""
        caching = [layer for layer in self.layers if layer.attends and not layer.reads_whole]
        of_layers = Counter(layer.heads for layer in caching)
        return tuple(heads for heads, _ in of_layers.most_common())

    @property
    def expandable(self) -> LatentConfig | None:
        """The latents of a model all of whose layers that attend over a cache are of latents."""
        return self.latent if all(heads.v_in_k for heads in self.heads) else None

    @property
    def expanded_dims(self) -> tuple[int, int]:
        """Columns of a head's key, those that turn included, and of its value, where latents are
        expanded; a model without latents of its own has its heads'."""
        if self.latent is None:
            heads = self.heads[0]
            return heads.head_dim, heads.v_head_dim
        return self.latent.nope_dim + self.latent.rope_dim, self.latent.v_dim

    @property
    def ropes(self) -> tuple[tuple[RopeConfig, int], ...]:
        """(rope, dimensions of a head that it turns) of the layers, each once, in order."""
        turned = [(layer.rope, layer.rotary_dim) for layer in self.layers]
        return tuple(dict.fromkeys((rope, dim) for rope, dim in turned if rope is not None))

    @property
    def rope_axes(self) -> int:
        """Numbers that say where a token stands."""
        return max((rope.axes for rope, _ in self.ropes), default=1)

    @property
    def has_states(self) -> bool:
        """Whether some layer keeps a state of each request."""
        return any(layer.state for layer in self.layers)

    @property
    def short_context(self) -> int | None:
        """The longest context limit that every rope serves with short factors; None: none has."""
        limits = [rope.short_context for rope, _ in self.ropes]
        return min((limit for limit in limits if limit is not None), default=None)
