"""grow_tree, select_tree: a tree of drafts, grown where the drafter is surest.

Every node of the frontier gets its topk best children; a child's score is its parent's plus its own
log-probability.  All are remembered as candidates, and the best topk of a step are the next
frontier; at the end the best candidates of all make the tree (EAGLE-2, Li et al. 2024,
arXiv:2406.16858).  Candidate r of step 0 has id r, candidate r of step i > 0, child r % topk of the
frontier's slot r // topk, has id topk + (i - 1) * topk^2 + r.  Order is by score, equal scores by
id: no child scores above its parent and its id is larger, so none is kept without its parent.

Worked example: topk 2, 3 steps, 6 draft tokens (probabilities; id: token: score).

    step 0      0: a .60   1: b .30                          parents -1 -1       frontier [0 1]
    step 1      2: c .42   3: d .12   4: e .15   5: f .12    parents 0 0 1 1     frontier [2 4]
    step 2      6: g .378  7: h .021  8: i .12   9: j .015   parents 2 2 4 4
    origin      [0 0], then [0 1]
    pass 1      rows a b      parents [-1 -1]            under a root row: [-1 | 0 0]
    pass 2      rows a b c e  parents [-1 -1 0 1]                          [-1 | 0 0 | 1 2]
    kept        ids 0 1 2 4 6
    tree        tokens [root a b c e g]  parents [-1 0 0 1 2 3]
"""

from typing import NamedTuple

import torch
from torch import Tensor

from paceline.core.draft_shape import DraftShape
from paceline.core.errors import KernelArgumentError
from paceline.kernels._check import reject
from paceline.kernels.custom_op import define_op
from paceline.kernels.draft_topk import TopDrafts
from paceline.kernels.stand_in import device_type


class Candidates(NamedTuple):
    """Everything that was ever drafted in a round; `grow_tree` of step i fills that step's part."""

    tokens: Tensor  # [reqs, num_candidates]  int64
    scores: Tensor  # [reqs, num_candidates]  float32  sums of log-probabilities; never NaN
    parents: Tensor  # [reqs, num_candidates]  int32  candidate id; -1: the root

    @classmethod
    def empty(cls, reqs: int, shape: DraftShape, device: torch.device) -> "Candidates":
        """Room for a round's candidates, not initialised."""
        size = (reqs, shape.num_candidates)
        return cls(
            torch.empty(size, dtype=torch.int64, device=device),
            torch.empty(size, dtype=torch.float32, device=device),
            torch.empty(size, dtype=torch.int32, device=device),
        )


class Frontier(NamedTuple):
    """The nodes that are expanded next, the best first."""

    ids: Tensor  # [reqs, topk]  int32  candidate ids
    scores: Tensor  # [reqs, topk]  float32
    tokens: Tensor  # [reqs, topk]  int64
    origin: Tensor  # [reqs, topk]  int64  slot of the parent in the frontier before; step 0: 0


