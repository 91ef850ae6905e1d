"""`generate --show-draft`: the same text, with the drafts in it marked."""

import re
from types import SimpleNamespace

import pytest
from click.testing import CliRunner
from fake_engine import FakeEngine

from paceline.cli.app import app
from paceline.cli.draft_stream import Painter

PROMPT = "for i in range(10):\n    print(i)\nfor i in"


class Ascii:
    """A token is a byte."""

    def decode(self, token_ids, *, skip_special_tokens):
        return bytes(token_ids).decode(errors="replace")

    def piece(self, token_id, *, skip_special_tokens):
        return None


def snapshot(text, drafted, *, finished=False, stop_reason=None):
    tokens = tuple(text.encode())
    completion = SimpleNamespace(
        token_ids=tokens,
        is_drafted=tuple(index in drafted for index in range(len(tokens))),
        stop_reason=stop_reason,
    )
    return SimpleNamespace(outputs=[completion], finished=finished)


def painted(*snapshots, has_colour=False):
    painter = Painter(Ascii(), [65], has_colour=has_colour)
    return [painter.paint(each) for each in snapshots]


def test_drafts_stand_in_brackets_and_bonus_tokens_do_not():
    pieces = painted(
        snapshot("a", set()),
        snapshot("abcd", {1, 2}),
        snapshot("abcdef", {1, 2, 4}, finished=True),
    )
    assert pieces == ["a", "[bc]d", "[e]f"]


def test_with_colour_drafts_are_green():
    (piece,) = painted(snapshot("abc", {0, 1}), has_colour=True)
    assert piece == "\x1b[32mab\x1b[0mc"


def test_half_a_character_waits_for_its_other_half():
    assert painted(snapshot("a\u00e9", {1})) == ["a\u00e9"]
    assert painted(snapshot("a\u00e9", {2})) == ["a[\u00e9]"]


def test_a_stop_token_is_no_part_of_the_text():
    pieces = painted(snapshot("ab", {1}), snapshot("abz", {1}, finished=True, stop_reason=122))
    assert pieces == ["a[b]", ""]


def run(*words, engine=None):
    return CliRunner().invoke(app, ["generate", "--prompt", PROMPT, *words], obj=engine)


def test_the_text_is_that_without_marks_and_the_rounds_are_counted():
    words = ["--max-tokens", "40", "--threads", "1", "--speculative-algorithm", "NGRAM"]
    plain, shown = run(*words), run(*words, "--show-draft")
    assert shown.exit_code == 0, shown.output
    marked = re.findall(r"\[[^\[\]]+\]", shown.stdout)
    assert marked
    assert shown.stdout.replace("[", "").replace("]", "") == plain.stdout
    rate, rounds = shown.stderr.splitlines()[-2:]
    assert re.search(r"40 tokens, .* ms, \d\.\d\d tokens per round$", rate)
    assert re.fullmatch(
        r"\d+ rounds, \d\.\d\d tokens per round, accepted by position( \d+%){5}", rounds
    )


def test_without_a_drafter_nothing_is_marked_and_it_says_so():
    words = ["--max-tokens", "6", "--threads", "1", "--speculative-algorithm", "off"]
    done = run(*words, "--show-draft")
    assert done.stdout == run(*words).stdout
    assert done.stderr.endswith("no rounds: nobody drafted; see --speculative-algorithm\n")


@pytest.mark.parametrize("words", [["--json"], ["--n", "2"]])
def test_only_one_streamed_completion_shows_drafts(words):
    engine = FakeEngine()
    done = run("--show-draft", *words, engine=engine)
    assert done.exit_code == 2
    assert "--show-draft streams one completion: drop --json and --n" in done.stderr
    assert not engine.prompts
