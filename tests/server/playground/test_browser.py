"""The page at /, in a real Chromium, before a real server."""

import json
import re
import shlex

import httpx
import pytest
from playground.chromium import PATH, chromium
from serving import FIRST_WORDS, serving, small_llm, wait_until

pytestmark = pytest.mark.skipif(PATH is None, reason="there is no Chromium on the path")

PROMPT = "def fibonacci(n):"
CTRL = 2
IS_REQUEST = "(each) => each.textContent === 'request' && each.nextSibling.textContent.length > 7"
BROKEN = """
(() => {
  window.told = [];
  window.whole = window.fetch;
  window.fetch = (url, how) => {
    const path = new URL(url).pathname.slice(1);
    window.told.push(path);
    if (path === "progress") return Promise.reject(new TypeError("it is gone"));
    const body = JSON.stringify({ error: { message: "later", code: "loading" } });
    return Promise.resolve(new Response(body, { status: 503 }));
  };
})()
"""
CONTRAST = """
(() => {
  const light = (colour) => {
    const [r, g, b] = colour.match(/[\\d.]+/g).map(Number);
    const part = (c) => (c / 255 <= 0.03928 ? c / 255 / 12.92 : ((c / 255 + 0.055) / 1.055) ** 2.4);
    return 0.2126 * part(r) + 0.7152 * part(g) + 0.0722 * part(b);
  };
  const behind = (node) => {
    for (; node; node = node.parentElement) {
      const colour = getComputedStyle(node).backgroundColor;
      if (!/, 0\\)$|transparent/.test(colour)) return colour;
    }
    return "rgb(255, 255, 255)";
  };
  const faults = [];
  for (const node of document.querySelectorAll("body *")) {
    const own = [...node.childNodes].some((each) => each.nodeType === 3 && each.textContent.trim());
    if (!own || !node.checkVisibility() || node.closest("svg, noscript, :disabled")) continue;
    const [one, two] = [light(getComputedStyle(node).color), light(behind(node))];
    const ratio = (Math.max(one, two) + 0.05) / (Math.min(one, two) + 0.05);
    if (ratio < 4.5) faults.push([node.outerHTML.slice(0, 80), ratio]);
  }
  return faults;
})()
"""


@pytest.fixture(scope="module")
def server():
    with serving(small_llm()) as world:
        yield world


@pytest.fixture(scope="module")
def browser():
    with chromium() as page:
        yield page


@pytest.fixture
def page(browser, server):
    """Opened and connected; nothing that it asked went elsewhere, and nothing was refused."""
    browser.events.clear()
    browser.size(1280, 900)
    browser.media(prefers_color_scheme="light", prefers_reduced_motion="no-preference")
    browser.open(server.url)
    browser.until("document.querySelector('#state').textContent === 'ready'")
    yield browser
    asked = [each["request"]["url"] for each in browser.said("Network.requestWillBeSent")]
    assert asked
    assert all(url.startswith((server.url, "about:", "data:")) for url in asked), asked
    assert not browser.said("Runtime.exceptionThrown")
    errors = [each["entry"] for each in browser.said("Log.entryAdded")]
    assert not [each for each in errors if each["level"] == "error"], errors


def text_of(page, selector):
    return page.run(f"document.querySelector({json.dumps(selector)}).textContent")


def ask(page, prompt=PROMPT, *, mode="completion", **fields):
    page.run(f"document.querySelector('[value={mode}]').click()")
    for name, value in ({"max_tokens": 24, "more": '{"ignore_eos": true}'} | fields).items():
        page.run(f"document.querySelector('#{name}').value = {json.dumps(str(value))}")
    page.type("#prompt", prompt)
    page.press("Enter", modifiers=CTRL)


def done(page):
    page.until("/^(done|stopped|failed)/.test(document.querySelector('#note').textContent)")
    return text_of(page, "#note")


def kinds(page):
    return page.run(
        "[...document.querySelectorAll('[role=option]')].map((each) => each.classList[1])"
    )


def asked_over_http(server, **more):
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 24, "temperature": 0,
            "ignore_eos": True, "trace_tokens": True}  # fmt: skip
    answer = httpx.post(f"{server.url}/v1/completions", json=body | more, timeout=None)
    return answer.json()["choices"][0]