def grow_tree_reference(
    children: TopDrafts, frontier: Frontier | None, candidates: Candidates, *, step: int
) -> Frontier:
    """The definition, and the CPU's path; arguments and mutation as `grow_tree`."""
    reqs, topk = candidates.tokens.shape[0], children.tokens.shape[-1]
    first = _first_id(step, topk)
    # A child's log-probability is at most 0, whatever rounding says.
    own = children.scores.view(reqs, -1, topk).clamp(max=0.0)
    scores, parents = own, torch.full_like(own, -1, dtype=torch.int32)
    if frontier is not None:
        scores = frontier.scores.unsqueeze(2) + own
        parents = frontier.ids.unsqueeze(2).expand_as(own)
    scores = scores.masked_fill(scores.isnan(), float("-inf")).flatten(1)
    tokens = children.tokens.view(reqs, -1)
    part = slice(first, first + tokens.shape[1])
    candidates.tokens[:, part].copy_(tokens)
    candidates.scores[:, part].copy_(scores)
    candidates.parents[:, part].copy_(parents.flatten(1))
    ordered, order = scores.sort(dim=1, descending=True, stable=True)
    best = order[:, :topk]
    return Frontier((best + first).int(), ordered[:, :topk], tokens.gather(1, best), best // topk)


def select_tree_reference(
    candidates: Candidates, roots: Tensor, num_draft_tokens: int
) -> tuple[Tensor, Tensor]:
    """The definition, and the CPU's path: (tokens, parents) as `select_tree`."""
    order = candidates.scores.sort(dim=1, descending=True, stable=True).indices
    ids = order[:, : num_draft_tokens - 1].sort(dim=1).values
    above = candidates.parents.gather(1, ids)
    # A kept id's row is 1 + how many kept ids are smaller; the root's children have parent -1.
    rows = (ids.unsqueeze(1) <= above.unsqueeze(2)).sum(2, dtype=torch.int32)
    tokens = torch.cat((roots.unsqueeze(1), candidates.tokens.gather(1, ids)), dim=1)
    return tokens, torch.cat((torch.full_like(rows[:, :1], -1), rows), dim=1)


def _grow_tree_cuda(
    child_tokens: Tensor,
    child_scores: Tensor,
    frontier_ids: Tensor | None,
    frontier_scores: Tensor | None,
    step: int,
    *outputs: Tensor,
) -> None:
    from paceline.kernels._triton.grow_tree import launch_grow_tree

    above = None
    if frontier_ids is not None and frontier_scores is not None:
        above = (frontier_ids, frontier_scores)
    launch_grow_tree(
        TopDrafts(child_tokens, child_scores),
        above,
        Candidates(*outputs[:3]),
        Frontier(*outputs[3:]),
        first_id=_first_id(step, child_tokens.shape[-1]),
    )


def _select_tree_cuda(
    cand_tokens: Tensor,
    cand_scores: Tensor,
    cand_parents: Tensor,
    roots: Tensor,
    tokens: Tensor,
    parents: Tensor,
) -> None:
    from paceline.kernels._triton.grow_tree import launch_select_tree

    launch_select_tree(Candidates(cand_tokens, cand_scores, cand_parents), roots, tokens, parents)


_GROW_TREE = define_op(
    "grow_tree(Tensor child_tokens, Tensor child_scores, Tensor? frontier_ids, "
    "Tensor? frontier_scores, int step, Tensor(a!) cand_tokens, Tensor(b!) cand_scores, "
    "Tensor(c!) cand_parents, Tensor(d!) ids, Tensor(e!) scores, Tensor(f!) tokens, "
    "Tensor(g!) origin) -> ()",
    cpu=None,
    cuda=_grow_tree_cuda,
)
_SELECT_TREE = define_op(
    "select_tree(Tensor cand_tokens, Tensor cand_scores, Tensor cand_parents, Tensor roots, "
    "Tensor(a!) tokens, Tensor(b!) parents) -> ()",
    cpu=None,
    cuda=_select_tree_cuda,
)


def grow_tree(
    children: TopDrafts, frontier: Frontier | None, candidates: Candidates, *, step: int
) -> Frontier:
    """Remember the frontier's children and choose the frontier of the next step.

    children: of [reqs * topk, topk], row r * topk + s for slot s of request r; in step 0 of
    [reqs, topk], the root's.  frontier: what the step before returned; None in step 0.  Mutates
    `candidates`, the part of this step.  NaN scores count as -inf.  On a CPU these are torch's
    operators, which a recorded graph replays on fixed storages.  Graph-safe: one program per
    request; `step` is frozen.  Raises KernelArgumentError.
    """
    reqs = candidates.tokens.shape[0]
    topk = children.tokens.shape[-1]
    _check_children(children, frontier, reqs, step=step)
    if candidates.tokens.shape[1] < _first_id(step + 1, topk):
        reject(
            "candidates",
            expected=f"at least {_first_id(step + 1, topk)} per request in step {step}",
            got=candidates.tokens,
            remedy="allocate them by Candidates.empty for the proposer's shape",
        )
    if device_type(children.tokens.device) == "cpu":
        return grow_tree_reference(children, frontier, candidates, step=step)
    device = children.tokens.device
    out = Frontier(
        *(
            torch.empty((reqs, topk), dtype=dtype, device=device)
            for dtype in (torch.int32, torch.float32, torch.int64, torch.int64)
        )
    )
    above = (None, None) if frontier is None else (frontier.ids, frontier.scores)
    _GROW_TREE(*children, *above, step, *candidates, *out)
    return out


def select_tree(
    candidates: Candidates, roots: Tensor, num_draft_tokens: int
) -> tuple[Tensor, Tensor]:
    """The tree to verify: the best num_draft_tokens - 1 candidates by (score, lowest id), by id.

    candidates: all steps' parts filled by `grow_tree`; roots: [reqs] int64, the newest token of
    each request.  Returns tokens [reqs, num_draft_tokens] int64, column 0 the root, and parents
    [reqs, num_draft_tokens] int32, a row of the same request, -1 for the root.  Mutates nothing.
    On a CPU these are torch's operators, which a recorded graph replays on fixed storages.
    Graph-safe: one program per request.  Raises KernelArgumentError.
    """
    reqs, num_candidates = candidates.tokens.shape
    if roots.shape != (reqs,) or roots.dtype != torch.int64:
        reject(
            "roots",
            expected=f"int64 [{reqs}]",
            got=roots,
            remedy="pass the newest token of each request",
        )
    if not 2 <= num_draft_tokens <= num_candidates + 1:
        raise KernelArgumentError.about(
            "num_draft_tokens",
            expected=f"2 to {num_candidates + 1}: as many candidates and a root",
            got=num_draft_tokens,
            remedy="take it from the shape that the candidates were made for",
        )
    if device_type(roots.device) == "cpu":
        return select_tree_reference(candidates, roots, num_draft_tokens)
    tokens = torch.empty((reqs, num_draft_tokens), dtype=torch.int64, device=roots.device)
    parents = torch.empty((reqs, num_draft_tokens), dtype=torch.int32, device=roots.device)
    _SELECT_TREE(*candidates, roots, tokens, parents)
    return tokens, parents


def pass_parents(before: Tensor, origin: Tensor) -> Tensor:
    """Parents of the rows of the next draft pass: those of the last pass, and of a new frontier.

    before: [reqs, rows] int32, rows 0 before the first pass, or 1, all -1, where every pass begins
    with a row for the root; origin: [reqs, topk] int64 of the new frontier.  Returns [reqs, rows +
    topk] int32, rows of the same request; -1: hangs on the request's prefix.  Mutates nothing.
    """
    rows, topk = before.shape[1], origin.shape[1]
    if rows < topk:  # the first frontier: its parent is the root, which has a row or none
        above = torch.full_like(origin, rows - 1, dtype=torch.int32)
    else:
        above = (origin + (rows - topk)).int()
    return torch.cat((before, above), dim=1)


def _first_id(step: int, topk: int) -> int:
    """The first candidate id of a step, which is the number of candidates before it."""
    return 0 if step == 0 else topk + (step - 1) * topk**2


def _check_children(
    children: TopDrafts, frontier: Frontier | None, reqs: int, *, step: int
) -> None:
    topk = children.tokens.shape[-1]
    rows = reqs if step == 0 else reqs * topk
    for name, tensor in children._asdict().items():
        if tensor.shape != (rows, topk) or not tensor.is_contiguous():
            reject(
                f"children.{name}",
                expected=f"contiguous [{rows}, {topk}] in step {step}",
                got=tensor,
                remedy="draft for every slot of the frontier, and in step 0 for the root alone",
            )
    if (frontier is None) != (step == 0):
        raise KernelArgumentError.about(
            "frontier",
            expected="None in step 0, and what the step before returned in any other",
            got=f"{'None' if frontier is None else 'a frontier'} in step {step}",
            remedy="count the steps of a round from 0",
        )
