"""Chat templates: messages to the text a model was tuned on.

The environment is the one Hugging Face templates are written for (transformers documentation,
"Writing a chat template"): sandboxed, blocks trimmed, `tojson` without HTML escapes,
`raise_exception`, `strftime_now`, loop controls, and the `generation` block, which renders as its
content.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

from paceline.core.errors import ConfigError, RequestError, message


class ChatTemplate:
    """One compiled template.  Raises ConfigError when it has a syntax error or jinja2 is absent."""

    def __init__(self, source: str) -> None:
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
        try:
            self._template = _environment().from_string(source)
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
        """The prompt text.  Raises RequestError when the template refuses the messages."""
        import jinja2

        try:
            return str(self._template.render(messages=messages, **variables))
        except (jinja2.TemplateError, TypeError) as error:
            raise RequestError(
                message(
                    "messages",
                    expected="what the model's chat template accepts",
                    got=f"its refusal: {error}",
                    remedy="check roles, their order and the content's type",
                )
            ) from error


def _environment() -> Any:
    from jinja2 import nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class GenerationBlock(Extension):
        """`{% generation %}…{% endgeneration %}` marks what the model writes."""

        tags = {"generation"}  # noqa: RUF012  jinja2's interface

        def parse(self, parser: Any) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body).set_lineno(line)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, GenerationBlock]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    *,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(text: str) -> NoReturn:
    import jinja2

    raise jinja2.TemplateError(text)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)
