"""Plug-in logits processors: named by the user, made once, their arguments checked at the edge."""

from collections.abc import Sequence

import torch

from paceline.core.errors import ConfigError, RequestError
from paceline.core.near import did_you_mean
from paceline.core.plugins import load_class
from paceline.core.request.sampling_params import SamplingParams
from paceline.layers.sampling import LogitsProcessor
from paceline.layers.sampling.processor import column_values, own_args
from paceline.plan.memory.demand import PLUG_IN_ROW_BYTES

Processors = tuple[LogitsProcessor, ...]
# What a plug-in raises for arguments that its author did not think of.
_FAULTS = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)


def load_processors(names: Sequence[str]) -> Processors:
    """The processors behind `package.module:Class` names, in order.  Raises ConfigError."""
    processors = tuple(map(_load, names))
    owners: dict[str, str] = {}
    for name, processor in zip(names, processors, strict=True):
        for argument in sorted(processor.arguments):
            if argument in owners:
                raise _config_error(
                    f"the argument '{argument}'",
                    "declared by one logits processor",
                    f"{owners[argument]} and {name}",
                    "load one of the two",
                )
            owners[argument] = name
        _check_columns(name, processor)
    num_bytes = sum(_row_bytes(processor) for processor in processors)
    if num_bytes > PLUG_IN_ROW_BYTES:
        raise _config_error(
            "columns of logits processors",
            f"at most {PLUG_IN_ROW_BYTES} bytes per request",
            num_bytes,
            "declare narrower ones, of token ids rather than of the vocabulary",
        )
    return processors


def check_extra_args(
    processors: Processors,
    params: SamplingParams,
    *,
    vocab_size: int,
    prompt_len: int,
    stop_ids: tuple[int, ...],
) -> None:
    """Raise RequestError for an argument that no processor declares, or that its own refuses or
    cannot pack: what passes here can join.
    """
    known = sorted(name for processor in processors for name in processor.arguments)
    for name, _ in params.extra_args:
        if name not in known:
            load = "load its processor with --logits-processor"
            raise RequestError.about(
                "a key of extra_args",
                expected=f"one of {', '.join(known)}" if known else "absent",
                got=f"{name!r}",
                remedy=did_you_mean(name, known, otherwise=load),
            )
    for processor in processors:
        args = own_args(processor, params)
        if not args:
            continue
        try:
            processor.check(args, vocab_size)
            column_values(processor, params, prompt_len=prompt_len, stop_ids=stop_ids)
        except _FAULTS as error:
            raise RequestError.about(
                f"extra_args of {type(processor).__name__}",
                expected="values it can pack",
                got=f"{args!r} ({error!r})",
                remedy="correct them, or let its check refuse them",
            ) from error


def _load(name: str) -> LogitsProcessor:
    found = load_class("logits processor", name, LogitsProcessor)  # type: ignore[type-abstract]
    try:
        return found()
    except TypeError as error:
        raise _config_error(
            "logits processor",
            "a class with pack and apply, made without arguments",
            f"{name!r} ({error})",
            "complete the class",
        ) from error


def _check_columns(name: str, processor: LogitsProcessor) -> None:
    for column, spec in processor.columns.items():
        if spec.dtype not in (torch.float32, torch.int64) or (spec.width or 1) < 1:
            raise _config_error(
                f"column '{column}' of {name}",
                "float32 or int64, at least 1 wide",
                f"{spec.dtype}, {spec.width} wide",
                "declare it so",
            )
    params = SamplingParams(temperature=0.0)
    column_values(processor, params, prompt_len=1, stop_ids=())


def _row_bytes(processor: LogitsProcessor) -> int:
    return sum(spec.dtype.itemsize * (spec.width or 1) for spec in processor.columns.values())


def _config_error(name: str, expected: str, got: object, remedy: str) -> ConfigError:
    return ConfigError.about(name, expected=expected, got=got, remedy=remedy)
