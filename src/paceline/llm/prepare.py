"""From options to everything that is known before a weight is read."""

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from paceline.attention.registry import Choice
from paceline.core.events import EventLog
from paceline.core.gpus import DeviceFacts
from paceline.core.model.cache_groups import CacheGroupSpec
from paceline.core.model.config import ModelConfig
from paceline.core.options.asked import engine_options, named
from paceline.core.options.engine_options import EngineOptions, known
from paceline.core.parallel import Parallel, of_rank
from paceline.llm.admission import Admission
from paceline.models.locate import ModelSource
from paceline.models.packed_layers import Packings
from paceline.models.size import as_built
from paceline.plan.attention_choice import mixer_choices, one_backend, phase_choices
from paceline.plan.cache_free import without_cache
from paceline.plan.contradictions import refuse_ranks
from paceline.plan.explain import nearest_if_short
from paceline.plan.machine import num_gpus_from_current
from paceline.plan.memory.demand import Demands
from paceline.plan.memory.fit import Fit, require_fit
from paceline.plan.processors import load_processors
from paceline.plan.resolution import Resolution
from paceline.plan.resolve import resolve
from paceline.plan.speculation import Speculation, all_groups, plan_speculation
from paceline.plan.target import find_target
from paceline.text.structured import StructureCompiler
from paceline.text.tokenizer import find_tokenizer, missing_tokenizer

_LOG = logging.getLogger("paceline")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Prepared:
    """Everything that is known before a weight is read; `LLM(prepared)` reads them."""

    source: ModelSource
    config: ModelConfig
    device: DeviceFacts
    resolution: Resolution
    fit: Fit
    attention: Choice
    speculation: Speculation | None
    admission: Admission  # what requests must meet, so that they can be checked now
    events: EventLog
    prepare_s: float
    parallel: Parallel  # which of the processes of the model this is
    packings: Packings  # of the target's weights

    @property
    def options(self) -> EngineOptions:
        """Resolved: what was asked, and what was chosen where it was left open."""
        return self.resolution.options

    @property
    def torch_device(self) -> torch.device:
        return torch.device(self.device.device_type)

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, known(self.options.dtype))
        return dtype

    @property
    def groups(self) -> tuple[CacheGroupSpec, ...]:
        """The target's cache groups, and the drafter's behind them."""
        return all_groups(of_rank(self.config, self.parallel), self.options, self.speculation)

    def to_json(self) -> dict[str, object]:
        """What documents say of how it computes: "attention" and "speculation"."""
        speculation = None if self.speculation is None else self.speculation.to_json()
        attention = {"name": self.attention.name, "why": self.attention.why}
        return {"attention": attention, "speculation": speculation}


def prepare(asked: Mapping[str, object], *, rank: int = 0) -> Prepared:
    """Locate, read, decide and plan; no weight is read.  Raises ConfigError, ModelError.

    asked: what the caller set of core.options.EngineOptions, under any name of theirs.  rank: of
    the processes of the model, which this is; 0 asks the others in.
    """
    began = time.perf_counter()
    asked = named(asked)
    given = engine_options(asked)
    target = find_target(given, weights=given.load_format != "dummy")
    config = without_cache(target.config, asked, given, target.device)
    asks_gpus = rank == 0 and target.device.device_type == "cuda"
    refuse_ranks(given, config, num_gpus_from_current() if asks_gpus else None)
    parallel = Parallel(rank, given.tensor_parallel_size)
    facts = target.device.of_each(parallel.size)
    speculation = plan_speculation(
        given, config, target.source, weights=given.load_format != "dummy"
    )
    demands = Demands(config, facts, speculation, parallel, target.packings)
    resolution, fit = resolve(asked, demands)
    short = nearest_if_short(asked, resolution, fit, demands)
    require_fit(fit, None if short is None else short.advice())
    events = EventLog()
    tokenizer = find_tokenizer(target.source.tokenizer, events, lowers=config.lowers)
    admission = Admission(
        config=config,
        tokenizer=tokenizer,
        processors=load_processors(resolution.options.logits_processors),
        context_len=known(resolution.options.max_model_len),
        dtype=getattr(torch, known(resolution.options.dtype)),
        has_blocks=resolution.options.prompt_blocks,
        notify=events,
        tokenizer_fault=missing_tokenizer(target.source.folder),
        structures=None
        if tokenizer is None
        else StructureCompiler(
            tokenizer, vocab_size=config.vocab_size, end_ids=config.eos_token_ids
        ),
    )
    phases = phase_choices(demands.rank_config, resolution.options, facts, speculation)
    attention = one_backend(phases)
    resolution = resolution.choose("attention_backend", attention.name, attention.why)
    mixers = mixer_choices(demands.rank_config, resolution.options, facts.device_type, speculation)
    if len({choice.name for choice in mixers.values()}) == 1:
        found = next(iter(mixers.values()))
        resolution = resolution.choose("linear_attention_backend", found.name, found.why)
    _LOG.debug("%s", resolution.table())
    return Prepared(
        source=target.source,
        config=config,
        device=facts,
        resolution=resolution,
        fit=fit,
        attention=attention,
        speculation=speculation,
        admission=admission,
        events=events,
        prepare_s=time.perf_counter() - began,
        parallel=parallel,
        packings=as_built(target.packings, config, parallel),
    )
