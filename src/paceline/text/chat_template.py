"""Chat templates: messages to the text a model was tuned on.

The environment is the one Hugging Face templates are written for (transformers documentation,
"Writing a chat template"): sandboxed, blocks trimmed, `tojson` without HTML escapes,
`raise_exception`, `strftime_now`, loop controls, and the `generation` block, which renders as its
content.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from paceline.core.errors import ConfigError, RequestError

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
_MAX_TOLD = 1_000  # characters of a template's own words in an error


class ChatTemplate:
    """One compiled template.  Raises ConfigError when it has a syntax error or jinja2 is absent."""

    def __init__(self, source: str) -> None:
        try:
            import jinja2
            from jinja2 import meta
        except ImportError as error:
            raise ConfigError.about(
                "chat template",
                expected="the jinja2 package",
                got="an installation without it",
                remedy="pip install jinja2, or send plain prompts",
            ) from error
        from paceline.text.template_sandbox import sandbox

        try:
            environment = sandbox()
            self._template = environment.from_string(source)
            self.source = source
            # The variables it looks up.
            self.reads = frozenset(meta.find_undeclared_variables(environment.parse(source)))
        except jinja2.TemplateSyntaxError as error:
            raise _unusable(f"line {error.lineno}: {error.message}") from error
        except (SyntaxError, *_FAULTS) as error:  # nested too deep, or a number too long
            raise _unusable(repr(error)) from error

    def render(self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> str:
        """The prompt text.

        Raises RequestError when the template refuses the messages, fails on them or does more than
        they are worth (template_budget.py).
        """
        import jinja2

        from paceline.text.template_budget import OverBudget
        from paceline.text.template_sandbox import render

        try:
            return render(self._template, {**variables, "messages": messages})
        except OverBudget as error:
            raise _refusal(str(error)) from error
        except (jinja2.TemplateError, *_FAULTS) as error:
            told = str(error) if isinstance(error, jinja2.TemplateError) else repr(error)
            cut = told if len(told) <= _MAX_TOLD else f"{told[:_MAX_TOLD]}..."
            raise _refusal(f"its refusal: {cut}") from error


def _unusable(got: str) -> ConfigError:
    return ConfigError.about(
        "chat template",
        expected="a valid Jinja template",
        got=got,
        remedy="repair chat_template in the model's tokenizer_config.json",
    )


def _refusal(got: str) -> RequestError:
    return RequestError.about(
        "messages",
        expected="what the model's chat template accepts",
        got=got,
        remedy="check roles, their order and the content's type",
    )
