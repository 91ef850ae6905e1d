"""The files of tests that take longest, which begin first: a file goes to one worker whole, and a
long one that begins last is waited for by all the others."""

from pathlib import Path

import pytest

HERE = Path(__file__).parent
LONGEST = (
    "proof/fixes/test_fixes.py",
    "proof/check/test_cells.py",
    "llm/ranks/test_llm_ranks.py",
    "llm/states/test_llm_mamba2.py",
    "llm/drafts/test_llm_draft_acceptance.py",
    "models/test_parity.py",
    "models/test_ranks.py",
    "llm/grammars/test_llm_grammar.py",
    "llm/test_llm_parity.py",
    "engine/test_scheduler_machine.py",
    "engine/test_round_machine.py",
    "test_imports.py",
    "cli/test_explain_nearest.py",
    "benchmarks/test_soak.py",
    "llm/states/test_llm_linear.py",
    "llm/test_llm_equality.py",
    "plan/test_nearest.py",
    "llm/drafts/test_llm_speculative_backends.py",
    "plan/test_rehearsed_shapes.py",
    "llm/drafts/test_llm_speculative.py",
    "plan/test_fit.py",
    "server/test_two_processes.py",
    "proof/check/test_state_cells.py",
    "llm/ranks/test_rank_ends.py",
    "runner/states/test_state_engine.py",
    "llm/embeds/test_llm_blocks.py",
    "server/tokens/test_token_traces.py",
    "plan/test_draft_budget.py",
    "bench/serve/test_bench_serve.py",
    "test_repository.py",
    "llm/box/test_replay.py",
    "llm/drafts/test_llm_mtp.py",
    "layers/test_rejection.py",
    "llm/embeds/test_llm_embeds.py",
    "llm/drafts/test_llm_grammar_drafts.py",
    "runner/ranks/test_rank_steps.py",
    "runner/states/test_encoder_engine.py",
    "plan/test_rehearsal.py",
    "mutants/test_mutants.py",
    "proof/check/test_third_party.py",
    "speculate/test_acceptance_distribution.py",
    "text/test_template_budget.py",
    "llm/states/test_llm_states.py",
    "llm/drafts/test_llm_latent.py",
)


def longest_first(items: list[pytest.Item]) -> None:
    """Sort tests by their files, in place; those of other files come behind, by their paths, which
    are the same where a worker collects in another order.  Tests of a file stay as they were."""
    place = {HERE / name: number for number, name in enumerate(LONGEST)}
    paths = sorted({item.path for item in items}, key=lambda p: (place.get(p, len(place)), p))
    order = {path: number for number, path in enumerate(paths)}
    items.sort(key=lambda item: order[item.path])
