"""From what was prepared to a running engine: `boot` loads, allocates and captures, and measures
what the plan only estimated."""

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from paceline.attention.names import Pair, parse
from paceline.attention.ragged.own import OWN
from paceline.attention.ragged.registry import load_ragged
from paceline.attention.registry import load_backend
from paceline.cache.manager import CacheManager
from paceline.cache.overlay_slots import OverlaySlots
from paceline.core.events import Event, Notify
from paceline.core.model.config import ModelConfig
from paceline.core.options.engine_options import known
from paceline.engine.acceptance import read_band
from paceline.engine.answers.receipt import EngineFacts, PhaseBackends
from paceline.engine.engine import Engine
from paceline.engine.loop import TurnFunction, overlapped_turn, twin_turn
from paceline.engine.request import HostNeed
from paceline.engine.scheduler import Scheduler
from paceline.engine.scheduler_config import SchedulerConfig
from paceline.kernels.all_reduce import Exchange
from paceline.kernels.openblas import set_num_threads
from paceline.llm.draft_self_test import check_drafter
from paceline.llm.prepare import Prepared
from paceline.llm.stored_weights import StoredWeights
from paceline.models.kv_scales import kv_format
from paceline.models.quantized.config import read_quantization
from paceline.models.size import weight_bytes
from paceline.plan.assemble import Decided, assemble, decide, join_tokens
from paceline.plan.machine import versions
from paceline.plan.memory.budget_table import compare
from paceline.plan.speculation import shape_of
from paceline.runner.build import wire_runner
from paceline.runner.model_runner import ModelRunner
from paceline.runner.recording.graphs import AHEAD, ONCE_IT_PAYS, CapturePolicy
from paceline.runner.staging import RING_DEPTH
from paceline.runner.streams import Stream, make_stream
from paceline.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from paceline.llm.box.black_box import BlackBox
    from paceline.llm.ranks import Ranks

_LOG = logging.getLogger("paceline")
_USUAL_CAPTURE = {"cpu": ONCE_IT_PAYS, "cuda": AHEAD}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Booted:
    """A running engine and everything that was decided on the way."""

    prepared: Prepared
    engine: Engine
    runner: ModelRunner
    boot_s: float
    ranks: "Ranks | None"  # the other processes of the model; None: this is all
    black_box: "BlackBox | None"  # where one was asked for

    @property
    def measured(self) -> Mapping[str, int]:
        """Bytes held now, by the names of budget_table.budget_lines."""
        return measured_bytes(self.runner)

    def report(self) -> dict[str, Any]:
        """As of `LLM.report`."""
        prepared = self.prepared
        return {
            "versions": versions(),
            "device": prepared.device.name,
            "vocab_size": prepared.config.vocab_size,
            "boot_s": self.boot_s,
            "options": prepared.resolution.to_json(),
            **prepared.to_json(),
            "memory": {"planned": prepared.fit.to_json(), "measured": dict(self.measured)},
            "events": [
                {"reason": event.reason, "detail": event.detail, "count": count}
                for event, count in prepared.events.counts().items()
            ],
        }

    def close(self) -> None:
        """Run what is in flight to its end, without what would follow; end other processes."""
        self.engine.drain()
        if self.ranks is not None:
            self.ranks.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class Knobs:
    """What tests and benches turn and users do not."""

    stream: Stream | None = None  # where steps run; None takes the device's own
    capture: CapturePolicy | None = None  # None takes the device's usual
    poison_graphs: bool = False  # fill intermediates of recorded graphs before each replay
    staging_depth: int = RING_DEPTH
    reserve_ahead: int | None = None  # tokens; None takes the scheduler's default
    admission_margin: int | None = None  # tokens; None takes the scheduler's default
    num_pages: tuple[int, ...] | None = None  # [num_groups]; None takes the budget's
    around_turn: Callable[[TurnFunction], TurnFunction] | None = None  # TurnLog's, say
    kept_steps: int | None = None  # of a black box; None takes the usual


def boot(prepared: Prepared, *, knobs: Knobs | None = None) -> Booted:
    """Load, allocate, capture.  Raises ConfigError, ModelError."""
    began = time.perf_counter()
    knobs = knobs or Knobs()
    decided = decide_parts(prepared, knobs)
    if prepared.parallel.size == 1:
        return _boot(prepared, decided, knobs, None, began=began)
    from paceline.llm.ranks import start_ranks  # brings msgspec, which one process does without

    ranks, num_pages = start_ranks(prepared, decided, knobs)
    try:
        return _boot(
            prepared,
            decided.with_pages(num_pages),
            replace(knobs, num_pages=num_pages),
            ranks,
            began=began,
        )
    except BaseException as error:
        ranks.end(error)
        raise


