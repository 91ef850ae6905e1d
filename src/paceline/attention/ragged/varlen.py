"""FlashAttention over keys that lie behind one another: the `fa4` and `fa3` ragged backends.

The libraries read whole rows of one head, and round what they return to the format of queries.
A request without a key walks a tile all the same, and may be given anything: here 0 and −inf.
Tiles of V are loaded whole, with rows of the next request, which are multiplied by 0: so V is made
finite first, and a request whose V was not gets NaN.  Of K a mask hides these rows.
"""

import inspect
from abc import abstractmethod
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from paceline.attention.backends import fa3_backend, fa4_backend
from paceline.attention.held import OPAQUE
from paceline.attention.keyless import blank_keyless_
from paceline.attention.ragged.contract import (
    RaggedBackend,
    RaggedCapabilities,
    RaggedConfig,
    RaggedLimits,
    RaggedPart,
    clean_values_,
    keyless_tokens,
    spoil_,
)
from paceline.core.errors import ConfigError
from paceline.kernels.ragged_attention import SharedColumns

LibraryT = TypeVar("LibraryT")
LSE_KEYWORDS = ("return_softmax_lse", "return_attn_probs")  # of FlashAttention 3, by build
_HALVES = frozenset({torch.bfloat16, torch.float16})
_DEEPSEEK = frozenset({(192, 128)})  # the one shape of unequal dims that both libraries state


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class VarlenBuffers(Generic[LibraryT]):
    """The library, which keeps no tensor of ours, and what each call of it is told."""

    library: LibraryT = field(metadata=OPAQUE)
    scale: float  # multiplies q.k


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class VarlenPlan(Generic[LibraryT]):
    """What one call is told of a part."""

    library: LibraryT
    scale: float  # multiplies q.k
    part: RaggedPart
    keyless: Tensor | None  # [tokens]  bool  the token's request has no key; None: each has one


@dataclass(frozen=True)
class VarlenBackend(
    RaggedBackend[VarlenBuffers[LibraryT], VarlenPlan[LibraryT]], Generic[LibraryT]
):
    """A backend of one call for each part.

    library: whatever has the library's function; None imports the real one in make_buffers.
    """

    library: LibraryT | None = None

    @abstractmethod
    def import_library(self) -> LibraryT:
        """The real library.  Raises ConfigError where it cannot be imported."""

    @abstractmethod
    def call(
        self, library: LibraryT, q: Tensor, k: Tensor, v: Tensor, part: RaggedPart, scale: float
    ) -> tuple[Tensor, Tensor]:
        """The library's: out [tokens, heads, v_head_dim], lse [heads, tokens] natural log."""

    def make_buffers(self, limits: RaggedLimits) -> VarlenBuffers[LibraryT]:
        """The library alone."""
        library = self.import_library() if self.library is None else self.library
        return VarlenBuffers(library=library, scale=limits.scale)

    def plan(self, part: RaggedPart, buffers: VarlenBuffers[LibraryT]) -> VarlenPlan[LibraryT]:
        """Which tokens have no key; lengths are read on the device."""
        return VarlenPlan(
            library=buffers.library, scale=buffers.scale, part=part, keyless=keyless_tokens(part)
        )

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        shared: SharedColumns | None,
        plan: VarlenPlan[LibraryT],
        *,
        out_dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor]:
        """See RaggedBackend.attend; out is in q's dtype."""
        assert shared is None, "keys have their shared columns beside their own"
        spoilt = clean_values_(v)
        out, by_head = self.call(plan.library, q, k, v, plan.part, plan.scale)
        spoil_(out, spoilt, plan.part)
        return blank_keyless_(out, by_head.t().contiguous(), plan.keyless)


