"""Models with experts in the whole engine: batches, padded rows, graphs, memory."""

import pytest
from llm_cases import (
    Checkpoint,
    assert_idle,
    assert_same_or_tie,
    make_checkpoint,
    make_llm,
    random_prompts,
    tokens_of,
)

from paceline.core.request.sampling_params import SamplingParams
from paceline.llm.boot import Knobs
from paceline.plan.explain import explain_model
from paceline.runner import build

CASES = ("qwen3_moe-window-every-second-layer", "gpt-oss-sinks-alternating-windows")
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=3)
PROMPTS = random_prompts((9, 20, 14, 3, 11), seed=7)


@pytest.fixture(scope="module", params=CASES)
def checkpoint(request, tmp_path_factory) -> Checkpoint:
    return make_checkpoint(request.param, tmp_path_factory.mktemp(request.param))


@pytest.mark.parametrize("eager", [False, True], ids=["graph", "eager"])
@pytest.mark.parametrize("num_prompts", [1, 5])
def test_greedy_tokens_are_transformers_where_most_experts_have_no_token(
    checkpoint: Checkpoint, num_prompts: int, eager: bool
) -> None:
    """A decode step of 5 rows with 3 experts each leaves most of qwen's 40 without a token."""
    prompts = PROMPTS[:num_prompts]
    with make_llm(checkpoint, enforce_eager=eager) as llm:
        found = tokens_of(llm.generate(prompts, GREEDY))
        assert_idle(llm)
    for prompt, token_ids in zip(prompts, found, strict=True):
        theirs = checkpoint.generate(prompt, GREEDY.max_tokens)
        assert_same_or_tie(token_ids, theirs, checkpoint.gap(prompt))


def test_padded_rows_of_a_graph_change_no_answer(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """5 rows in graphs of 6, as on a GPU; what is left of padded rows is poisoned."""
    monkeypatch.setitem(build._EVERY_SIZE, "cpu", 1)
    with make_llm(checkpoint, knobs=Knobs(poison_graphs=True)) as llm:
        found = tokens_of(llm.generate(PROMPTS, GREEDY))
        keys = llm.engine._runner._graphs._graphs
        assert {6} < {key.padded_reqs for key in keys} <= {1, 6, 8}
    for prompt, token_ids in zip(PROMPTS, found, strict=True):
        theirs = checkpoint.generate(prompt, GREEDY.max_tokens)
        assert_same_or_tie(token_ids, theirs, checkpoint.gap(prompt))


def test_graphs_change_no_bit(checkpoint: Checkpoint) -> None:
    """Tokens and log-probabilities of replayed graphs, poisoned between replays, and of eager steps
    of the same batch."""
    seen = []
    for options in ({"knobs": Knobs(poison_graphs=True)}, {"enforce_eager": True}):
        with make_llm(checkpoint, max_num_seqs=4, **options) as llm:
            outputs = llm.generate(PROMPTS[:4], GREEDY)
            seen.append([(out.outputs[0].token_ids, out.outputs[0].logprobs) for out in outputs])
    assert seen[0] == seen[1]


def test_measured_weights_of_experts_were_planned(checkpoint: Checkpoint) -> None:
    with make_llm(checkpoint) as llm:
        memory = llm.report()["memory"]
    assert memory["measured"]["weights"] == memory["planned"]["weights_bytes"]
    assert memory["measured"]["workspace"] <= memory["planned"]["workspace_bytes"]


def test_a_shape_with_experts_is_explained() -> None:
    plan = explain_model({"model": "qwen3-30b-a3b", "load_format": "dummy"}, gpu="h200")
    assert plan.fit.weights_bytes == 2 * 30_532_122_624
    assert not plan.fit.short_by_bytes
