"""What clients send to /tokenize and /detokenize."""

from typing import Annotated, Any

from msgspec import Meta

from paceline.server.bodies.places import Place
from paceline.server.bodies.refusals import Wire
from paceline.server.bodies.wire import ChatRequest
from paceline.server.errors import ApiError
from paceline.server.tools.wire import MAX_MESSAGES, MAX_TOOLS, Message, Tool


class TokenizeRequest(Wire, frozen=True, kw_only=True):
    """POST /tokenize: a prompt, or messages as a chat takes them."""

    model: str | None = None
    prompt: str | None = None
    add_special_tokens: bool | None = None  # to a prompt; for messages the template decides
    messages: Annotated[list[Message], Meta(min_length=1, max_length=MAX_MESSAGES)] | None = None
    tools: Annotated[list[Tool], Meta(max_length=MAX_TOOLS)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    def check(self, place: Place) -> None:
        Wire.check(self, place)
        if (self.prompt is None) == (self.messages is None):
            got = "none" if self.prompt is None else "both"
            raise ApiError.about(
                "the body", expected="with prompt or messages", got=got, remedy="send one of them"
            )
        names = ("tools", "chat_template_kwargs", "add_generation_prompt", "continue_final_message")
        wrong = names if self.messages is None else ("add_special_tokens",)
        for name in wrong:
            if getattr(self, name) is not None:
                other = "messages" if self.messages is None else "prompt"
                raise ApiError.about(
                    name,
                    expected=f"sent with {other}",
                    got="without",
                    remedy="remove it",
                    param=name,
                )

    def as_chat(self, model: str) -> ChatRequest:
        """The same of a chat.  Raises ApiError."""
        chat = ChatRequest(
            model=model,
            messages=self.messages or [],
            tools=self.tools,
            chat_template_kwargs=self.chat_template_kwargs,
            add_generation_prompt=self.add_generation_prompt,
            continue_final_message=self.continue_final_message,
        )
        chat.check(())
        return chat


class DetokenizeRequest(Wire, frozen=True, kw_only=True):
    """POST /detokenize."""

    model: str | None = None
    tokens: list[int]