def test_tokens_are_coloured_by_where_they_came_from(page, server):
    ask(page)
    assert done(page) == "done: 24 tokens"
    choice = asked_over_http(server)
    drafted = [token["drafted"] for token in choice["trace"]["tokens"]]
    assert True in drafted
    assert kinds(page) == ["drafted" if each else "sampled" for each in drafted]
    said = text_of(page, "[role=listbox]").replace("↵", "").replace("⇥", "")
    assert said == choice["text"]
    read = page.run(
        "[...document.querySelectorAll('details .token')].map((each) => each.classList[1])"
    )
    assert len(read) == len(choice["trace"]["prompt"]["tokens"])


def test_a_prompt_hit_is_shown(page, server):
    long = "x = 1\n" * 20
    for _ in range(2):
        ask(page, long, max_tokens=2)
        done(page)
    marks = page.run(
        "[...document.querySelectorAll('details .token')].map((each) => each.classList[1])"
    )
    assert marks.count("hit") > 16
    assert marks == sorted(marks, key=["hit", "prompt"].index)
    assert f"{marks.count('hit')} from the prefix cache" in text_of(page, ".turn summary")


def test_a_round_is_drawn_with_what_was_taken_and_what_was_not(page, server):
    ask(page)
    done(page)
    rounds = asked_over_http(server)["trace"]["rounds"]
    assert page.run("document.querySelectorAll('#rounds button').length") == len(rounds)
    page.run("document.querySelector('#rounds button').click()")
    drafts = rounds[0]["drafts"]
    taken = sum(each["taken"] for each in drafts)
    assert rounds[0]["emitted"] == taken + 1
    count = "document.querySelectorAll('#tree .{}').length"
    assert page.run(count.format("rejected")) == len(drafts) - taken
    assert page.run("document.querySelectorAll('#tree g.taken').length") == taken
    assert page.run(count.format("bonus")) == page.run(count.format("root")) == 1
    label = page.run("document.querySelector('#tree svg').getAttribute('aria-label')")
    assert label.startswith(f"Round 1: {len(drafts)} drafts verified, {taken} taken")
    shares = page.run("document.querySelector('#acceptance').textContent")
    took = sum(each["emitted"] > 1 for each in rounds) / len(rounds)
    assert f"{100 * took:.0f} %" in shares


def test_arrow_keys_look_at_tokens_and_tell_their_alternatives(page):
    ask(page, alternatives=3)
    done(page)
    page.run("document.querySelector('[role=listbox]').focus()")
    for key, at in (
        ("ArrowRight", 0),
        ("ArrowRight", 1),
        ("ArrowLeft", 0),
        ("End", 23),
        ("Home", 0),
    ):
        page.press(key)
        chosen = page.run(
            "document.querySelector('[role=listbox]').getAttribute('aria-activedescendant')"
        )
        assert chosen.endswith(f"-{at}")
    assert page.run("document.querySelectorAll('.chosen').length") == 1
    assert page.run("document.querySelectorAll('#token .bar-row').length") in (3, 4)
    assert "log-probability" in text_of(page, "#token")
    page.press("ArrowDown")  # the next round
    assert "round" in text_of(page, "#token")
    assert page.run("document.querySelectorAll('.same-round').length") >= 1


def test_a_conversation_goes_on_and_begins_anew(page):
    page.type("#system", "Be short.")
    for words in ("hi", "more"):
        ask(page, words, mode="chat", max_tokens=4)
        done(page)
        page.run("document.querySelector('#note').textContent = ''")
    assert page.run("document.querySelectorAll('.turn').length") == 2
    last = json.loads(page.said("Network.requestWillBeSent")[-1]["request"].get("postData", "{}"))
    bodies = [each["request"].get("postData") for each in page.said("Network.requestWillBeSent")]
    last = json.loads([each for each in bodies if each][-1])
    assert [each["role"] for each in last["messages"]] == ["system", "user", "assistant", "user"]
    page.run("document.querySelector('#clear').click()")
    assert page.run("document.querySelectorAll('.turn').length") == 0
    assert page.run("document.querySelectorAll('#history tr').length") == 2
    page.run("document.querySelector('#history button').click()")
    assert page.run("document.querySelectorAll('.turn').length") == 1


def test_escape_stops_a_request(page, server):
    server.turns.hold(after=FIRST_WORDS)
    ask(page, max_tokens=200)
    page.until("document.querySelectorAll('[role=option]').length > 0")
    assert page.run("document.querySelector('#stopper').disabled") is False
    page.press("Escape")
    assert done(page) == "stopped"
    assert page.run(f"[...document.querySelectorAll('dt')].some({IS_REQUEST})")
    server.turns.go()
    wait_until(server.is_idle)
    assert page.run("document.querySelector('#send').disabled") is False


