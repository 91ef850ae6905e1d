"""The shapes `paceline bench attention` times, and its flags.  No torch."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace

from paceline.attention.measurements import LayerShape, Phase
from paceline.core.dtypes import DTYPES
from paceline.core.errors import ConfigError
from paceline.core.model.config import Heads
from paceline.core.model.lookback import Chunk, first_visible
from paceline.core.options.spec import Flag

PEERS = ("auto", "flashinfer", "none")
KV_DTYPES = ("auto", "fp8_e4m3", "fp8")


# Named after fields of AttentionShape or arguments of `bench_attention`.
FLAGS = (
    Flag(name="batch_size", kind=int, default=64, help="Requests of the step."),
    Flag(name="kv_len", kind=int, default=4096, help="Keys of each request, new ones included."),
    Flag(name="extend_len", kind=int, default=1, help="New tokens of each request; 1 is decode."),
    Flag(name="num_heads", kind=int, default=32, help="Query heads."),
    Flag(name="num_kv_heads", kind=int, default=8, help="Key and value heads."),
    Flag(name="head_dim", kind=int, default=128, help="Elements of a head."),
    Flag(
        name="latent_rank",
        kind=int,
        default=None,
        help="Of latents: columns of the one K that are V, too.",
    ),
    Flag(name="page_size", kind=int, default=16, help="Tokens of a page."),
    Flag(
        name="chunk",
        kind=int,
        default=None,
        help="Of chunk-local layers: tokens of a chunk, whose own keys a token sees alone.",
    ),
    Flag(name="dtype", kind=str, default="bfloat16", help="Of queries and K/V.", choices=DTYPES),
    Flag(name="kv_dtype", kind=str, default="auto", help="Of the cache.", choices=KV_DTYPES),
    Flag(name="backend", kind=str, default="auto", help="As --attention-backend."),
    Flag(
        name="peer",
        kind=str,
        default="auto",
        help="Library timed beside ours; auto takes FlashInfer where it is installed.",
        choices=PEERS,
    ),
    Flag(
        name="backends",
        kind=str,
        default=None,
        help="Time these instead, in turns; several names separated by commas.",
    ),
    Flag(
        name="shapes",
        kind=str,
        default="one",
        help="Of --backends: the one of these flags, or a fixed suite per phase.",
        choices=("one", "suite"),
    ),
    Flag(
        name="save",
        kind=str,
        default=None,
        help="Of --backends: merge what was measured into this table of measurements.",
    ),
    Flag(name="device", kind=str, default="auto", help="Where.", choices=("auto", "cpu", "cuda")),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionShape:
    """One causal attention layer over a paged cache.  Raises ConfigError for a senseless one."""

    batch_size: int = 64
    kv_len: int = 4096
    extend_len: int = 1
    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    latent_rank: int | None = None  # V is so many leading columns of K; None: it is beside K
    page_size: int = 16
    dtype: str = "bfloat16"
    kv_dtype: str = "auto"  # "auto" is dtype
    chunk: int | None = None  # tokens: each sees the keys of its own alone; None: all before it

    def __post_init__(self) -> None:
        counts = {name: value for name, value in asdict(self).items() if isinstance(value, int)}
        for name, value in counts.items():
            if value < 1:
                _refuse(name, "at least 1", value)
        if self.extend_len > self.kv_len:
            _refuse("extend_len", f"at most {self.kv_len}, the keys of a request", self.extend_len)
        if self.num_heads % self.num_kv_heads:
            _refuse("num_heads", f"a multiple of {self.num_kv_heads}, the KV heads", self.num_heads)
        if self.latent_rank is not None:
            if self.num_kv_heads != 1:
                _refuse("num_kv_heads", "1 with latents", self.num_kv_heads)
            if self.latent_rank > self.head_dim:
                _refuse("latent_rank", f"at most {self.head_dim}, the columns", self.latent_rank)

    @property
    def heads(self) -> Heads:
        """Of the layer."""
        counts, rank = (self.num_heads, self.num_kv_heads), self.latent_rank
        return Heads(*counts, self.head_dim, rank or self.head_dim, v_in_k=rank is not None)

    @property
    def phase(self) -> Phase:
        return "decode" if self.extend_len == 1 else "prefill"

    @property
    def layer(self) -> LayerShape:
        """What of it a model decides."""
        return LayerShape(
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            page_size=self.page_size,
            dtype=self.dtype,
            kv_dtype=self.dtype if self.kv_dtype == "auto" else "float8_e4m3fn",
            chunk=self.chunk,
        )

    @property
    def lookback(self) -> Chunk | None:
        """Of the layer."""
        return None if self.chunk is None else Chunk(self.chunk)

    @property
    def kv_token_bytes(self) -> int:
        """K and V of one token."""
        number = {"float32": 4}.get(self.dtype, 2)
        if self.latent_rank and self.kv_dtype != "auto":  # codes, a scale, and what turned
            return self.latent_rank + 4 + (self.head_dim - self.latent_rank) * number
        element = number if self.kv_dtype == "auto" else 1
        columns = self.head_dim if self.latent_rank else 2 * self.head_dim
        return self.num_kv_heads * columns * element

    @property
    def cache_bytes(self) -> int:
        """K and V of all tokens, in one layer."""
        return self.batch_size * self.kv_len * self.kv_token_bytes

    @property
    def moved_bytes(self) -> int:
        """What one step must read of the cache: from its first token's first visible key on."""
        seen = self.kv_len - first_visible(self.lookback, self.kv_len - self.extend_len)
        return self.batch_size * seen * self.kv_token_bytes

    @property
    def flops(self) -> int:
        """Two products over every visible (query, key) pair."""
        seen = self._seen_before(self.kv_len) - self._seen_before(self.kv_len - self.extend_len)
        dims = self.head_dim + self.heads.v_head_dim
        return 2 * self.num_heads * dims * self.batch_size * seen

    def _seen_before(self, position: int) -> int:
        """Pairs of all queries before a position and the keys that they see."""
        size = self.chunk or self.kv_len
        whole, rest = divmod(position, size)
        return whole * (size * (size + 1) // 2) + rest * (rest + 1) // 2

    def limit_s(self, bandwidth: float | None, matmul_flops: float | None) -> float | None:
        """Seconds no kernel can beat; None where the device's peaks are not known."""
        if bandwidth is None:
            return None
        return max(self.moved_bytes / bandwidth, self.flops / matmul_flops if matmul_flops else 0.0)


def attention_shape(values: Mapping[str, object]) -> AttentionShape:
    """The shape among the values of FLAGS."""
    names = AttentionShape.__dataclass_fields__
    chosen = {name: values[name] for name in names}
    return AttentionShape(**chosen)  # type: ignore[arg-type]


def suite(shape: AttentionShape) -> tuple[AttentionShape, ...]:
    """The layer of `shape` under the loads that auto compares backends by."""
    lens, batches = ((1024, 8192), (1, 16, 64)) if shape.latent_rank else ((1024, 4096), (1, 8, 64))
    prefills = [(1, 1024, 1024), (1, 8192, 8192), (8, 1024, 1024)]
    if shape.chunk is not None:  # half of the first chunk and of the second, and across the edge
        lens = (max(1, shape.chunk // 2), shape.chunk + shape.chunk // 2)
        prefills[1] = (1, lens[1], shape.chunk)
    decodes = [(batch, kv_len, 1) for kv_len in lens for batch in batches]
    return tuple(
        replace(shape, batch_size=batch, kv_len=kv_len, extend_len=extend)
        for batch, kv_len, extend in decodes + prefills
    )


def _refuse(name: str, expected: str, got: int) -> None:
    flag = "--" + name.replace("_", "-")
    raise ConfigError.about(name, expected=expected, got=got, remedy=f"change {flag}")
