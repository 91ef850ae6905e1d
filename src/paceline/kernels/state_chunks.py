"""state_chunks: rows over states where a step is ragged: prompts, and decodes in their company.

What comes out is defined in extend_states; this writes states and windows in place.
"""

from torch import Tensor

from paceline.kernels._check import reject, require_triton
from paceline.kernels.custom_op import define_op
from paceline.kernels.extend_states import Chunks
from paceline.kernels.state_inputs import ConvInputs, HeadRows
from paceline.kernels.state_rows import Rates, require_rates


def _launch(*arguments: object) -> None:
    require_triton("state_chunks", otherwise="choose the torch backend of linear attention")
    from paceline.kernels._triton.state_chunks import launch_state_chunks

    launch_state_chunks(*arguments)  # type: ignore[arg-type]


_STATE_CHUNKS = define_op(
    "state_chunks(Tensor q, Tensor k, Tensor v, Tensor decay, Tensor rate, Tensor? skip, "
    "Tensor starts, Tensor owners, Tensor rows, Tensor places, Tensor(a!) state, Tensor slots, "
    "Tensor inputs, Tensor(b!) window, Tensor(c!)? solved, Tensor(d!) out) -> ()",
    cpu=_launch,
    cuda=_launch,
)


def state_chunks(
    heads: HeadRows,
    rates: Rates,
    chunks: Chunks,
    starts: Tensor,
    state: Tensor,
    given: ConvInputs,
    *,
    out: Tensor,
) -> None:
    """What rows read of their states, chunk after chunk of each request.

    heads: contiguous, of one dtype, in which products are taken; sums are float32; starts:
    [padded_reqs + 1] int32; state: [num_slots, value_heads, key_dim, value_dim], the part of one
    layer; given: what the rows were made of; out: [tokens, value_heads, value_dim].  Mutates
    `state`, the window of `given` and `out`.  Triton on every device.  Graph-safe: shapes are
    static.  Raises KernelArgumentError.
    """
    num, size = chunks.rows.shape
    if len({each.dtype for each in heads}) != 1:
        reject("q", expected=f"in the dtype of v, {heads.v.dtype}", got=heads.q, remedy="cast it")
    value_heads, value_dim = heads.v.shape[1:]
    if not state.is_contiguous() or state.shape[1:] != (value_heads, heads.k.shape[2], value_dim):
        expected = "contiguous [slots, value_heads, key_dim, value_dim]"
        reject("state", expected=expected, got=state, remedy="pass a layer's part")
    require_rates(rates)
    solved = None
    if rates.is_delta:
        solved = heads.k.new_empty((num, value_heads, size, size))
    _STATE_CHUNKS(
        *heads,
        rates.decay,
        rates.rate,
        rates.skip,
        starts,
        chunks.reqs,
        chunks.rows,
        chunks.places,
        state,
        given.slots,
        given.rows,
        given.window,
        solved,
        out,
    )
