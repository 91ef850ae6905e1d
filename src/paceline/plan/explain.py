"""Explain: what the engine would do with a model on a device, before loading anything.

Needs the model's config.json and the device's facts only.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from paceline.attention.registry import Choice
from paceline.core.errors import ModelError
from paceline.core.gpus import DeviceFacts, gib
from paceline.core.model.config import SOFTMAX, ModelConfig
from paceline.core.options.asked import engine_options, named
from paceline.core.options.engine_options import EngineOptions, known
from paceline.core.parallel import Parallel, of_rank
from paceline.kernels.packed_linear import how_multiplied
from paceline.models.locate import ModelSource
from paceline.models.packed_layers import Packings
from paceline.models.quantized.scheme import Quantization
from paceline.models.size import (
    as_built,
    bytes_by_format,
    empty_part,
    packing_bytes,
)
from paceline.plan.attention_choice import (
    PhaseChoice,
    mixer_choices,
    one_backend,
    phase_choices,
)
from paceline.plan.cache_free import without_cache
from paceline.plan.exchanged import Exchanged, exchanged
from paceline.plan.memory.budget_table import table
from paceline.plan.memory.demand import Demands
from paceline.plan.memory.fit import Fit, require_fit
from paceline.plan.memory.nearest import nearest
from paceline.plan.memory.suggestion import Nearest
from paceline.plan.processors import load_processors
from paceline.plan.resolution import Resolution
from paceline.plan.resolve import resolve
from paceline.plan.speculation import Speculation, plan_speculation
from paceline.plan.target import find_target
from paceline.text.tokenizer import find_tokenizer, missing_tokenizer

_PASSED = (  # of drafts beside layers with states
    "  a round that passes a length at which states are kept, and ends behind it, keeps none: less "
    "of a text that was generated is found again"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TextPlan:
    """How the model reads and writes text."""

    tokens: int | None  # of the tokenizer; None: the model takes token ids, or it cannot be read
    chat_template: bool  # there is one that can be used
    fault: str | None  # of a chat template, which only chats need, or of the tokenizer
    error: ModelError | None  # of files that cannot be read

    @classmethod
    def of(cls, source: ModelSource) -> "TextPlan":
        """Reads the tokenizer's files."""
        try:
            tokenizer = find_tokenizer(source.tokenizer, lambda _: None)
        except ModelError as error:
            return cls(tokens=None, chat_template=False, fault=str(error), error=error)
        if tokenizer is None:
            fault = missing_tokenizer(source.folder)
            return cls(tokens=None, chat_template=False, fault=fault, error=None)
        fault = tokenizer.chat_template_fault
        has_template = tokenizer.has_chat_template
        return cls(tokens=tokenizer.vocab_size, chat_template=has_template, fault=fault, error=None)

    def __str__(self) -> str:
        if self.fault is not None:
            return f"text: {self.fault}"
        if self.tokens is None:
            return "text: none; prompts are token ids"
        chat = "a chat template" if self.chat_template else "no chat template"
        return f"text: {self.tokens} tokens, {chat}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """Everything `paceline explain` shows."""

    model: str
    config: ModelConfig
    quantization: Quantization | None
    packings: Packings
    weights_by_format: Mapping[str, str]  # sizes, where some are packed
    packed_at_once: str | None  # size of what packing takes as weights are read; None: nothing
    device: DeviceFacts
    speculation: Speculation | None
    resolution: Resolution
    fit: Fit
    phases: tuple[PhaseChoice, ...]
    mixers: Mapping[str, Choice]  # by kind, who runs the layers that keep states
    nearest: Nearest | None  # None where it fits
    text: TextPlan
    exchanged: Exchanged | None  # None: one process has the model

    def require(self) -> None:
        """Raise ConfigError when the model cannot run on the device, ModelError when a file of its
        tokenizer cannot be read."""
        require_fit(self.fit, None if self.nearest is None else self.nearest.advice())
        if self.text.error is not None:
            raise self.text.error
        one_backend(self.phases)

    def to_json(self) -> dict[str, object]:
        """The document of `paceline explain --json`."""
        arch = self.device.cuda_arch
        return {
            "model": self.model,
            "model_type": self.config.model_type,
            "quantization": self.quantization and self.quantization.method,
            "device": {
                "name": self.device.name,
                "type": self.device.device_type,
                "total_bytes": self.device.total_bytes,
                "cuda_arch": None if arch is None else list(arch),
                "source": self.device.source,
            },
            "text": {
                "tokens": self.text.tokens,
                "chat_template": self.text.chat_template,
                "fault": self.text.fault,
            },
            "speculation": self.speculation and self.speculation.to_json(),
            "options": self.resolution.to_json(),
            "ranks": self.exchanged and self.exchanged.to_json(),
            "fits": not self.fit.short_by_bytes,
            "fit": self.fit.to_json(),
            "nearest": self.nearest and self.nearest.to_json(),
            "attention": [
                {
                    "phase": choice.phase,
                    "backend": choice.backend,
                    "why": choice.why,
                    "rejected": {name: list(why) for name, why in choice.rejected.items()},
                }
                for choice in self.phases
            ],
            "linear_attention": [
                {
                    "mixer": kind,
                    "backend": choice.name,
                    "why": choice.why,
                    "rejected": {name: list(why) for name, why in choice.rejected.items()},
                }
                for kind, choice in self.mixers.items()
            ],
        }


def _weights(plan: Explanation) -> list[str]:
    """How weights are stored, where they are no plain numbers, and what reads them."""
    if not plan.packings:
        return [f"weights: {plan.quantization}"] if plan.quantization else []
    method = "" if plan.quantization is None else f"{plan.quantization.method}; "
    return [
        f"weights: {method}{plan.packings}",
        *(f"  {size} of {kind}" for kind, size in plan.weights_by_format.items()),
        *([f"  {plan.packed_at_once} more while one is packed"] if plan.packed_at_once else []),
        f"  {how_multiplied(known(plan.resolution.options.dtype))}",
    ]


def explain_model(asked: Mapping[str, object], *, gpu: str | None) -> Explanation:
    """Plan `asked["model"]` on a GPU by name, or on this machine when `gpu` is None.

    Raises ConfigError, ModelError for what no plan can be made of.
    """
    asked = named(asked)
    given = engine_options(asked)
    target = find_target(given, weights=False, gpu=gpu)
    config = without_cache(target.config, asked, given, target.device)
    parallel = Parallel(0, given.tensor_parallel_size)
    of_rank(config, parallel)
    device = target.device.of_each(parallel.size)
    speculation = plan_speculation(given, config, target.source, weights=False)
    demands = Demands(config, device, speculation, parallel, target.packings)
    resolution, fit = resolve(asked, demands)
    load_processors(resolution.options.logits_processors)
    dtype: torch.dtype = getattr(torch, known(resolution.options.dtype))
    by_format, at_once = _packed_sizes(demands, resolution.options)
    return Explanation(
        model=target.source.name,
        config=config,
        quantization=target.quantization,
        packings=as_built(target.packings, config, parallel),
        weights_by_format=by_format,
        packed_at_once=at_once,
        device=device,
        speculation=speculation,
        resolution=resolution,
        fit=fit,
        phases=phase_choices(demands.rank_config, resolution.options, device, speculation),
        mixers=mixer_choices(
            demands.rank_config, resolution.options, device.device_type, speculation
        ),
        nearest=nearest_if_short(asked, resolution, fit, demands),
        text=TextPlan.of(target.source),
        exchanged=exchanged(config, parallel.size, dtype, target.packings),
    )


def _packed_sizes(demands: Demands, options: EngineOptions) -> tuple[dict[str, str], str | None]:
    """(what weights, or a rank's part, take, by format; what packing them takes meanwhile); nothing
    where all are plain numbers."""
    if not demands.packings:
        return {}, None
    dtype: torch.dtype = getattr(torch, known(options.dtype))
    model = empty_part(demands.config, demands.parallel, demands.packings, dtype=dtype)
    at_once = packing_bytes(model, demands.packings) if options.load_format != "dummy" else 0
    by_format = {kind: gib(size) for kind, size in bytes_by_format(model).items()}
    return by_format, gib(at_once) if at_once else None


def nearest_if_short(
    asked: Mapping[str, object], resolution: Resolution, fit: Fit, demands: Demands
) -> Nearest | None:
    """The nearest options that fit, when `fit`, the budget of `resolution`, is short.

    demands: what `resolve` was given, which are not rehearsed again.
    """
    if not fit.short_by_bytes:
        return None

    def lacking(options: EngineOptions) -> list[str]:
        phases = phase_choices(demands.rank_config, options, demands.device, demands.speculation)
        return [choice.phase for choice in phases if choice.backend is None]

    usual = lacking(resolution.options)
    return nearest(
        asked,
        resolution,
        fit,
        demands,
        runs=lambda options: lacking(options) == usual,
    )


def show(plan: Explanation) -> str:
    """The plan for people."""
    config = plan.config
    others = Counter(layer.mixer for layer in config.layers if layer.mixer != SOFTMAX)
    alone = dict.fromkeys(layer.heads for layer in config.layers if layer.reads_whole)
    mixers = [
        *map(str, (*config.heads, *alone)),
        *(f"{num} of {mixer}" for mixer, num in others.items()),
    ]
    rows = [
        f"{plan.model}: {config.model_type}, {config.num_layers} layers, {' and '.join(mixers)}, "
        f"weights {gib(plan.fit.weights_bytes)}",
        *_weights(plan),
        str(plan.text),
        *([f"vectors: {told}"] if (told := config.prompt_told()) else []),
        *([f"drafts: {plan.speculation}"] if plan.speculation else []),
        *([str(plan.exchanged)] if plan.exchanged else []),
        *([_PASSED] if plan.speculation and config.has_states else []),
        plan.resolution.table(),
        table(plan.fit),
        *([plan.nearest.show()] if plan.nearest else []),
        "attention",
    ]
    for choice in plan.phases:
        rows.append(f"  {choice.phase:<8}{choice.backend or 'none'} ({choice.why})")
        rows += [f"    not {name}: {'; '.join(r)}" for name, r in choice.rejected.items()]
    rows += ["linear attention"] if plan.mixers else []
    for kind, chosen in plan.mixers.items():
        rows.append(f"  {kind:<8}{chosen.name} ({chosen.why})")
        rows += [f"    not {name}: {'; '.join(r)}" for name, r in chosen.rejected.items()]
    return "\n".join(rows)
