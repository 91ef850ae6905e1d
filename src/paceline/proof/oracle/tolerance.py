"""What a backend may differ from the oracle by, and proof that no mistake fits in.

The allowance is a small multiple of the error of an independent run in the case's precision, per
token and head, relative to the size of the values it mixes.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.proof.oracle.batch_data import BatchData
from paceline.proof.oracle.methods.softmax import attend_both
from paceline.proof.oracle.mistakes import Mistake, mistakes
from paceline.proof.oracle.wrong import hidden_keys, touched_answers
from paceline.proof.suite.case import Case

MULTIPLE = 2.5  # of the low-precision run's worst error
MARGIN = 2.0  # a wrong answer is this many allowances away, so that noise cannot hide it
ROWS_AT_ONCE = 64
# Half a unit in the last place, relative: 8, 11 and 24 bits of significand.
ROUNDING = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 2.0**-24}
# The least relative error to expect: weights of a GPU's exp2, or rounded in another order.
LEAST = {"bfloat16": 2.0**-10, "float16": 2.0**-13, "float32": 3e-6}
# Relative error of tanh in hardware (PTX ISA, tanh.approx.f32), which kernels use in 16 bits.
TANH_ERROR = 2.0**-11
TINY = 1e-6  # the size of values where a row sees none
# Of a log-sum-exp: absolute in 16 bits, where a kernel may sum its weights as it rounded them for
# the product with V; relative to its size, which is at least 1, in float32.
LSE_ALLOWED = {"bfloat16": 2.0**-9 + 1e-4, "float16": 1e-3, "float32": 1e-5}


@dataclass(frozen=True, slots=True)
class Judgement:
    """How far an output is off, where it is worst compared with what is allowed."""

    error: float  # L2 over the head's numbers, relative to the values; infinite for NaN
    tolerance: float  # allowed there, likewise
    where: str

    @property
    def is_right(self) -> bool:
        return self.error <= self.tolerance

    def said(self, what: str, likely: list[str]) -> str:
        """In words, with the mistakes that give nearly the same."""
        sizes = f"{what} {self.error:.3g} where {self.tolerance:.3g} is allowed, at {self.where}"
        return f"{sizes} (looks like: {', or '.join(likely)})" if likely else sizes


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Expectation:
    """The right answer of one batch, layer by layer, whatever backend and runner."""

    case: Case
    index: int  # of the batch
    data: BatchData
    exact: tuple[Tensor, ...]  # [layers] [num_tokens, heads, v_head_dim]  float64
    allowed: tuple[Tensor, ...]  # [layers] [num_tokens, heads]  float64  L2 over v_head_dim
    sizes: tuple[Tensor, ...]  # [layers] [num_tokens, heads]  float64  of the values mixed
    lses: tuple[Tensor, ...]  # [layers] [num_tokens, heads]  float64  natural, without sinks

    def judge(self, layer: int, out: Tensor) -> Judgement:
        """Compares out [num_tokens, heads, v_head_dim], tokens without padding, of any dtype."""
        exact, allowed, sizes = self.exact[layer], self.allowed[layer], self.sizes[layer]
        if out.shape != exact.shape:
            return Judgement(math.inf, 0.0, f"shape {tuple(out.shape)}, not {tuple(exact.shape)}")
        error = (out.detach().cpu().double() - exact).norm(dim=2)
        return self._worst(error, allowed, sizes)

    def judge_lse(self, layer: int, lse: Tensor) -> Judgement:
        """Compares lse [num_tokens, heads], tokens without padding; -inf is -inf exactly."""
        case, exact = self.case, self.lses[layer]
        if lse.shape != exact.shape:
            return Judgement(math.inf, 0.0, f"shape {tuple(lse.shape)}, not {tuple(exact.shape)}")
        got = lse.detach().cpu().double()
        error = (got - exact).abs().masked_fill(got == exact, 0.0)
        ones = torch.ones_like(exact)
        allowed = LSE_ALLOWED[case.dtype] * ones
        if case.dtype == "float32":
            allowed = allowed * exact.abs().nan_to_num(posinf=1.0).clamp(min=1.0)
        elif case.soft_cap is not None:
            allowed = allowed + TANH_ERROR * case.soft_cap
        return self._worst(error, allowed, ones)

    def _worst(self, error: Tensor, allowed: Tensor, sizes: Tensor) -> Judgement:
        """Where [num_tokens, heads] an error is greatest for what is allowed; what is dropped may
        be anything."""
        batch = self.case.batches[self.index]
        error = error.nan_to_num(nan=math.inf, posinf=math.inf)
        error[torch.tensor(batch.is_dropped)] = 0.0
        token, head = divmod(int((error / allowed).argmax()), error.shape[1])
        size = float(sizes[token, head])
        return Judgement(
            float(error[token, head]) / size,
            float(allowed[token, head]) / size,
            self._where(token, head),
        )

    def blind(self, layer: int) -> list[str]:
        """Names of the mistakes that the comparison could accept."""
        batch = self.case.batches[self.index]
        found = mistakes(self.case, batch, self.data, layer)
        sharp = (mistake for mistake in found if mistake.must_show)
        return [mistake.name for mistake in sharp if self._may_accept(layer, mistake)]

    def _may_accept(self, layer: int, mistake: Mistake) -> bool:
        """Whether a mistake touches rows and stays within the margin on all of them."""
        batch = self.case.batches[self.index]
        is_touched = False
        for request, rows, wrong in touched_answers(self.case, batch, layer, mistake):
            if request in batch.frozen:
                continue
            is_touched = True
            start = sum(batch.extend_lens[:request])
            tokens = [start + row for row in rows]
            error = (wrong - self.exact[layer][tokens]).norm(dim=2)
            if bool((error > MARGIN * self.allowed[layer][tokens]).any()):
                return False
        return is_touched

    def _where(self, token: int, head: int) -> str:
        request, row = 0, token
        for extend in self.case.batches[self.index].extend_lens:
            if row < extend:
                break
            request, row = request + 1, row - extend
        return f"batch {self.index}, request {request}, row {row}, head {head}"


def expect(case: Case, index: int, data: BatchData) -> Expectation:
    """The oracle's answer for batch `index`, and what a backend may differ by."""
    batch = case.batches[index]
    exact, allowed, sizes, lses = [], [], [], []
    for layer in range(len(case.layers)):
        right, lse = attend_both(case, batch, data, layer)
        rounded, size = _low_precision(case, index, data, layer)
        relative = float(((rounded - right).norm(dim=2) / size).max())
        floor = max(relative, LEAST[case.dtype])
        exact.append(right)
        lses.append(lse)
        sizes.append(size)
        allowed.append(MULTIPLE * floor * size + ROUNDING[case.dtype] * right.norm(dim=2))
    return Expectation(
        case=case,
        index=index,
        data=data,
        exact=tuple(exact),
        allowed=tuple(allowed),
        sizes=tuple(sizes),
        lses=tuple(lses),
    )


