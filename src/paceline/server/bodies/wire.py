"""What clients may send: the OpenAI API's fields this server honours, and its own additions.

Types are strict and unknown fields are refused.  null means the same as leaving a field out.
`user`, `metadata`, `safety_identifier` and `prompt_cache_key` describe the caller and change no
answer: they are accepted and not kept.
"""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import UNSET, Meta, Raw, UnsetType

from paceline.core.request.sampling_params import MAX_LOGPROBS, SamplingParams
from paceline.server.bodies.places import Place, written
from paceline.server.bodies.refusals import Refusal, Unserved, Wire, as_sent
from paceline.server.errors import ApiError
from paceline.server.parameters.rules import check_rules
from paceline.server.parameters.structured import StructuredRequest
from paceline.server.tools.wire import (
    MAX_MESSAGES,
    MAX_TOOLS,
    OLD_TOOLS,
    TEXT_ONLY,
    Effort,
    Message,
    Tool,
    ToolChoice,
    check_tools,
)

MAX_METADATA = 16  # the OpenAI API's limit

MAX_PRIORITY = 1000  # lower goes first, among the requests of its client

_MAX_EXTRA_ARGS = 1 << 17  # bytes: the one field whose content is not known here, and built
_OBJECT = {"type": ["object", "null"], "description": "of the server's logits processors"}

TokenIds = Annotated[list[int], Meta(min_length=1)]
Prompts = str | Annotated[list[str | int | TokenIds], Meta(min_length=1)]  # of one type
Priority = Annotated[int, Meta(ge=-MAX_PRIORITY, le=MAX_PRIORITY)]
DeadlineS = Annotated[float, Meta(ge=0.001)]  # for the whole answer


