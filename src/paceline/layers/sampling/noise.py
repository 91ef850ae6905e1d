"""The noise of sampling: kernels/gumbel.py over a vocabulary.

Nothing about the batch, the step or earlier draws enters, so batching, speculation and preemption
cannot change a seeded answer.  What must be independent of this noise, for acceptance by rejection,
comes from outputs of the seed's stream far behind those of completions.
"""

import torch
from torch import Tensor

from paceline.kernels.gumbel import gumbel_at, splitmix64

_DRAFT_SEED, _COIN_SEED = 2**62, 2**62 + 1  # places in the stream of a request's seed
_BITS = 40  # of a coin


def gumbel(seeds: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
    """`gumbel_at` of every token id: [num_rows, vocab_size] float32.

    seeds, positions: [num_rows] int64.
    """
    return gumbel_at(seeds, positions, torch.arange(vocab_size, device=seeds.device))


def draft_seeds(seeds: Tensor) -> Tensor:
    """Seeds of noise that is independent of the seeds' own, for drafts: [num_rows] int64.

    seeds: [num_rows] int64.
    """
    return splitmix64(seeds, torch.full_like(seeds, _DRAFT_SEED))


def coins(seeds: Tensor, positions: Tensor) -> Tensor:
    """One number for each (seed, position), uniform in (0, 1], independent of both noises:
    [num_rows] float32.

    seeds, positions: [num_rows] int64.
    """
    stream = splitmix64(seeds, torch.full_like(seeds, _COIN_SEED))
    bits = splitmix64(stream, positions) & (2**_BITS - 1)
    uniform: Tensor = (bits.to(torch.float32) + 0.5) * 2.0**-_BITS
    return uniform
