"""boot: from options to a running engine, measuring what the plan only estimated."""

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from paceline.attention.registry import Choice, load_backend
from paceline.core.draft_shape import DraftShape
from paceline.core.events import Event, EventLog, Notify
from paceline.core.gpus import DeviceFacts
from paceline.core.model_config import CacheGroupSpec, ModelConfig, cache_group_specs
from paceline.core.options import REJECTION, EngineOptions, engine_options, known
from paceline.core.parallel import Parallel
from paceline.engine.acceptance import read_band
from paceline.engine.attention_choice import one_backend, phase_choices
from paceline.engine.budget_table import compare
from paceline.engine.draft_self_test import check_drafter
from paceline.engine.drafter import DrafterFacts, make_proposer
from paceline.engine.engine import Engine
from paceline.engine.explain import nearest_if_short
from paceline.engine.fit import Fit, require_fit
from paceline.engine.kv_format import kv_format
from paceline.engine.loop import overlapped_turn, twin_turn
from paceline.engine.measured import measured_bytes
from paceline.engine.processors import Processors, load_processors
from paceline.engine.resolution import Resolution
from paceline.engine.resolve import resolve
from paceline.engine.scheduler import Scheduler
from paceline.engine.scheduler_config import SchedulerConfig
from paceline.engine.speculation import Speculation, all_groups, plan_speculation
from paceline.engine.target import find_target
from paceline.engine.tokenizer import Tokenizer
from paceline.kvcache.manager import CacheManager
from paceline.models.causal_lm import CausalLM
from paceline.models.loader import load_model
from paceline.models.locate import ModelSource
from paceline.runner.build import RunnerConfig, build_runner, tokens_in_flight
from paceline.runner.model_runner import ModelRunner
from paceline.runner.staging import RING_DEPTH
from paceline.runner.streams import Stream, make_stream

_LOG = logging.getLogger("paceline")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Booted:
    """A running engine and everything that was decided on the way."""

    engine: Engine
    runner: ModelRunner
    tokenizer: Tokenizer | None
    processors: Processors  # plug-ins, behind the built-in ones
    config: ModelConfig
    device: DeviceFacts
    resolution: Resolution
    fit: Fit
    measured: Mapping[str, int]  # bytes by the names of fit.budget_lines
    attention: Choice
    speculation: Speculation | None
    boot_s: float
    events: EventLog


@dataclass(frozen=True, slots=True, kw_only=True)
class Knobs:
    """What tests turn and users do not."""

    stream: Stream | None = None  # where steps run; None takes the device's own
    poison_graphs: bool = False  # fill intermediates of recorded graphs before each replay
    staging_depth: int = RING_DEPTH
    reserve_ahead: int | None = None  # tokens; None takes the scheduler's default
    admission_margin: int | None = None  # tokens; None takes the scheduler's default
    num_pages: tuple[int, ...] | None = None  # [num_groups]; None takes the budget's


@dataclass(frozen=True, slots=True, kw_only=True)
class _Decided:
    """Everything that is known before a weight is read."""

    source: ModelSource
    config: ModelConfig
    device: DeviceFacts
    resolution: Resolution
    fit: Fit
    processors: Processors
    attention: Choice
    speculation: Speculation | None

    @property
    def torch_device(self) -> torch.device:
        return torch.device(self.device.device_type)

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, known(self.resolution.options.dtype))
        return dtype

    @property
    def draft(self) -> DraftShape | None:
        return None if self.speculation is None else self.speculation.shape

    @property
    def groups(self) -> tuple[CacheGroupSpec, ...]:
        """The target's cache groups, and the drafter's behind them."""
        page_size = known(self.resolution.options.page_size)
        return all_groups(self.config, page_size, self.speculation)


