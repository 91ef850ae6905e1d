"""Schemas of every part that is followed, in the manner of JSON-Schema-Test-Suite, and of those
that are not, with the words in which they are refused.
"""

from typing import Any

Schema = dict[str, Any]
WORD: Schema = {"type": "string", "maxLength": 6}


def obj(required: list[str] | None = None, **properties: Schema) -> Schema:
    names = list(properties) if required is None else required
    return {
        "type": "object",
        "properties": properties,
        "required": names,
        "additionalProperties": False,
    }


def arr(items: Any, low: int = 0, high: int = 3) -> Schema:
    return {"type": "array", "items": items, "minItems": low, "maxItems": high}


PERSON = obj(name=WORD, age={"type": "integer", "minimum": 0, "maximum": 120})
TREE = {
    "$defs": {"node": {"anyOf": [{"enum": [1, 2]}, arr({"$ref": "#/$defs/node"}, 0, 1)]}},
    "$ref": "#/$defs/node",
}
SCHEMAS: dict[str, Any] = {
    # scalars
    "null": {"type": "null"},
    "boolean": {"type": "boolean"},
    "integer": {"type": "integer", "minimum": -99, "maximum": 99},
    "integer of a minimum": {"type": "integer", "minimum": 10, "maximum": 12345},
    "integer of a maximum": {"type": "integer", "maximum": -10, "minimum": -1000},
    "integer exclusive": {"type": "integer", "exclusiveMinimum": 3, "exclusiveMaximum": 7},
    "integer multiple": {"type": "integer", "multipleOf": 7, "minimum": 1, "maximum": 99},
    "number": {"type": "number", "minimum": 0, "maximum": 1},
    "number exclusive": {"type": "number", "exclusiveMinimum": -1.5, "exclusiveMaximum": 2.25},
    "number of fractions": {"type": "number", "minimum": 0.125, "maximum": 0.5},
    "const number": {"const": 12.5},
    "const text": {"const": 'a "quoted" \\ text\n'},
    "const object": {"const": {"a": [1, None, True]}},
    "enum": {"enum": ["red", "green", "blue"]},
    "enum of kinds": {"enum": [1, "one", None, True, [1], {"one": 1}]},
    "enum with type": {"type": "string", "enum": ["a", "b"]},
    "types": {"type": ["integer", "null"], "minimum": 0, "maximum": 9},
    # strings
    "string": {"type": "string", "maxLength": 12},
    "string of a length": {"type": "string", "minLength": 4, "maxLength": 4},
    "string at least": {"type": "string", "minLength": 2, "maxLength": 9},
    "pattern": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"},
    "pattern open": {"type": "string", "pattern": "^x[0-9]$|^y$"},
    "pattern of words": {"type": "string", "pattern": "^(cat|dog)(, (cat|dog)){0,2}$"},
    "pattern unicode": {"type": "string", "pattern": "^[äöü]{1,3}$"},
    "date": {"type": "string", "format": "date"},
    "time": {"type": "string", "format": "time"},
    "date-time": {"type": "string", "format": "date-time"},
    "uuid": {"type": "string", "format": "uuid"},
    "ipv4": {"type": "string", "format": "ipv4"},
    "email": {"type": "string", "format": "email", "maxLength": 40},
    # arrays
    "array": arr({"type": "integer", "minimum": 0, "maximum": 9}),
    "array of a length": arr(WORD, 2, 2),
    "array at least": arr({"type": "boolean"}, 1, 4),
    "array empty": arr(WORD, 0, 0),
    "array of arrays": arr(arr({"enum": [0, 1]}, 1, 2), 1, 2),
    "array of objects": arr(PERSON, 1, 2),
    "tuple": {
        "type": "array",
        "prefixItems": [{"type": "integer", "maximum": 9, "minimum": 0}, WORD],
        "items": False,
        "minItems": 2,
    },
    "tuple and more": {
        "type": "array",
        "prefixItems": [{"const": "x"}],
        "items": {"type": "null"},
        "minItems": 1,
        "maxItems": 3,
    },
    # objects
    "object": PERSON,
    "object empty": obj(),
    "object optional": obj([], a=WORD, b={"type": "null"}),
    "object some optional": obj(["b"], a=WORD, b={"type": "null"}, c={"type": "boolean"}),
    "object nested": obj(a=obj(b=obj(c={"type": "boolean"}))),
    "object of arrays": obj(tags=arr(WORD, 1, 2), at=arr({"type": "integer", "maximum": 9}, 1, 1)),
    "object of one more": {
        "type": "object",
        "additionalProperties": {"type": "boolean"},
        "maxProperties": 2,
    },
    "object of few": {
        "type": "object",
        "additionalProperties": {"type": "null"},
        "minProperties": 1,
        "maxProperties": 1,
    },
    "object named by a pattern": {
        "type": "object",
        "patternProperties": {"^k[0-9]$": {"type": "integer", "minimum": 0, "maximum": 9}},
        "additionalProperties": False,
        "maxProperties": 2,
    },
    "object of odd names": obj(**{'a "b"': {"const": 1}, "ü\n": {"const": 2}, "": {"const": 3}}),
    "object wide": obj(**{f"field_{i}": {"enum": [i, None]} for i in range(3)}),
    # several at once
    "anyOf": {"anyOf": [{"type": "null"}, {"enum": ["a", "b"]}, PERSON]},
    "anyOf of objects": {"anyOf": [obj(a={"const": 1}), obj(b={"const": 2})]},
    "anyOf in an object": obj(x={"anyOf": [{"type": "null"}, {"type": "boolean"}]}),
    "anyOf in an array": arr({"anyOf": [{"const": 1}, {"const": "1"}]}, 2, 3),
    "oneOf apart": {"oneOf": [{"type": "null"}, {"type": "boolean"}]},
    "oneOf of consts": {"oneOf": [obj(kind={"const": "a"}), obj(kind={"const": "b"})]},
    "allOf": {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 5}]},
    "allOf of objects": {
        "allOf": [
            {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]},
            {"properties": {"b": {"const": 2}}, "required": ["b"]},
        ],
        "properties": {"a": {}, "b": {}},
        "additionalProperties": False,
    },
    # references
    "$ref": {"$defs": {"p": PERSON}, "$ref": "#/$defs/p"},
    "$ref twice": {"$defs": {"w": WORD}, **obj(a={"$ref": "#/$defs/w"}, b={"$ref": "#/$defs/w"})},
    "$ref to definitions": {
        "definitions": {"c": {"enum": ["x", "y"]}},
        **obj(a={"$ref": "#/definitions/c"}),
    },
    "$ref to a property": obj(a={"enum": [1, 2]}, b={"$ref": "#/properties/a"}),
    "$ref to itself": TREE,
    "$ref beside": {
        "$defs": {"n": {"type": "integer", "minimum": 0}},
        "$ref": "#/$defs/n",
        "maximum": 9,
    },
    "$ref in an array": {"$defs": {"c": {"enum": ["x", "y"]}}, **arr({"$ref": "#/$defs/c"}, 1, 3)},
    # words that say nothing of the form
    "annotations": {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": "https://example.test/s",
        "title": "T",
        "description": "d",
        "$comment": "c",
        "examples": [1],
        "default": 1,
        "type": "integer",
        "minimum": 0,
        "maximum": 9,
    },
    "a draft of old": {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "type": "array",
        "items": {"enum": [1, 2]},
        "maxItems": 2,
    },
    "its own options": {"x-guidance": {"lenient": True}, "type": "boolean"},
    "all at once": obj(
        ["id", "state", "lines"],
        id={"type": "string", "pattern": "^[a-f0-9]{8}$"},
        state={"enum": ["new", "paid"]},
        note={"anyOf": [WORD, {"type": "null"}]},
        lines=arr(obj(sku=WORD, count={"type": "integer", "minimum": 1, "maximum": 99}), 1, 2),
    ),
}
REFUSED: dict[str, tuple[Any, str]] = {
    "not": ({"not": {"type": "string"}}, '["not"]'),
    "if": ({"if": {}, "then": {}, "else": {}}, "then"),
    "uniqueItems": ({"type": "array", "uniqueItems": True}, "uniqueItems"),
    "contains": ({"type": "array", "contains": {"const": 1}}, "contains"),
    "dependentRequired": ({"type": "object", "dependentRequired": {"a": ["b"]}}, "dependentReq"),
    "dependentSchemas": ({"type": "object", "dependentSchemas": {}}, "dependentSchemas"),
    "propertyNames": ({"type": "object", "propertyNames": {}}, "propertyNames"),
    "unevaluatedProperties": (
        {"type": "object", "unevaluatedProperties": False},
        "unevaluatedProperties",
    ),
    "deep inside": (obj(a=arr({"not": {}})), '["not"]'),
    "lenient by itself": (
        {"x-guidance": {"lenient": True}, "type": "array", "uniqueItems": True},
        "uniqueItems",
    ),
    "format": ({"type": "string", "format": "phone"}, "Unknown format: phone"),
    "oneOf that overlaps": ({"oneOf": [WORD, {"type": "string"}]}, "oneOf"),
    "look-around": ({"type": "string", "pattern": "(?=a)b"}, "look-around"),
    "a remote $ref": ({"$ref": "https://example.test/a"}, "https://example.test/a"),
    "a $ref to nothing": ({"$ref": "#/$defs/a"}, "/$defs/a"),
    "a type of none": ({"type": "text"}, "Invalid type: text"),
    "bounds that cross": ({"type": "integer", "minimum": 3, "maximum": 1}, "minimum (3)"),
    "nothing": (False, "Unsatisfiable"),
    "no choice": ({"enum": []}, "empty"),
    "no JSON": ("{", "line 1"),
    "no schema": ("[1]", "object"),
}
