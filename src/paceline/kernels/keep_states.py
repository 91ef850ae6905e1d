"""keep_states: behind a step, what each slot stands for, and copies of the states others may find.

Worked example: state_every 4; one request at 6 tokens that computes 2, with slot 5 and checkpoint
slot 7; another at 9 that computes 1, with slot 6; a padded row.

    committed     [8, 10, 2]      prefix + kept
    lens          5: 8, 6: 10, 7: 8     slot 0 stands for nothing: 0
    slot 7 <- slot 5              8 is divisible by 4, and 10 is not
    state_lens    [8, 0, 0]       what the host is told
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from paceline.core.model.cache_groups import CHECKPOINT, WRITE
from paceline.core.padding import PAD_PAGE
from paceline.kernels.custom_op import define_op
from paceline.kernels.stand_in import device_type
from paceline.kernels.step_view import GroupView, StepView


def keep_states_reference(
    parts: Sequence[Tensor],
    lens: Tensor,
    prefix_lens: Tensor,
    slots: Tensor,
    num_kept: Tensor,
    every: int,
    state_lens: Tensor,
) -> None:
    """The definition, and the CPU's path.  slots: [padded_reqs, 3] int32; others as `keep_states`.

    Where nothing is kept slot 0 is copied over.
    """
    written = slots[:, WRITE].long()
    committed = prefix_lens + num_kept
    is_kept = (committed % every == 0) & (num_kept > 0) & (slots[:, CHECKPOINT] != PAD_PAGE)
    checkpoints = slots[:, CHECKPOINT].long() * is_kept
    torch.mul(committed, is_kept, out=state_lens)
    for part in parts:
        part.index_copy_(1, checkpoints, part.index_select(1, written))
    lens.index_copy_(0, written, committed)
    lens.index_copy_(0, checkpoints, committed)
    lens[PAD_PAGE].zero_()


def _keep_states_cuda(*arguments: Any) -> None:
    from paceline.kernels._triton.keep_states import launch_keep_states

    launch_keep_states(*arguments)


_KEEP_STATES = define_op(
    "keep_states(Tensor(a!)[] parts, Tensor(b!) lens, Tensor prefix_lens, Tensor slots, "
    "Tensor num_kept, int every, Tensor(c!) state_lens) -> ()",
    cpu=None,
    cuda=_keep_states_cuda,
)


def keep_states(
    parts: Sequence[Tensor],
    lens: Tensor,
    view: StepView,
    group: GroupView,
    num_kept: Tensor,
    *,
    every: int,
    state_lens: Tensor,
) -> None:
    """Copy write slot -> checkpoint slot where a request's length is divisible by `every`.

    parts: of [layers, num_slots, *shape], contiguous, any dtype; lens: [num_slots] int32 tokens
    that each slot stands for; num_kept: [padded_reqs] int32 rows of each request that last, of a
    round a column of its results; state_lens: [padded_reqs] int32 the lengths of the checkpoint
    slots it wrote, else 0.  Mutates parts, lens and state_lens.  Graph-safe: shapes are static.
    What slot 0 holds afterwards is nobody's to read.
    """
    arguments = (
        list(parts),
        lens,
        view.prefix_lens,
        group.page_table,
        num_kept,
        every,
        state_lens,
    )
    if device_type(lens.device) == "cpu":
        keep_states_reference(*arguments)
        return
    _KEEP_STATES(*arguments)
