"""draft_topk: the best drafts of each row of a drafter's logits, and their log-probabilities.

A request that samples chooses argmax(logits + T * noise), where the noise of a token depends on
(seed, position, token id) alone.  A drafter that adds the noise the target will add proposes what
the target is likely to sample.  A draft vocabulary is a part of the target's: draft id i stands for
token i + d2t[i].

Worked example: k = 2, T = 0, draft vocabulary of 4.

    logits     [1.0, 3.0, 3.0, NaN]      d2t [5, 5, 7, 7]
    draft ids  [1, 2]                    the largest; equal ones: the lowest id; NaN counts as -inf
    tokens     [6, 9]                    1 + 5, 2 + 7
    scores     [-0.76, -0.76]            log softmax of [1, 3, 3, -inf]
"""

from typing import NamedTuple

import torch
from torch import Tensor

from paceline.core.errors import KernelArgumentError
from paceline.kernels._check import reject
from paceline.kernels.custom_op import define_op
from paceline.kernels.gumbel import gumbel_at
from paceline.kernels.stand_in import device_type

MAX_DRAFTS = 16
BLOCK_VOCAB = 1024  # tokens of a program: 126 of them for a row of 128,256
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_LOW_BITS = 2**32 - 1


class TopDrafts(NamedTuple):
    """The drafts of every row, the best first."""

    tokens: Tensor  # [rows, k]  int64  token ids of the target
    scores: Tensor  # [rows, k]  float32  natural log-probabilities; -inf where none can be told


class DraftNoise(NamedTuple):
    """What the noise of each row depends on."""

    temperature: Tensor  # [rows]  float32  0: no noise
    seeds: Tensor  # [rows]  int64
    positions: Tensor  # [rows]  int64  the index that the drafted token will have


def draft_topk_reference(
    logits: Tensor, k: int, *, noise: DraftNoise | None, d2t: Tensor | None
) -> TopDrafts:
    """The definition, and the CPU's path.  noise: None where no row draws any."""
    logits = logits.float()
    draft_ids = torch.arange(logits.shape[1], device=logits.device)
    if noise is not None:
        targets = draft_ids if d2t is None else draft_ids + d2t
        drawn = gumbel_at(noise.seeds, noise.positions, targets)
        logits = logits + noise.temperature.unsqueeze(1) * drawn
    logits = logits.masked_fill(logits.isnan(), float("-inf"))
    best = torch.topk(_ranks(logits, draft_ids), k, dim=-1).values
    chosen = _LOW_BITS - (best & _LOW_BITS)
    scores = logits.log_softmax(-1).gather(1, chosen)
    scores = scores.masked_fill(scores.isnan(), float("-inf"))
    return TopDrafts(chosen if d2t is None else chosen + d2t[chosen], scores)


def _ranks(logits: Tensor, draft_ids: Tensor) -> Tensor:
    """[rows, draft vocab] int64, all different: ordered as the logits, then from the last id."""
    bits = (logits + 0.0).view(torch.int32)  # -0.0 becomes 0.0
    ordered = bits ^ ((bits >> 31) & 0x7FFF_FFFF)
    return (ordered.long() << 32) | (_LOW_BITS - draft_ids)


def _draft_topk_cuda(
    logits: Tensor,
    temperature: Tensor | None,
    seeds: Tensor | None,
    positions: Tensor | None,
    d2t: Tensor | None,
    tokens: Tensor,
    scores: Tensor,
) -> None:
    from paceline.kernels._triton.draft_topk import launch_draft_topk

    noise = None
    if temperature is not None and seeds is not None and positions is not None:
        noise = DraftNoise(temperature, seeds, positions)
    launch_draft_topk(logits, TopDrafts(tokens, scores), noise=noise, d2t=d2t)


def _scratch(logits: Tensor, *others: Tensor) -> tuple[int, ...]:
    """Of each block: the ranks of its best, the highest logit, its share of the softmax."""
    (rows, vocab), k = logits.shape, others[-1].shape[1]
    blocks = rows * -(-vocab // BLOCK_VOCAB)
    return 8 * k * blocks, 4 * blocks, 4 * blocks


_DRAFT_TOPK = define_op(
    "draft_topk(Tensor logits, Tensor? temperature, Tensor? seeds, Tensor? positions, "
    "Tensor? d2t, Tensor(a!) tokens, Tensor(b!) scores) -> ()",
    cpu=None,
    cuda=_draft_topk_cuda,
    scratch=_scratch,
)


def draft_topk(
    logits: Tensor,
    k: int,
    *,
    temperature: Tensor,
    seeds: Tensor,
    positions: Tensor,
    d2t: Tensor | None,
    noise: bool,
) -> TopDrafts:
    """The k largest of logits + temperature * Gumbel noise of each row; ties: the lowest draft id.

    logits: [rows, draft vocab] float32, bfloat16 or float16, the last dimension contiguous; k: 1 to
    MAX_DRAFTS; temperature, seeds, positions: [rows] float32, int64, int64 as in DraftNoise; d2t:
    [draft vocab] int64, what to add to a draft id, None: nothing.  noise: False, which a graph
    freezes, where no row draws any; then those three are not read.  Tokens of a row are different
    and in range whatever the logits hold.  Mutates nothing.  On a CPU these are torch's operators,
    which a recorded graph replays on fixed storages.  Graph-safe: the grid depends on shapes only.
    Raises KernelArgumentError.
    """
    _check_logits(logits, k, d2t)
    drawn = DraftNoise(temperature, seeds, positions) if noise else None
    if drawn is not None:
        _check_noise(drawn, logits.shape[0])
    if device_type(logits.device) == "cpu":
        return draft_topk_reference(logits, k, noise=drawn, d2t=d2t)
    shape = (logits.shape[0], k)
    tokens = torch.empty(shape, dtype=torch.int64, device=logits.device)
    scores = torch.empty(shape, dtype=torch.float32, device=logits.device)
    _DRAFT_TOPK(logits, *(drawn or (None, None, None)), d2t, tokens, scores)
    return TopDrafts(tokens, scores)


def _check_logits(logits: Tensor, k: int, d2t: Tensor | None) -> None:
    if logits.ndim != 2 or logits.dtype not in _DTYPES or logits.stride(1) != 1:
        reject(
            "logits",
            expected="float32, bfloat16 or float16 [rows, draft vocab], contiguous rows",
            got=logits,
            remedy="pass what the drafter's head returned",
        )
    vocab = logits.shape[1]
    if not 1 <= k <= min(MAX_DRAFTS, vocab):
        raise KernelArgumentError.about(
            "k",
            expected=f"1 to {min(MAX_DRAFTS, vocab)}",
            got=k,
            remedy="lower --speculative-eagle-topk",
        )
    if d2t is not None and (d2t.shape != (vocab,) or d2t.dtype != torch.int64):
        reject(
            "d2t",
            expected=f"int64 [{vocab}], as many as logits of a row",
            got=d2t,
            remedy="pass the offsets of the checkpoint that the head came from",
        )


def _check_noise(noise: DraftNoise, rows: int) -> None:
    for name, tensor in noise._asdict().items():
        dtype = torch.float32 if name == "temperature" else torch.int64
        if tensor.shape != (rows,) or tensor.dtype != dtype or not tensor.is_contiguous():
            reject(
                name,
                expected=f"contiguous {str(dtype).removeprefix('torch.')} [{rows}], one per row",
                got=tensor,
                remedy="select the sampling rows of the requests, once for each of their rows",
            )
