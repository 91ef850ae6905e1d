"""Rules between the fields of a request: what one needs beside it, and what it excludes.

The same rules refuse requests, and are told by GET /capabilities and docs/parameters.md.
"""

from functools import cache
from typing import NamedTuple

import msgspec

from paceline.server.bodies.refusals import is_sent
from paceline.server.errors import ApiError

_NOTHING = (None, msgspec.UNSET, False)


class Rule(NamedTuple):
    """Of a field that asks for something."""

    name: str
    needs: str = ""  # a field that must ask for something too
    excludes: str = ""  # a field that must not
    agrees: str = ""  # a field that must hold the same number
    default: int | None = None  # what that one means left out; None: nothing to agree with
    when: str = ""  # a field without which it need not agree
    why: str = ""  # what a refusal says behind it

    def told(self) -> str:
        """In the words of a refusal."""
        if self.needs:
            return f"{self.name} needs {self.needs} to be true; set it, or leave {self.name} out"
        if self.excludes:
            return f"{self.excludes} and {self.name} {self.why}"
        return f"{self.name} must be {self.agrees}{self.when and f' where there is {self.when}'}"

    def refusal(self, request: msgspec.Struct, param: str) -> ApiError | None:
        """Of a request that breaks it."""
        if not asks(request, self.name):
            return None
        if self.agrees:
            return self._disagreement(request, param)
        if asks(request, self.needs) if self.needs else not asks(request, self.excludes):
            return None
        return ApiError(400, self.told(), param=param)

    def _disagreement(self, request: msgspec.Struct, param: str) -> ApiError | None:
        got, wanted = getattr(request, self.name), getattr(request, self.agrees)
        wanted = self.default if wanted is None else wanted
        if wanted in (None, got) or (self.when and not asks(request, self.when)):
            return None
        expected = f"{self.agrees}, {wanted}{self.when and f', where there is {self.when}'}"
        return ApiError.about(self.name, expected=expected, got=got, remedy=self.why, param=param)


# The form of an answer is said in one of these.
FORMS = (
    "response_format",
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
)
_ONE_FORM = "are two forms of one answer; send one of them"
_TWO_NAMES = "are two names of one limit; send one of them"
_IN_ONE_PIECE = "exclude each other: a prompt's scores come in one piece; leave one out"

RULES = (
    Rule("stream_options", needs="stream"),
    Rule("continuous_usage_stats", needs="include_usage"),
    Rule("top_logprobs", needs="logprobs"),
    Rule("max_completion_tokens", excludes="max_tokens", why=_TWO_NAMES),
    Rule("continue_final_message", excludes="add_generation_prompt", why="exclude one another"),
    Rule("prompt_logprobs", excludes="stream", why=_IN_ONE_PIECE),
    Rule("prompt_logprobs", agrees="logprobs", when="echo", why="leave one of them out"),
    Rule("best_of", agrees="n", default=1, why="ask for n completions and choose among them"),
    *(
        Rule(name, excludes=other, why=_ONE_FORM)
        for index, name in enumerate(FORMS)
        for other in FORMS[:index]
    ),
)


@cache
def rules_of(kind: type[msgspec.Struct]) -> tuple[Rule, ...]:
    """Those whose fields `kind` has."""
    names = {"", *kind.__struct_fields__}
    return tuple(r for r in RULES if {r.name, r.needs, r.excludes, r.agrees, r.when} <= names)


def check_rules(request: msgspec.Struct, within: str = "") -> None:
    """Raise ApiError, 400, for the first rule that a request breaks.  within: what it is a field
    of, with a point behind."""
    for rule in rules_of(type(request)):
        refusal = rule.refusal(request, f"{within}{rule.name}")
        if refusal is not None:
            raise refusal


def asks(request: msgspec.Struct, name: str) -> bool:
    """Whether a field holds more than nothing: null, false, or free text as a response_format."""
    value = getattr(request, name)
    if isinstance(value, msgspec.Raw):
        return is_sent(value)
    if any(value is each for each in _NOTHING):
        return False
    return not (name == "response_format" and value.type == "text")
