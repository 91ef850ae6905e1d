"""Builders of cases: the batches of one captured step, as captured, shrunk and grown."""

from collections.abc import Sequence
from dataclasses import replace

from paceline.core.model.lookback import Chunk, Lookback
from paceline.proof.suite.case import Batch, Case, Layer
from paceline.proof.suite.modes import ForwardMode
from paceline.proof.suite.trees import Parents

Rows = tuple[tuple[int, int], ...]  # [num_reqs] prefix and extend lengths


def base_case(mode: ForwardMode, *windows: Lookback | None) -> Case:
    """What the cases of a mode start from: bfloat16, and one layer per window, or one without."""
    layers = tuple(Layer(window) for window in windows or (None,))
    has_chunks = any(isinstance(window, Chunk) for window in windows)
    return Case(
        name="base",
        method="chunk" if has_chunks else "swa" if any(windows) else "dense",
        mode=mode,
        batches=(),
        captured_reqs=4,
        dtype="bfloat16",
        layers=layers,
    )


def ragged_case(base: Case, name: str, rows: Rows) -> Case:
    """`base` in three batches, padded to the requests and tokens of the first.

    Full, with requests of prefix 1 beyond the given ones; half of them with half the tokens; all of
    them a page longer.  The last two leave tokens over, and a row to hold them.
    """
    reqs = max(base.captured_reqs, len(rows) + 1)
    full = rows + ((1, 1),) * (reqs - len(rows))
    half = rows[::-1][: (len(rows) + 1) // 2]
    shrunk = tuple((prefix // 2, (extend + 1) // 2) for prefix, extend in half)
    grown = tuple((prefix + base.page_size, extend) for prefix, extend in rows[1:] + rows[:1])
    batches = tuple(
        Batch(tuple(prefix for prefix, _ in each), tuple(extend for _, extend in each))
        for each in (full, shrunk, grown)
    )
    return replace(
        base,
        name=name,
        batches=batches,
        captured_reqs=reqs,
        captured_tokens=batches[0].num_tokens,
    )


def uniform_case(base: Case, name: str, prefixes: Sequence[int], *, extend: int = 1) -> Case:
    """`base` in three batches of `extend` tokens per request.

    Full, with requests of prefix 1 beyond the given ones; half as many rows, of half the prefix;
    all of them a page longer.  The second leaves scratch rows, and mostly the third.
    """
    reqs, given = base.captured_reqs, tuple(prefixes)
    assert len(given) <= reqs, f"{name}: {len(given)} requests are more than {reqs}"
    full = given + (1,) * (reqs - len(given))
    shrunk = tuple(max(1, prefix // 2) for prefix in given[::-1][: (reqs + 1) // 2])
    grown = tuple(prefix + base.page_size for prefix in given[1:] + given[:1])
    return with_prefixes(base, name, (full, shrunk, grown), extend=extend)


def live_sizes_case(base: Case, name: str, prefixes: Sequence[int], *, extend: int = 1) -> Case:
    """`base` with all requests, then with 1, 2, ... of them, a token longer each time."""
    sizes = (len(prefixes), *range(1, len(prefixes)))
    lists = tuple(
        tuple(prefix + turn for prefix in prefixes[:size]) for turn, size in enumerate(sizes)
    )
    return with_prefixes(replace(base, captured_reqs=len(prefixes)), name, lists, extend=extend)


def tree_case(base: Case, name: str, prefixes: Sequence[int], *trees: Parents) -> Case:
    """uniform_case with a tree per request.

    trees: of one number of nodes; they take turns, so that a replay gives a request another tree
    than the capture did.
    """
    (extend,) = {len(tree) for tree in trees}
    return with_trees(uniform_case(base, name, prefixes, extend=extend), *trees)


def with_trees(case: Case, *trees: Parents) -> Case:
    """`case` with the trees in turn instead of chains."""
    batches = tuple(
        replace(
            batch,
            parents=tuple(trees[(turn + row) % len(trees)] for row in range(batch.num_reqs)),
        )
        for turn, batch in enumerate(case.batches)
    )
    return replace(case, batches=batches)


def with_frozen(case: Case, *frozen: tuple[int, ...]) -> Case:
    """`case` with the requests of each batch that the device has finished."""
    pairs = zip(case.batches, frozen, strict=True)
    return replace(case, batches=tuple(replace(batch, frozen=rows) for batch, rows in pairs))


def with_prefixes(base: Case, name: str, lists: Sequence[tuple[int, ...]], *, extend: int) -> Case:
    """`base` with one batch per list of prefixes, `extend` tokens per request."""
    batches = tuple(Batch(prefixes, (extend,) * len(prefixes)) for prefixes in lists)
    return replace(base, name=name, batches=batches)


def full(*cases: Case) -> tuple[Case, ...]:
    """The same, left out of the quick suite."""
    return tuple(replace(case, is_quick=False) for case in cases)


def interpreted(*cases: Case) -> tuple[Case, ...]:
    """The same, run by Triton's interpreter too."""
    return tuple(replace(case, is_interpreted=True) for case in cases)
