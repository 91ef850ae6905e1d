"""Chat templates: messages to the text a model was tuned on.

The environment is the one Hugging Face templates are written for (transformers documentation,
"Writing a chat template"): sandboxed, blocks trimmed, `tojson` without HTML escapes,
`raise_exception`, `strftime_now`, loop controls, and the `generation` block, which renders as its
content.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from paceline.core.errors import ConfigError, RequestError, message

RENDER_LIMIT_S = 5.0  # templates take milliseconds
# What a template's expressions raise when they do not fit the messages.
_FAULTS = (
    ArithmeticError,
    AttributeError,
    LookupError,
    MemoryError,
    RuntimeError,
    TypeError,
    ValueError,
)


class ChatTemplate:
    """One compiled template.  Raises ConfigError when it has a syntax error or jinja2 is absent."""

    def __init__(self, source: str, *, limit_s: float = RENDER_LIMIT_S) -> None:
        try:
            import jinja2
        except ImportError as error:
            raise ConfigError(
                message(
                    "chat template",
                    expected="the jinja2 package",
                    got="an installation without it",
                    remedy="pip install jinja2, or send plain prompts",
                )
            ) from error
        from paceline.engine.template_sandbox import sandbox

        self._limit_s = limit_s
        try:
            self._template = sandbox().from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ConfigError(
                message(
                    "chat template",
                    expected="a valid Jinja template",
                    got=f"line {error.lineno}: {error.message}",
                    remedy="repair chat_template in the model's tokenizer_config.json",
                )
            ) from error

    def render(self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> str:
        """The prompt text.  Raises RequestError when the template refuses the messages, fails on
        them or does not end.
        """
        import jinja2

        from paceline.engine.template_sandbox import Expired, TimeLimit

        limit = TimeLimit(self._limit_s)
        try:
            with limit:
                return str(self._template.render(messages=messages, **variables))
        except (jinja2.TemplateError, Expired, *_FAULTS) as error:
            if limit.has_fired:
                raise _refusal(f"no end of it within {self._limit_s:g} s") from error
            told = str(error) if isinstance(error, jinja2.TemplateError) else repr(error)
            raise _refusal(f"its refusal: {told}") from error


def _refusal(got: str) -> RequestError:
    return RequestError(
        message(
            "messages",
            expected="what the model's chat template accepts",
            got=got,
            remedy="check roles, their order and the content's type",
        )
    )
