"""The noise of sampling: kernels/gumbel.py over a vocabulary, and the seeds of completions.

Nothing about the batch, the step or earlier draws enters, so batching, speculation and preemption
cannot change a seeded answer.
"""

import torch
from torch import Tensor

from paceline.kernels.gumbel import gumbel_at, splitmix64


def gumbel(seeds: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
    """`gumbel_at` of every token id: [num_rows, vocab_size] float32.

    seeds, positions: [num_rows] int64.
    """
    return gumbel_at(seeds, positions, torch.arange(vocab_size, device=seeds.device))


def child_seed(seed: int, index: int) -> int:
    """The seed of completion `index` of a request: `seed` itself for the first, then the outputs
    of its SplitMix64 stream.
    """
    if index == 0:
        return seed
    return int(splitmix64(torch.tensor(seed), torch.tensor(index)))
