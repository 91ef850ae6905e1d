"""The kernels of drafting, compiled, against their references at the sizes of real drafters."""

import pytest
import torch

from paceline.core.draft_shape import DraftShape
from paceline.kernels.draft_topk import DraftNoise, TopDrafts, draft_topk, draft_topk_reference
from paceline.kernels.grow_tree import Candidates, Frontier, grow_tree, select_tree
from paceline.kernels.ngram_lookup import ngram_lookup, ngram_lookup_reference

# Warnings of drivers and compilers are shown and fail nothing.
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]

TREES = [
    DraftShape(num_steps=steps, topk=topk, num_draft_tokens=tokens)
    for steps, topk, tokens in [(3, 4, 8), (8, 8, 64), (5, 10, 60), (2, 2, 3)]
]


def on_gpu(drafts: TopDrafts) -> TopDrafts:
    return TopDrafts(drafts.tokens.cuda(), drafts.scores.cuda())


@pytest.mark.parametrize("k", [1, 4, 16])
@pytest.mark.parametrize("vocab", [32_000, 128_256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("mapped", [False, True])
def test_draft_topk_equals_its_reference(
    k: int, vocab: int, dtype: torch.dtype, mapped: bool
) -> None:
    """bfloat16 logits tie often; noise leaves no ties, but differs by roundings."""
    generator = torch.Generator().manual_seed(k)
    rows = 9
    logits = (torch.randn(rows, vocab, generator=generator) * 3).to(dtype)
    d2t = torch.arange(vocab) if mapped else None
    temperature = torch.rand(rows, generator=generator)
    temperature[::2] = 0.0
    seeds = torch.randint(-(2**63), 2**63 - 1, (rows,), generator=generator)
    positions = torch.randint(0, 100_000, (rows,), generator=generator)
    noise = DraftNoise(temperature, seeds, positions)
    wanted = draft_topk_reference(logits, k, noise=noise, d2t=d2t)
    found = draft_topk(
        logits.cuda(),
        k,
        **{name: tensor.cuda() for name, tensor in noise._asdict().items()},
        d2t=None if d2t is None else d2t.cuda(),
        noise=True,
    )
    assert torch.equal(found.tokens.cpu(), wanted.tokens)
    torch.testing.assert_close(found.scores.cpu(), wanted.scores, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("shape", TREES, ids=lambda s: f"{s.num_steps}-{s.topk}")
def test_trees_equal_those_of_the_reference(shape: DraftShape) -> None:
    """Scores are sums of a few powers of two: many tie, and every device adds them alike."""
    generator, reqs = torch.Generator().manual_seed(0), 33
    roots = torch.randint(0, 1000, (reqs,), generator=generator)
    mine = Candidates.empty(reqs, shape, torch.device("cuda"))
    theirs = Candidates.empty(reqs, shape, torch.device("cpu"))
    found: Frontier | None = None
    wanted: Frontier | None = None
    for step in range(shape.num_steps):
        size = (reqs if step == 0 else reqs * shape.topk, shape.topk)
        tokens = torch.rand(size[0], 90, generator=generator).argsort(1)[:, : shape.topk]
        scores = -torch.randint(0, 5, size, generator=generator).float() / 4
        children = TopDrafts(tokens.contiguous(), scores)
        found = grow_tree(on_gpu(children), found, mine, step=step)
        wanted = grow_tree(children, wanted, theirs, step=step)
        for name, one, other in zip(Frontier._fields, found, wanted, strict=True):
            assert torch.equal(one.cpu(), other), name
    for one, other in zip(
        select_tree(mine, roots.cuda(), shape.num_draft_tokens),
        select_tree(theirs, roots, shape.num_draft_tokens),
        strict=True,
    ):
        assert torch.equal(one.cpu(), other)


@pytest.mark.parametrize("shape", [DraftShape(num_steps=5, topk=1, num_draft_tokens=6), *TREES])
def test_ngram_lookup_equals_its_reference(shape: DraftShape) -> None:
    generator = torch.Generator().manual_seed(0)
    history = torch.randint(0, 30, (6, 131_072), generator=generator, dtype=torch.int32)
    row_ids = torch.tensor([5, 3, 1, 2, 0])
    known = torch.tensor([131_072, 70_001, 2049, 17, 2], dtype=torch.int32)
    wanted = ngram_lookup_reference(history, row_ids, known, shape=shape, min_n=1, max_n=4)
    found = ngram_lookup(
        history.cuda(), row_ids.cuda(), known.cuda(), shape=shape, min_n=1, max_n=4
    )
    assert torch.equal(found.tokens.cpu(), wanted.tokens)
    assert (found.parents is None) == (wanted.parents is None)
    if found.parents is not None and wanted.parents is not None:
        assert torch.equal(found.parents.cpu(), wanted.parents)
