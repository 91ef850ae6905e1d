"""paceline: an LLM inference engine whose fast path is one program in every form it runs in."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline.core.sampling_params import SamplingParams
    from paceline.engine.llm import LLM
    from paceline.engine.outputs import RequestOutput

__all__ = ["LLM", "RequestOutput", "SamplingParams"]

_HOMES = {
    "LLM": "paceline.engine.llm",
    "RequestOutput": "paceline.engine.outputs",
    "SamplingParams": "paceline.core.sampling_params",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'paceline' has no attribute {name!r}; it has {__all__}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