class StreamOptions(Wire, frozen=True, kw_only=True):
    """How a stream ends."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None  # in every chunk, of what has come

    include_obfuscation: Annotated[Unserved, Refusal((False,), "chunks are not padded")] = UNSET


class GenerationRequest(StructuredRequest, frozen=True, kw_only=True, dict=True):
    """What both endpoints take."""

    model: str
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    n: int | None = None
    stop: str | list[str] | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None

    # Additions of this server.
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[int] | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    extra_args: Annotated[Raw | UnsetType, Meta(extra_json_schema=_OBJECT)] = UNSET
    speculative: bool | str | None = None  # "on", "off" or a bool
    receipt: bool | None = None  # how it was computed, with the last usage
    trace_tokens: bool | None = None  # where tokens came from and what was drafted, by choice
    priority: Priority | None = None
    deadline_s: DeadlineS | None = None

    def check(self, place: Place) -> None:
        Wire.check(self, place)
        if self.stream_options is not None:
            self.stream_options.check((*place, "stream_options"))
            check_rules(self.stream_options, "stream_options.")
        if self.response_format is not None:
            self.response_format.check((*place, "response_format"))
        check_rules(self)
        _ = self._own_args

    @cached_property
    def _own_args(self) -> Any:
        """extra_args, built once.  Raises ApiError, before that, unless it is an object or null of
        bounded size."""
        sent = self.extra_args
        if sent is UNSET:
            return None
        expected, got = f"at most {_MAX_EXTRA_ARGS} bytes", str(len(sent))
        if len(sent) <= _MAX_EXTRA_ARGS:
            if bytes(memoryview(sent)[:1]) in (b"{", b"n"):
                return msgspec.json.decode(sent)
            expected, got = "an object", as_sent(sent)
        name, remedy = "extra_args", "pass {name: value}"
        raise ApiError.about(name, expected=expected, got=got, remedy=remedy, param=name)

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        return self.include_usage and bool(self.stream_options.continuous_usage_stats)  # type: ignore[union-attr]

    def _sampling(self, **own: int | None) -> dict[str, Any]:
        """What was not left out.  own: what the endpoints name each in its way."""
        asked = {name: getattr(self, name) for name in _SAMPLING}
        asked |= {"extra_args": self._own_args, "structured_outputs": self.form}
        return {name: value for name, value in asked.items() if value is not None} | own


# What SamplingParams has under the same name, in its order: in that of a set, which every process
# has another of, two of them would tell it in two ways.
_SAMPLING = tuple(
    field.name
    for field in fields(SamplingParams)
    if field.name in GenerationRequest.__struct_fields__
)


class CompletionRequest(GenerationRequest, frozen=True, kw_only=True):
    """POST /v1/completions."""

    counted_fields: ClassVar[tuple[str, ...]] = ("prompt",)

    prompt: Prompts
    logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    echo: bool | None = None
    best_of: int | None = None  # as many as n
    prompt_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None

    suffix: Annotated[Unserved, Refusal(("",), "this server continues a text, it fills no gap")] = (
        UNSET
    )

    @property
    def prompts(self) -> Sequence[str | Sequence[int]]:
        """One or several."""
        return as_prompts(self.prompt)

    def sampling(self) -> dict[str, Any]:
        """For SamplingParams.from_dict, which checks them."""
        echoed = self.logprobs if self.echo else None
        scored = self.prompt_logprobs if echoed is None else echoed
        alone = {"max_tokens": 1} if self.echoes_alone else {}  # which is not generated
        return self._sampling(logprobs=self.logprobs, prompt_logprobs=scored, **alone)

    @property
    def echoes_alone(self) -> bool:
        """Whether the prompt itself is the answer."""
        return bool(self.echo) and self.max_tokens == 0

    def check(self, place: Place) -> None:
        GenerationRequest.check(self, place)
        check_alike(self.prompt, "prompt")


def as_prompts(sent: str | Sequence[str | int | list[int]]) -> Sequence[str | Sequence[int]]:
    """What was sent as one or several."""
    is_one = isinstance(sent, str) or isinstance(sent[0], int)
    return [sent] if is_one else sent  # type: ignore[return-value, list-item]


def check_alike(sent: str | Sequence[str | int | list[int]], name: str) -> None:
    """Raise ApiError, 400, for several of different types.  name: of their field."""
    if isinstance(sent, str) or len(set(map(type, sent))) == 1:
        return
    first = type(sent[0])
    raise mixed_prompts(name, next(at for at, each in enumerate(sent) if type(each) is not first))


def mixed_prompts(name: str, index: int) -> ApiError:
    """Of a list of prompts with another type at `index`."""
    param = written((name, index))
    remedy = "send texts, token ids or lists of token ids, one of these"
    return ApiError.about(
        param, expected="like those before it", got="another type", remedy=remedy, param=param
    )


class ChatRequest(GenerationRequest, frozen=True, kw_only=True):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Meta(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    metadata: Annotated[dict[str, str], Meta(max_length=MAX_METADATA)] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    tools: Annotated[list[Tool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | Literal["none", "auto", "required"] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Effort | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    audio: Annotated[Unserved, Refusal((), TEXT_ONLY)] = UNSET
    chat_template: Annotated[
        Unserved, Refusal((), "the template is the one in the model's folder; change it there")
    ] = UNSET
    function_call: Annotated[Unserved, Refusal(("none",), OLD_TOOLS)] = UNSET
    functions: Annotated[Unserved, Refusal(([],), OLD_TOOLS)] = UNSET
    modalities: Annotated[Unserved, Refusal((["text"],), TEXT_ONLY)] = UNSET
    moderation: Annotated[Unserved, Refusal((), "nothing is moderated here")] = UNSET
    prediction: Annotated[Unserved, Refusal((), "leave it out; the answer is the same")] = UNSET
    prompt_cache_options: Annotated[
        Unserved, Refusal((), "prefixes are shared without being asked")
    ] = UNSET
    prompt_cache_retention: Annotated[
        Unserved, Refusal(("in_memory",), "prefixes are kept in memory")
    ] = UNSET
    prompt_logprobs: Annotated[Unserved, Refusal((), "ask /v1/completions for them")] = UNSET
    service_tier: Annotated[Unserved, Refusal(("auto", "default"), "there is one tier")] = UNSET
    store: Annotated[Unserved, Refusal((False,), "nothing is stored here")] = UNSET
    verbosity: Annotated[Unserved, Refusal(("medium",), "ask for it in a message")] = UNSET
    web_search_options: Annotated[Unserved, Refusal((), "this server searches nothing")] = UNSET

    @property
    def names(self) -> Mapping[str, str]:
        """Of a param, as SamplingParams calls it, to what stands for it here."""
        return {"max_tokens": "max_completion_tokens"} if self.max_tokens is None else {}

    def check(self, place: Place) -> None:
        GenerationRequest.check(self, place)
        for index, each in enumerate(self.messages):
            each.check((*place, "messages", index))
        check_tools(self.tools or (), self.tool_choice, place)
        if self.tool_choice not in (None, "none", "auto") and self.form is not None:
            text = "tool_choice and a form of the answer exclude each other; send one of them"
            raise ApiError(400, text, param="tool_choice")

    def sampling(self) -> dict[str, Any]:
        """For SamplingParams.from_dict, which checks them; without a limit to the rest of the
        context.
        """
        limit = self.max_completion_tokens if self.max_tokens is None else self.max_tokens
        logprobs = (self.top_logprobs or 0) if self.logprobs else None
        return self._sampling(max_tokens=limit, logprobs=logprobs)