def test_the_command_for_a_shell_asks_the_same(page, server):
    ask(page, 'it\'s "so"', max_tokens=3)
    done(page)
    page.type("#prompt", "")
    page.run("document.querySelector('#curl').click()")
    page.until("!document.querySelector('#command').hidden")
    words = shlex.split(text_of(page, "#command"))
    url, body = words[2], json.loads(words[words.index("-d") + 1])
    assert url == f"{server.url}/v1/completions"
    assert body["prompt"] == 'it\'s "so"'
    assert httpx.post(url, json=body, timeout=None).text.endswith("data: [DONE]\n\n")


def test_what_the_server_refuses_is_said_in_its_words(page):
    ask(page, more='{"no_such_field": 1}')
    done(page)
    assert "no_such_field must be a field of this endpoint" in text_of(page, "#error")
    assert re.search(r"\(request [\w-]{8,}\)$", text_of(page, "#error"))
    assert page.run("getComputedStyle(document.querySelector('#error')).display") != "none"
    page.events.clear()  # its 400 is logged as an error
    ask(page, more="{")
    assert "JSON" in text_of(page, "#error")
    page.run("fetch('metrics')")


def test_the_pool_and_the_queue_are_shown(page, server):
    ask(page, max_tokens=4)
    done(page)
    page.until("document.querySelectorAll('#pool .bar-row').length > 0")
    assert "waiting" in text_of(page, "#load")
    stats = server.llm.engine.scheduler.cache.stats()
    assert page.run("document.querySelectorAll('#pool .bar-row').length") == len(stats.groups)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_can_be_read_in_the_light_and_in_the_dark(page, scheme):
    page.media(prefers_color_scheme=scheme, prefers_reduced_motion="reduce")
    ask(page)
    done(page)
    page.run("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
    page.run("document.querySelector('[role=option]').click()")
    assert page.run(CONTRAST) == []
    paper = page.run("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, paper[4:-1].split(","))) > 384) == (scheme == "light")
    page.run("document.querySelector('#theme').click()")
    assert page.run("getComputedStyle(document.body).backgroundColor") != paper
    page.run("document.querySelector('#theme').click()")
    page.run("localStorage.clear(); delete document.documentElement.dataset.theme")


def test_a_server_that_starts_again_is_met_again(page):
    """Even where it is gone between saying that it loads and saying how far it is."""
    page.run(BROKEN)
    page.until("window.told.filter((each) => each === 'progress').length > 1")
    assert text_of(page, "#state") == "does not answer"
    page.run("document.querySelector('#model').textContent = ''; window.fetch = window.whole")
    page.until("document.querySelector('#state').textContent === 'ready'")
    assert text_of(page, "#model").startswith("tiny")


def test_scores_of_an_echo_are_not_those_of_the_answer(page, server):
    ask(page, alternatives=1, max_tokens=2, more='{"echo": true, "ignore_eos": true}')
    done(page)
    scores = asked_over_http(server, logprobs=1, max_tokens=2)["logprobs"]["token_logprobs"]
    page.run("document.querySelector('[role=option]').click()")
    assert f"{scores[0]:.3f}" in text_of(page, "#token")


def test_nothing_moves_where_that_is_not_wanted(page):
    moves = "getComputedStyle(document.querySelector('.legend .token')).transitionDuration"
    assert page.run(moves) != "0s"
    page.media(prefers_reduced_motion="reduce")
    assert page.run(moves) == "0s"


def test_a_phone_needs_no_sideways_scrolling(page):
    page.size(360, 740, scale=2, mobile=True)
    ask(page, "x = 1\n" * 20 + "a" * 200)
    done(page)
    assert page.run("[document.documentElement.scrollWidth, innerWidth]") == [360, 360]


def test_a_key_is_typed_sent_and_kept_nowhere(browser):
    with serving(small_llm(speculative_algorithm="off"), api_keys=["secret"]) as server:
        browser.open(server.url)
        browser.until("document.querySelector('#state').textContent === 'asks for a key'")
        assert "Authorization" in text_of(browser, "#error")
        browser.type("#key", "secret")
        browser.until("document.querySelector('#state').textContent === 'ready'")
        assert browser.run("document.querySelector('#error').hidden")
        ask(browser, max_tokens=2)
        assert done(browser) == "done: 2 tokens"
        kept = "JSON.stringify([localStorage, sessionStorage, document.cookie, location.href])"
        assert "secret" not in browser.run(kept)
        browser.run("document.querySelector('#curl').click()")
        browser.until("!document.querySelector('#command').hidden")
        assert "$PACELINE_API_KEY" in text_of(browser, "#command")
        assert "secret" not in text_of(browser, "#command")
