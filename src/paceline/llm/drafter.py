"""From a decided speculation to a proposer with weights in it."""

from dataclasses import dataclass, replace

import torch

from paceline.attention.contract import AttentionBackend
from paceline.cache.pool import KVFormat
from paceline.core.parallel import Parallel
from paceline.models.causal_lm import CausalLM
from paceline.models.eagle_loader import load_eagle_head
from paceline.models.loader import load_model
from paceline.plan.speculation import Speculation
from paceline.runner.build import RunnerConfig
from paceline.runner.proposer import Proposer
from paceline.speculate.build import DraftPlacement, eagle_proposer, standalone_proposer
from paceline.speculate.ngram import NgramProposer


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterFacts:
    """What a drafter shares with its target's engine."""

    backend: AttentionBackend
    limits: RunnerConfig
    page_size: int  # tokens
    num_pages: tuple[int, ...]  # [num_draft_groups]
    kv: KVFormat
    dtype: torch.dtype
    device: torch.device
    load_format: str
    seed: int


def make_proposer(speculation: Speculation, target: CausalLM, facts: DrafterFacts) -> Proposer:
    """Load the drafter's weights and allocate its cache.  Raises WeightsError."""
    if speculation.ngram is not None:
        low, high = speculation.ngram
        return NgramProposer(speculation.shape, min_n=low, max_n=high)
    assert speculation.model is not None, speculation
    assert speculation.source is not None, speculation
    place = DraftPlacement(
        groups=speculation.groups(facts.page_size),
        num_pages=facts.num_pages,
        backend=facts.backend,
        limits=facts.limits,
        kv=replace(facts.kv, scales={}),
        dtype=facts.dtype,
        device=facts.device,
    )
    bound = facts.limits.kv_len_bound
    if speculation.head is None:
        model = load_model(
            speculation.source,
            replace(speculation.model, max_position=facts.limits.context_len),
            parallel=Parallel(),
            device=facts.device,
            dtype=facts.dtype,
            load_format=facts.load_format,
            max_positions=bound,
            seed=facts.seed,
        )
        return standalone_proposer(speculation.shape, model, speculation.model, place)
    head = load_eagle_head(
        speculation.source,
        speculation.head,
        target,
        parallel=Parallel(),
        device=facts.device,
        dtype=facts.dtype,
        load_format=facts.load_format,
        max_positions=bound,
        seed=facts.seed,
    )
    return eagle_proposer(speculation.algorithm, speculation.shape, head, speculation.taps, place)
