"""Contenders: backends as the matrix runs them, on the real library or on its emulator."""

from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

import torch

from paceline.attention.backends.flashinfer_backend import FlashInferBackend
from paceline.attention.backends.flashinfer_mla_backend import FlashInferMLABackend
from paceline.attention.backends.flashmla_backend import FlashMLABackend
from paceline.attention.backends.trtllm_mha_backend import TrtllmMHABackend
from paceline.attention.cascade import cascade, needs_cascade
from paceline.attention.contract import (
    AttentionBackend,
    AttentionConfig,
    GraphSupport,
    needed_support,
)
from paceline.attention.flash_attention import FlashAttentionBackend
from paceline.attention.latent_decode import LatentDecodeBackend
from paceline.attention.mixers import load_state_backend
from paceline.attention.names import parse, singles
from paceline.attention.ragged.contract import RaggedBackend, RaggedConfig
from paceline.attention.ragged.flashinfer_ragged import FlashInferRagged
from paceline.attention.ragged.registry import load_ragged
from paceline.attention.ragged.varlen import VarlenBackend
from paceline.attention.registry import compose, load_backend
from paceline.attention.states import StateBackend, StateConfig
from paceline.core.model.config import SOFTMAX
from paceline.core.model.lookback import Chunk
from paceline.core.modes import MaskKind
from paceline.proof.check.cell import RunnerKind
from paceline.proof.oracle.states import RECURRENCES
from paceline.proof.suite.case import Case

# Vendor libraries by backend; on a CPU an emulator stands in.
EMULATORS = {
    "flashinfer": "paceline.proof.emulators.flashinfer",
    "fa3": "paceline.proof.emulators.flash_attn",
    "fa4": "paceline.proof.emulators.flash_attn",
    "flashinfer_mla": "paceline.proof.emulators.flashinfer_mla",
    "flashmla": "paceline.proof.emulators.flashmla",
    "trtllm_mla": "paceline.proof.emulators.trtllm_mla",
    "cutedsl_mla": "paceline.proof.emulators.trtllm_mla",
    "tokenspeed_mla": "paceline.proof.emulators.tokenspeed_mla",
    "cutlass_mla": "paceline.proof.emulators.cutlass_mla",
    "trtllm_mha": "paceline.proof.emulators.trtllm_mha",
}
# The same of ragged backends.
RAGGED_EMULATORS = {
    "flashinfer": "paceline.proof.emulators.flashinfer_expanded",
    "fa3": "paceline.proof.emulators.flash_attn_ragged",
    "fa4": "paceline.proof.emulators.flash_attn",
}
_OF_A_LIBRARY = (
    *(FlashInferBackend, FlashAttentionBackend, FlashInferMLABackend, FlashMLABackend),
    *(LatentDecodeBackend, TrtllmMHABackend),
)
_EMULATED_ARCH = (9, 0)  # but for backends whose first one is later


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """One backend of the matrix."""

    name: str
    backend: AttentionBackend | StateBackend
    is_emulated: bool


def contender(name: str, device_type: str) -> Contender:
    """The backend of any name that `load_backend` takes, for cells on a device.

    On a CPU a vendor's library is its emulator.  Raises ConfigError for an unknown name.
    """
    if device_type == "cuda":
        return Contender(name=name, backend=load_backend(name), is_emulated=False)
    parsed = parse(name)
    is_emulated = not EMULATORS.keys().isdisjoint(singles(parsed))
    return Contender(name=name, backend=compose(parsed, _on_a_cpu), is_emulated=is_emulated)


def state_contender(name: str, kind: str = SOFTMAX) -> Contender:
    """The state backend of a short name, of `kind` where it has such, or of a class
    `package.module:Class`.  Raises ConfigError."""
    return Contender(name=name, backend=load_state_backend(name, kind=kind), is_emulated=False)


def for_case(who: Contender, case: Case) -> AttentionBackend | StateBackend:
    """What runs a case: by cascade where a tree is more than the backend can mask."""
    backend = who.backend
    if isinstance(backend, StateBackend):
        return backend
    lookback = any(layer.window is not None for layer in case.layers)
    if needs_cascade(backend.capabilities, _masks(case), lookback=lookback):
        return cascade(backend)
    return backend


