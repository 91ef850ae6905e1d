"""What stands around states: gates with their norms, and how fast heads forget.

References meet transformers' modules; kernels, interpreted, meet the references.
"""

import pytest
import torch
from torch import Tensor
from torch.nn.functional import softplus
from transformers.models.mamba2.modeling_mamba2 import MambaRMSNormGated
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNormGated

from paceline.core.errors import KernelArgumentError
from paceline.core.model.config import GateOrder
from paceline.kernels.decay_rates import decay_rates
from paceline.kernels.gated_norm import (
    HEADS,
    gated_head_norm,
    gated_head_norm_reference,
    gated_norm,
    gated_norm_reference,
)
from paceline.kernels.sigmoid_gate import sigmoid_gate

EPS = 1e-5
TOKENS, PARTS, SIDE_BY_SIDE, DIM = 5, 2, 2, 6
ROW = PARTS * SIDE_BY_SIDE * DIM
ULP = torch.finfo(torch.bfloat16).eps


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape))) * 3.0


def strided(*shape: int, seed: int = 0) -> Tensor:
    """bfloat16 whose last two dimensions lie apart."""
    return noise(*shape[:-1], shape[-1] + 3, seed=seed).bfloat16()[..., : shape[-1]]


def test_gates_are_those_of_transformers() -> None:
    y, weight = noise(TOKENS, ROW).bfloat16(), noise(ROW).bfloat16()
    z = strided(TOKENS, ROW, seed=1)
    theirs = MambaRMSNormGated(ROW, group_size=ROW, eps=EPS)
    theirs.weight = torch.nn.Parameter(weight, requires_grad=False)
    found = gated_norm(y, z, weight, eps=EPS, groups=1, order=GateOrder.GATE_NORM)
    assert torch.equal(found, theirs(y, z))
    heads, gates = y.view(TOKENS, -1, DIM), strided(TOKENS, PARTS, SIDE_BY_SIDE * DIM)
    each = Qwen3NextRMSNormGated(DIM, eps=EPS)
    each.weight = torch.nn.Parameter(weight[:DIM], requires_grad=False)
    wanted = each(heads.reshape(-1, DIM), gates.reshape(-1, DIM)).view(TOKENS, -1)
    assert torch.equal(gated_head_norm(heads, gates, weight[:DIM], eps=EPS), wanted)


def test_a_sigmoid_gates_heads_and_whole_tokens() -> None:
    from paceline.kernels._triton.sigmoid_gate import launch_sigmoid_gate

    x, both = strided(TOKENS, 3, 430), strided(TOKENS, 3, 860, seed=1)  # two blocks of a row
    for gate in (both[:, :, 430:], strided(TOKENS, 1, 1, seed=2)):
        wanted = x * torch.sigmoid(gate)
        assert torch.equal(sigmoid_gate(x, gate), wanted.flatten(1))
        out = torch.full((TOKENS, 1290), torch.nan, dtype=x.dtype)
        launch_sigmoid_gate(x, gate, out)
        torch.testing.assert_close(out.view(x.shape), wanted, rtol=2 * ULP, atol=0.0)  # two cuts


def test_a_sigmoid_is_rounded_before_it_gates() -> None:
    """0.73105 is 1497.2 steps of float16, and products with 1497 round in one way."""
    from paceline.kernels._triton.sigmoid_gate import launch_sigmoid_gate

    x, gate = torch.arange(64).half().view(1, 1, 64), torch.ones(1, 1, 1).half()
    out = torch.full((1, 64), torch.nan).half()
    launch_sigmoid_gate(x, gate, out)
    assert torch.equal(out, (x * gate.sigmoid()).flatten(1))


def test_what_is_no_gate_is_named() -> None:
    x = noise(2, 3, 4)
    with pytest.raises(KernelArgumentError, match=r"gate must be .* or \[2, 1, 1\]"):
        sigmoid_gate(x, noise(2, 3, 1))
    with pytest.raises(KernelArgumentError, match=r"x must be \[tokens, heads, dim\]"):
        sigmoid_gate(x[0], x[0])


