"""The flags of the sampling parameters: a flag for each field of SamplingParams."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, TypeVar

import click

from paceline.cli.verb import GroupedOption
from paceline.core.request.sampling_params import SamplingParams

GROUP = "Sampling"
GREEDY = (0.0, "a command typed twice answers the same")  # the usual temperature
Command = TypeVar("Command", bound=Callable[..., object])


class Json(click.ParamType):  # type: ignore[type-arg]
    """A word of JSON; what it holds is checked with the parameters."""

    name = "json"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> object:
        try:
            return json.loads(value)
        except json.JSONDecodeError as error:
            self.fail(f"{value!r} is not JSON: {error}", param, ctx)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingFlag:
    """How one field is typed."""

    flags: tuple[str, ...]
    kind: Any  # bool: a switch
    help: str
    is_repeated: bool = False


def _flag(*flags: str, kind: Any, help: str, is_repeated: bool = False) -> SamplingFlag:
    return SamplingFlag(flags=flags, kind=kind, help=help, is_repeated=is_repeated)


SAMPLING = {
    "max_tokens": _flag(
        "--max-tokens", "--max-new-tokens", kind=int, help="Longest output.  [tokens]"
    ),
    "temperature": _flag("--temperature", kind=float, help="0 takes the most likely token."),
    "top_k": _flag("--top-k", kind=int, help="Most likely tokens kept."),
    "top_p": _flag("--top-p", kind=float, help="Mass of the most likely tokens kept."),
    "min_p": _flag(
        "--min-p", kind=float, help="Least likelihood of a kept token, relative to the best."
    ),
    "repetition_penalty": _flag(
        "--repetition-penalty", kind=float, help="Over prompt and output; 1 is none."
    ),
    "presence_penalty": _flag("--presence-penalty", kind=float, help="Over the output; 0 is none."),
    "frequency_penalty": _flag(
        "--frequency-penalty", kind=float, help="Over the output, by count; 0 is none."
    ),
    "logit_bias": _flag(
        "--logit-bias", kind=Json(), help="Added to the logits of tokens: '{\"42\": -100}'."
    ),
    "min_tokens": _flag("--min-tokens", kind=int, help="No end before so many.  [tokens]"),
    "stop": _flag(
        "--stop", kind=str, is_repeated=True, help="Text that ends the output.  May be repeated."
    ),
    "stop_token_ids": _flag(
        "--stop-token-id",
        "--stop-token-ids",
        kind=int,
        is_repeated=True,
        help="Token that ends the output.  May be repeated.",
    ),
    "include_stop_str_in_output": _flag(
        "--include-stop-str-in-output", kind=bool, help="Show the stop text."
    ),
    "ignore_eos": _flag("--ignore-eos", kind=bool, help="Go on behind end tokens."),
    "skip_special_tokens": _flag(
        "--skip-special-tokens/--no-skip-special-tokens",
        kind=bool,
        help="Leave special tokens out of the text.",
    ),
    "n": _flag("--n", kind=int, help="Completions of each prompt."),
    "logprobs": _flag(
        "--logprobs",
        kind=int,
        help="With --json: log-probabilities of the output, and of so many most likely tokens.",
    ),
    "prompt_logprobs": _flag(
        "--prompt-logprobs",
        kind=int,
        help="With --json: the same of the prompt's tokens.",
    ),
    "extra_args": _flag(
        "--extra-args", kind=Json(), help="Arguments of logits processors, as one JSON object."
    ),
    "structured_outputs": _flag(
        "--structured-outputs",
        kind=Json(),
        help='Form of the answer: \'{"json": {"type": "object"}}\'; or json_object, regex, choice, '
        "grammar.",
    ),
    "speculative": _flag(
        "--speculative", kind=click.Choice(("on", "off")), help="off: take no drafts."
    ),
    "receipt": _flag("--receipt", kind=bool, help="With --json: how it was computed."),
    "trace_tokens": _flag(
        "--trace-tokens", kind=bool, help="With --json: where tokens came from; drafts of rounds."
    ),
}


def sampling_flags(
    *, without: tuple[str, ...] = (), **usual: tuple[object, str]
) -> Callable[[Command], Command]:
    """Add a flag for each field of SamplingParams but those `without`.

    usual: defaults that differ from the API's, with the reason; a max_tokens of None means the rest
    of the context.  A command makes its parameters by `sampling_params`.
    """

    def add(command: Command) -> Command:
        for name in reversed(SAMPLING):
            if name not in without:
                command = _decorator(name, usual.get(name))(command)
        return command

    return add


def sampling_params(values: Mapping[str, Any], **more: object) -> SamplingParams:
    """The parameters that were typed, and `more`.  Raises RequestError."""
    typed = {
        name: values[name]
        for name in SAMPLING
        if name == "max_tokens" or values.get(name) not in (None, ())
    }
    return SamplingParams.from_dict({**typed, **more})


def _decorator(name: str, usual: tuple[object, str] | None) -> Callable[[Command], Command]:
    flag = SAMPLING[name]
    api = next(field.default for field in fields(SamplingParams) if field.name == name)
    default, shown = None, f"  [default: {_shown(api)}]"
    if usual is not None:
        default, why = usual
        meant = "the rest of the context" if default is None else default
        shown = f"  [default: {meant}; {_shown(api)} in the API: {why}]"
    settings: dict[str, Any] = {"is_flag": True} if flag.kind is bool else {"type": flag.kind}
    return click.option(
        *flag.flags,
        name,
        cls=GroupedOption,
        group=GROUP,
        default=default,
        multiple=flag.is_repeated,
        help=flag.help + shown,
        **settings,
    )


def _shown(default: object) -> object:
    if isinstance(default, bool):
        return "on" if default else "off"
    return "none" if default in (None, ()) else default