def _boot(
    prepared: Prepared, decided: Decided, knobs: Knobs, ranks: "Ranks | None", *, began: float
) -> Booted:
    options, notify = prepared.options, prepared.events
    exchange, meet = (None, None) if ranks is None else (ranks.exchange, ranks.meet)
    runner = load_runner(prepared, decided, knobs, exchange, meet)
    _LOG.debug("memory, planned and measured\n%s", compare(prepared.fit, measured_bytes(runner)))
    tokenizer = prepared.admission.tokenizer
    scheduler = _scheduler(prepared, knobs, notify, padded_tokens=runner.padded_tokens)
    black_box = _black_box(prepared, knobs, scheduler)
    turn: TurnFunction = overlapped_turn if options.overlap else twin_turn
    if black_box is not None:
        turn = black_box.around(turn)
    engine = Engine(
        scheduler,
        runner if ranks is None else ranks.leading(runner),
        tokenizer,
        turn=turn if knobs.around_turn is None else knobs.around_turn(turn),
        context_len=known(options.max_model_len),
        sanitize=options.sanitize,
        rope_axes=prepared.config.rope_axes,
        facts=_facts(prepared),
    )
    if ranks is not None:
        ranks.wait_until_ready()
    _test_drafter(engine, tokenizer, prepared, notify)
    boot_s = prepared.prepare_s + time.perf_counter() - began
    _LOG.info("%s; ready in %.1f s", prepared.resolution.line(), boot_s)
    return Booted(
        prepared=prepared,
        engine=engine,
        runner=runner,
        boot_s=boot_s,
        ranks=ranks,
        black_box=black_box,
    )


def _black_box(prepared: Prepared, knobs: Knobs, scheduler: Scheduler) -> "BlackBox | None":
    """Raises ConfigError for a folder that cannot be written."""
    folder = prepared.options.black_box_dir
    if folder is None:
        return None
    from paceline.llm.box.black_box import KEPT_BYTES, KEPT_STEPS, BlackBox  # brings msgspec
    from paceline.llm.box.record import made_by

    made = made_by(prepared, planned_pages(prepared, knobs))
    return BlackBox(
        Path(folder),
        scheduler,
        made,
        kept_steps=knobs.kept_steps or KEPT_STEPS,
        kept_bytes=prepared.options.black_box_bytes or KEPT_BYTES,
    )


def _facts(prepared: Prepared) -> EngineFacts:
    """What receipts say of every request."""
    name, plan = parse(prepared.attention.name), prepared.speculation
    prefill, decode = (name.prefill, name.decode) if isinstance(name, Pair) else (name, name)
    return EngineFacts(
        model=prepared.options.model,
        device=prepared.device.name,
        dtype=known(prepared.options.dtype),
        attention=PhaseBackends(prefill=str(prefill), decode=str(decode)),
        drafter=None if plan is None else plan.drafter.algorithm,
        versions={name: found for name, found in versions().items() if found is not None},
    )


def _test_drafter(
    engine: Engine, tokenizer: Tokenizer | None, prepared: Prepared, notify: Notify
) -> None:
    """See that the drafter accepts what it is known to, unless nobody knows or it is forced."""
    speculation, options = prepared.speculation, prepared.options
    if speculation is None or speculation.drafter.source is None or speculation.forced is not None:
        return
    folder = speculation.drafter.source.folder
    if folder is None or tokenizer is None or options.load_format == "dummy":
        return
    band, context_len = read_band(folder), known(options.max_model_len)
    if band is not None:
        check_drafter(
            engine,
            tokenizer,
            band,
            speculation.shape,
            notify,
            context_len=context_len,
            max_batch=options.speculative_max_batch,
        )


def decide_parts(prepared: Prepared, knobs: Knobs) -> Decided:
    """What will be loaded and allocated.  Raises ModelError for scales that cannot be read."""
    options, source, notify = prepared.options, prepared.source, prepared.events
    _note_context(prepared.config, known(options.max_model_len), notify)
    if told := prepared.config.prompt_told():
        notify(Event("default_prompt", told))
    quantization = read_quantization(source.config)
    packings = prepared.packings
    if packings:
        notify(Event("weights_packed", str(packings)))
    is_read = quantization is not None and options.load_format != "dummy"
    if is_read and (packings.num_unread or not packings):
        notify(Event("weights_dequantised", str(quantization)))
    decided = decide(
        prepared.config,
        options,
        prepared.speculation,
        num_pages=planned_pages(prepared, knobs),
        kv=kv_format(
            known(options.kv_cache_dtype),
            source.folder if options.load_format != "dummy" else None,
            source.config,
            num_layers=prepared.config.num_layers,
            of_latents=any(heads.v_in_k for heads in prepared.config.heads),
            notify=notify,
        ),
        processors=prepared.admission.processors,
        parallel=prepared.parallel,
        packings=prepared.packings,
    )
    # What one rank records all must, or their exchanges part: where a graph is too large for one of
    # them, it would stop in the middle.
    is_alone = prepared.parallel.size == 1
    limits = replace(
        decided.limits,
        capture_policy=knobs.capture or _USUAL_CAPTURE[prepared.device.device_type],
        recorded_bytes=prepared.fit.graphs_bytes if is_alone else None,
        poison_graphs=knobs.poison_graphs,
        staging_depth=knobs.staging_depth,
    )
    return replace(decided, limits=limits)


