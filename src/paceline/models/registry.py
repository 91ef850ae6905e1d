"""The architectures: Hugging Face model_type -> where it is built, and facts sizes depend on.

Imports no torch; the architecture's file is imported when it is asked for.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from importlib import import_module
from typing import TYPE_CHECKING, Any

from paceline.core.errors import ModelError

if TYPE_CHECKING:
    from paceline.models.causal_lm import CausalLM


class QKNorm(Enum):
    """Norms of Q and K before rope."""

    NONE = "none"
    HEAD = "head"  # over each head
    ROW = "row"  # over all heads of a token


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """One supported model_type."""

    module: str  # holds build(config, *, parallel, device, dtype, max_positions)
    qk_norm: QKNorm = QKNorm.NONE
    layer_norms: int = 2  # hidden-sized norms per layer
    names_experts: bool = False  # its checkpoints name each expert's tensors, or stack them


def _entry(name: str, **facts: Any) -> Architecture:
    return Architecture(module=f"paceline.models.{name}", **facts)


ARCHITECTURES = {
    "gemma": _entry("gemma"),
    "gemma2": _entry("gemma2", layer_norms=4),
    "gemma3_text": _entry("gemma3_text", qk_norm=QKNorm.HEAD, layer_norms=4),
    "gpt_oss": _entry("gpt_oss"),
    "granite": _entry("granite"),
    "llama": _entry("llama"),
    "mistral": _entry("mistral"),
    "mixtral": _entry("mixtral", names_experts=True),
    "olmo2": _entry("olmo2", qk_norm=QKNorm.ROW),
    "phi3": _entry("phi3"),
    "qwen2": _entry("qwen2"),
    "qwen2_moe": _entry("qwen2_moe", names_experts=True),
    "qwen3": _entry("qwen3", qk_norm=QKNorm.HEAD),
    "qwen3_moe": _entry("qwen3_moe", qk_norm=QKNorm.HEAD, names_experts=True),
    "smollm3": _entry("smollm3"),
}


def architecture(model_type: str) -> Architecture:
    """Raises ModelError naming the known ones."""
    if model_type not in ARCHITECTURES:
        raise ModelError.about(
            "model_type",
            expected=f"one of {', '.join(sorted(ARCHITECTURES))}",
            got=repr(model_type),
            remedy="use a model of a supported architecture",
        )
    return ARCHITECTURES[model_type]


def builder(model_type: str) -> Callable[..., "CausalLM"]:
    """The `build` function of an architecture, imported now."""
    build: Callable[..., CausalLM] = import_module(architecture(model_type).module).build
    return build
