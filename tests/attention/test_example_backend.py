"""The example backend of docs/architecture.md: it is the tested file, and it serves a model."""

import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from paceline import LLM, SamplingParams
from paceline.cli.app import app
from paceline.core.errors import BackendUnsupported

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs" / "architecture.md"
NAME = "example_backend:DenseBackend"
PROMPTS = [[5, 9, 33, 7], [11] * 19, [4]]
# float32, so that two orders of summation cannot part at a tie of rounded logits.
SMALL = {"max_num_seqs": 3, "max_model_len": 48, "max_num_batched_tokens": 16, "threads": 1}
SMALL |= {"dtype": "float32"}


def complete(backend: str, **options: object) -> tuple[list[tuple[int, ...]], list[dict]]:
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    with LLM(attention_backend=backend, **SMALL, **options) as llm:
        outputs = llm.generate(PROMPTS, params)
        return [output.outputs[0].token_ids for output in outputs], llm.report()["events"]


@pytest.mark.parametrize("name", ["example_backend.py", "example_state_backend.py"])
def test_the_page_shows_the_tested_file(name):
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert (HERE / name).read_text() in blocks


@pytest.fixture(scope="module")
def expected() -> list[tuple[int, ...]]:
    return complete("torch", enforce_eager=True)[0]


@pytest.mark.parametrize(("page_size", "enforce_eager"), [(1, True), (16, False)])
def test_it_generates_what_the_torch_backend_does(page_size, enforce_eager, expected):
    ours, events = complete(NAME, page_size=page_size, enforce_eager=enforce_eager)
    assert ours == expected
    assert not events


def test_the_command_line_takes_it_by_module_and_class():
    words = ["generate", "--prompt", "def f(", "--max-tokens", "4", "--dtype", "float32"]
    words += ["--max-num-seqs", "1", "--max-model-len", "48", "--threads", "1"]
    done = CliRunner().invoke(app, [*words, "--attention-backend", NAME, "--verbose"])
    assert done.exit_code == 0, done.output
    assert done.stdout == CliRunner().invoke(app, words).stdout
    assert re.search(rf"attention-backend +{NAME} *\(asked\)", done.stderr)


def test_a_model_it_cannot_serve_is_refused_with_the_reason():
    with pytest.raises(BackendUnsupported, match="sliding window must be absent, got present"):
        LLM("gemma-3-1b", load_format="dummy", attention_backend=NAME)
