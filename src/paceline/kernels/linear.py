"""linear: x W^T + b through the fastest library path for the shape.

torch's own float32 product on a CPU goes to MKL, which takes its slow path on processors of other
makers; oneDNN, which torch carries too, does not, and is best with the weight stored column by
column.  For one or two tokens its set-up costs more than it gains.  `benchmarks/cpu_linear.py`
measures all of this.

On a GPU a few tokens take kernels.skinny_linear, more take cuBLAS.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.kernels.act_and_mul import act_and_mul
from paceline.kernels.skinny_linear import fits_skinny, skinny_linear

_ONEDNN_TOKENS = 3  # from here on oneDNN is faster


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
    takes_onednn = x.device.type == "cpu" and x.dtype == torch.float32
    if takes_onednn and x.shape[0] >= _ONEDNN_TOKENS and torch.backends.mkldnn.is_available():
        product: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
        return product
    return F.linear(x, weight, bias)


def gated_linear(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    """act(x G^T) * (x U^T) with weight = [G; U].

    x: [tokens, in]; weight: [2 * inter, in], gate rows then up rows; bias: [2 * inter] or None;
    activation: one of act_and_mul.ACTIVATIONS.  Returns [tokens, inter].  Recordable.
    """
    if fits_skinny(x, weight):
        return skinny_linear(x, weight, bias, activation=activation)
    return act_and_mul(linear(x, weight, bias), activation)
