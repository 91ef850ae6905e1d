"""linear: x W^T + b through the fastest library path for the shape.

torch's own float32 product on a CPU goes to MKL, which takes its slow path on processors of other
makers; oneDNN, which torch carries too, does not, and is best with the weight stored column by
column.  For one or two tokens its set-up costs more than it gains.  `benchmarks/cpu_linear.py`
measures all of this.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

_ONEDNN_TOKENS = 3  # from here on oneDNN is faster


def linear_reference(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The definition.  x: [tokens, in]; weight: [out, in]; bias: [out]; returns [tokens, out]."""
    return F.linear(x, weight, bias)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x W^T + b.

    x: [tokens, in]; weight: [out, in]; bias: [out] or None; one dtype and device.  Returns
    [tokens, out].  Mutates nothing; recordable.
    """
    takes_onednn = x.device.type == "cpu" and x.dtype == torch.float32
    if takes_onednn and x.shape[0] >= _ONEDNN_TOKENS and torch.backends.mkldnn.is_available():
        product: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
        return product
    return F.linear(x, weight, bias)
