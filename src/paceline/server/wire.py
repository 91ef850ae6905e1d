"""What clients may send: the OpenAI API's fields this server honours, and its own additions.

Types are strict and unknown fields are refused.  null means the same as leaving a field out.
`user`, `metadata`, `safety_identifier` and `prompt_cache_key` describe the caller and change no
answer: they are accepted and not kept.
"""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from paceline.core.sampling_params import MAX_LOGPROBS, SamplingParams
from paceline.server.refusals import (
    CHAT_REFUSALS,
    COMPLETION_REFUSALS,
    MESSAGE_REFUSALS,
    Refusal,
    without_refused,
)

TokenIds = Annotated[list[int], Field(min_length=1, fail_fast=True)]
Texts = Annotated[list[str], Field(min_length=1, fail_fast=True)]
Batches = Annotated[list[TokenIds], Field(min_length=1, fail_fast=True)]

# Fields of a request that SamplingParams has under the same name.
_SAMPLING = (
    "n",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "min_tokens",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "seed",
    "extra_args",
    "speculative",
)


class Wire(BaseModel):
    """An object a client sends."""

    model_config = ConfigDict(extra="forbid", strict=True)
    refusals: ClassVar[dict[str, Refusal]] = {}

    @model_validator(mode="before")
    @classmethod
    def _refuse(cls, body: Any) -> Any:
        return without_refused(body, cls.refusals)


class StreamOptions(Wire):
    """How a stream ends."""

    refusals = {"include_obfuscation": Refusal((False,), "chunks are not padded")}

    include_usage: bool | None = None


class GenerationRequest(Wire):
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
    extra_args: dict[str, Any] | None = None  # of the server's logits processors
    speculative: bool | str | None = None  # "on", "off" or a bool

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def sampling(self, **more: Any) -> SamplingParams:
        """Raises RequestError for values out of range."""
        asked = {name: getattr(self, name) for name in _SAMPLING}
        return SamplingParams.from_dict(
            {name: value for name, value in asked.items() if value is not None} | more
        )


class CompletionRequest(GenerationRequest):
    """POST /v1/completions."""

    refusals = dict(COMPLETION_REFUSALS)

    prompt: str | Texts | TokenIds | Batches
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    echo: bool | None = None


class TextPart(Wire):
    """A piece of a message."""

    type: Literal["text"]
    text: str


class Message(Wire):
    """One turn of a conversation; its content is a text, or a list of text parts, joined by line
    ends.
    """

    refusals = dict(MESSAGE_REFUSALS)

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]
    name: str | None = None

    def for_template(self) -> dict[str, str]:
        """As chat templates read it."""
        content = self.content
        text = content if isinstance(content, str) else "\n".join(part.text for part in content)
        named = {} if self.name is None else {"name": self.name}
        return {"role": self.role, "content": text, **named}


class ChatRequest(GenerationRequest):
    """POST /v1/chat/completions."""

    refusals = dict(CHAT_REFUSALS)

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    metadata: dict[str, str] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
