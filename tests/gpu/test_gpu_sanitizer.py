"""The sanitizer over CUDA graphs: a right engine passes, and a reader of dead slots is named."""

from typing import ClassVar

import pytest
from torch import Tensor

from paceline.attention.backends.triton_backend import TritonBackend, TritonPlan
from paceline.attention.contract import LayerCache, Part
from paceline.core.errors import SanitizerError
from paceline.core.sampling_params import SamplingParams
from paceline.engine.llm import LLM

# Warnings of drivers fail nothing.
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]

PROMPTS = [[5 + row, 6, 7, 8 + row] * (row + 1) for row in range(5)]
SAMPLED = SamplingParams(temperature=0.8, seed=1, max_tokens=24, ignore_eos=True, logprobs=2)


class ReadsBehindEnd(TritonBackend):
    """Adds what lies on the page of the reserved row's slots that nobody may read."""

    name: ClassVar[str] = "reads-behind-end"

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, layer: LayerCache, plan: TritonPlan, part: Part
    ) -> tuple[Tensor, Tensor | None]:
        out, lse = super().forward(q, k, v, layer, plan, part)
        return out + layer.v_cache[0, -1].mean(), lse


def test_a_sanitized_engine_gives_the_same_tokens() -> None:
    answers = []
    for sanitize in (False, True):
        with LLM("bundled", device="cuda", max_num_seqs=6, sanitize=sanitize) as llm:
            outputs = llm.generate(PROMPTS, SAMPLED)
            answers.append([output.outputs[0].token_ids for output in outputs])
    assert answers[0] == answers[1]


def test_a_backend_that_reads_the_reserved_page_is_named() -> None:
    backend = f"{__name__}:{ReadsBehindEnd.__name__}"
    with (
        LLM("bundled", device="cuda", attention_backend=backend, sanitize=True) as llm,
        pytest.raises(SanitizerError) as caught,
    ):
        llm.generate(PROMPTS, SAMPLED)
    assert "attention backend 'reads-behind-end'" in str(caught.value)
    assert "page 0" in str(caught.value)
    assert "test_gpu_sanitizer.py:" in str(caught.value)
