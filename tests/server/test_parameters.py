"""The table of parameters says what is done, in the page, over HTTP and by the reader of bodies."""

import re
from pathlib import Path

import httpx
import msgspec
import pytest
from scripted import scripted_service
from serving import serving, small_llm
from starlette.testclient import TestClient

from paceline.cli.serve import serve
from paceline.server.app import build_app
from paceline.server.bodies.wire import ChatRequest, CompletionRequest, StreamOptions
from paceline.server.errors import ApiError
from paceline.server.parameters.rules import RULES, check_rules, rules_of
from paceline.server.parameters.table import ABOUT_THE_CALLER, KINDS, PARTS, capabilities, page

PAGE = Path(__file__).parents[2] / "docs" / "parameters.md"
BODIES = {
    CompletionRequest: {"model": "m", "prompt": "hi"},
    ChatRequest: {"model": "m", "messages": [{"role": "user", "content": "hi"}]},
    StreamOptions: {},
}
ASKING = {
    "response_format": {"type": "json_object"},
    "structured_outputs": {"json_object": True},
    "guided_json": {},
    "guided_regex": "a",
    "guided_choice": ["a"],
    "guided_grammar": "start: /a/",
    "stream_options": {},
}
RULES_OF_KINDS = [(kind, rule) for kind in BODIES for rule in rules_of(kind)]


def test_the_page_is_the_table():
    assert PAGE.read_text() == page()


def test_a_server_tells_the_table():
    with serving(small_llm()) as server:
        told = httpx.get(f"{server.url}/capabilities").json()
    assert told == {"ends": ["generate", "score"], "scores_pairs": False, **capabilities()}


def test_a_server_of_vectors_tells_that_it_makes_them():
    with serving(small_llm(pooling="mean")) as server:
        told = httpx.get(f"{server.url}/capabilities").json()
    assert told["ends"] == ["generate", "pool", "score"]


def test_every_field_is_in_the_table():
    told = capabilities()
    for path, kind in KINDS.items():
        assert set(told["parameters"][path]) == set(kind.__struct_fields__)
    assert set(told["parts"]) == set(PARTS)
    served = TestClient(build_app(scripted_service(None))).get("/openapi.json").json()
    asked = {
        path for path, kinds in served["paths"].items() if "requestBody" in kinds.get("post", {})
    }
    assert set(KINDS) == asked
    assert set().union(*told["parameters"].values()) >= ABOUT_THE_CALLER


def test_the_help_names_every_path():
    told = (serve.help or "").partition("Paths:")[2].partition("Unknown")[0]
    paths = TestClient(build_app(scripted_service(None))).get("/openapi.json").json()["paths"]
    served = {path for path in paths if "{" not in path}
    assert set(re.findall(r"/[\w/.]*", told)) - {"/", "/openapi.json"} == served


def test_every_rule_is_of_some_body():
    assert {rule for _, rule in RULES_OF_KINDS} == set(RULES)


@pytest.mark.parametrize(("kind", "rule"), RULES_OF_KINDS)
def test_a_rule_that_is_told_refuses_what_breaks_it_alone(kind, rule):
    own = raw(kind, rule.name)
    other = raw(kind, rule.needs or rule.excludes or rule.agrees)
    more = raw(kind, rule.when) if rule.when else {}
    fine, broken = (own, own | other) if rule.excludes else (own | other, own)
    if rule.agrees:
        broken = own | more | {rule.agrees: own[rule.name] + 1}
        fine = broken | {rule.agrees: own[rule.name]}
    others = [each for each in rules_of(kind) if each != rule]
    check_rules(decoded(kind, fine))
    with pytest.raises(ApiError) as refused:
        check_rules(decoded(kind, broken))
    assert refused.value.param == rule.name
    assert rule.told().split(",")[0].split(" where")[0] in str(refused.value).replace(", 4", "")
    assert all(each.refusal(decoded(kind, broken), "") is None for each in others)


def raw(kind, name):
    """A field that asks for something, of its type."""
    switches = {"stream", "echo", "include_usage", "continuous_usage_stats"}
    switches |= {"add_generation_prompt", "continue_final_message"}
    if kind is ChatRequest:
        switches.add("logprobs")
    return {name: True if name in switches else ASKING.get(name, 3)}


def decoded(kind, asked):
    return msgspec.json.decode(msgspec.json.encode(BODIES[kind] | asked), type=kind)
