"""decay_rates: how fast heads of linear attention forget, of what a layer projects.

    step = softplus(a + bias), within limits;   decay = -exp(log) * step

log and bias are a layer's own, of each head; a is a token's.  A gated delta net (arXiv:2412.06464)
takes from the token a rate beta, too, sigmoid(b), which lies before a in each of its parts, and has
no limits; Mamba 2 (arXiv:2405.21060) goes on with the step.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import softplus

from paceline.kernels._check import reject
from paceline.kernels.custom_op import define_op

ENDLESS = (0.0, float("inf"))  # limits that no step meets


class RawRates(NamedTuple):
    """What rates are made of: by `decay_rates`, or by a kernel that reads them of states."""

    given: Tensor  # [tokens, parts, heads // parts], or with has_beta twice as many
    bias: Tensor  # [heads]  float32
    log: Tensor  # [heads]  float32
    limits: tuple[float, float]
    has_beta: bool

    def made(self) -> tuple[Tensor, Tensor]:
        """As `decay_rates`."""
        given, bias, log, limits, has_beta = self
        return decay_rates(given, bias, log, limits=limits, has_beta=has_beta)


def decay_rates_reference(
    given: Tensor, bias: Tensor, log: Tensor, *, limits: tuple[float, float], has_beta: bool
) -> tuple[Tensor, Tensor]:
    """The definition, and the CPU's path; arguments and results as `decay_rates`."""
    wide = given.float()
    heads = wide.shape[2] // 2 if has_beta else wide.shape[2]
    step = softplus(wide[:, :, -heads:].flatten(1) + bias).clamp(*limits)
    rate = wide[:, :, :heads].flatten(1).sigmoid() if has_beta else step
    return -log.exp() * step, rate


def _on_cpu(
    given: Tensor,
    bias: Tensor,
    log: Tensor,
    least: float,
    most: float,
    has_beta: bool,
    decay: Tensor,
    rate: Tensor,
) -> None:
    found = decay_rates_reference(given, bias, log, limits=(least, most), has_beta=has_beta)
    decay.copy_(found[0])
    rate.copy_(found[1])


def _on_cuda(*arguments: Any) -> None:
    from paceline.kernels._triton.decay_rates import launch_decay_rates

    launch_decay_rates(*arguments)


_DECAY_RATES = define_op(
    "decay_rates(Tensor given, Tensor bias, Tensor log, float least, float most, bool has_beta, "
    "Tensor(a!) decay, Tensor(b!) rate) -> ()",
    cpu=_on_cpu,
    cuda=_on_cuda,
)


def require_given(given: Tensor, heads: int, *, has_beta: bool) -> None:
    """Raise KernelArgumentError unless kernels can read rates of so many heads from it."""
    if given.stride(2) != 1 or given.shape[1:].numel() != (2 if has_beta else 1) * heads:
        reject(
            "given",
            expected=f"[tokens, parts, ...] of {heads} heads with a contiguous last dimension",
            got=given,
            remedy="pass what the layer projects for its heads",
        )


def decay_rates(
    given: Tensor,
    bias: Tensor,
    log: Tensor,
    *,
    limits: tuple[float, float] = ENDLESS,
    has_beta: bool,
) -> tuple[Tensor, Tensor]:
    """(decay, and beta or the step), each [tokens, heads] float32, new tensors.

    given: [tokens, parts, heads // parts], a of a part's heads, or with `has_beta` twice as many, b
    and then a; tokens and parts may be strided; bias, log: [heads] float32.  Mutates nothing.
    Graph-safe: the grid depends on shapes only.  Raises KernelArgumentError.
    """
    heads = bias.shape[0]
    require_given(given, heads, has_beta=has_beta)
    decay, rate = (
        torch.empty((given.shape[0], heads), dtype=torch.float32, device=given.device)
        for _ in range(2)
    )
    _DECAY_RATES(given, bias, log, *limits, has_beta, decay, rate)
    return decay, rate
