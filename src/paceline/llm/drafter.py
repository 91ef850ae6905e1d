"""From a decided speculation to a proposer with weights in it."""

from dataclasses import replace

from paceline.attention.contract import AttentionBackend
from paceline.cache.pool import KVFormat
from paceline.core.options import known
from paceline.core.parallel import Parallel
from paceline.llm.prepare import Prepared
from paceline.models.causal_lm import CausalLM
from paceline.models.eagle_loader import load_eagle_head
from paceline.models.loader import load_model
from paceline.runner.build import RunnerConfig
from paceline.runner.proposer import Proposer
from paceline.speculate.build import DraftPlacement, eagle_proposer, standalone_proposer
from paceline.speculate.ngram import NgramProposer


def make_proposer(
    prepared: Prepared,
    target: CausalLM,
    *,
    backend: AttentionBackend,
    limits: RunnerConfig,
    num_pages: tuple[int, ...],
    kv: KVFormat,
) -> Proposer:
    """Load the drafter's weights and allocate its cache.  Raises WeightsError.

    backend, limits, kv: those of its target's engine; num_pages: [num_draft_groups].
    """
    speculation, options = prepared.speculation, prepared.options
    assert speculation is not None, "somebody drafts"
    if speculation.ngram is not None:
        low, high = speculation.ngram
        return NgramProposer(speculation.shape, min_n=low, max_n=high)
    assert speculation.model is not None, speculation
    assert speculation.source is not None, speculation
    place = DraftPlacement(
        groups=speculation.groups(known(options.page_size)),
        num_pages=num_pages,
        backend=backend,
        limits=limits,
        kv=replace(kv, scales={}),
        dtype=prepared.dtype,
        device=prepared.torch_device,
    )
    bound = limits.kv_len_bound
    if speculation.head is None:
        model = load_model(
            speculation.source,
            replace(speculation.model, max_position=limits.context_len),
            parallel=Parallel(),
            device=prepared.torch_device,
            dtype=prepared.dtype,
            load_format=options.load_format,
            max_positions=bound,
            seed=options.seed,
        )
        return standalone_proposer(speculation.shape, model, speculation.model, place)
    head = load_eagle_head(
        speculation.source,
        speculation.head,
        target,
        parallel=Parallel(),
        device=prepared.torch_device,
        dtype=prepared.dtype,
        load_format=options.load_format,
        max_positions=bound,
        seed=options.seed,
    )
    return eagle_proposer(speculation.algorithm, speculation.shape, head, speculation.taps, place)
