"""Algorithm and Drafter: what the rooms above may know of who drafts.  Each folder implements both.

Algorithm   a value of --speculative-algorithm: what is usual, what it refuses
  read      -> Drafter: decided and checked against its target, before a weight is read
  proposer  -> Proposer, with everything whose address a graph may hold
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

import torch
from torch import nn

from paceline.core.draft_shape import DraftShape
from paceline.core.model.cache_groups import CacheGroupSpec, draft_group_specs
from paceline.core.model.config import ModelConfig
from paceline.core.options.engine_options import EngineOptions
from paceline.core.parallel import Parallel
from paceline.models.causal_lm import CausalLM
from paceline.models.locate import ModelSource
from paceline.runner.proposer import Proposer
from paceline.runner.runner_config import RunnerConfig
from paceline.speculate.build import DraftPlacement

Chosen = tuple[object, str]  # what an option became that was left open, and why


class Loading(TypedDict):
    """How stored weights are read: arguments of `load_model`, of a target or a drafter."""

    parallel: Parallel
    device: torch.device
    dtype: torch.dtype
    load_format: str
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Drafter(ABC):
    """Who drafts, and how deep and wide.  The defaults are those of one that computes nothing."""

    algorithm: str  # one of DRAFT_ALGORITHMS
    shape: DraftShape
    source: ModelSource | None = None  # of the draft model
    model: ModelConfig | None = None  # the layers that draft; None: nothing is computed
    vocab_size: int = 0  # tokens that it chooses among; 0 without a model
    taps: tuple[str, ...] = ()  # hidden states of the target that it reads
    tap_width: int = 0  # elements of these that are kept per token
    from_root: bool = True  # a round's first pass reads the root, and position p the token at p;
    # else p reads the token at p + 1, and what was kept of the root gives the first drafts

    @property
    def chosen(self) -> Mapping[str, Chosen]:
        """Settings of its own that were left open."""
        return {}

    @property
    def passes(self) -> int:
        """Calls of its layers in a round, the one that observes included."""
        return 0 if self.model is None else 1 + len(self.pass_rows)

    @property
    def pass_rows(self) -> tuple[int, ...]:
        """[num_passes] rows per request of each pass that drafts."""
        return self.shape.pass_rows(from_root=self.from_root)

    def groups(self, page_size: int) -> tuple[CacheGroupSpec, ...]:
        """Its cache groups, which stand behind the target's."""
        if self.model is None:
            return ()
        return draft_group_specs(self.model, page_size, next_token=not self.from_root)

    def load(self, target: CausalLM, limits: RunnerConfig, how: Loading) -> nn.Module | None:
        """What it computes with, ready to run beside `target`, whose weights are in place.

        Raises WeightsError, naming the tensors or the file at fault.
        """
        return None

    def empty(self, target: CausalLM, limits: RunnerConfig, dtype: torch.dtype) -> nn.Module | None:
        """The same without weights, on the meta device."""
        return None

    @abstractmethod
    def proposer(self, module: Any, place: DraftPlacement) -> Proposer:
        """Ready to draft.  module: what `load` or `empty` gave."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Algorithm(ABC):
    """A way of drafting, before it is known with which model."""

    name: str  # one of DRAFT_ALGORITHMS
    usual_steps: int  # drafts on a path where nobody says
    has_model: bool = True  # else there is no draft model, and drafts have no probabilities
    is_within: bool = False  # its layers are in the target's own checkpoint
    tells_itself: bool = False  # config.json of its models always says what they are
    is_own: bool = False  # the bundled model has a draft model for it
    own_options: tuple[str, ...] = ()  # which no other algorithm has
    others: str = ""  # why: what others do not do

    @property
    def takes_path(self) -> bool:
        """Whether its draft model is named by --speculative-draft-model-path."""
        return self.has_model and not self.is_within

    @property
    def bundled(self) -> Path | None:
        """What 'bundled' names as its draft model; None: the bundled model itself."""
        return None

    def usual_tokens(self, steps: int, topk: int) -> tuple[int, str]:
        """(rows verified of a tree where nobody says, why)."""
        # Beyond twice the width, one more node is accepted in few rounds and costs a row in all.
        candidates = topk + (steps - 1) * topk**2
        tokens = min(max(2 * topk, steps + 1), candidates + 1)
        return tokens, "twice the width, at least a whole path"

    def told_by(self, config: Mapping[str, Any]) -> str | None:
        """What the config.json of a draft model of its kind describes; None: another kind's."""
        return None

    def refuse(self, options: EngineOptions, shape: DraftShape) -> None:
        """Raise ConfigError for settings of its own that cannot be."""
        return None

    @abstractmethod
    def read(
        self,
        options: EngineOptions,
        shape: DraftShape,
        source: ModelSource | None,
        *,
        target: ModelConfig,
        of: ModelSource,
    ) -> Drafter:
        """The drafter, checked against the target (from `of`).  Raises ConfigError, ModelError."""
