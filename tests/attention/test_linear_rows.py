"""How rows over states are cut into chunks, and that buffers hold all of them."""

import pytest
import torch
from torch import Tensor

from paceline.attention.backends.gdn_triton import TritonGdn
from paceline.attention.linear import triton_backend
from paceline.attention.linear.inputs import Mamba2Inputs
from paceline.attention.linear.rows import LinearBuffers, LinearPlan, linear_buffers, plan_rows
from paceline.attention.linear.shape import MAMBA2, LinearShape
from paceline.attention.mixers import load_state_backend
from paceline.attention.states import StateLayer, StateLimits
from paceline.core.modes import MaskKind
from paceline.kernels.gated_norm import Gate, gated_rows_reference
from paceline.kernels.step_view import GroupView, StepView

SHAPE = LinearShape(key_heads=1, value_heads=2, key_dim=2, value_dim=2, conv_width=3)


def step_of(lens: list[int], *, longest: int) -> tuple[StepView, GroupView, LinearBuffers]:
    """Requests of so many rows, in buffers that hold them and no more."""
    each, num = torch.tensor(lens, dtype=torch.int32), sum(lens)
    req_ids = torch.arange(len(lens)).repeat_interleave(each)
    starts = torch.nn.functional.pad(each.cumsum(0), (1, 0)).int()
    slots = torch.ones(len(lens), 3, dtype=torch.int32)
    none: Tensor = torch.empty(0, dtype=torch.int64)
    group = GroupView(page_table=slots, out_cache_loc=none, prefix_lens=0 * each, kv_lens=each)
    positions = torch.arange(num) - starts[req_ids]
    view = StepView(
        row_ids=torch.arange(len(lens)),
        prefix_lens=0 * each,
        extend_lens=each,
        kv_lens=each,
        cu_seqlens_q=starts,
        req_ids=req_ids,
        positions=positions,
        rope_positions=positions,
        input_ids=positions,
        logits_loc=starts[1:].long() - 1,
        groups=(group,),
        mask=MaskKind.CAUSAL,
        tree_mask=None,
        max_extend_len=longest,
        kv_len_bound=longest,
    )
    limits = StateLimits(
        device=torch.device("cpu"),
        dtype=torch.float32,
        num_layers=3,
        parts={part.name: part.shape for part in SHAPE.parts},
        max_reqs=len(lens),
        max_tokens=num,
        max_round_tokens=0,
    )
    return view, group, linear_buffers(limits)


def planned(lens: list[int], *, longest: int) -> LinearPlan:
    return plan_rows(*step_of(lens, longest=longest), is_round=False)


@pytest.mark.parametrize(
    ("lens", "size"),
    [
        ([512], 64),
        ([40, 24], 32),
        ([40, 26], 64),
        ([40, 30, 1, 9], 32),
        ([3, 1], 16),
        ([65, 65], 64),
    ],
)
def test_a_step_is_cut_into_chunks_of_one_size(lens: list[int], size: int) -> None:
    chunks = planned(lens, longest=max(lens)).chunks
    assert chunks is not None
    owners, rows = [], []
    for req, num in enumerate(lens):
        for begin in range(0, num, size):
            owners.append(req)
            rows += range(sum(lens[:req]) + begin, sum(lens[:req]) + min(begin + size, num))
    assert chunks.rows.shape[1] == size
    assert chunks.reqs.tolist() == owners + [len(lens)] * (chunks.reqs.shape[0] - len(owners))
    assert chunks.rows[chunks.live].tolist() == rows
    assert chunks.live.flatten()[chunks.places].all()
    assert chunks.rows.flatten()[chunks.places].tolist() == rows


@pytest.mark.parametrize("lens", [[1], [1, 1, 1], [3, 3], [64, 64]])
def test_as_many_rows_of_each_request_are_a_chunk_of_each(lens: list[int]) -> None:
    plan = planned(lens, longest=lens[0])
    assert plan.chunks is None
    assert plan.shape == SHAPE


def test_decodes_of_few_requests_derive_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_backend, "MOST_STEP_VALUES", 2 * SHAPE.value_size)
    backend = TritonGdn()

    def plan(lens: list[int], *, is_round: bool = False) -> object:
        return backend.plan(*step_of(lens, longest=lens[0]), is_round=is_round)

    found = plan([1, 1])
    assert isinstance(found, triton_backend.DecodePlan)
    assert found.shape == SHAPE
    assert isinstance(plan([1, 1, 1]), LinearPlan)
    assert isinstance(plan([2, 2]), LinearPlan)
    assert isinstance(plan([1, 1], is_round=True), LinearPlan)


@pytest.mark.parametrize("name", ["torch", "triton"])
def test_a_gate_is_taken_with_decodes_of_one_launch_alone(name: str) -> None:
    """And it is then the gate behind `extend`; a backend that knows none says so."""
    backend = load_state_backend(name, kind=MAMBA2)
    for lens, has_gate in (([1, 1], name == "triton"), ([2, 2], False), ([1, 2], False)):
        view, group, buffers = step_of(lens, longest=max(lens))
        plan = backend.plan(view, group, buffers, is_round=False)
        rows = sum(lens)
        source = torch.Generator().manual_seed(rows)
        inputs = Mamba2Inputs(
            torch.randn(rows, SHAPE.channels, generator=source),
            torch.randn(SHAPE.channels, 3, generator=source),
            None,
            (-torch.rand(rows, 2, generator=source), torch.rand(rows, 2, generator=source)),
            torch.ones(2),
        )
        gate = Gate(torch.randn(rows, 4, generator=source), torch.rand(4, generator=source))

        def layer(seed: int = 5) -> StateLayer:
            source = torch.Generator().manual_seed(seed)
            parts = {
                part.name: torch.randn(2, *part.shape, generator=source) for part in SHAPE.parts
            }
            return StateLayer(layer_id=0, index=0, parts=parts)

        mine, untouched = layer(), layer()
        found = backend.extend_gated(inputs, gate, mine, plan)
        assert (found is not None) == has_gate
        if found is None:
            assert all(
                torch.equal(mine.parts[name], part) for name, part in untouched.parts.items()
            )
            continue
        wanted = gated_rows_reference(backend.extend(inputs, untouched, plan).flatten(1), gate)
        torch.testing.assert_close(found.rows, wanted.rows)
        torch.testing.assert_close(found.squares.sum(1, keepdim=True), wanted.squares)
