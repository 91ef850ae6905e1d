"""Committers: what each cache group does once a step knows which of its rows last.

The program holds one for each of the target's groups, made at boot, and asks them in turn at the
end of every step, whatever they hold.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from paceline.attention.states import StateBackend, StateGroupPlan, StateLayer
from paceline.cache.pool import KVPool, StatePool
from paceline.kernels.compact_kv import compact_kv
from paceline.kernels.keep_states import keep_states
from paceline.kernels.step_view import StepView


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StateMixer:
    """One STATE group: its slots, and who runs its layers."""

    group: int  # of the step's view
    pool: StatePool
    backend: StateBackend
    buffers: Any
    layers: Mapping[int, StateLayer]  # by layer id of the model

    def plan(self, view: StepView, *, is_round: bool) -> StateGroupPlan:
        """What its layers share in a step."""
        group = view.groups[self.group]
        plan = self.backend.plan(view, group, self.buffers, is_round=is_round)
        return StateGroupPlan(backend=self.backend, layers=self.layers, plan=plan)


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


class StateSlots(Committer):
    """Of states: a round writes them here, along what was accepted, any other step has written them
    as it ran.  Then those that others may find are copied, and what each stands for is noted."""

    def __init__(self, mixer: StateMixer, state_lens: Tensor) -> None:
        """state_lens: [max_reqs] int32 of the step buffers."""
        self._mixer = mixer
        self._state_lens = state_lens
        every = mixer.pool.spec.state_every
        assert every is not None, "a STATE group says where its states are kept"
        self._every = every

    def commit(self, view: StepView, path: Tensor | None, num_kept: Tensor) -> None:
        """As the contract says."""
        mixer = self._mixer
        group = view.groups[mixer.group]
        if path is not None:
            for layer in mixer.layers.values():
                mixer.backend.commit(
                    view, group, layer, mixer.buffers, path=path, num_kept=num_kept
                )
        keep_states(
            [*mixer.pool.parts.values()],
            mixer.pool.lens,
            view,
            group,
            num_kept,
            every=self._every,
            state_lens=self._state_lens[: view.padded_reqs],
        )


def token_rows(pools: Sequence[KVPool]) -> tuple[Committer, ...]:
    """[num_target_groups] those of groups that hold tokens."""
    return tuple(TokenRows(pool, group) for group, pool in enumerate(pools))