def boot(asked: Mapping[str, object], *, knobs: Knobs | None = None) -> Booted:
    """Locate, plan, load, allocate, capture.  Raises ConfigError, ModelError."""
    began = time.perf_counter()
    knobs = knobs or Knobs()
    decided = _decide(asked)
    options = decided.resolution.options
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    events = EventLog()
    model = _load(decided, events)
    runner = _build(model, decided, knobs, events)
    runner.boot()
    measured = measured_bytes(model, runner)
    _LOG.info("memory, planned and measured\n%s", compare(decided.fit, measured))
    # Without tokenizer.json the model serves token ids.
    vocabulary = decided.source.tokenizer
    tokenizer = None if vocabulary is None else Tokenizer.from_folder(vocabulary.parent)
    engine = Engine(
        _scheduler(decided, knobs, events),
        runner,
        tokenizer,
        turn=overlapped_turn if options.overlap else twin_turn,
        context_len=known(options.max_model_len),
    )
    _test_drafter(engine, tokenizer, decided, events)
    return Booted(
        engine=engine,
        runner=runner,
        tokenizer=tokenizer,
        processors=decided.processors,
        config=decided.config,
        device=decided.device,
        resolution=decided.resolution,
        fit=decided.fit,
        measured=measured,
        attention=decided.attention,
        speculation=decided.speculation,
        boot_s=time.perf_counter() - began,
        events=events,
    )


def _test_drafter(
    engine: Engine, tokenizer: Tokenizer | None, decided: _Decided, notify: Notify
) -> None:
    """See that the drafter accepts what it is known to, unless nobody knows or it is forced."""
    speculation, options = decided.speculation, decided.resolution.options
    if speculation is None or speculation.source is None or speculation.forced is not None:
        return
    folder = speculation.source.folder
    if folder is None or tokenizer is None or options.load_format == "dummy":
        return
    band, context_len = read_band(folder), known(options.max_model_len)
    if band is not None:
        check_drafter(engine, tokenizer, band, speculation.shape, notify, context_len=context_len)


def _decide(asked: Mapping[str, object]) -> _Decided:
    """Every choice, and that it fits; nothing is loaded yet."""
    given = engine_options(asked)
    target = find_target(given, weights=given.load_format != "dummy")
    config, facts = target.config, target.device
    speculation = plan_speculation(
        given, config, target.source, weights=given.load_format != "dummy"
    )
    resolution, fit = resolve(asked, config=config, device=facts, speculation=speculation)
    short = nearest_if_short(asked, fit, config=config, device=facts, speculation=speculation)
    require_fit(fit, None if short is None else short.advice())
    processors = load_processors(resolution.options.logits_processors)
    attention = one_backend(phase_choices(config, resolution.options, facts, speculation))
    resolution = resolution.choose("attention_backend", attention.name, attention.why)
    _LOG.info("%s", resolution.table())
    return _Decided(
        source=target.source,
        config=config,
        device=facts,
        resolution=resolution,
        fit=fit,
        processors=processors,
        attention=attention,
        speculation=speculation,
    )


def _load(decided: _Decided, notify: Notify) -> CausalLM:
    options = decided.resolution.options
    return load_model(
        decided.source,
        _at_context(decided.config, known(options.max_model_len), notify),
        parallel=Parallel(),
        device=decided.torch_device,
        dtype=decided.dtype,
        load_format=options.load_format,
        max_positions=known(options.max_model_len) + tokens_in_flight(decided.draft),
        seed=options.seed,
    )


