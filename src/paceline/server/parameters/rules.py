"""Rules between the fields of a request: what one needs beside it, and what it excludes.

The same rules refuse requests, and are told by GET /capabilities and docs/parameters.md.
"""

from typing import NamedTuple

import msgspec

from paceline.server.errors import ApiError

_NOTHING = (None, msgspec.UNSET, False)


class Rule(NamedTuple):
    """Of a field that asks for something."""

    name: str
    needs: str = ""  # a field that must ask for something too
    excludes: str = ""  # a field that must not
    why: str = ""  # of an exclusion

    def told(self) -> str:
        """In the words of a refusal."""
        if self.needs:
            return f"{self.name} needs {self.needs} to be true; set it, or leave {self.name} out"
        return f"{self.excludes} and {self.name} {self.why}"


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
    *(
        Rule(name, excludes=other, why=_ONE_FORM)
        for index, name in enumerate(FORMS)
        for other in FORMS[:index]
    ),
)


def rules_of(kind: type[msgspec.Struct]) -> list[Rule]:
    """Those whose fields `kind` has."""
    names = {"", *kind.__struct_fields__}
    return [rule for rule in RULES if {rule.name, rule.needs, rule.excludes} <= names]


def check_rules(request: msgspec.Struct, within: str = "") -> None:
    """Raise ApiError, 400, for the first rule that a request breaks.  within: what it is a field
    of, with a point behind."""
    for rule in rules_of(type(request)):
        is_broken = asks(request, rule.name) and (
            not asks(request, rule.needs) if rule.needs else asks(request, rule.excludes)
        )
        if is_broken:
            raise ApiError(400, rule.told(), param=f"{within}{rule.name}")


def asks(request: msgspec.Struct, name: str) -> bool:
    """Whether a field holds more than nothing: null, false, or free text as a response_format."""
    value = getattr(request, name)
    if isinstance(value, msgspec.Raw):
        return bytes(memoryview(value)[:4]) != b"null"
    if any(value is each for each in _NOTHING):
        return False
    return not (name == "response_format" and value.type == "text")
