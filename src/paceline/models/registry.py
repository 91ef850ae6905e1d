"""The architectures: Hugging Face model_type -> where it is built, and facts sizes depend on.

Imports no torch; the architecture's file is imported when it is asked for.
"""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING

from paceline.core.errors import ModelError, message

if TYPE_CHECKING:
    from paceline.models.causal_lm import CausalLM


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """One supported model_type."""

    module: str  # holds build(config, *, parallel, device, dtype, max_positions)
    qk_norm: bool  # per-head norms of Q and K
    layer_norms: int  # hidden-sized norms per layer


ARCHITECTURES = {
    "gemma2": Architecture(module="paceline.models.gemma2", qk_norm=False, layer_norms=4),
    "gemma3_text": Architecture(module="paceline.models.gemma3_text", qk_norm=True, layer_norms=4),
    "gpt_oss": Architecture(module="paceline.models.gpt_oss", qk_norm=False, layer_norms=2),
    "llama": Architecture(module="paceline.models.llama", qk_norm=False, layer_norms=2),
    "mistral": Architecture(module="paceline.models.mistral", qk_norm=False, layer_norms=2),
    "phi3": Architecture(module="paceline.models.phi3", qk_norm=False, layer_norms=2),
    "qwen2": Architecture(module="paceline.models.qwen2", qk_norm=False, layer_norms=2),
    "qwen3": Architecture(module="paceline.models.qwen3", qk_norm=True, layer_norms=2),
    "qwen3_moe": Architecture(module="paceline.models.qwen3_moe", qk_norm=True, layer_norms=2),
}


def architecture(model_type: str) -> Architecture:
    """Raises ModelError naming the known ones."""
    if model_type not in ARCHITECTURES:
        raise ModelError(
            message(
                "model_type",
                expected=f"one of {', '.join(sorted(ARCHITECTURES))}",
                got=repr(model_type),
                remedy="use a model of a supported architecture",
            )
        )
    return ARCHITECTURES[model_type]


def builder(model_type: str) -> Callable[..., "CausalLM"]:
    """The `build` function of an architecture, imported now."""
    build: Callable[..., CausalLM] = import_module(architecture(model_type).module).build
    return build