def _build(model: CausalLM, decided: _Decided, knobs: Knobs, notify: Notify) -> ModelRunner:
    options, source = decided.resolution.options, decided.source
    groups = cache_group_specs(decided.config, known(options.page_size))
    backend = load_backend(decided.attention.name)()
    num_pages = _num_pages(decided.fit, knobs)
    limits = _runner_config(decided, knobs, num_pages[: len(groups)])
    kv = kv_format(
        known(options.kv_cache_dtype),
        source.folder if options.load_format != "dummy" else None,
        num_layers=decided.config.num_layers,
        notify=notify,
    )
    proposer = None
    if decided.speculation is not None:
        facts = DrafterFacts(
            backend=backend,
            limits=limits,
            page_size=known(options.page_size),
            num_pages=num_pages[len(groups) :],
            kv=kv,
            dtype=decided.dtype,
            device=decided.torch_device,
            load_format=options.load_format,
            seed=options.seed,
        )
        proposer = make_proposer(decided.speculation, model, facts)
        if decided.speculation.caution is not None:
            notify(decided.speculation.caution)
    return build_runner(
        model,
        decided.config,
        groups,
        backend,
        limits,
        stream=knobs.stream or make_stream(decided.torch_device),
        device=decided.torch_device,
        dtype=decided.dtype,
        kv=kv,
        notify=notify,
        proposer=proposer,
    )


def _at_context(config: ModelConfig, context_len: int, notify: Notify) -> ModelConfig:
    """The configuration at the context limit that is served; longrope's factors depend on it."""
    short = config.rope.short_context
    if short is not None and context_len > short:
        detail = (
            f"--max-model-len {context_len} is beyond the trained context: every position takes "
            f"the long factors, so short prompts are answered otherwise than up to {short}"
        )
        notify(Event("rope_long_factors", detail))
    return replace(config, max_position=context_len)


def _runner_config(decided: _Decided, knobs: Knobs, num_pages: tuple[int, ...]) -> RunnerConfig:
    """num_pages: of the target's groups."""
    options, speculation = decided.resolution.options, decided.speculation
    return RunnerConfig(
        max_running=known(options.max_num_seqs),
        max_batched_tokens=known(options.max_num_batched_tokens),
        context_len=known(options.max_model_len),
        max_join_tokens=_join_tokens(options),
        num_pages=num_pages,
        graph_max_reqs=known(options.cuda_graph_max_bs),
        graph_max_tokens=known(options.cuda_graph_max_tokens),
        capture=not options.enforce_eager,
        poison_graphs=knobs.poison_graphs,
        sanitize=options.sanitize,
        staging_depth=knobs.staging_depth,
        logits_processors=decided.processors,
        draft=decided.draft,
        force_accept_len=None if speculation is None else speculation.forced,
        rejects=speculation is not None and speculation.acceptance == REJECTION,
    )


def _scheduler(decided: _Decided, knobs: Knobs, notify: Notify) -> Scheduler:
    options, draft = decided.resolution.options, decided.draft
    longest_round = 0 if draft is None else draft.reach
    cache = CacheManager(
        decided.groups,
        _num_pages(decided.fit, knobs),
        max_extend_len=max(known(options.chunked_prefill_size), longest_round),
        enable_prefix_cache=options.enable_prefix_cache,
    )
    limits = SchedulerConfig(
        max_running=known(options.max_num_seqs),
        max_batched_tokens=known(options.max_num_batched_tokens),
        chunked_prefill_size=known(options.chunked_prefill_size),
        max_join_tokens=_join_tokens(options),
        draft=draft,
        exact_lengths=load_backend(decided.attention.name).capabilities.host_plan,
    )
    if knobs.reserve_ahead is not None:
        limits = replace(limits, reserve_ahead=knobs.reserve_ahead)
    if knobs.admission_margin is not None:
        limits = replace(limits, admission_margin=knobs.admission_margin)
    if limits.fallback is not None:
        notify(limits.fallback)
    return Scheduler(limits, cache)


def _num_pages(fit: Fit, knobs: Knobs) -> tuple[int, ...]:
    """[num_groups] pages of each pool; what is allocated and what is handed out must agree."""
    return knobs.num_pages or tuple(group.num_pages for group in fit.groups)


def _join_tokens(options: EngineOptions) -> int:
    """Known tokens that may join in one step: room for prefix hits beyond what is computed."""
    return max(known(options.max_model_len), 4 * known(options.max_num_batched_tokens))
