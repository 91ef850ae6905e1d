"""Which attention backend serves each phase of a model, and which one engine therefore runs; who
runs its layers that mix otherwise."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import get_args

import torch

from paceline.attention.contract import AttentionBackend, AttentionConfig, GraphSupport
from paceline.attention.measurements import Phase
from paceline.attention.mixers import choose_mixers
from paceline.attention.names import NO_ATTENTION, Cascade, Pair
from paceline.attention.registry import Choice, choose, load_backend
from paceline.attention.states import StateConfig
from paceline.cache.pool import torch_kv_dtype
from paceline.core.errors import BackendUnsupported
from paceline.core.gpus import DeviceFacts
from paceline.core.model.cache_groups import usual_state_every
from paceline.core.model.config import LayerSpec, ModelConfig
from paceline.core.model.lookback import Chunk
from paceline.core.modes import MaskKind
from paceline.core.options.engine_options import EngineOptions, known
from paceline.plan.speculation import Speculation, shape_of


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseChoice:
    phase: Phase
    backend: str | None  # None: nothing can run
    why: str  # this one
    rejected: Mapping[str, list[str]]  # name -> every reason


def phase_choices(
    config: ModelConfig,
    options: EngineOptions,
    device: DeviceFacts,
    speculation: Speculation | None = None,
) -> tuple[PhaseChoice, ...]:
    """The backend of each phase, with every rejected one: prefill, then decode, rounds included.

    Only decode needs graphs; but a pair has them where both have, so auto asks both for them.
    """
    decode = _graphs(options, speculation)
    masks = {MaskKind.CAUSAL} if speculation is None else {MaskKind.CAUSAL, speculation.shape.mask}
    prompts = {MaskKind.CAUSAL, MaskKind.BLOCK} if options.prompt_blocks else {MaskKind.CAUSAL}
    is_auto = options.attention_backend in (None, "auto")
    prefill = decode if is_auto else GraphSupport.NEVER
    graphs: dict[Phase, GraphSupport] = {"prefill": prefill, "decode": decode}
    choices = []
    models = (config, None if speculation is None else speculation.drafter.model)
    attending = [model for model in models if model is not None and model.heads]
    if not attending:
        return tuple(_nobody(phase, options) for phase in get_args(Phase))
    for phase in get_args(Phase):
        asked = partial(
            attention_config,
            options=options,
            device=device,
            graph=graphs[phase],
            masks=frozenset(masks if phase == "decode" else prompts),
        )
        wanted, *drafts = [asked(model) for model in attending]
        found = _choose(
            phase,
            wanted,
            options,
            drafts=drafts[0] if drafts else None,
            rounds=speculation is not None,
            gpu=device.name,
        )
        choices.append(found)
    return tuple(choices)


def one_backend(phases: Sequence[PhaseChoice]) -> Choice:
    """The backend that serves every phase: prefill+decode where they differ.

    Raises BackendUnsupported with every reason where a phase has none.
    """
    names = []
    for choice in phases:
        if choice.backend is None:
            ((asked, reasons),) = choice.rejected.items()
            eager = any(other.backend is not None for other in phases)
            advice = ["it can run without graphs: add --enforce-eager"] if eager else []
            raise BackendUnsupported(asked, [*reasons, *advice])
        names.append(choice.backend)
    if names == [names[0], str(Cascade(names[0]))]:
        names = names[1:]  # one backend, which runs trees by cascade and all else as it is
    whys = dict.fromkeys(choice.why for choice in phases)
    why = "; ".join(f"{choice.phase}: {choice.why}" for choice in phases)
    rejected: dict[str, list[str]] = {}
    for choice in phases:
        for name, reasons in choice.rejected.items():
            known_reasons = rejected.setdefault(name, [])
            known_reasons += [reason for reason in reasons if reason not in known_reasons]
    return Choice(
        name=str(Pair(*names)) if len(set(names)) > 1 else names[0],
        why=why if len(whys) > 1 else next(iter(whys)),
        rejected={name: reasons for name, reasons in rejected.items() if name not in names},
    )


def planned_backend(
    config: ModelConfig,
    options: EngineOptions,
    device: DeviceFacts,
    speculation: Speculation | None,
) -> AttentionBackend | None:
    """The backend that an engine would run; None where none can.  Raises ConfigError."""
    try:
        phases = phase_choices(config, options, device, speculation)
        return load_backend(one_backend(phases).name)
    except BackendUnsupported:
        return None


def attention_config(
    config: ModelConfig,
    options: EngineOptions,
    device: DeviceFacts,
    *,
    graph: GraphSupport,
    masks: frozenset[MaskKind],
) -> AttentionConfig:
    """What the model asks of an attention backend under resolved `options`."""
    return AttentionConfig(
        device_type=device.device_type,
        cuda_arch=device.cuda_arch,
        dtype=getattr(torch, known(options.dtype)),
        kv_dtype=torch_kv_dtype(known(options.kv_cache_dtype)),
        page_size=known(options.page_size),
        heads=config.heads,
        window=any(isinstance(layer.window, int) for layer in config.layers),
        chunks=frozenset(
            layer.window.size for layer in config.layers if isinstance(layer.window, Chunk)
        ),
        soft_cap=any(layer.soft_cap is not None for layer in config.layers),
        sinks=any(layer.sinks for layer in config.layers),
        masks=masks,
        needs_lse=False,
        graph=graph,
        encoder=any(layer.reads_encoder for layer in config.layers),
    )


def mixer_choices(
    config: ModelConfig,
    options: EngineOptions,
    device_type: str,
    speculation: Speculation | None,
) -> dict[str, Choice]:
    """By kind of mixer, who runs the layers that keep states, under resolved `options`.

    Raises BackendUnsupported, ConfigError, ModelError as `choose_mixers` does.
    """
    masks = {MaskKind.CAUSAL if speculation is None else speculation.shape.mask}
    masks |= {MaskKind.BLOCK} if options.prompt_blocks else set()
    every = options.state_checkpoint_every or usual_state_every(known(options.page_size))

    def wanted(layer: LayerSpec) -> StateConfig:
        return StateConfig(
            device_type=device_type,
            dtype=getattr(torch, known(options.dtype)),
            masks=frozenset(masks),
            parts=layer.state,
            state_every=every,
            graph=_graphs(options, speculation),
            round_rows=shape_of(speculation).num_draft_tokens,
        )

    return choose_mixers(config.layers, options.linear_attention_backend, wanted)


def _graphs(options: EngineOptions, speculation: Speculation | None) -> GraphSupport:
    """Of decode and rounds, which are graphs unless nothing is: others may run eagerly."""
    if options.enforce_eager:
        return GraphSupport.NEVER
    return GraphSupport.DECODE if speculation is None else GraphSupport.UNIFORM


def _nobody(phase: Phase, options: EngineOptions) -> PhaseChoice:
    """Of an engine in which no layer attends over a cache."""
    asked, why = options.attention_backend, "no layer attends over a cache"
    if asked in (None, "auto", NO_ATTENTION):
        return PhaseChoice(phase=phase, backend=NO_ATTENTION, why=why, rejected={})
    reasons = [f"{why}: leave --attention-backend out"]
    return PhaseChoice(phase=phase, backend=None, why="none can run", rejected={asked: reasons})


def _choose(
    phase: Phase,
    wanted: AttentionConfig,
    options: EngineOptions,
    *,
    drafts: AttentionConfig | None,
    rounds: bool,
    gpu: str,
) -> PhaseChoice:
    asked = "auto" if options.attention_backend is None else options.attention_backend
    try:
        choice = choose(wanted, asked, drafts=drafts, rounds=rounds, phase=phase, gpu=gpu)
    except BackendUnsupported as error:
        rejected = {error.backend: error.reasons}
        return PhaseChoice(phase=phase, backend=None, why="none can run", rejected=rejected)
    return PhaseChoice(phase=phase, backend=choice.name, why=choice.why, rejected=choice.rejected)
