"""Ragged backends: contracts of the libraries behind them, and who is chosen."""

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.attention.held import tensor_bytes
from paceline.attention.measurements import Measurement
from paceline.attention.ragged.contract import (
    RaggedBackend,
    RaggedConfig,
    RaggedLimits,
    RaggedPart,
    keyless_tokens,
    spoil_,
)
from paceline.attention.ragged.flashinfer_ragged import FlashInferRagged
from paceline.attention.ragged.own import OWN
from paceline.attention.ragged.registry import RAGGED_BACKENDS, choose_ragged, load_ragged
from paceline.attention.ragged.varlen import FlashAttention3Ragged, FlashAttention4Ragged
from paceline.attention.registry import Choice
from paceline.core.errors import BackendUnsupported, ConfigError, KernelArgumentError
from paceline.proof.emulators import flash_attn, flash_attn_ragged, flashinfer_expanded

LENS_Q, LENS_K, HEADS, SCALE = (5, 1, 9), (7, 0, 4), 2, 0.3
OF_LIBRARIES = [FlashAttention3Ragged(flash_attn_ragged), FlashAttention4Ragged(flash_attn)]
FLASHINFER = FlashInferRagged(flashinfer_expanded)
LIMITS = RaggedLimits(
    device=torch.device("cpu"),
    dtype=torch.bfloat16,
    max_reqs=3,
    max_tokens=15,
    max_pieces=1,
    num_heads=HEADS,
    head_dim=192,
    v_head_dim=128,
    scale=SCALE,
)
H200 = RaggedConfig(
    device_type="cuda",
    cuda_arch=(9, 0),
    dtype=torch.bfloat16,
    num_heads=128,
    head_dim=192,
    v_head_dim=128,
)


def ends_of(lens: tuple[int, ...]) -> Tensor:
    return torch.tensor([0, *torch.tensor(lens).cumsum(0).tolist()], dtype=torch.int32)


def part_of(k_lens: tuple[int, ...], *, causal: bool) -> RaggedPart:
    lens = (ends_of(LENS_Q), ends_of(k_lens), LENS_Q, k_lens)
    cu_q, cu_k, q_lens, lens_k = lens
    return RaggedPart(index=0, cu_q=cu_q, cu_k=cu_k, q_lens=q_lens, k_lens=lens_k, causal=causal)


