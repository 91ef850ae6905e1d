"""d2t: which target token each token of a draft head's reduced vocabulary is.

Stored as offsets: target id = draft id + d2t[draft id].  The second map of released heads, t2d, is
no table of ids: it marks the target tokens that the draft vocabulary has.
"""

import torch
from torch import Tensor

from paceline.core.errors import WeightsError
from paceline.models.checkpoint import StoredTensors

_REMEDY = "check that the head's config.json, its weights and the target belong together"


def read_d2t(checkpoint: StoredTensors, size: int, vocab_size: int, *, head: str) -> Tensor:
    """[size] int64 offsets, checked, on the CPU; zeros where a full vocabulary has none stored.

    Raises WeightsError about the head named `head` unless each draft token is another token of the
    target, and t2d, where stored, marks just these.
    """
    if "d2t" not in checkpoint.names:
        if size < vocab_size:
            raise WeightsError.about(
                f"weights of '{head}'",
                expected=f"with a tensor d2t: its vocabulary has {size} of {vocab_size} tokens",
                got="none",
                remedy="download the head again, or correct draft_vocab_size",
            )
        return torch.zeros(size, dtype=torch.int64)
    _check(checkpoint, "d2t", ("I64", "I32"), size)
    d2t = checkpoint.tensor("d2t").to(torch.int64)
    ids = d2t + torch.arange(size)
    outside = (ids < 0) | (ids >= vocab_size)
    if outside.any():
        _refuse("d2t", f"offsets to target ids 0 to {vocab_size - 1}", ids[outside][0].item())
    marked = torch.zeros(vocab_size, dtype=torch.bool)
    marked[ids] = True
    distinct = int(marked.sum())
    if distinct != size:
        _refuse("d2t", f"offsets to {size} different target ids", distinct)
    if "t2d" in checkpoint.names:
        _check(checkpoint, "t2d", ("BOOL",), vocab_size)
        t2d = checkpoint.tensor("t2d")
        if not torch.equal(t2d, marked):
            wrong = int((t2d != marked).sum())
            _refuse("t2d", "true at the target ids of d2t alone", f"{wrong} that differ")
    return d2t


def spread_d2t(size: int, vocab_size: int) -> Tensor:
    """[size] int64 offsets of a made-up draft vocabulary, spread evenly over the target's."""
    ids = torch.arange(size)
    return ids * vocab_size // size - ids


def _check(checkpoint: StoredTensors, name: str, dtypes: tuple[str, ...], size: int) -> None:
    shape, dtype = checkpoint.shape(name), checkpoint.dtype(name)
    if shape != (size,) or dtype not in dtypes:
        _refuse(name, f"{' or '.join(dtypes)} [{size}]", f"{dtype} {list(shape)}")


def _refuse(name: str, expected: str, got: object) -> None:
    raise WeightsError.about(f"tensor '{name}'", expected=expected, got=got, remedy=_REMEDY)
