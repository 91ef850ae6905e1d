"""Committers: what each cache group does once a step knows which of its rows last.

The program holds one for each of the target's groups, made at boot, and asks them in turn at the
end of every step, whatever they hold.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from torch import Tensor

from paceline.cache.pool import KVPool
from paceline.kernels.compact_kv import compact_kv
from paceline.kernels.step_view import StepView


class Committer(ABC):
    """Makes one cache group hold the rows of a step that last, and no others."""

    @abstractmethod
    def commit(self, view: StepView, path: Tensor | None, num_kept: Tensor) -> None:
        """Device-only, static shapes; behind the step's commit.

        path: [padded_reqs, max_path] int64 of a round, the rows of each request that were accepted,
        the root first; behind the first num_kept an entry is its own index.  None: all rows last.
        num_kept: [padded_reqs] int32 rows of each request that last.
        """


class TokenRows(Committer):
    """Of paged rows: undone by a length, so that all there is to do is to bring a tree's accepted
    rows together.  A chain's lie together."""

    def __init__(self, pool: KVPool, group: int) -> None:
        """group: of the step's view."""
        self._pool = pool
        self._group = group

    def commit(self, view: StepView, path: Tensor | None, num_kept: Tensor) -> None:
        """As the contract says; entries behind the first num_kept stay where they are."""
        if path is None or view.tree_mask is None:
            return
        loc = view.groups[self._group].out_cache_loc.view(view.padded_reqs, -1)
        compact_kv([*self._pool.parts.values()], loc, path)


def token_rows(pools: Sequence[KVPool]) -> tuple[Committer, ...]:
    """[num_target_groups] those of groups that hold tokens."""
    return tuple(TokenRows(pool, group) for group, pool in enumerate(pools))
