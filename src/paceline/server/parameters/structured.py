"""The form of an answer as clients ask for it: the OpenAI API's response_format, and what clients
of other engines send.  Each becomes what SamplingParams takes: one kind and its text.
"""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, Raw, UnsetType

from paceline.core.request.structured import StructureKind
from paceline.server.bodies.places import Place, written
from paceline.server.bodies.refusals import Wire, is_sent
from paceline.server.errors import ApiError

_SCHEMA = {"type": ["object", "boolean", "string", "null"], "description": "a JSON schema"}
Schema = Annotated[Raw | UnsetType, Meta(extra_json_schema=_SCHEMA)]
Form = dict[str, object]  # for SamplingParams.structured_outputs


class JsonSchema(Wire, frozen=True, kw_only=True):
    """A schema with a name; it is followed whether strict or not."""

    name: str
    description: str | None = None
    schema: Schema = UNSET
    strict: bool | None = None


class ResponseFormat(Wire, frozen=True, kw_only=True):
    """The OpenAI API's field."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    def check(self, place: Place) -> None:
        Wire.check(self, place)
        is_schema, given = self.type == "json_schema", self.json_schema
        if is_schema != (given is not None):
            raise ApiError.about(
                "json_schema",
                expected="there with type json_schema, and with no other",
                got="nothing" if given is None else f"type {self.type}",
                remedy='send {"type": "json_schema", "json_schema": {"name": ..., "schema": ...}}',
                param=written((*place, "json_schema")),
            )
        if given is not None and not is_sent(given.schema):
            raise ApiError.about(
                "schema",
                expected="present",
                got="nothing",
                remedy="add it",
                param=written((*place, "json_schema", "schema")),
                code="missing_required_parameter",
            )

    @property
    def form(self) -> Form | None:
        if self.type == "text":
            return None
        if self.json_schema is None:
            return {StructureKind.JSON_OBJECT: True}
        return {StructureKind.JSON: schema_text(self.json_schema.schema)}


class StructuredFields(Wire, frozen=True, kw_only=True):
    """One of these."""

    json: Schema = UNSET
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None

    @property
    def form(self) -> Form:
        """What was sent, however many that is."""
        asked: Form = {} if not is_sent(self.json) else {StructureKind.JSON: schema_text(self.json)}
        for name in ("json_object", "regex", "choice", "grammar"):
            if getattr(self, name) is not None:
                asked[name] = getattr(self, name)
        return asked


class StructuredRequest(Wire, frozen=True, kw_only=True):
    """What both endpoints take; rules.py lets one of these through."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredFields | None = None
    guided_json: Schema = UNSET
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None

    @property
    def form(self) -> Form | None:
        """For SamplingParams; None: free text."""
        if self.response_format is not None and self.response_format.form is not None:
            return self.response_format.form
        if self.structured_outputs is not None:
            return self.structured_outputs.form
        if is_sent(self.guided_json):
            return {StructureKind.JSON: schema_text(self.guided_json)}
        asked: Form = {
            StructureKind.REGEX: self.guided_regex,
            StructureKind.CHOICE: self.guided_choice,
            StructureKind.GRAMMAR: self.guided_grammar,
        }
        return {kind: said for kind, said in asked.items() if said is not None} or None


def schema_text(raw: Any) -> str:
    """A schema's text, as it came or in a JSON string."""
    sent = bytes(raw)
    return msgspec.json.decode(sent, type=str) if sent[:1] == b'"' else sent.decode()
