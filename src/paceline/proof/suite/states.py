"""Cases of layers that keep a state of each request: every step that writes one, every way to the
right slot.

Of each there are two, with slots in order and with slots in none.
"""

from dataclasses import replace

from paceline.proof.suite.build import (
    base_case,
    ragged_case,
    tree_case,
    uniform_case,
    with_frozen,
)
from paceline.proof.suite.case import Case, Layer, PageLayout
from paceline.proof.suite.modes import ForwardMode
from paceline.proof.suite.trees import Parents, beam, chain, irregular, path_to, unbalanced

STATE_METHODS = ("sum", "gdn", "mamba2")  # kinds of mixer that have an oracle
_PAGE, _EVERY = 4, 8


def state_cases() -> tuple[Case, ...]:
    """All cases of all kinds."""
    return tuple(
        replace(case, method=method, layout=layout, name=f"{case.name}-{layout.value}")
        for method in STATE_METHODS
        for layout in (PageLayout.CONTIGUOUS, PageLayout.SHUFFLED)
        for case in (*_steps(), *_rounds())
    )


def _base(mode: ForwardMode) -> Case:
    """float32, two layers."""
    base = replace(base_case(mode), dtype="float32", page_size=_PAGE, state_every=_EVERY)
    return replace(base, layers=(Layer(),) * 2)


def _steps() -> tuple[Case, ...]:
    decode, extend = _base(ForwardMode.DECODE), _base(ForwardMode.EXTEND)
    mixed, fixed = _base(ForwardMode.MIXED), _base(ForwardMode.DRAFT_EXTEND_V2)
    return (
        ragged_case(extend, "prefill", ((0, 5), (0, 16), (0, 8), (0, 1))),
        ragged_case(extend, "chunks", ((8, 8), (3, 5), (16, 1), (0, 19))),
        ragged_case(mixed, "decode-and-chunks", ((7, 1), (8, 17), (15, 1), (0, 6))),
        uniform_case(decode, "decode", (7, 8, 15)),
        with_frozen(uniform_case(decode, "frozen-rows", (7, 12, 23, 8)), (), (0,), (1, 3)),
        ragged_case(_base(ForwardMode.DRAFT_EXTEND), "accepted", ((5, 3), (8, 1), (14, 2))),
        uniform_case(fixed, "fixed3", (5, 13, 8), extend=3),
    )


def _rounds() -> tuple[Case, ...]:
    verify = _base(ForwardMode.TARGET_VERIFY)
    edges = (7, 12, 15, 1)
    return (
        _accepting(uniform_case(verify, "chain4", edges, extend=4)),
        _accepting(
            with_frozen(uniform_case(verify, "chain4-frozen", edges, extend=4), (), (0,), (1, 2))
        ),
        _accepting(tree_case(verify, "topk2", edges, beam(2, 3), unbalanced(7))),
        _accepting(tree_case(verify, "irregular", edges, irregular(9), chain(9))),
    )


def _accepting(case: Case) -> Case:
    """`case` as rounds: of each request the path to another row, the root alone and the last one
    among them."""
    batches = []
    for turn, batch in enumerate(case.batches):
        accepted = []
        for request, extend in enumerate(batch.extend_lens):
            tree: Parents = chain(extend) if batch.parents is None else batch.parents[request]
            accepted.append(path_to(tree, (extend - 1 - turn - 2 * request) % extend))
        batches.append(replace(batch, accepted=tuple(accepted)))
    return replace(case, batches=tuple(batches))
