"""Draft trees as parents: which earlier row of its request each row hangs on, −1: the prefix.

A verify tree starts with its root, the last committed token; a draft step holds the drafted nodes
alone, so that several rows hang on the prefix.  Pure Python.
"""

Parents = tuple[int, ...]  # [extend_len] an earlier row of the same request, or -1


def chain(num: int) -> Parents:
    """One branch of `num` nodes."""
    return tuple(range(-1, num - 1))


def wide(leaves: int) -> Parents:
    """A root and its leaves."""
    return (-1,) + (0,) * leaves


def forest(num: int) -> Parents:
    """`num` nodes on the prefix: what the first draft step of a tree computes."""
    return (-1,) * num


def beam(topk: int, depth: int) -> Parents:
    """A root, then `depth` levels of `topk` nodes, as a beam search leaves them.

    On the first level each hangs on the root; later one node has several children, which are not
    neighbours, and another has none.  beam(2, 1) is the one tree of SGLang's attention tests.
    """
    parents = [-1] + [0] * topk
    for level in range(1, depth):
        first = 1 + (level - 1) * topk  # row of the level above's first node
        parents += [first + child * child * level % topk for child in range(topk)]
    return tuple(parents)


def unbalanced(num: int) -> Parents:
    """A chain of which every second node also has a leaf: a comb of `num` nodes, spine first."""
    spine = (2 * num + 2) // 3
    return chain(spine) + tuple(2 * leaf for leaf in range(num - spine))


def irregular(num: int) -> Parents:
    """Branches in order of insertion, as n-gram matches bring them: a branch, then the next.

    Rows of one depth are not neighbours, and every third row starts a branch on an earlier one.
    """
    parents = list(chain(num))
    for row in range(3, num, 3):
        parents[row] = row * 5 % (row - 1)
    return tuple(parents)


def depths(parents: Parents) -> tuple[int, ...]:
    """[extend_len] ancestors of each row within the step, itself not counted."""
    found: list[int] = []
    for parent in parents:
        found.append(found[parent] + 1 if parent >= 0 else 0)
    return tuple(found)


def path_to(parents: Parents, row: int) -> tuple[int, ...]:
    """The rows from the one that hangs on the prefix down to `row`."""
    path: tuple[int, ...] = ()
    while row >= 0:
        path, row = (row, *path), parents[row]
    return path


def draft_step(parents: Parents, index: int) -> Parents:
    """The tree of draft step `index` that leads to the verify tree `parents`.

    The root is in the cache, so its children hang on the prefix; the step holds every drafted node
    of depth 1 to `index` + 1, earlier ones once more.
    """
    levels = depths(parents)
    kept = [row for row, level in enumerate(levels) if 1 <= level <= index + 1]
    new = {row: place for place, row in enumerate(kept)}
    return tuple(new.get(parents[row], -1) for row in kept)


VERIFY_TREES: dict[str, Parents] = {
    "topk2": beam(2, 1),
    "topk2-deep": beam(2, 4),
    "topk4": beam(4, 2),
    "topk8": beam(8, 2),
    "unbalanced": unbalanced(8),
    "deep": unbalanced(13),
    "wide": wide(8),
    "irregular": irregular(9),
    "roots": (-1, -1, 0, 1, 1, -1),
    "chain-as-tree": chain(4),
}
