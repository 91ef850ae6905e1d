"""torch's flex_attention over rows and keys laid out by request.

On CUDA the compiled kernel, which passes over tiles of keys that no row of a tile sees.  On a CPU
torch's definition of the operator, all scores at once: what it compiles there returns no lse.
"""

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.kernels.stand_in import device_type

# (batch, head, q_idx, kv_idx), each a tensor of one integer -> bool: whether the key is seen.
MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
_TILE = 128  # rows, and keys, that the compiled kernel takes or leaves together
# Of a kernel: by dtype, heads, mask, part, window, soft cap; of one request, row or page or many.
_VARIANTS = 512


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seen: MaskMod,
    reach: Tensor,
    *,
    scale: float,
    soft_cap: float | None,
) -> tuple[Tensor, Tensor]:
    """(out [reqs, num_heads, rows, v_head_dim], lse [reqs, num_heads, rows] float32, -inf where no
    key is seen).

    q: [reqs, num_heads, rows, head_dim]; k, v: [reqs, num_kv_heads, keys, *head_dim], of one dtype.
    seen: of the request, the query head, the row and the key.  It may close over tensors alone: a
    number would be compiled in.
    reach: [reqs, rows] int64; no row sees a key at this index, or behind it.
    scale, soft_cap: as AttentionSpec.
    """
    tiles = key_tiles(reach, k.shape[2], seen)
    change = _score_mod(soft_cap, q.device)
    if device_type(q.device) == "cuda":
        return _by_kernel(q, k, v, change, tiles, scale)
    # The public function has torch._dynamo trace every new shape on its way to this one.
    from torch._higher_order_ops.flex_attention import math_attention

    out, log2, *_ = math_attention(q, k, v, change, tiles.as_tuple(), scale, {})
    return out, log2 * math.log(2.0)


def key_tiles(reach: Tensor, num_keys: int, seen: MaskMod) -> Any:
    """The BlockMask of `attend`: of each tile of rows the tiles of keys before its furthest reach.

    Worked example: rows that reach 5, 100 and 300 of 512 keys take the first 3 of 4 tiles.
    """
    from torch.nn.attention.flex_attention import BlockMask

    reqs, rows = reach.shape
    by_tile = F.pad(reach, (0, -rows % _TILE)).view(reqs, 1, -1, _TILE)
    most = -(-num_keys // _TILE)
    count = ((by_tile.amax(-1) + _TILE - 1) // _TILE).clamp(0, most)  # [reqs, 1, row tiles]
    tiles = torch.arange(most, device=reach.device, dtype=torch.int32)
    return BlockMask.from_kv_blocks(
        count.int(),
        tiles.repeat(*count.shape, 1),  # [reqs, 1, row tiles, most]
        BLOCK_SIZE=_TILE,
        mask_mod=seen,
        seq_lengths=(rows, num_keys),
        compute_q_blocks=False,
    )


def _score_mod(soft_cap: float | None, device: torch.device) -> Callable[..., Tensor]:
    """What becomes of a scaled score."""
    if soft_cap is None:
        return lambda score, batch, head, q_idx, kv_idx: score
    cap = torch.full((1,), soft_cap, device=device)
    return lambda score, batch, head, q_idx, kv_idx: cap[0] * torch.tanh(score / cap[0])


def _by_kernel(
    q: Tensor, k: Tensor, v: Tensor, change: Callable[..., Tensor], tiles: Any, scale: float
) -> tuple[Tensor, Tensor]:
    from torch.nn.attention.flex_attention import AuxRequest

    limits = {"recompile_limit": _VARIANTS, "accumulated_recompile_limit": _VARIANTS}
    with torch._dynamo.config.patch(limits):
        out, aux = _compiled()(
            q, k, v, change, tiles, scale, enable_gqa=True, return_aux=AuxRequest(lse=True)
        )
    return out, aux.lse


@cache
def _compiled() -> Callable[..., Any]:
    """Of any shape; compiled at its first call."""
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=True, fullgraph=True)
