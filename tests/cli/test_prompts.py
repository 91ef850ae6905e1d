"""Where prompts come from, and how several are answered."""

import json
from pathlib import Path

import jsonschema
import pytest
from click.testing import CliRunner
from fake_engine import FakeEngine

from paceline.cli.app import app
from paceline.models.locate import BUNDLED_FOLDER

SCHEMA = json.loads((Path(__file__).parents[2] / "docs" / "schemas" / "generate.json").read_text())


def run(*words, engine=None, stdin=None):
    return CliRunner().invoke(app, ["generate", *words], obj=engine or FakeEngine(), input=stdin)


def test_prompts_are_typed_read_from_stdin_and_from_files_in_this_order(tmp_path):
    for name, text in {"a": "from a\n", "b": "from b\n\n"}.items():
        (tmp_path / name).write_text(text)
    engine = FakeEngine()
    words = ["--prompt-file", str(tmp_path / "a"), "--prompt", "typed", "--prompt", "-"]
    done = run(*words, "--prompt-file", str(tmp_path / "b"), engine=engine, stdin="piped\n")
    assert done.exit_code == 0, done.output
    assert engine.prompts == [["typed"], ["piped"], ["from a"], ["from b\n"]]


def test_every_prompt_is_answered_and_named():
    done = run("--prompt", "a", "--prompt", "b", "--echo", "--max-tokens", "1")
    assert done.stdout == "aone \nbone \n"
    assert done.stderr.count("1 tokens, ") == 2
    assert "prompt 0\n" in done.stderr
    assert "prompt 1\n" in done.stderr


def test_several_prompts_give_a_document_each_on_a_line_of_its_own():
    done = run("--prompt", "a", "--prompt", "b", "--json")
    documents = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(documents) == 2
    for document in documents:
        jsonschema.validate(document, SCHEMA)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ([], "nothing to continue: give --prompt TEXT, --prompt - or --prompt-file"),
        (["--prompt", "-", "--prompt", "-"], "--prompt - reads stdin to its end: give it once"),
        (["--prompt-file", "not/here"], "'not/here' does not exist"),
    ],
)
def test_prompts_that_cannot_be_had_are_refused(words, text):
    engine = FakeEngine()
    done = run(*words, engine=engine)
    assert done.exit_code == 2
    assert text in " ".join(done.stderr.split())
    assert not engine.prompts


def test_a_file_that_is_no_text_is_refused(tmp_path):
    (tmp_path / "a").write_bytes(b"\xff")
    done = run("--prompt-file", str(tmp_path / "a"))
    assert done.exit_code == 2
    assert "must be UTF-8 text, got" in " ".join(done.stderr.split())


def test_with_chat_a_prompt_is_a_users_message():
    engine = FakeEngine()
    assert run("--prompt", "a", "--chat", engine=engine).exit_code == 0
    [[conversation]] = engine.prompts
    assert conversation.messages == [{"role": "user", "content": "a"}]
    assert conversation.add_generation_prompt


def test_the_bundled_model_answers_a_chat_in_the_words_of_its_template():
    words = ["generate", "--prompt", "x = 1", "--chat", "--max-tokens", "2", "--enforce-eager"]
    done = CliRunner().invoke(
        app, [*words, "--speculative-algorithm", "off", "--threads", "1", "--json", "--quiet"]
    )
    assert done.exit_code == 0, done.output
    assert done.stderr == ""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(BUNDLED_FOLDER)
    messages = [{"role": "user", "content": "x = 1"}]
    theirs = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    ids = getattr(theirs, "input_ids", theirs)
    assert json.loads(done.stdout)["metrics"]["prompt_tokens"] == len(ids)
