"""The page at /, without a browser: what it is made of, what it may ask, who may see it."""

import re
from html.parser import HTMLParser

import httpx
import pytest
from scripted import scripted, scripted_service
from starlette.testclient import TestClient

from paceline.server.access.access import Access
from paceline.server.app import build_app, build_loading_app
from paceline.server.life import Life
from paceline.server.playground.page import FILES


@pytest.fixture(scope="module")
def world():
    with scripted("hermes", access=Access(api_keys=("secret",))) as server:
        yield server


def source(name):
    return TestClient(build_app(scripted_service(None))).get(name).text


class Parts(HTMLParser):
    """Tags with their attributes."""

    def __init__(self, page):
        super().__init__()
        self.tags = []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))


PARTS = Parts(source("/")).tags


@pytest.mark.parametrize("path", FILES)
def test_its_files_are_served_to_everybody_with_a_policy(world, path):
    answer = httpx.get(f"{world.url}{path}")
    assert answer.status_code == 200
    policy = answer.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'")
    assert "unsafe" not in policy
    assert answer.headers["x-content-type-options"] == "nosniff"
    head = httpx.head(f"{world.url}{path}")
    assert (head.status_code, head.content) == (200, b"")


def test_what_it_asks_for_needs_the_key(world):
    for path in ("/v1/models", "/metrics", "/progress", "/playground/nothing.js", "/playground"):
        assert httpx.get(f"{world.url}{path}").status_code == 401


@pytest.mark.parametrize("path", FILES)
def test_no_file_names_another_place(path):
    found = set(re.findall(r"(?:https?:)?//[\w.-]+\.\w+[^\s\"')]*", source(path)))
    assert found <= {"http://www.w3.org/2000/svg"}  # the name of a language


def test_all_that_it_loads_is_served():
    named = [attrs.get("src") or attrs.get("href") for _, attrs in PARTS]
    named = {each for each in named if each and not each.startswith("#")}
    imported = {
        f"playground/{name}"
        for path in FILES
        for name in re.findall(r'from "\./([\w.]+)"', source(path))
    }
    assert {f"/{each}" for each in named | imported} == set(FILES) - {"/"}


def test_it_has_no_script_or_style_of_its_own_in_line():
    for tag, attrs in PARTS:
        assert "style" not in attrs, (tag, attrs)
        assert not [name for name in attrs if name.startswith("on")], (tag, attrs)
        assert tag != "style"
        assert tag != "script" or attrs["src"]


def test_every_field_has_a_label():
    text = source("/")
    labelled = re.findall(r"<label[^>]*>(.*?)</label>", text, re.DOTALL)
    inside = set(re.findall(r'id="(\w+)"', " ".join(labelled)))
    fields = {a.get("id", a.get("name")) for tag, a in PARTS if tag in ("input", "textarea")}
    assert fields - inside == {"mode"}, "each of its radios is in a label without an id"


def test_it_writes_no_html_from_text():
    for path in FILES:
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", source(path)
        )


def test_it_is_there_while_the_model_loads():
    service = scripted_service(None)
    app = build_loading_app(service.engine, Life(), access=Access(api_keys=("secret",)))
    assert TestClient(app).get("/").status_code == 200
