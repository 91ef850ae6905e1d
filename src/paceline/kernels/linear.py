"""linear: x W^T + b through the fastest library path for the shape.

torch's own float32 product on a CPU goes to MKL, which leaves the AVX-512 of other makers'
processors unused; oneDNN, which torch carries too, does not, and is best with the weight stored
column by column.  For one or two tokens its set-up costs more than it gains, and without AVX-512 it
gains nothing.  One thread alone has small products from kernels.openblas.  16-bit numbers on a CPU
without instructions for them take kernels.linear_cpu.  `benchmarks/cpu_linear.py` measures all of
this.

On a GPU a few tokens take kernels.skinny_linear, more take cuBLAS, and many with an activation
behind them kernels.activated_linear.  Of many tokens cuBLAS adds a product to the stream where it
writes it (docs/decisions/143-products-of-prompts-into-the-stream.md).
"""

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.kernels.act_and_mul import act_and_mul, activate
from paceline.kernels.activated_linear import activated_linear, fits_activated
from paceline.kernels.linear_cpu import is_emulated, linear_cpu
from paceline.kernels.openblas import fits_openblas, has_avx512, openblas_linear
from paceline.kernels.skinny_linear import fits_skinny, skinny_linear
from paceline.kernels.stand_in import device_type, is_hopper

_ONEDNN_TOKENS = 3  # from here on oneDNN is faster
LEAST_ADDED = 512  # tokens; with fewer some shapes lose what others gain


@cache
def _onednn_gains() -> bool:
    return has_avx512() and torch.backends.mkldnn.is_available()


def linear_reference(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The definition.  x: [tokens, in]; weight: [out, in]; bias: [out]; returns [tokens, out]."""
    return F.linear(x, weight, bias)


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, *, counters: Tensor | None = None
) -> Tensor:
    """x W^T + b.

    x: [tokens, in]; weight: [out, in]; bias: [out] or None; one dtype and device.  counters: the
    layer's own `skinny_linear.arrival_counters`, which let a small weight be read at full speed.
    Returns [tokens, out].  Mutates counters, back to what they were; recordable.
    """
    if fits_skinny(x, weight):
        return skinny_linear(x, weight, bias, counters=counters)
    if device_type(x.device) == "cpu" and is_emulated(x.dtype):
        return linear_cpu(x, weight, bias)
    if fits_openblas(x, weight):
        return openblas_linear(x, weight, bias)
    takes_onednn = device_type(x.device) == "cpu" and x.dtype == torch.float32 and _onednn_gains()
    if takes_onednn and x.shape[0] >= _ONEDNN_TOKENS:
        product: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
        return product
    return F.linear(x, weight, bias)


def fits_add_linear(x: Tensor) -> bool:
    """Whether `add_linear`, and a norm of the sum, is faster than a norm that adds a product to it;
    shape and dtype only.  x: [tokens, in]."""
    has_16_bits = x.dtype in (torch.bfloat16, torch.float16)
    return is_hopper(x.device) and has_16_bits and x.shape[0] >= LEAST_ADDED


def add_linear(x: Tensor, weight: Tensor, stream: Tensor) -> None:
    """stream += x W^T, in place.

    x: [tokens, in]; weight: [out, in]; stream: [tokens, out]; one dtype and device.  A library may
    round the product before it adds it, or not.  Recordable.
    """
    stream.addmm_(x, weight.mT)


def gated_linear(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    """act(x G^T) * (x U^T) with weight = [G; U].

    x: [tokens, in]; weight: [2 * inter, in], gate rows then up rows; bias: [2 * inter] or None;
    activation: one of act_and_mul.ACTIVATIONS.  Returns [tokens, inter].  Recordable.
    """
    if fits_skinny(x, weight, parts=2):
        return skinny_linear(x, weight, bias, activation=activation)
    if fits_activated(x, weight, gated=True):
        return activated_linear(x, weight, bias, activation, gated=True)
    return act_and_mul(linear(x, weight, bias), activation)


def linear_then(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    """act(x W^T + b).

    x: [tokens, in]; weight: [out, in]; bias: [out] or None; activation: one of
    act_and_mul.ACTIVATIONS.  Returns [tokens, out].  Recordable.
    """
    if fits_activated(x, weight, gated=False):
        return activated_linear(x, weight, bias, activation, gated=False)
    return activate(linear(x, weight, bias), activation)
