"""eagle_input: what the first layer of an EAGLE-3 head reads, from token ids and features.

out = [rms_norm(table[id]), rms_norm(feature)], each half with a weight of its own (released weights
of Li et al. 2025, arXiv:2503.01840).  Norms round as kernels.rms_norm does.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from paceline.kernels._check import reject, require_triton
from paceline.kernels.custom_op import Run, define_op
from paceline.kernels.rms_norm import bind_rms_norm, rms_norm_reference
from paceline.kernels.stand_in import device_type


class HalfNorms(NamedTuple):
    """The weights of the two norms."""

    embedding: Tensor  # [dim]
    feature: Tensor  # [dim]
    eps: float


def eagle_input_reference(
    input_ids: Tensor, table: Tensor, features: Tensor, norms: HalfNorms
) -> Tensor:
    """The definition.  input_ids: [tokens]; table: [vocab, dim]; features: [tokens, dim]; returns
    [tokens, 2 * dim]."""
    left = rms_norm_reference(table[input_ids], norms.embedding, norms.eps)
    return torch.cat((left, rms_norm_reference(features, norms.feature, norms.eps)), dim=-1)


def _bind_eagle_input(
    input_ids: Tensor,
    table: Tensor,
    features: Tensor,
    embedding_norm: Tensor,
    feature_norm: Tensor,
    eps: float,
    out: Tensor,
) -> Run:
    left, right = torch.chunk(out, 2, dim=1)
    rows = table.new_empty(input_ids.shape[0], table.shape[1])
    normalise_left = bind_rms_norm(rows, embedding_norm, eps, False, False, left)
    normalise_right = bind_rms_norm(features, feature_norm, eps, False, False, right)

    def run() -> None:
        torch.index_select(table, 0, input_ids, out=rows)
        normalise_left()
        normalise_right()

    return run


def _eagle_input_cuda(
    input_ids: Tensor,
    table: Tensor,
    features: Tensor,
    embedding_norm: Tensor,
    feature_norm: Tensor,
    eps: float,
    out: Tensor,
) -> None:
    require_triton("eagle_input", otherwise="run the head on a CPU")
    from paceline.kernels._triton.eagle_input import launch_eagle_input

    norms = HalfNorms(embedding_norm, feature_norm, eps)
    launch_eagle_input(input_ids, table, features, norms, out=out)


_EAGLE_INPUT = define_op(
    "eagle_input(Tensor input_ids, Tensor table, Tensor features, Tensor embedding_norm, "
    "Tensor feature_norm, float eps, Tensor(a!) out) -> ()",
    bind=_bind_eagle_input,
    cuda=_eagle_input_cuda,
)


def eagle_input(input_ids: Tensor, table: Tensor, features: Tensor, norms: HalfNorms) -> Tensor:
    """Look tokens up, normalise embeddings and features, side by side in a new tensor.

    input_ids: [tokens] int64, each below vocab; table: [vocab, dim], on a GPU with contiguous
    rows; features: [tokens, dim] in table's dtype, rows contiguous; norms: [dim] each, in the same
    dtype.  Returns [tokens, 2 * dim].  Mutates nothing.  Graph-safe: the grid depends on shapes
    only.  Raises KernelArgumentError.
    """
    _check(input_ids, table, features, norms)
    tokens, dim = features.shape
    out = features.new_empty(tokens, 2 * dim)
    _EAGLE_INPUT(input_ids, table, features, norms.embedding, norms.feature, norms.eps, out)
    return out


def _check(input_ids: Tensor, table: Tensor, features: Tensor, norms: HalfNorms) -> None:
    needs_rows = device_type(table.device) != "cpu"  # there torch looks up in any order
    if table.dim() != 2 or (needs_rows and table.stride(1) != 1):
        reject(
            "table",
            expected="[vocab, dim], on a GPU with contiguous rows",
            got=table,
            remedy="pass the embedding's weight as it is stored",
        )
    dim, dtype, device = table.shape[1], table.dtype, table.device
    fits = features.dim() == 2 and features.shape[1] == dim and features.stride(1) == 1
    if not fits or features.dtype != dtype or features.device != device:
        reject(
            "features",
            expected=f"{dtype} [tokens, {dim}] on {device} with contiguous rows",
            got=features,
            remedy="pass what the head's fuse or forward returned",
        )
    if input_ids.shape != features.shape[:1] or input_ids.dtype != torch.int64:
        reject(
            "input_ids",
            expected=f"int64 [{features.shape[0]}]",
            got=input_ids,
            remedy="give one token id for each row of features",
        )
    for name, weight in (("norms.embedding", norms.embedding), ("norms.feature", norms.feature)):
        if weight.shape != (dim,) or weight.dtype != dtype:
            reject(
                name,
                expected=f"{dtype} [{dim}]",
                got=weight,
                remedy="load the norm's weight in the table's dtype",
            )