def operands(keys: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(keys)
    rows = ((sum(LENS_Q), 192), (keys, 192), (keys, 128))
    q, k, v = (torch.randn(num, HEADS, dim, generator=generator).bfloat16() for num, dim in rows)
    return q, k, v


def run(backend: RaggedBackend, part: RaggedPart) -> tuple[Tensor, Tensor]:
    how: dict[str, Any] = {"out_dtype": torch.bfloat16}
    plan = backend.plan(part, backend.make_buffers(LIMITS))
    return backend.attend(*operands(int(part.cu_k[-1])), None, plan, **how)


@pytest.mark.parametrize("backend", [*OF_LIBRARIES, FLASHINFER], ids=lambda each: each.name)
def test_libraries_say_what_our_definition_does(backend) -> None:
    """Of rows among themselves, and of keys of which one request has none."""
    for part in (part_of(LENS_Q, causal=True), part_of(LENS_K, causal=False)):
        (out, lse), (wanted, wanted_lse) = run(backend, part), run(OWN, part)
        torch.testing.assert_close(out, wanted, rtol=2**-6, atol=2**-7)
        torch.testing.assert_close(lse, wanted_lse, rtol=1e-3, atol=1e-3)
    assert (out[5] == 0).all()
    assert (lse[5] == -math.inf).all()


@pytest.mark.parametrize("backend", [OWN, *OF_LIBRARIES, FLASHINFER], ids=lambda each: each.name)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_no_request_takes_values_of_another_or_hides_its_own(backend, bad) -> None:
    """Of V alone, whose rows a tile of the request before it holds; neither do rows behind all."""
    part, how = part_of(LENS_K, causal=False), {"out_dtype": torch.bfloat16}
    plan = backend.plan(part, backend.make_buffers(LIMITS))
    q, k, v = operands(12)
    wanted, _ = backend.attend(q, k, v.clone(), None, plan, **how)
    v[-1] = v[8, 1, 3] = bad
    found, lse = backend.attend(q, k, v, None, plan, **how)
    assert torch.equal(found[:6], wanted[:6])
    assert not found[6:, 1, 3].isfinite().any()
    assert lse[6:].isfinite().all()


@pytest.mark.parametrize("live", [(9, 0, 0), (0, 0, 0)], ids=["frozen", "warm-up"])
def test_rows_behind_the_last_that_lives_are_nobodys(live) -> None:
    """The host counts on more rows than the device has: no operator may check one by the other."""
    part = replace(part_of(LENS_K, causal=False), cu_q=ends_of(live), k_lens=(5, 0, 7))
    out = torch.zeros(sum(LENS_Q), HEADS, 128)
    spoil_(out, torch.arange(12) == 3, part)  # a key of the first request
    assert out[: live[0]].isnan().all()
    keyless = keyless_tokens(part)
    assert keyless is not None
    assert keyless[: live[0]].tolist() == [False] * live[0]


@pytest.mark.parametrize(
    ("library", "text"),
    [
        (SimpleNamespace(flash_attn_varlen_func=lambda q, k, v: (q, k)), "got q, k, v"),
        (SimpleNamespace(), "got no such function"),
    ],
)
def test_a_build_that_cannot_be_asked_for_lse_is_refused(library, text) -> None:
    with pytest.raises(ConfigError, match=f"return_softmax_lse or return_attn_probs, {text}"):
        FlashAttention3Ragged(library).make_buffers(LIMITS)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"q_lens": (5, 1, 8)}, "max_seqlen_q must be at least 9"),
        ({"k_lens": (6, 2, 4)}, "max_seqlen_k must be at least 7"),
        ({"cu_k": ends_of((7, 1, 4))}, r"cu_seqlens_k\[-1\] must be at most 11"),
        ({"cu_q": ends_of((9, 1, 6))}, r"cu_seqlens_q\[-1\] must be at most 15"),
        ({"cu_k": ends_of(LENS_K).long()}, "cu_seqlens_k dtype must be torch.int32"),
        ({"cu_k": ends_of((7, 0))}, "cu_seqlens_k length must be 4"),
        ({"cu_k": torch.tensor([0, 7, 6, 11], dtype=torch.int32)}, "cu_seqlens_k must be monotone"),
    ],
)
@pytest.mark.parametrize("backend", OF_LIBRARIES, ids=lambda each: each.name)
def test_lengths_that_the_libraries_would_believe_are_refused(backend, change, text) -> None:
    part = replace(part_of(LENS_K, causal=False), **{"k_lens": (7, 7, 7)} | change)
    plan = backend.plan(part, backend.make_buffers(LIMITS))
    with pytest.raises(KernelArgumentError, match=text):
        backend.attend(*operands(11), None, plan, out_dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda q, k, v: (q.float(), k, v), "q must be bfloat16 or float16"),
        (lambda q, k, v: (q, k.half(), v), "k and v dtype must be torch.bfloat16"),
        (lambda q, k, v: (q, k[:, :1], v), "places and heads of v"),
        (lambda q, k, v: (q, k, v[:-1]), "places and heads of v"),
        (lambda q, k, v: (q, k[..., :64], v), "head dim of k must be 192"),
        (lambda q, k, v: (q[..., :20], k[..., :20], v), "head dim must be a multiple of 8"),
        (lambda q, k, v: (q, k, v.mT.contiguous().mT), "last stride of v must be 1"),
    ],
)
@pytest.mark.parametrize("backend", OF_LIBRARIES, ids=lambda each: each.name)
def test_operands_that_the_libraries_cannot_take_are_refused(backend, change, text) -> None:
    part = part_of(LENS_K, causal=False)
    plan = backend.plan(part, backend.make_buffers(LIMITS))
    given = change(*operands(11))
    with pytest.raises(KernelArgumentError, match=text):
        backend.attend(*given, None, plan, out_dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda q, k, v: (q.half(), k, v), "q dtype must be torch.bfloat16"),
        (lambda q, k, v: (q[:-1], k, v), r"q shape must be \(15, 2, 192\)"),
        (lambda q, k, v: (q, k[..., :128], v), "k shape must be"),
        (lambda q, k, v: (q, k, v[..., :64]), "v shape must be"),
        (lambda q, k, v: (q, k[:-1], v[:-1]), r"kv_indptr\[-1\] must be at most 10 keys"),
        (lambda q, k, v: (q, k, v.mT.contiguous().mT), "last stride of v must be 1"),
        (
            lambda q, k, v: (q, torch.cat((k[..., :1], k), 2)[..., 1:], v),
            "address and strides of k must be multiples of 16 bytes",
        ),
    ],
)
def test_what_flashinfer_would_read_elsewhere_is_refused(change, text) -> None:
    plan = FLASHINFER.plan(part_of(LENS_K, causal=False), FLASHINFER.make_buffers(LIMITS))
    given = change(*operands(11))
    with pytest.raises(KernelArgumentError, match=f"flashinfer {text}"):
        FLASHINFER.attend(*given, None, plan, out_dtype=torch.bfloat16)


def test_parts_of_a_step_and_steps_behind_it_keep_their_plans() -> None:
    """A wrapper that planned again would have forgotten what a step in flight runs by."""
    buffers = FLASHINFER.make_buffers(LIMITS)
    own, piece = part_of(LENS_Q, causal=True), replace(part_of(LENS_K, causal=False), index=1)
    first = [FLASHINFER.plan(part, buffers) for part in (own, piece)]
    later = [FLASHINFER.plan(part, buffers) for part in (own, own, own)]
    wrappers = {id(plan.wrapper) for plan in (*first, *later)}
    assert len(wrappers) == 5
    assert FLASHINFER.plan(own, buffers).wrapper is first[0].wrapper
    assert 0 < tensor_bytes(buffers) <= FLASHINFER.buffer_bytes(LIMITS)


