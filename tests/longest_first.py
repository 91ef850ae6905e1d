"""The files of tests that take longest, which begin first: a file goes to one worker whole, and a
long one that begins last is waited for by all the others."""

from pathlib import Path

import pytest

HERE = Path(__file__).parent
LONGEST = (
    "proof/fixes/test_fixes.py",
    "llm/ranks/test_llm_ranks.py",
    "llm/ranks/test_rank_ends.py",
    "llm/drafts/test_llm_speculative_backends.py",
    "proof/check/test_latent_cells.py",
    "llm/drafts/test_llm_draft_acceptance.py",
    "llm/test_llm_equality.py",
    "proof/check/test_cells.py",
    "llm/grammars/test_llm_grammar.py",
    "server/test_two_processes.py",
    "llm/drafts/test_llm_speculative.py",
    "engine/test_scheduler_machine.py",
    "plan/test_nearest.py",
    "llm/drafts/test_llm_speculative_requests.py",
    "runner/states/test_state_engine.py",
    "plan/test_draft_budget.py",
    "llm/test_llm_fp8_cache.py",
    "test_repository.py",
    "benchmarks/test_soak.py",
)


def longest_first(items: list[pytest.Item]) -> None:
    """Sort tests by their files, in place; those of other files come behind, as they were."""
    place = {HERE / name: number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.path, len(place)))
