"""Explain: what the engine would do with a model on a device, before loading anything.

Needs the model's config.json and the device's facts only; torch is imported for dtypes.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from paceline.attention.contract import AttentionConfig, GraphSupport
from paceline.attention.registry import choose
from paceline.core.errors import BackendUnsupported
from paceline.core.gpus import DeviceFacts, gpu_by_name
from paceline.core.model_config import ModelConfig
from paceline.core.modes import MaskKind
from paceline.core.options import EngineOptions
from paceline.engine.fit import Fit, gib, require_fit, table
from paceline.engine.machine import local_device
from paceline.engine.resolve import Resolution, resolve


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseChoice:
    """The attention backend of one phase."""

    phase: str  # "prefill" or "decode"
    backend: str | None  # None: nothing can run
    why: str  # this one
    rejected: Mapping[str, list[str]]  # name -> every reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """Everything `paceline explain` shows."""

    model: str
    config: ModelConfig
    device: DeviceFacts
    resolution: Resolution
    fit: Fit
    phases: tuple[PhaseChoice, ...]

    def require(self) -> None:
        """Raise ConfigError when the model cannot run on the device."""
        require_fit(self.fit)
        for choice in self.phases:
            if choice.backend is None:
                raise BackendUnsupported(
                    self.resolution.options.attention_backend or "auto",
                    [f"{name}: {'; '.join(why)}" for name, why in choice.rejected.items()],
                )

    def to_json(self) -> dict[str, object]:
        """The document of `paceline explain --json`."""
        arch = self.device.cuda_arch
        return {
            "model": self.model,
            "model_type": self.config.model_type,
            "device": {
                "name": self.device.name,
                "type": self.device.device_type,
                "total_bytes": self.device.total_bytes,
                "cuda_arch": None if arch is None else list(arch),
                "source": self.device.source,
            },
            "options": self.resolution.to_json(),
            "fits": not self.fit.short_by_bytes,
            "fit": self.fit.to_json(),
            "attention": [
                {
                    "phase": choice.phase,
                    "backend": choice.backend,
                    "why": choice.why,
                    "rejected": {name: list(why) for name, why in choice.rejected.items()},
                }
                for choice in self.phases
            ],
        }


def explain_model(asked: Mapping[str, object], *, gpu: str | None) -> Explanation:
    """Plan `asked["model"]` on a GPU by name, or on this machine when `gpu` is None."""
    from paceline.models.config import parse_config
    from paceline.models.locate import locate

    model, revision = asked.get("model", "bundled"), asked.get("revision")
    source = locate(str(model), None if revision is None else str(revision), weights=False)
    config = parse_config(source.config, source.generation_config)
    wanted = asked.get("device")
    device = (
        gpu_by_name(gpu)
        if gpu is not None
        else local_device(None if wanted in (None, "auto") else str(wanted))
    )
    resolution, fit = resolve(asked, config=config, device=device)
    return Explanation(
        model=source.name,
        config=config,
        device=device,
        resolution=resolution,
        fit=fit,
        phases=phase_choices(config, resolution.options, device),
    )


def phase_choices(
    config: ModelConfig, options: EngineOptions, device: DeviceFacts
) -> tuple[PhaseChoice, ...]:
    """The backend of each phase, with every rejected one."""
    decode = GraphSupport.NEVER if options.enforce_eager else GraphSupport.DECODE
    graphs = {"prefill": GraphSupport.NEVER, "decode": decode}
    choices = []
    for phase, graph in graphs.items():
        wanted = attention_config(config, options, device, graph=graph)
        choices.append(_choose(phase, wanted, options.attention_backend))
    return tuple(choices)


def attention_config(
    config: ModelConfig, options: EngineOptions, device: DeviceFacts, *, graph: GraphSupport
) -> AttentionConfig:
    """What the model asks of an attention backend under resolved `options`."""
    import torch

    assert options.page_size is not None
    assert options.dtype is not None
    return AttentionConfig(
        device_type=device.device_type,
        cuda_arch=device.cuda_arch,
        dtype=getattr(torch, options.dtype),
        page_size=options.page_size,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        v_head_dim=config.v_head_dim,
        window=any(window is not None for window in config.layer_windows),
        soft_cap=config.attention_soft_cap is not None,
        masks=frozenset({MaskKind.CAUSAL}),
        needs_lse=False,
        graph=graph,
    )


def show(plan: Explanation) -> str:
    """The plan for people."""
    config = plan.config
    heads = f"{config.num_heads}/{config.num_kv_heads} heads of {config.head_dim}"
    rows = [
        f"{plan.model}: {config.model_type}, {config.num_layers} layers, {heads}, "
        f"weights {gib(plan.fit.weights_bytes)}",
        plan.resolution.table(),
        table(plan.fit),
        "attention",
    ]
    for choice in plan.phases:
        rows.append(f"  {choice.phase:<8}{choice.backend or 'none'} ({choice.why})")
        rows += [f"    not {name}: {'; '.join(r)}" for name, r in choice.rejected.items()]
    return "\n".join(rows)


def _choose(phase: str, wanted: AttentionConfig, asked: str | None) -> PhaseChoice:
    try:
        choice = choose(wanted, asked or "auto")
    except BackendUnsupported as error:
        rejected = {error.backend: error.reasons}
        return PhaseChoice(phase=phase, backend=None, why="none can run", rejected=rejected)
    return PhaseChoice(phase=phase, backend=choice.name, why=choice.why, rejected=choice.rejected)