class Varlen4Library(Protocol):
    """The one function of FlashAttention 4 that we call."""

    def flash_attn_varlen_func(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        softmax_scale: float,
        causal: bool,
        return_lse: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """See `flash_attn.cute.interface`."""


@dataclass(frozen=True)
class FlashAttention4Ragged(VarlenBackend[Varlen4Library]):
    """FlashAttention 4."""

    name = "fa4"
    capabilities = RaggedCapabilities(
        device_types=frozenset({"cuda"}),
        min_cuda_arch=(9, 0),
        max_cuda_arch=fa4_backend.LAST_ARCH,
        dtypes=_HALVES,
        head_dims=_DEEPSEEK,
        shared_columns=False,
    )

    def unsupported_reasons(self, config: RaggedConfig) -> list[str]:
        """Capabilities, and whether it is installed."""
        return super().unsupported_reasons(config) + fa4_backend.absence()

    def import_library(self) -> Any:
        """As the backend of that name."""
        return fa4_backend.FlashAttention4Backend().import_library()

    def call(
        self,
        library: Varlen4Library,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        part: RaggedPart,
        scale: float,
    ) -> tuple[Tensor, Tensor]:
        """See VarlenBackend.call."""
        out, lse = library.flash_attn_varlen_func(
            q,
            k,
            v,
            cu_seqlens_q=part.cu_q,
            cu_seqlens_k=part.cu_k,
            max_seqlen_q=max(part.q_lens),
            max_seqlen_k=max(part.k_lens),
            softmax_scale=scale,
            causal=part.causal,
            return_lse=True,
        )
        assert lse is not None, "asked for"
        return out, lse


class Varlen3Library(Protocol):
    """The one function of FlashAttention 3 that we call."""

    def flash_attn_varlen_func(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        *,
        softmax_scale: float,
        causal: bool,
        **wants_lse: bool,
    ) -> tuple[Tensor, ...]:
        """See `flash_attn_interface`.  wants_lse: its one keyword, which builds call otherwise."""


@dataclass(frozen=True)
class FlashAttention3Ragged(VarlenBackend[Varlen3Library]):
    """FlashAttention 3, of any build that has the function."""

    name = "fa3"
    capabilities = RaggedCapabilities(
        device_types=frozenset({"cuda"}),
        min_cuda_arch=(9, 0),
        max_cuda_arch=(9, 9),
        dtypes=_HALVES,
        head_dims=_DEEPSEEK,
        shared_columns=False,
    )

    def unsupported_reasons(self, config: RaggedConfig) -> list[str]:
        """Capabilities, and whether a build can be found."""
        return super().unsupported_reasons(config) + fa3_backend.absence()

    def import_library(self) -> Any:
        """As the backend of that name."""
        return fa3_backend.FlashAttention3Backend().import_library()

    def make_buffers(self, limits: RaggedLimits) -> VarlenBuffers[Varlen3Library]:
        """The library alone.  Raises ConfigError for a build that cannot be asked for lse."""
        buffers = super().make_buffers(limits)
        _lse_keyword(buffers.library)
        return buffers

    def call(
        self,
        library: Varlen3Library,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        part: RaggedPart,
        scale: float,
    ) -> tuple[Tensor, Tensor]:
        """See VarlenBackend.call."""
        wants_lse: Any = {_lse_keyword(library): True}
        out, lse, *_ = library.flash_attn_varlen_func(
            q,
            k,
            v,
            part.cu_q,
            part.cu_k,
            max(part.q_lens),
            max(part.k_lens),
            softmax_scale=scale,
            causal=part.causal,
            **wants_lse,
        )
        return out, lse


def _lse_keyword(library: Varlen3Library) -> str:
    """What a build calls the wish for a log-sum-exp.  Raises ConfigError where it has neither."""
    function = getattr(library, "flash_attn_varlen_func", None)
    known = () if function is None else inspect.signature(function).parameters
    found = next((name for name in LSE_KEYWORDS if name in known), None)
    if found is None:
        raise ConfigError.about(
            "parameters of flash_attn_varlen_func",
            expected=" or ".join(LSE_KEYWORDS),
            got=", ".join(known) or "no such function",
            remedy="build a later flash-attention, or choose another --latent-expand-backend",
        )
    return found
