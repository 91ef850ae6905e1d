"""What can be known without the weights is said before they are read: they are damaged here."""

import json
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner

from paceline.cli.app import app
from paceline.models.locate import BUNDLED_FOLDER

BROKEN_TEMPLATE = "line one\n{% if %}"
TEMPLATE_FAULT = "chat template must be a valid Jinja template, got line 2: "


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled model, whose weights cannot be read."""
    folder = tmp_path_factory.mktemp("damaged") / "model"
    shutil.copytree(BUNDLED_FOLDER, folder, ignore=shutil.ignore_patterns("eagle*", "head*"))
    [weights] = folder.glob("*.safetensors")
    weights.write_bytes(weights.read_bytes()[:1000])
    return folder


def run(*words: str, stdin: str | None = None):
    return CliRunner().invoke(app, list(words), input=stdin)


PROMPT = ("generate", "--prompt", "a")
CASES = {
    "a temperature": ((*PROMPT, "--temperature", "-1"), "temperature must be a finite number in"),
    "a number of tokens": ((*PROMPT, "--max-tokens", "0"), "max_tokens must be an integer of at"),
    "an empty prompt": (("generate", "--prompt", ""), "prompt must be 1 to "),
    "a long prompt": (
        ("generate", "--prompt", "a b " * 2000),
        "tokens (context 2048, 1 generated), got 4001 tokens; shorten",
    ),
    "no JSON": ((*PROMPT, "--extra-args", "{"), "'{' is not JSON"),
    "an argument nobody takes": (
        (*PROMPT, "--extra-args", '{"bias": 1}'),
        "a key of extra_args must be absent, got 'bias'; load its processor",
    ),
    "a processor": (
        (*PROMPT, "--logits-processor", "not.here:Class"),
        "logits processor must be an importable",
    ),
    "a backend": ((*PROMPT, "--attention-backend", "flash9"), "got 'flash9'"),
    "of a bench, a shape": (
        ("bench", "latency", "--input-len", "2000", "--output-len", "49"),
        "input_len and output_len must be at most 2048 tokens together, the context, got 2049; "
        "lower one, or raise --max-model-len",
    ),
    "of prove, a mass": (("prove", "--top-p", "5"), "top_p must be a finite number in 0..1"),
    "of chat, a temperature": (("chat", "--temperature", "-1"), "temperature must be a finite"),
}


@pytest.mark.parametrize("case", CASES)
def test_what_was_typed_is_refused_before_weights_are_read(folder: Path, case: str) -> None:
    words, text = CASES[case]
    done = run(*words, "--model", str(folder), stdin="")
    assert done.exit_code == 2
    assert text in done.stderr.replace("\n", " ")
    assert "safetensors" not in done.stderr


def test_with_nothing_wrong_the_weights_are_what_fails(folder: Path) -> None:
    """Else the test above could not fail."""
    done = run(*PROMPT, "--model", str(folder))
    assert done.exit_code == 2
    assert "model.safetensors must be a complete safetensors file" in done.stderr


@pytest.mark.parametrize("verb", [PROMPT, ("chat",), ("serve", "--port", "0")])
def test_a_tokenizer_that_cannot_be_read_is_told_first(
    folder: Path, tmp_path: Path, verb: tuple[str, ...]
) -> None:
    shutil.copytree(folder, tmp_path / "model")
    (tmp_path / "model" / "tokenizer.json").write_text("{")
    done = run(*verb, "--model", str(tmp_path / "model"), stdin="")
    assert done.exit_code == 2
    assert "tokenizer.json must be a tokenizer in the tokenizers format" in done.stderr


def test_a_tokenizer_in_another_form_alone_is_told(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "model")
    (tmp_path / "model" / "tokenizer.json").rename(tmp_path / "model" / "tokenizer.model")
    text = (
        "tokenizer must be tokenizer.json in the model folder, got tokenizer.model alone; save the "
        "model with a fast tokenizer, or pass token ids\n"
    )
    for verb in (PROMPT, ("chat",)):
        done = run(*verb, "--model", str(tmp_path / "model"), stdin="")
        assert done.exit_code == 2
        assert done.stderr == f"ModelError: {text}"
    done = run("explain", str(tmp_path / "model"))
    assert done.exit_code == 0, "token ids can be served"
    assert f"text: {text}" in done.stdout


def template_folder(source: Path, folder: Path) -> Path:
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("eagle*", "head*"))
    (folder / "chat_template.jinja").write_text(BROKEN_TEMPLATE)
    return folder


def test_chat_refuses_a_template_it_cannot_use_first(folder: Path, tmp_path: Path) -> None:
    done = run("chat", "--model", str(template_folder(folder, tmp_path / "model")), stdin="")
    assert done.exit_code == 2
    assert TEMPLATE_FAULT in done.stderr


def test_generate_needs_no_template_and_says_that_it_is_unusable(tmp_path: Path) -> None:
    folder = template_folder(BUNDLED_FOLDER, tmp_path / "model")
    words = ["--max-tokens", "2", "--threads", "1", "--model", str(folder)]
    done = run(*PROMPT, *words, "--json")
    assert done.exit_code == 0, done.output
    assert len(json.loads(done.stdout.splitlines()[-1])["token_ids"]) == 2
    assert f"chat_template_unusable: {TEMPLATE_FAULT}" in done.stderr


def test_explain_reports_text(folder: Path, tmp_path: Path) -> None:
    done = run("explain", str(folder))
    assert done.exit_code == 0, done.output
    assert "text: 4096 tokens, a chat template\n" in done.stdout
    done = run("explain", str(template_folder(folder, tmp_path / "template")))
    assert done.exit_code == 0, done.output
    assert f"text: {TEMPLATE_FAULT}" in done.stdout
    assert "text: none; prompts are token ids\n" in run("explain", "llama-3.2-1b").stdout


def test_explain_reports_files_that_cannot_be_read(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "model")
    (tmp_path / "model" / "tokenizer.json").write_text("{")
    done = run("explain", str(tmp_path / "model"), "--json")
    document = json.loads(done.stdout.splitlines()[0])
    assert "tokenizer.json must be a tokenizer" in document["text"]["fault"]
    assert done.exit_code == 2
    assert "ModelError: " in done.stderr
    done = run("explain", "--logits-processor", "not.here:Class")
    assert done.exit_code == 2
    assert "logits processor must be an importable" in done.stderr