def load_runner(
    prepared: Prepared,
    decided: Decided,
    knobs: Knobs,
    exchange: Exchange | None,
    meet: Callable[[], None] | None,
) -> ModelRunner:
    """Load, allocate, capture.  exchange: with the other ranks, and meet: returns when all have
    loaded; None: there are none.  Raises ConfigError, ModelError."""
    device, notify, threads = prepared.torch_device, prepared.events, prepared.options.threads
    if threads is not None:
        set_num_threads(threads)
    if prepared.speculation is not None and prepared.speculation.caution is not None:
        notify(prepared.speculation.caution)
    backend = load_backend(prepared.attention.name)
    ragged = load_ragged(prepared.options.latent_expand_backend or OWN.name)
    weights = StoredWeights(prepared, exchange)
    parts = assemble(decided, weights, backend, device, ragged=ragged)
    stream = knobs.stream or make_stream(device)
    runner = wire_runner(parts, decided.limits, stream=stream, device=device, notify=notify)
    if meet is not None:
        meet()
    runner.boot()
    return runner


def _note_context(config: ModelConfig, context_len: int, notify: Notify) -> None:
    """Say where the context limit that is served changes longrope's factors."""
    short = config.short_context
    if short is not None and context_len > short:
        detail = (
            f"--max-model-len {context_len} is beyond the trained context: every position takes "
            f"the long factors, so short prompts are answered otherwise than up to {short}"
        )
        notify(Event("rope_long_factors", detail))


def _scheduler(
    prepared: Prepared, knobs: Knobs, notify: Notify, *, padded_tokens: tuple[int, ...]
) -> Scheduler:
    options, draft = prepared.options, shape_of(prepared.speculation)
    plans_on_host = load_backend(prepared.attention.name).capabilities.host_plan
    cache = CacheManager(
        prepared.groups,
        planned_pages(prepared, knobs),
        max_extend_len=max(known(options.chunked_prefill_size), draft.reach),
        enable_prefix_cache=options.enable_prefix_cache,
    )
    limits = SchedulerConfig(
        max_running=known(options.max_num_seqs),
        max_batched_tokens=known(options.max_num_batched_tokens),
        chunked_prefill_size=known(options.chunked_prefill_size),
        max_join_tokens=join_tokens(options),
        padded_tokens=padded_tokens,
        draft=draft,
        max_drafting=options.speculative_max_batch,
        host_needs=frozenset({HostNeed.EXACT_LENGTHS}) if plans_on_host else frozenset(),
        whole_prompts=prepared.config.reads_whole,
        pooling=prepared.config.pooling,
    )
    if knobs.reserve_ahead is not None:
        limits = replace(limits, reserve_ahead=knobs.reserve_ahead)
    if knobs.admission_margin is not None:
        limits = replace(limits, admission_margin=knobs.admission_margin)
    if limits.fallback is not None:
        notify(limits.fallback)
    slots = options.max_prompt_embeds
    return Scheduler(limits, cache, OverlaySlots(slots) if slots else None)


def planned_pages(prepared: Prepared, knobs: Knobs) -> tuple[int, ...]:
    """[num_groups] pages of each pool; what is allocated and what is handed out must agree."""
    return knobs.num_pages or tuple(group.num_pages for group in prepared.fit.groups)


def measured_bytes(runner: ModelRunner) -> dict[str, int]:
    """Bytes that are held now, by the names of `budget_table.compare`."""
    model, drafter = runner.parts.model, runner.parts.proposer.model
    held = runner.named_bytes()
    found = {
        "weights": weight_bytes(model),
        "KV": held["kv"],
        "workspace": held["workspace"] + sum(_tables(model).values()),
        "graphs": held["graphs"],
    }
    if drafter is None:
        return found
    # A head looks tokens up in the target's table, which is no table of its own.
    others = _addresses(model)
    own = {address: size for address, size in _tables(drafter).items() if address not in others}
    found["workspace"] += sum(own.values())
    return found | {"draft weights": weight_bytes(drafter)}


def _tables(module: torch.nn.Module) -> dict[int, int]:
    """Address -> bytes of the storages that a model keeps beside its parameters, rope tables above
    all, which layers share.  Views of parameters are none."""
    stored = [
        value.untyped_storage()
        for part in module.modules()
        for value in vars(part).values()
        if isinstance(value, torch.Tensor)
    ]
    parameters = _addresses(module)
    sizes = {storage.data_ptr(): storage.nbytes() for storage in stored}
    return {address: size for address, size in sizes.items() if address not in parameters}


def _addresses(module: torch.nn.Module) -> set[int]:
    """Of the storages of its parameters."""
    return {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}