def ragged_for(case: Case, device_type: str) -> RaggedBackend:
    """Who attends to what a case expands: the real library, or on a CPU its emulator."""
    backend = load_ragged(case.ragged_backend)
    if device_type == "cuda" or case.ragged_backend not in RAGGED_EMULATORS:
        return backend
    assert isinstance(backend, VarlenBackend | FlashInferRagged), "of a library"
    library: Any = import_module(RAGGED_EMULATORS[case.ragged_backend])
    return replace(backend, library=library)


def is_emulated(case: Case, who: Contender, device_type: str) -> bool:
    """Whether a library that takes part in a cell is an emulator."""
    return who.is_emulated or (device_type != "cuda" and case.ragged_backend in RAGGED_EMULATORS)


def refusals(case: Case, who: Contender, runner: RunnerKind, device: torch.device) -> list[str]:
    """Every reason why a contender cannot run a case; empty when it can."""
    if isinstance(who.backend, StateBackend):
        return _state_refusals(case, who.backend, runner, device)
    is_local = not who.is_emulated
    arch = max(_EMULATED_ARCH, who.backend.capabilities.min_cuda_arch or _EMULATED_ARCH)
    if is_local and device.type == "cuda":
        arch = torch.cuda.get_device_capability(device)
    dtype: torch.dtype = getattr(torch, case.dtype)
    graph = GraphSupport.NEVER
    if runner is not RunnerKind.EAGER:
        graph = needed_support(None if case.is_ragged else case.max_extend_len)
    config = AttentionConfig(
        device_type=device.type if is_local else "cuda",
        cuda_arch=arch if not is_local or device.type == "cuda" else None,
        dtype=dtype,
        kv_dtype=dtype if case.kv_dtype is None else getattr(torch, case.kv_dtype),
        page_size=case.page_size,
        heads=(case.heads,),
        window=_has_window(case),
        chunks=frozenset(
            layer.window.size for layer in case.layers if isinstance(layer.window, Chunk)
        ),
        soft_cap=case.soft_cap is not None,
        sinks=case.sinks,
        masks=_masks(case),
        needs_lse=case.prefix_only,
        step_alone=case.step_only or case.both_ways,
        encoder=case.reads_encoder,
        graph=graph,
    )
    composed = for_case(who, case)
    assert isinstance(composed, AttentionBackend)
    reasons: object = composed.unsupported_reasons(config)
    if not isinstance(reasons, list):
        raise TypeError(f"unsupported_reasons must return a list of texts, got {reasons!r}")
    return reasons + _ragged_refusals(case, device)


def _ragged_refusals(case: Case, device: torch.device) -> list[str]:
    """As `refusals`, of who attends to what is expanded."""
    if not case.latent_expand_from:
        return []
    is_real = device.type == "cuda"
    is_own = case.ragged_backend not in RAGGED_EMULATORS
    wanted = RaggedConfig(
        device_type=device.type if is_own else "cuda",
        cuda_arch=torch.cuda.get_device_capability(device) if is_real else _EMULATED_ARCH,
        dtype=getattr(torch, case.dtype),
        num_heads=case.num_heads,
        head_dim=case.head_dim,
        v_head_dim=case.v_head_dim,
    )
    return load_ragged(case.ragged_backend).unsupported_reasons(wanted)


def _state_refusals(
    case: Case, backend: StateBackend, runner: RunnerKind, device: torch.device
) -> list[str]:
    if backend.kind != case.method:
        return [f"kind of layers {case.method}, of {backend.kind}"]
    graph = GraphSupport.NEVER
    if runner is not RunnerKind.EAGER:
        graph = needed_support(None if case.is_ragged else case.max_extend_len)
    assert case.state_every is not None, "a case of states says where they are kept"
    wanted = StateConfig(
        device_type=device.type,
        dtype=getattr(torch, case.dtype),
        masks=_masks(case),
        parts=RECURRENCES[case.method].parts,
        state_every=case.state_every,
        graph=graph,
    )
    return backend.unsupported_reasons(wanted)


def _masks(case: Case) -> frozenset[MaskKind]:
    return frozenset(case.mask(batch) for batch in case.batches)


def _has_window(case: Case) -> bool:
    return any(isinstance(layer.window, int) for layer in case.layers)


def _on_a_cpu(name: str) -> AttentionBackend:
    """The backend of a name that is not composed, on the emulator of its library if it has one."""
    backend = load_backend(name)
    if name not in EMULATORS:
        return backend
    assert isinstance(backend, _OF_A_LIBRARY)
    library: Any = import_module(EMULATORS[name])  # of as many protocols as there are backends
    return replace(backend, library=library)
