"""Prefill and mixed steps as padded graphs, in the whole engine, for any number of rows."""

import pytest
from llm_cases import (
    Checkpoint,
    Tokens,
    assert_idle,
    assert_same_or_tie,
    make_checkpoint,
    make_llm,
    random_prompts,
)

from paceline.core.request.sampling_params import SamplingParams
from paceline.llm.boot import Knobs

CASES = ("gemma2-soft-caps-alternating-windows", "gpt-oss-sinks-alternating-windows")
PARAMS = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=2)
PROMPTS = random_prompts((9, 20, 14, 3, 31, 20), seed=3)
Seen = list[tuple[Tokens, tuple[float, ...]]]


@pytest.fixture(scope="module", params=CASES)
def checkpoint(request, tmp_path_factory) -> Checkpoint:
    return make_checkpoint(request.param, tmp_path_factory.mktemp(request.param))


def answers(checkpoint: Checkpoint, **options: object) -> tuple[Seen, int]:
    """Tokens and log-probabilities of PROMPTS, and how many ragged graphs were captured."""
    with make_llm(
        checkpoint,
        knobs=Knobs(poison_graphs=True),
        max_num_batched_tokens=24,  # most prompts come in chunks, beside rows that decode
        cuda_graph_max_tokens=24,
        enable_prefix_cache=False,
        **options,
    ) as llm:
        found = [output.outputs[0] for output in llm.generate(PROMPTS, PARAMS)]
        graphs = llm.engine._runner._graphs
        ragged = [] if graphs is None else [k for k in graphs.graphs if k.extend_len is None]
        assert_idle(llm)
    return [(one.token_ids, tuple(step.chosen for step in one.logprobs)) for one in found], len(
        ragged
    )


@pytest.mark.parametrize("rows", [1, 2, 5])
def test_answers_are_transformers_and_graphs_move_no_bit(checkpoint: Checkpoint, rows: int) -> None:
    replayed, captured = answers(checkpoint, max_num_seqs=rows)
    eager, none = answers(checkpoint, max_num_seqs=rows, enforce_eager=True)
    assert (captured > 1, none) == (True, 0)  # beside the one of boot
    assert replayed == eager
    for prompt, (token_ids, _) in zip(PROMPTS, replayed, strict=True):
        theirs = checkpoint.generate(prompt, PARAMS.max_tokens)
        assert_same_or_tie(token_ids, theirs, checkpoint.gap(prompt))
