"""paceline: an LLM inference engine whose fast path is one program in every form it runs in."""

import os
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline.core.request.sampling_params import SamplingParams
    from paceline.engine.answers.outputs import RequestOutput
    from paceline.llm.async_llm import AsyncLLM
    from paceline.llm.llm import LLM

# How long a CPU thread spins before it sleeps, unless the environment says; read when torch is
# first imported.  GNU's default of 300,000 turns is milliseconds: with fewer free cores than
# threads every parallel operation costs that, on all of them (decision 035).
if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & os.environ.keys():
    os.environ["GOMP_SPINCOUNT"] = "1000"

__all__ = ["LLM", "AsyncLLM", "RequestOutput", "SamplingParams"]

_HOMES = {
    "LLM": "paceline.llm.llm",
    "AsyncLLM": "paceline.llm.async_llm",
    "RequestOutput": "paceline.engine.answers.outputs",
    "SamplingParams": "paceline.core.request.sampling_params",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'paceline' has no attribute {name!r}; it has {__all__}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])


def _revert_fixes(ids: str) -> None:
    """Bring past bugs back, as `paceline debug fixes` lists them; ends the process where it cannot,
    with the code of flags that cannot work: a bug that is not there must not look caught."""
    from pathlib import Path

    from paceline.core.errors import ConfigError
    from paceline.core.reverts.hook import revert

    package = Path(__file__).parent
    try:
        revert(ids.split(","), fixes=package / "proof" / "fixes", package=package)
    except ConfigError as error:
        print(f"ConfigError: PACELINE_REVERT_FIX: {error}", file=sys.stderr)
        raise SystemExit(2) from error


if os.environ.get("PACELINE_REVERT_FIX"):
    _revert_fixes(os.environ["PACELINE_REVERT_FIX"])
