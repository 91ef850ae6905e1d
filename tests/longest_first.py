"""The files of tests that take longest, which begin first: a file goes to one worker whole, and a
long one that begins last is waited for by all the others."""

from pathlib import Path

import pytest

HERE = Path(__file__).parent
LONGEST = (
    "proof/fixes/test_fixes.py",
    "proof/check/test_cells.py",
    "llm/ranks/test_llm_ranks.py",
    "llm/drafts/test_llm_draft_acceptance.py",
    "llm/test_llm_parity.py",
    "engine/test_scheduler_machine.py",
    "llm/grammars/test_llm_grammar.py",
    "llm/states/test_llm_mamba2.py",
    "server/test_two_processes.py",
    "benchmarks/test_soak.py",
    "plan/test_rehearsal.py",
    "llm/ranks/test_rank_ends.py",
    "llm/test_llm_equality.py",
    "proof/check/test_state_cells.py",
    "plan/test_draft_budget.py",
    "models/test_ranks.py",
    "llm/states/test_llm_linear.py",
    "models/test_parity.py",
    "server/test_serve_command.py",
    "plan/test_nearest.py",
    "llm/drafts/test_llm_speculative_backends.py",
    "llm/drafts/test_llm_speculative.py",
    "cli/test_explain_nearest.py",
    "runner/states/test_state_engine.py",
    "server/tokens/test_token_traces.py",
    "plan/test_rehearsed_shapes.py",
    "llm/drafts/test_llm_speculative_requests.py",
    "llm/drafts/test_llm_grammar_drafts.py",
    "llm/box/test_replay.py",
    "test_repository.py",
)


def longest_first(items: list[pytest.Item]) -> None:
    """Sort tests by their files, in place; those of other files come behind, as they were."""
    place = {HERE / name: number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.path, len(place)))