@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("order", GateOrder, ids=str)
def test_the_kernel_gates_as_its_reference(order: GateOrder, groups: int) -> None:
    from paceline.kernels._triton.gated_norm import launch_gated_norm

    y, z = strided(TOKENS, ROW), strided(TOKENS, ROW, seed=1)
    weight = None if order is GateOrder.GATE else noise(ROW).bfloat16()
    out = torch.full((TOKENS, ROW), torch.nan, dtype=y.dtype)
    launch_gated_norm(y, z, weight, EPS, groups, order.value, out)
    wanted = gated_norm_reference(y, z, weight, eps=EPS, groups=groups, order=order)
    torch.testing.assert_close(out, wanted, rtol=2 * ULP, atol=1e-6)


def test_the_kernel_gates_heads_as_its_reference() -> None:
    from paceline.kernels._triton.gated_norm import launch_gated_norm

    y = strided(TOKENS, PARTS * SIDE_BY_SIDE, DIM)
    z, weight = strided(TOKENS, PARTS, SIDE_BY_SIDE * DIM), noise(DIM).bfloat16()
    out = torch.full((TOKENS, ROW), torch.nan, dtype=y.dtype)
    launch_gated_norm(y, z, weight, EPS, y.shape[1], HEADS, out)
    wanted = gated_head_norm_reference(y, z, weight, eps=EPS)
    torch.testing.assert_close(out, wanted, rtol=3 * ULP, atol=1e-6)


@pytest.mark.parametrize("has_beta", [True, False])
def test_rates_are_softplus_of_any_size(has_beta: bool) -> None:
    from paceline.kernels._triton.decay_rates import launch_decay_rates

    per, heads = SIDE_BY_SIDE, PARTS * SIDE_BY_SIDE
    limits = (0.0, float("inf")) if has_beta else (1e-3, 20.0)
    given = strided(TOKENS, PARTS, 2 * per if has_beta else per) * 8
    bias, log = noise(heads), noise(heads, seed=1) / 3
    found = tuple(torch.full((TOKENS, heads), torch.nan) for _ in range(2))
    launch_decay_rates(given, bias, log, *limits, has_beta, *found)
    on_cpu = decay_rates(given, bias, log, limits=limits, has_beta=has_beta)
    exact = given.double()
    step = softplus(exact[:, :, -per:].flatten(1) + bias.double()).clamp(*limits)
    rate = exact[:, :, :per].flatten(1).sigmoid() if has_beta else step
    for mine, theirs, wanted in zip(found, on_cpu, (-log.double().exp() * step, rate), strict=True):
        torch.testing.assert_close(mine.double(), wanted, rtol=1e-5, atol=0)
        torch.testing.assert_close(theirs.double(), wanted, rtol=1e-5, atol=0)


def test_a_rate_of_a_number_that_is_none_is_none() -> None:
    from paceline.kernels._triton.decay_rates import launch_decay_rates

    given, nothing = torch.tensor([[[torch.nan, 1.0]]]), torch.zeros(2)
    decay, step = torch.zeros(1, 2), torch.zeros(1, 2)
    launch_decay_rates(given, nothing, nothing, 1e-3, 20.0, False, decay, step)
    assert torch.equal(decay.isnan(), given[0].isnan())
    assert torch.equal(step.isnan(), given[0].isnan())


def test_rows_of_another_form_are_refused() -> None:
    y, z = noise(TOKENS, 4, DIM), noise(TOKENS, ROW + 2)
    with pytest.raises(KernelArgumentError, match="z must be"):
        gated_norm(y.flatten(1), z, None, eps=EPS, groups=1, order=GateOrder.GATE)
    with pytest.raises(KernelArgumentError, match="y must be"):
        gated_head_norm(y.mT.contiguous().mT, y, z[0], eps=EPS)
    with pytest.raises(KernelArgumentError, match="given must be"):
        decay_rates(y, y[0, 0], y[0, 0], has_beta=True)
