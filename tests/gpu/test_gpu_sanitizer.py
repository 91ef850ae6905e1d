"""The sanitizer over CUDA graphs: a right engine passes, and a reader of dead slots is named; cells
of what no shipped model has on a GPU."""

from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.attention.backends.triton_backend import TritonBackend, TritonPlan
from paceline.attention.contract import LayerCache, Part
from paceline.core.errors import SanitizerError
from paceline.core.request.sampling_params import SamplingParams
from paceline.llm.llm import LLM
from paceline.proof.check.cell import RunnerKind, Status
from paceline.proof.rig.contenders import Contender, state_contender
from paceline.proof.rig.harness import run_cell
from paceline.proof.suite.case import Case
from paceline.proof.suite.encoders import encoder_cases
from paceline.proof.suite.states import state_cases

# Warnings of drivers fail nothing.
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]

PROMPTS = [[5 + row, 6, 7, 8 + row] * (row + 1) for row in range(5)]
SAMPLED = SamplingParams(temperature=0.8, seed=1, max_tokens=24, ignore_eos=True, logprobs=2)


class ReadsBehindEnd(TritonBackend):
    """Adds what lies on the page of the reserved row's slots that nobody may read."""

    name = "reads-behind-end"

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, layer: LayerCache, plan: TritonPlan, part: Part
    ) -> tuple[Tensor, Tensor | None]:
        out, lse = super().forward(q, k, v, layer, plan, part)
        return out + layer.v_cache[0, -1].mean(), lse


def answers(**asked: Any) -> list[list[int]]:
    with LLM("bundled", device="cuda", max_num_seqs=6, **asked) as llm:
        return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, SAMPLED)]


def test_a_sanitized_engine_gives_the_same_tokens() -> None:
    assert answers(sanitize=True) == answers(sanitize=False)


@pytest.mark.parametrize("algorithm", ["off", "EAGLE3"])
def test_a_backend_that_reads_the_reserved_page_is_named(algorithm: str) -> None:
    """At its first step, which with a drafter is one of the self-test at boot."""
    with pytest.raises(SanitizerError) as caught:
        answers(
            attention_backend=f"{__name__}:{ReadsBehindEnd.__name__}",
            speculative_algorithm=algorithm,
            sanitize=True,
        )
    assert "attention backend 'reads-behind-end'" in str(caught.value)
    assert "page 0" in str(caught.value)
    assert "test_gpu_sanitizer.py:" in str(caught.value)


def test_an_engine_that_failed_to_boot_leaves_the_next_one_its_memory() -> None:
    for _ in range(2):
        with pytest.raises(SanitizerError):
            answers(
                attention_backend=f"{__name__}:{ReadsBehindEnd.__name__}",
                speculative_algorithm="EAGLE3",
                sanitize=True,
            )
    assert answers()


CUDA = torch.device("cuda")
ON_A_GPU = pytest.mark.parametrize("runner", [RunnerKind.EAGER, RunnerKind.CUDA_GRAPH])


@ON_A_GPU
@pytest.mark.parametrize(
    "case",
    [case for case in state_cases() if case.method == "sum"],  # what the example backend serves
    ids=lambda case: f"{case.mode.value}/{case.name}",
)
def test_states_equal_the_oracle(case: Case, runner: RunnerKind) -> None:
    result = run_cell(case, state_contender("example_state_backend:SumBackend"), runner, CUDA)
    assert result.status is Status.PROVEN, result.reason


@ON_A_GPU
@pytest.mark.parametrize("case", encoder_cases(), ids=lambda case: f"{case.mode.value}/{case.name}")
def test_rows_of_an_encoder_equal_the_oracle(case: Case, runner: RunnerKind) -> None:
    who = Contender(name="triton", backend=TritonBackend(), is_emulated=False)
    result = run_cell(case, who, runner, CUDA)
    assert result.status is Status.PROVEN, result.reason
