"""Parallel: which share of every layer this process holds."""

from dataclasses import dataclass

from paceline.core.errors import ConfigError

PARALLEL_FLAGS = ("--tensor-parallel-size", "--tp-size", "--tp", "-tp")


@dataclass(frozen=True, slots=True)
class Parallel:
    """Rank and size of the tensor-parallel group.  Size 1 is the only one served today."""

    rank: int = 0
    size: int = 1

    def __post_init__(self) -> None:
        if self.size != 1 or self.rank != 0:
            raise ConfigError.about(
                "parallel",
                expected="rank 0 of size 1",
                got=f"rank {self.rank} of size {self.size}",
                remedy="several GPUs for one model: not yet; run one process per model and GPU",
            )

    def share(self, total: int, name: str) -> int:
        """This rank's part of `total` heads or columns."""
        if total % self.size:
            raise ConfigError.about(
                name,
                expected=f"divisible by {self.size}",
                got=total,
                remedy="choose a parallel size that divides it",
            )
        return total // self.size
