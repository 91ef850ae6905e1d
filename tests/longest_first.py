"""The files of tests that take longest, which begin first: a file goes to one worker whole, and a
long one that begins last is waited for by all the others."""

from pathlib import Path

import pytest

HERE = Path(__file__).parent
LONGEST = (
    "proof/fixes/test_fixes.py",
    "llm/ranks/test_llm_ranks.py",
    "llm/drafts/test_llm_draft_acceptance.py",
    "llm/states/test_llm_mamba2.py",
    "proof/check/test_cells.py",
    "llm/test_llm_parity.py",
    "llm/drafts/test_llm_speculative_backends.py",
    "llm/ranks/test_rank_ends.py",
    "llm/states/test_llm_linear.py",
    "llm/test_llm_equality.py",
    "llm/grammars/test_llm_grammar.py",
    "server/test_two_processes.py",
    "benchmarks/test_soak.py",
    "plan/test_rehearsal.py",
    "proof/check/test_state_cells.py",
    "engine/test_scheduler_machine.py",
    "plan/test_nearest.py",
    "llm/drafts/test_llm_speculative_requests.py",
    "llm/drafts/test_llm_speculative.py",
    "runner/states/test_state_engine.py",
    "plan/test_draft_budget.py",
    "test_repository.py",
)


def longest_first(items: list[pytest.Item]) -> None:
    """Sort tests by their files, in place; those of other files come behind, as they were."""
    place = {HERE / name: number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.path, len(place)))
