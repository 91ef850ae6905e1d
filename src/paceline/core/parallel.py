"""Parallel: which share of every layer this process holds, and how many ranks can share a model."""

from dataclasses import dataclass, replace
from typing import NamedTuple

from paceline.core.errors import ConfigError
from paceline.core.model.config import LayerSpec, ModelConfig, RowPart

MOST_RANKS = 64  # words of shared memory, see runner/shared_memory.py


class Span(NamedTuple):
    """Which of `total` heads, rows or columns a rank holds."""

    first: int
    size: int
    total: int

    @property
    def end(self) -> int:
        return self.first + self.size

    def times(self, rows: int) -> "Span":
        """Of as many things, each of `rows` rows."""
        return Span(self.first * rows, self.size * rows, self.total * rows)


def whole(total: int) -> Span:
    """All of them."""
    return Span(0, total, total)


@dataclass(frozen=True, slots=True)
class Parallel:
    """Rank and size of the tensor-parallel group.  One process is rank 0 of 1."""

    rank: int = 0
    size: int = 1

    def __post_init__(self) -> None:
        assert 0 <= self.rank < self.size, (self.rank, self.size)

    def share(self, total: int, name: str) -> Span:
        """This rank's part of `total` heads or columns.  Raises ConfigError unless all ranks have
        as many."""
        if total % self.size:
            raise ConfigError.about(
                name,
                expected=f"divisible by {self.size}",
                got=total,
                remedy="choose a parallel size that divides it",
            )
        size = total // self.size
        return Span(self.rank * size, size, total)

    def spread(self, total: int) -> Span:
        """This rank's part of `total` things that stay whole: as even as can be, of which the first
        ranks have one more."""
        each, more = divmod(total, self.size)
        first = self.rank * each + min(self.rank, more)
        return Span(first, each + (self.rank < more), total)

    def share_kv(self, total: int, name: str) -> Span:
        """As `share`; where ranks exceed heads, ranks side by side hold the same one."""
        if total >= self.size:
            return self.share(total, name)
        if self.size % total:
            raise ConfigError.about(
                name,
                expected=f"a divisor of {self.size}, or divisible by it",
                got=total,
                remedy="choose a parallel size that divides it, or that is a multiple of it",
            )
        return Span(self.rank * total // self.size, 1, total)

    def share_rows(self, total: int) -> Span:
        """This rank's rows of a table whose parts may differ: the last ranks have fewer."""
        most = -(-total // self.size)
        first = min(self.rank * most, total)
        return Span(first, min(most, total - first), total)


ALONE = Parallel()


def rank_of(span: Span) -> Parallel:
    """Which rank `Parallel.share` gave this part."""
    return Parallel(span.first // span.size, span.total // span.size)


def of_rank(config: ModelConfig, parallel: Parallel) -> ModelConfig:
    """The model as one rank's cache and kernels see it: its heads, and its part of every state.

    Raises ConfigError with every reason why as many ranks cannot share the model.
    """
    if parallel.size == 1:
        return config
    reasons = rank_reasons(config, parallel.size)
    if reasons:
        raise ConfigError.about(
            "tensor_parallel_size",
            expected=f"one of {', '.join(map(str, rank_sizes(config, parallel.size)))}",
            got=f"{parallel.size}: {'; '.join(reasons)}",
            remedy="choose one of these",
        )
    return replace(config, layers=tuple(_share(layer, parallel) for layer in config.layers))


def rank_sizes(config: ModelConfig, most: int) -> list[int]:
    """How many ranks can share a model, up to `most`."""
    return [size for size in range(1, most + 1) if not rank_reasons(config, size)]


def rank_reasons(config: ModelConfig, size: int) -> list[str]:
    """Why `size` ranks cannot share a model; none: they can."""
    shared = {"intermediate_size": config.intermediate_size}
    if config.moe is not None:
        shared = shared if not all(config.moe.layers) else {}
        shared["intermediate_size of experts"] = config.moe.intermediate_size
        shared["intermediate_size of the shared expert"] = config.moe.shared_size or 0
    reasons = [f"{name} is {total}" for name, total in shared.items() if total % size]
    for heads in config.heads:
        q, kv = heads.num_heads, heads.num_kv_heads
        if q % size:
            reasons.append(f"there are {q} heads")
        if not heads.v_in_k and kv % size and size % kv:
            reasons.append(f"there are {kv} KV heads")
    if config.looks_ahead and size > 1:
        reasons.append("an encoder is not split among ranks")
    if config.encoder_input is not None and size > 1:
        reasons.append("layers that read an encoder are not split among ranks")
    if config.mamba2 is not None and size > 1:
        reasons.append("layers of mamba2 are not split among ranks")
    states = {part: None for layer in config.layers for part in layer.state if part.by_heads}
    reasons += [
        f"'{part.name}' of a state has {part.shape[0]}" for part in states if part.shape[0] % size
    ]
    return reasons


def _share(layer: LayerSpec, parallel: Parallel) -> LayerSpec:
    heads = layer.heads
    layer = replace(layer, state=tuple(_part(part, parallel) for part in layer.state))
    if not layer.attends:
        return layer
    by_heads = all(part.by_heads for part in layer.rows)
    kv = parallel.share_kv(heads.num_kv_heads, "num_kv_heads").size if by_heads else 1
    shared = replace(
        heads, num_heads=parallel.share(heads.num_heads, "num_heads").size, num_kv_heads=kv
    )
    return replace(layer, heads=shared)


def _part(part: RowPart, parallel: Parallel) -> RowPart:
    if not part.by_heads:
        return part
    first = parallel.share(part.shape[0], f"the first dimension of '{part.name}'").size
    return replace(part, shape=(first, *part.shape[1:]))
