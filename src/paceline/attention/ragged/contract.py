"""The contract of ragged backends: who attends where keys and values are expanded from latents.

    Expansion -> expanded_plan -> RaggedPart, of the step's rows and of each piece -> plan -> attend

A step that is expanded is no graph, so a backend may plan from the host's lengths.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Generic

import torch
from torch import Tensor
from torch.nn import functional
from typing_extensions import TypeVar

from paceline.kernels.ragged_attention import SharedColumns


@dataclass(frozen=True, slots=True, kw_only=True)
class RaggedCapabilities:
    """What a backend can do, as data.  None means: no limit."""

    device_types: frozenset[str]  # "cpu", "cuda"
    min_cuda_arch: tuple[int, int] | None  # compute capability
    max_cuda_arch: tuple[int, int] | None
    dtypes: frozenset[torch.dtype] | None
    head_dims: frozenset[tuple[int, int]] | None  # columns of Q and K, shared ones too, and of V
    shared_columns: bool  # reads what heads share of a key once; others have it beside each head's
    host_plan: bool = False  # attends by the host's lengths, and keys must lie by these


@dataclass(frozen=True, slots=True, kw_only=True)
class RaggedConfig:
    """What a model on a device asks of a ragged backend."""

    device_type: str
    cuda_arch: tuple[int, int] | None
    dtype: torch.dtype
    num_heads: int
    head_dim: int  # columns of a query and of a key, shared ones included
    v_head_dim: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RaggedLimits:
    """The largest step that is expanded, and the constants of its layers."""

    device: torch.device
    dtype: torch.dtype
    max_reqs: int
    max_tokens: int  # of a step, and rows of a piece
    max_pieces: int  # of the prefixes of a step
    num_heads: int
    head_dim: int  # as of RaggedConfig
    v_head_dim: int
    scale: float  # multiplies q.k


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RaggedPart:
    """Whose keys the queries of a step meet: its own rows, or a piece of the prefixes."""

    index: int  # 0: the step's own rows; behind them the pieces, in order
    cu_q: Tensor  # [reqs + 1]  int32  prefix sums of queries, the last is all rows of q
    cu_k: Tensor  # [reqs + 1]  int32  of keys, the last is at most the rows of k
    q_lens: tuple[int, ...]  # [reqs]  as of cu_q
    k_lens: tuple[int, ...]  # [reqs]  as of cu_k, but for a row that the device froze since: there
    # it is too long, and nobody reads what comes of its queries
    causal: bool  # the last query and the last key of a request meet


Buffers = TypeVar("Buffers", default=Any)
Plan = TypeVar("Plan", default=Any)


class RaggedBackend(ABC, Generic[Buffers, Plan]):
    """Attends for every layer of an expanded step.  Stateless: buffers are arguments.

    Buffers, Plan: types of its own; nobody else looks into them.
    """

    name: str
    capabilities: RaggedCapabilities

    def unsupported_reasons(self, config: RaggedConfig) -> list[str]:
        """Every reason why this backend cannot serve `config`; empty when it can."""
        return ragged_reasons(self.capabilities, config)

    @abstractmethod
    def make_buffers(self, limits: RaggedLimits) -> Buffers:
        """Allocate once what stays.  Raises ConfigError where a library cannot be imported."""

    def buffer_bytes(self, limits: RaggedLimits) -> int:
        """The most bytes that buffers hold, for the memory budget, which runs no library."""
        return 0

    @abstractmethod
    def plan(self, part: RaggedPart, buffers: Buffers) -> Plan:
        """What all layers of a step share.  On the step's stream; reads no number of the device."""

    @abstractmethod
    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        shared: SharedColumns | None,
        plan: Plan,
        *,
        out_dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor]:
        """One layer: out [tokens, num_heads, v_head_dim], and lse [tokens, num_heads] float32
        natural log; of a request without a key 0 and −inf.

        q: [tokens, num_heads, head_dim]; k: [keys, num_heads, head_dim]; v: [keys, num_heads,
        v_head_dim], whose rows may lie apart.  shared: columns that stand beside these, where
        capabilities say that they may; else None.  q.k is multiplied by the limits' scale.
        out_dtype: of out, or q's where a backend knows no other.  A number that is not finite stays
        within its request.  Mutates its buffers, and may mutate v.
        """


def ragged_reasons(can: RaggedCapabilities, want: RaggedConfig) -> list[str]:
    """All reasons why `can` does not cover `want`, each naming what was expected and got."""
    reasons: list[str] = []

    def need(covered: bool, name: str, expected: object, got: object) -> None:
        if not covered:
            reasons.append(f"{name} must be {expected}, got {got}")

    devices = " or ".join(sorted(can.device_types))
    need(want.device_type in can.device_types, "device", devices, want.device_type)
    arch, least, most = want.cuda_arch or (0, 0), can.min_cuda_arch, can.max_cuda_arch
    if want.device_type == "cuda" and least is not None:
        need(arch >= least, "CUDA arch", f"at least {least}", arch)
    if want.device_type == "cuda" and most is not None:
        need(arch <= most, "CUDA arch", f"at most {most}", arch)
    if can.dtypes is not None:
        need(want.dtype in can.dtypes, "dtype", sorted(map(str, can.dtypes)), want.dtype)
    dims = (want.head_dim, want.v_head_dim)
    if can.head_dims is not None:
        need(dims in can.head_dims, "head dims of K and V", sorted(can.head_dims), dims)
    return reasons


def keyless_tokens(part: RaggedPart) -> Tensor | None:
    """[tokens] bool: the token's request has no key; None where each has one."""
    if 0 not in part.k_lens:
        return None
    return _of_tokens(part.cu_k.diff() == 0, part)


def clean_values_(v: Tensor) -> Tensor:
    """[keys] bool: a value of the key is not finite.

    v: [keys, heads, v_head_dim], whose rows with such a value become 0: a library that multiplies
    rows of the next request by 0 would make NaN of them.
    """
    # The largest magnitude is exact in any format, and takes no tensor of v's size.
    largest: Tensor = torch.linalg.vector_norm(v, math.inf, dim=(1, 2))
    spoilt = ~largest.isfinite()
    v.masked_fill_(spoilt.view(-1, 1, 1), 0.0)
    return spoilt


def spoil_(out: Tensor, keys: Tensor, part: RaggedPart) -> Tensor:
    """out [tokens, heads, v_head_dim] with NaN where a token's request has one of `keys`.

    keys: [num_keys] bool, as `clean_values_` returns it.  Mutates out.
    """
    before = functional.pad(keys.cumsum(0), (1, 0))
    tokens = _of_tokens(before[part.cu_k].diff() > 0, part)
    return out.masked_fill_(tokens.view(-1, 1, 1), math.nan)


def _of_tokens(of_reqs: Tensor, part: RaggedPart) -> Tensor:
    """[reqs] -> [tokens]; of those behind the last request, which a frozen row leaves, anything."""
    token = torch.arange(sum(part.q_lens), dtype=torch.int32, device=of_reqs.device)
    request = torch.searchsorted(part.cu_q[1:], token, right=True)
    return of_reqs.index_select(0, request.clamp(max=len(of_reqs) - 1))
