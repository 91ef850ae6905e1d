"""Runs: changes of neighbouring rows of the request table, which one copy makes for all of them.

Requests that enter together take rows that lie side by side, so a step of 64 prompts has four
copies and not 256, of which each would cost the host as much as the longest.
"""

from collections.abc import Iterable

from paceline.core.step import Delta, JoinDelta, PageDelta

PADDING = 2  # a run's tokens, padded to its longest, are at most so many times what they are


def join_runs(deltas: Iterable[Delta]) -> list[list[JoinDelta]]:
    """Those that join, in order, as rows that follow one another.  A run ends before a prompt whose
    length would pad the others by more than PADDING says."""
    runs: list[list[JoinDelta]] = []
    known = longest = 0  # tokens of the last run; of its longest prompt
    for delta in deltas:
        if not isinstance(delta, JoinDelta):
            continue
        num_tokens, run = len(delta.token_ids), runs[-1] if runs else []
        known, longest = known + num_tokens, max(longest, num_tokens)
        follows = run and run[-1].row + 1 == delta.row
        if follows and (len(run) + 1) * longest <= PADDING * known:
            run.append(delta)
        else:
            runs.append([delta])
            known = longest = num_tokens
    return runs


def page_runs(deltas: Iterable[Delta]) -> list[list[PageDelta]]:
    """Changes of page tables, of each group in order: the same entries of rows that follow one
    another."""
    runs: list[list[PageDelta]] = []
    last: dict[int, list[PageDelta]] = {}  # by group
    for delta in deltas:
        if not isinstance(delta, PageDelta):
            continue
        run = last.get(delta.group)
        if run is None or not _follows(run[-1], delta):
            last[delta.group] = run = []
            runs.append(run)
        run.append(delta)
    return runs


def _follows(before: PageDelta, delta: PageDelta) -> bool:
    alike = before.start == delta.start and len(before.page_ids) == len(delta.page_ids)
    return alike and before.row + 1 == delta.row
