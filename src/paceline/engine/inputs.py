"""What callers pass to `generate`, in all the forms they may write it, as lists."""

from collections.abc import Mapping, Sequence
from typing import Any

from paceline.core.errors import RequestError, message
from paceline.core.sampling_params import SamplingParams

Prompt = str | Sequence[int]
Params = SamplingParams | Mapping[str, Any]


def as_batch(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or many as a list; ids are not looked at.  Raises RequestError."""
    if isinstance(prompts, str):
        return [prompts]
    if not _is_list(prompts):
        raise _prompt_error("prompts", type(prompts).__name__)
    items = list(prompts)
    if not items:
        raise _prompt_error("prompts", "an empty list")
    if all(isinstance(item, int) for item in items):
        return [items]  # type: ignore[list-item]
    for item in items:
        if not (isinstance(item, str) or _is_list(item)):
            raise _prompt_error("prompt", type(item).__name__)
    return items  # type: ignore[return-value]


def _is_list(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray)


def _prompt_error(name: str, got: str) -> RequestError:
    expected = "text or a sequence of token ids"
    if name == "prompts":
        expected += ", or a list of such, at least one"
    return RequestError(
        message(name, expected=expected, got=got, remedy="pass a str or a list of int")
    )


def as_params(params: Params | Sequence[Params] | None, count: int) -> list[SamplingParams]:
    """Parameters for each of `count` prompts.  Raises RequestError."""
    if params is None:
        params = SamplingParams()
    if isinstance(params, SamplingParams | Mapping):
        params = [params] * count
    got = len(params) if _is_list(params) else type(params).__name__
    if got != count:
        raise _params_error(f"one for all or one for each of {count} prompts", got)
    return [_as_one_params(each) for each in params]


def _as_one_params(value: Params) -> SamplingParams:
    if isinstance(value, SamplingParams):
        return value
    if not isinstance(value, Mapping):
        raise _params_error("SamplingParams or a mapping", type(value).__name__)
    return SamplingParams.from_dict(value)


def _params_error(expected: str, got: object) -> RequestError:
    remedy = "pass a single SamplingParams"
    return RequestError(message("params", expected=expected, got=got, remedy=remedy))
