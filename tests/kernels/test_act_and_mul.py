"""act_and_mul: the op and its Triton kernel against transformers' activations."""

import pytest
import torch
from torch import Tensor
from transformers.activations import ACT2FN

from paceline.core.errors import KernelArgumentError
from paceline.kernels.act_and_mul import ACTIVATIONS, act_and_mul, act_and_mul_reference

NAMES = {"silu": "silu", "gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh", "relu": "relu"}


def run_triton(x: Tensor, kind: str) -> Tensor:
    from paceline.kernels._triton.act_and_mul import launch_act_and_mul

    out = x.new_full((x.shape[0], x.shape[1] // 2), float("nan"))
    launch_act_and_mul(x, kind, out)
    return out


@pytest.mark.parametrize(
    "run", [act_and_mul, act_and_mul_reference, run_triton], ids=["op", "reference", "triton"]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_gated_activation_equals_transformers(run: object, dtype: torch.dtype, kind: str) -> None:
    generator = torch.Generator().manual_seed(1)
    wide = torch.randn(3, 2600, generator=generator) * 6.0
    x = wide.to(dtype)[:, :2580]
    gate, up = x.chunk(2, dim=-1)
    expected = ACT2FN[NAMES[kind]](gate) * up
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(run(x, kind), expected, rtol=2.0 * eps, atol=4e-6)
    swapped = torch.cat((up, gate), dim=-1)
    assert not torch.allclose(run(swapped, kind).float(), expected.float(), atol=0.5)


def test_bad_argument_is_named_with_what_was_expected() -> None:
    with pytest.raises(
        KernelArgumentError, match="kind must be one of gelu, gelu_tanh, relu, silu, got"
    ):
        act_and_mul(torch.ones(2, 8), "swish")
    with pytest.raises(KernelArgumentError, match=r"x must be \[tokens, 2 \* inter\].*\[2, 7\]"):
        act_and_mul(torch.ones(2, 7), "silu")
