"""commit_states: the states of a round, once it is known which of its rows last.

Of each row a round keeps the key, what it wrote of a value (u) and its summed decay G; see
extend_states.  Behind the path of rows j to the last of them, m,

    S = exp(G_m) S + sum_j exp(G_m - G_j) k_j u_j^T

which is one product.  Where nothing lasts it is what was read.
"""

import torch
from torch import Tensor

from paceline.kernels._check import reject, require_triton
from paceline.kernels.custom_op import define_op


def commit_states_reference(
    states: Tensor, k: Tensor, u: Tensor, decay: Tensor, path: Tensor, num_kept: Tensor
) -> Tensor:
    """[reqs, value_heads, key_dim, value_dim] float32: the states behind the first `num_kept` rows
    of `path`.  The definition, and the CPU's path.

    states: likewise, before the round; k: [reqs, rows, key_heads, key_dim] float32; u: [reqs, rows,
    value_heads, value_dim] float32; decay: [reqs, rows, value_heads] float32; path: [reqs, longest]
    int64; num_kept: [reqs] int32.  Mutates nothing.
    """
    reqs, longest = path.shape
    heads, per_key = k.shape[2], u.shape[2] // k.shape[2]

    def along(each: Tensor) -> Tensor:
        return each.gather(
            1, path.view(reqs, longest, *(1,) * (each.dim() - 2)).expand(-1, -1, *each.shape[2:])
        )

    decays = along(decay)  # [reqs, longest, value_heads]
    last = (num_kept.long() - 1).clamp(min=0).view(reqs, 1, 1).expand(-1, 1, decays.shape[2])
    is_any = (num_kept > 0).view(reqs, 1, 1)
    total = decays.gather(1, last).masked_fill(~is_any, 0.0)
    is_kept = torch.arange(longest, device=path.device) < num_kept.unsqueeze(1)
    weight = (total - decays).masked_fill(~is_kept.unsqueeze(2), -torch.inf).exp()
    keys = along(k).unsqueeze(3) * weight.view(reqs, longest, heads, per_key, 1)
    values = along(u).view(reqs, longest, heads, per_key, -1)
    added = keys.permute(0, 2, 3, 4, 1) @ values.permute(0, 2, 3, 1, 4)
    return total.exp().view(reqs, -1, 1, 1) * states + added.flatten(1, 2)


def _launch(*arguments: object) -> None:
    require_triton("commit_states", otherwise="choose the torch backend of linear attention")
    from paceline.kernels._triton.commit_states import launch_commit_states

    launch_commit_states(*arguments)  # type: ignore[arg-type]


_COMMIT_STATES = define_op(
    "commit_states(Tensor(a!) state, Tensor(b!) window, Tensor slots, Tensor k, Tensor u, "
    "Tensor summed, Tensor inputs, Tensor path, Tensor num_kept) -> ()",
    cpu=_launch,
    cuda=_launch,
)


def commit_states(
    state: Tensor,
    window: Tensor,
    slots: Tensor,
    *,
    k: Tensor,
    u: Tensor,
    summed: Tensor,
    inputs: Tensor,
    path: Tensor,
    num_kept: Tensor,
) -> None:
    """Write the slot of each request, state and window, in one pass over both.

    state: [num_slots, value_heads, key_dim, value_dim]; window: [num_slots, channels, width - 1];
    slots: [reqs, 3] int32 read, write, checkpoint, a read slot 0 is zeros; k, u, summed, inputs:
    [reqs * rows, ...] as a round keeps them, contiguous; path, num_kept: see the definition above,
    whose rows are a request's own.  Mutates state and window.  Triton on every device.  Graph-safe:
    shapes are static.  Raises KernelArgumentError.
    """
    for name, each in (("state", state), ("window", window), ("k", k), ("u", u)):
        if not each.is_contiguous():
            reject(name, expected="contiguous", got=each, remedy="pass what a round kept, whole")
    if path.shape[0] != slots.shape[0] or path.stride(1) != 1:
        expected = f"[{slots.shape[0]}, longest] with contiguous rows"
        reject("path", expected=expected, got=path, remedy="pass the accepted rows")
    _COMMIT_STATES(state, window, slots, k, u, summed, inputs, path, num_kept)