def test_schedules_of_all_pieces_are_counted() -> None:
    piece, counted = part_of(LENS_K, causal=False), []
    for num in (1, 40):
        limits = replace(LIMITS, max_pieces=num)
        buffers, parts = FLASHINFER.make_buffers(limits), range(1 + num)
        plans = [FLASHINFER.plan(replace(piece, index=i), buffers) for i in (*parts,) * 5]
        held = sum({id(plan.wrapper): len(plan.wrapper._schedule) for plan in plans}.values())
        counted.append(FLASHINFER.buffer_bytes(limits) - held)
    assert 0 < counted[0] <= counted[1]


def test_a_schedule_beyond_its_workspace_is_refused() -> None:
    buffers = FLASHINFER.make_buffers(replace(LIMITS, max_tokens=1, max_reqs=1))
    many = (2000,) * 3
    part = replace(part_of(many, causal=False), q_lens=many, cu_q=ends_of(many))
    with pytest.raises(KernelArgumentError, match="bytes of int_workspace_buffer must be at least"):
        FLASHINFER.plan(part, buffers)


def test_every_reason_against_a_backend_is_named() -> None:
    config = replace(H200, cuda_arch=(8, 9), dtype=torch.float32, head_dim=96, v_head_dim=64)
    with pytest.raises(BackendUnsupported) as caught:
        choose_ragged(config, "fa3", attention=None, gpu="")
    for text in (
        "CUDA arch must be at least (9, 0), got (8, 9)",
        "dtype must be ['torch.bfloat16', 'torch.float16'], got torch.float32",
        "head dims of K and V must be [(192, 128)], got (96, 64)",
    ):
        assert text in str(caught.value)
    later = replace(H200, cuda_arch=(10, 0))
    assert load_ragged("fa4").unsupported_reasons(later) == []
    with pytest.raises(BackendUnsupported, match=r"CUDA arch must be at most \(9, 9\), got"):
        choose_ragged(later, "fa3", attention=None, gpu="")
    with pytest.raises(BackendUnsupported, match="device must be cuda, got cpu"):
        choose_ragged(replace(H200, device_type="cpu"), "fa4", attention=None, gpu="")


def test_an_asked_attention_backend_has_its_library_or_is_told_why_not() -> None:
    def beside(attention: str, config: RaggedConfig) -> Choice:
        return choose_ragged(config, None, attention=attention, gpu="")

    alone = beside("triton", H200)
    ours = "our own kernel, not triton: latents alone are what that attends to"
    assert (alone.name, alone.why, alone.rejected) == ("own", ours, {})
    taken = beside("flashinfer_mla+triton", H200)
    why = "of the library of flashinfer_mla+triton, asked for"
    assert (taken.name, taken.why) == ("flashinfer", why)
    refused = beside("fa3", replace(H200, cuda_arch=(10, 0)))
    [reason] = refused.rejected["fa3"]
    assert reason == "CUDA arch must be at most (9, 9), got (10, 0)"
    assert refused.why == f"our own kernel, not fa3, whose library cannot: {reason}"


def test_names_are_known_or_complete() -> None:
    assert {name: load_ragged(name).name for name in RAGGED_BACKENDS} == {
        name: name for name in RAGGED_BACKENDS
    }
    with pytest.raises(ConfigError, match="backend of attention to expanded latents must be own,"):
        load_ragged("fa5")
    with pytest.raises(ConfigError, match=r"ragged backend .*Lacking must be complete, got no"):
        load_ragged(f"{__name__}:Lacking")


class Lacking(RaggedBackend[None, None]):
    """Lacks everything."""


def row_of(backend: str, us: float) -> Measurement:
    return Measurement(
        gpu="NVIDIA H200",
        phase="expanded",
        batch_size=8,
        kv_len=4096,
        extend_len=4096,
        num_heads=128,
        num_kv_heads=128,
        head_dim=192,
        page_size=1,
        dtype="bfloat16",
        kv_dtype="bfloat16",
        backend=backend,
        us=us,
        error=0.1,
        date="2026-11-26",
        versions={},
    )


@pytest.mark.parametrize(
    ("us", "installed", "name", "why"),
    [
        (80.0, True, "fa4", "fastest of fa4, own for expanded on NVIDIA H200"),
        (
            98.0,
            True,
            "own",
            "first of fa4, own for expanded on NVIDIA H200, where fa4 is less than",
        ),
        (80.0, False, "own", "the only one that can run"),
    ],
)
def test_auto_takes_the_measured_fastest(monkeypatch, us, installed, name, why) -> None:
    version = "1" if installed else None
    monkeypatch.setattr("paceline.attention.registry.installed_version", lambda package: version)
    table = (row_of("own", 100.0), row_of("fa4", us))
    found = choose_ragged(H200, None, attention="auto", gpu="NVIDIA H200", table=table)
    assert found.name == name
    assert found.why.startswith(why)
    assert found.rejected.keys() == {"own", "flashinfer", "fa4"} - {name}
