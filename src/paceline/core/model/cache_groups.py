"""Cache groups: layers of one model, or of its drafter, that are cached alike.  No torch."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from paceline.core.dtypes import ELEMENT_BYTES, FP8
from paceline.core.errors import ConfigError
from paceline.core.model.config import (
    SOFTMAX,
    Cached,
    CacheKind,
    ModelConfig,
    RowPart,
    scaled_latent_parts,
)
from paceline.core.model.lookback import Chunk, Lookback, in_order

READ, WRITE, CHECKPOINT = range(3)  # a STATE group's page table: slots of a request
NUM_SLOT_COLUMNS = 3
STATE_EVERY = 512  # tokens, unasked, between states that others may start from
_LENGTH_BYTES = 4  # what each slot of a STATE group says it stands for


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheGroupSpec:
    """Layers that share page size, lifetime and what is held of a token."""

    name: str  # "full", "window-1024" or "chunk-8192"; of a drafter: "draft-full"; "full-3" where
    # layers from 3 on cache other rows than those of another full group
    layer_ids: tuple[int, ...]  # of the model the group belongs to
    window: Lookback | None  # keys visible; None = all
    page_size: int  # tokens
    parts: tuple[RowPart, ...]
    mixer: str = SOFTMAX  # of its layers
    draft: bool = False  # of the drafter, not of the target
    next_token: bool = False  # the KV of a token depends on the token behind it, too
    kind: CacheKind = CacheKind.TOKENS
    state_every: int | None = None  # of STATE alone: at lengths divisible by it, in tokens, a state
    # may be kept for others to start from
    encoder_len: int | None = None  # of ENCODER alone: rows of a request at most

    def __post_init__(self) -> None:
        if self.kind is not CacheKind.STATE:
            fits, expected = self.state_every is None, "None: it holds every row"
        else:
            every = self.state_every or 0
            fits = every > 0 and every % self.page_size == 0
            expected = f"a positive multiple of the page size, {self.page_size}"
        if not fits:
            raise ConfigError.about(
                f"state_every of cache group '{self.name}'",
                expected=expected,
                got=self.state_every,
                remedy="the prefix tree finds states at the ends of its pages",
            )
        if self.kind is CacheKind.ENCODER and self.window is not None:
            raise ConfigError.about(
                f"window of cache group '{self.name}'",
                expected="None: every token sees all rows of its encoder",
                got=self.window,
                remedy="leave the window out of layers that read an encoder",
            )
        if (self.kind is CacheKind.ENCODER) != bool(self.encoder_len):
            raise ConfigError.about(
                f"encoder_len of cache group '{self.name}'",
                expected="a positive number of rows in an ENCODER group, and None in others",
                got=self.encoder_len,
                remedy="say in max_encoder_len how many rows the model's encoder makes at most",
            )

    @property
    def stored(self) -> tuple[RowPart, ...]:
        """The parts that have memory of their own."""
        return tuple(part for part in self.parts if part.of is None)

    def page_bytes(self, element_bytes: int) -> int:
        """Bytes of one page, or slot, over all layers and parts of the group."""
        per_row = sum(
            math.prod(part.shape)
            * (element_bytes if part.dtype is None else ELEMENT_BYTES[part.dtype])
            for part in self.stored
        )
        if self.kind is CacheKind.STATE:
            return per_row * len(self.layer_ids) + _LENGTH_BYTES
        return per_row * self.page_size * len(self.layer_ids)


def in_format(group: CacheGroupSpec, dtype: str, kv_dtype: str) -> CacheGroupSpec:
    """`group` as activations of `dtype` and a cache of `kv_dtype` have it.

    States whose layers name no number format have the activations'.  Latents in float8 have scales
    by rows.
    """
    if group.kind is CacheKind.STATE:
        parts = tuple(replace(part, dtype=part.dtype or dtype) for part in group.parts)
        return replace(group, parts=parts)
    if kv_dtype != FP8 or all(part.of is None for part in group.parts):
        return group
    k, v = group.parts
    rank = v.shape[1]
    return replace(group, parts=scaled_latent_parts(rank, k.shape[1] - rank, dtype))


def usual_state_every(page_size: int) -> int:
    """Tokens between kept states where nobody asks: STATE_EVERY, in whole pages."""
    return -(-STATE_EVERY // page_size) * page_size


def cache_group_specs(
    config: ModelConfig, page_size: int, *, state_every: int | None = None
) -> tuple[CacheGroupSpec, ...]:
    """The model's cache groups: layers that mix alike and cache like rows under one window, in the
    order of CacheKind, full attention first.

    state_every: of groups of states; None: the usual.
    """
    every = state_every or usual_state_every(page_size)
    members: dict[Cached, list[int]] = {}
    for index, layer in enumerate(config.layers):
        for cached in layer.caches:
            members.setdefault(cached, []).append(index)

    kinds = list(CacheKind)

    def place(
        kind: CacheKind, mixer: str, window: Lookback | None
    ) -> tuple[int, str, tuple[int, int]]:
        return kinds.index(kind), mixer, in_order(window)

    groups = sorted(members.items(), key=lambda member: place(*member[0][:3]))
    names = [_group_name(*alike[:3]) for alike, _ in groups]
    return tuple(
        CacheGroupSpec(
            name=name if names.count(name) == 1 else f"{name}-{layer_ids[0]}",
            layer_ids=tuple(layer_ids),
            window=window,
            page_size=page_size,
            parts=parts,
            mixer=mixer,
            kind=kind,
            state_every=every if kind is CacheKind.STATE else None,
            encoder_len=config.max_encoder_len if kind is CacheKind.ENCODER else None,
        )
        for name, ((kind, mixer, window, parts), layer_ids) in zip(names, groups, strict=True)
    )


def _group_name(kind: CacheKind, mixer: str, window: Lookback | None) -> str:
    """Of a cache group; where several would have one, the first layer's number follows."""
    if kind is CacheKind.STATE:
        return mixer
    if kind is CacheKind.ENCODER:
        return "encoder"
    if isinstance(window, Chunk):
        return f"chunk-{window.size}"
    return "full" if window is None else f"window-{window}"


def draft_group_specs(
    config: ModelConfig, page_size: int, *, next_token: bool
) -> tuple[CacheGroupSpec, ...]:
    """A drafter's cache groups, by the layers of its own model; they stand behind the target's.

    next_token: draft position p takes the token at p + 1.
    """
    return tuple(
        replace(spec, name=f"draft-{spec.name}", draft=True, next_token=next_token)
        for spec in cache_group_specs(config, page_size)
    )


def page_size_of(specs: Sequence[CacheGroupSpec]) -> int:
    """The one page size of groups, in tokens; 1 where there are none.  Raises ConfigError."""
    found = sorted({spec.page_size for spec in specs}) or [1]  # without groups nothing is paged
    if len(found) != 1:
        raise ConfigError.about(
            "page_size of the cache groups",
            expected="one size for all",
            got=found,
            remedy="the prefix tree shares whole pages; give every group the same size",
        )
    return found[0]


def state_every_of(specs: Sequence[CacheGroupSpec]) -> int | None:
    """The one interval at which states are kept; None: there are none.  Raises ConfigError."""
    found = sorted({spec.state_every for spec in specs if spec.state_every is not None})
    if len(found) > 1:
        raise ConfigError.about(
            "state_every of the cache groups",
            expected="one interval for all",
            got=found,
            remedy="a step ends where all states of a request are kept; take a common multiple",
        )
    return found[0] if found else None
