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
PROMPTS = [[5, 9, 33, 7], [11] * 19, [4], list(range(40, 73))]
# float32, so that two orders of summation cannot part at a tie of rounded logits.
SMALL = {"max_num_seqs": 4, "max_model_len": 128, "max_num_batched_tokens": 64, "dtype": "float32"}


def complete(backend: str, **options: object) -> tuple[list[tuple[int, ...]], list[dict]]:
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    with LLM(attention_backend=backend, **SMALL, **options) as llm:
        outputs = llm.generate(PROMPTS, params)
        return [output.outputs[0].token_ids for output in outputs], llm.report()["events"]


def test_the_page_shows_the_tested_file():
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert (HERE / "example_backend.py").read_text() in blocks


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("enforce_eager", [True, False], ids=["eager", "graphs"])
def test_it_generates_what_the_torch_backend_does(page_size, enforce_eager):
    options = {"page_size": page_size, "enforce_eager": enforce_eager, "chunked_prefill_size": 16}
    ours, events = complete(NAME, **options)
    assert ours == complete("torch", **options)[0]
    assert not events


def test_the_command_line_takes_it_by_module_and_class():
    words = ["generate", "--prompt", "def f(", "--max-tokens", "4", "--dtype", "float32"]
    words += ["--max-num-seqs", "2", "--max-model-len", "64", "--max-num-batched-tokens", "64"]
    done = CliRunner().invoke(app, [*words, "--attention-backend", NAME])
    assert done.exit_code == 0, done.output
    assert done.stdout == CliRunner().invoke(app, words).stdout
    assert re.search(rf"attention-backend +{NAME} +\(asked\)", done.stderr)


def test_a_model_it_cannot_serve_is_refused_with_the_reason():
    with pytest.raises(BackendUnsupported, match="sliding window must be absent, got present"):
        LLM("gemma-3-1b", load_format="dummy", attention_backend=NAME)
