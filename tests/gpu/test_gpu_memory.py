"""The pool that budgets follow takes what torch's allocator takes."""

import random

import pytest
import torch

from paceline.plan.memory.cuda_pool import CudaPool

pytestmark = pytest.mark.gpu
SIZES = (300, 70_000, 1 << 20, 3 << 20, 9 << 20, 10 << 20, 33 << 20)


@pytest.mark.parametrize("seed", range(4))
def test_a_cuda_pool_grows_as_the_allocator_does(seed: int) -> None:
    source, ours, theirs = random.Random(seed), CudaPool(), torch.cuda.MemPool()
    alive = []
    with torch.cuda.use_mem_pool(theirs):
        for _ in range(300):
            if alive and source.random() < 0.48:
                piece, tensor = alive.pop(source.randrange(len(alive)))
                ours.give_back(piece)
                del tensor
            else:
                size = int(source.choice(SIZES) * source.uniform(0.5, 1.5))
                tensor = torch.empty(size, dtype=torch.uint8, device="cuda")
                alive.append((ours.take(size), tensor))
    segments = torch.cuda.memory_snapshot()
    held = sum(s["total_size"] for s in segments if tuple(s["segment_pool_id"]) == theirs.id)
    assert ours.held == held