def _low_precision(case: Case, index: int, data: BatchData, layer: int) -> tuple[Tensor, Tensor]:
    """(out [num_tokens, heads, v_head_dim], size [num_tokens, heads]) as kernels compute: products
    summed in float32, weights rounded before they meet the values, output rounded.

    size is the mean length of the values, weighted as the output is.
    """
    batch = case.batches[index]
    outs, sizes = [], []
    for request, extend in enumerate(batch.extend_lens):
        for first in range(0, extend, ROWS_AT_ONCE):
            rows = list(range(first, min(first + ROWS_AT_ONCE, extend)))
            keys = data.keys[request].shape[1]
            hidden = hidden_keys(case, batch, layer, request, rows, keys)
            out, size = _low_rows(case, data, layer, request, rows, hidden)
            outs.append(out)
            sizes.append(size)
    return torch.cat(outs), torch.cat(sizes)


def _low_rows(
    case: Case, data: BatchData, layer: int, request: int, rows: list[int], hidden: Tensor
) -> tuple[Tensor, Tensor]:
    dtype: torch.dtype = getattr(torch, case.dtype)
    if not hidden.shape[1]:  # of an encoder without rows
        shape = (len(rows), case.num_heads, case.v_head_dim)
        nothing = torch.zeros(shape, dtype=torch.float64)
        return nothing, torch.full(shape[:2], TINY, dtype=torch.float64)
    group = case.num_heads // case.num_kv_heads
    query = data.queries[request][layer, rows].float().transpose(0, 1)  # [heads, rows, head_dim]
    key = data.keys[request][layer].float().transpose(0, 1).repeat_interleave(group, 0)
    value = data.values[request][layer].float().transpose(0, 1).repeat_interleave(group, 0)
    scores = query @ key.transpose(1, 2) * data.scale
    if case.soft_cap is not None:
        scores = _rough_cap(scores, case)
    scores = scores.masked_fill(hidden, -math.inf)
    best = scores.amax(2, keepdim=True).clamp(min=-1e30)
    weights = (scores - best).exp()  # [heads, rows, keys]
    total = weights.sum(2, keepdim=True)
    if data.sinks is not None and not case.is_part:
        total = total + (data.sinks[layer].float()[:, None, None] - best).exp()
    total = total.clamp(min=1e-30)
    out = (weights.to(dtype).float() @ value / total).to(dtype)
    size = (weights @ value.norm(dim=2).unsqueeze(2) / total).squeeze(2)
    return out.transpose(0, 1).double(), size.transpose(0, 1).double().clamp(min=TINY)


def _rough_cap(scores: Tensor, case: Case) -> Tensor:
    """Capped with the error of hardware's tanh, up for one key and down for the next."""
    assert case.soft_cap is not None, "no cap"
    bent = torch.tanh(scores / case.soft_cap)
    if case.dtype != "float32":
        signs = 1 - 2 * (torch.arange(scores.shape[2]) % 2)
        bent = bent * (1 + TANH_ERROR * signs)
    return case.soft_cap * bent
