"""Every capability has its reason, and all reasons of a configuration are told at once."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from paged_cases import BatchSpec, Shape, make_case

from paceline.attention.backends.fa3_backend import FlashAttention3Backend
from paceline.attention.backends.fa4_backend import FlashAttention4Backend
from paceline.attention.backends.flashinfer_backend import FlashInferBackend
from paceline.attention.backends.torch_backend import TorchBackend
from paceline.attention.backends.triton_backend import TritonBackend
from paceline.attention.capability import capability_reasons
from paceline.attention.contract import (
    AttentionBackend,
    AttentionConfig,
    Capabilities,
    ChunkSupport,
    GraphSupport,
)
from paceline.core.errors import ConfigError
from paceline.core.model.config import Heads
from paceline.core.model.lookback import Chunk
from paceline.core.modes import MaskKind

NARROW = Capabilities(
    device_types=frozenset({"cuda"}),
    min_cuda_arch=(9, 0),
    dtypes=frozenset({torch.bfloat16, torch.float16}),
    kv_dtypes=frozenset({torch.bfloat16, torch.float16}),
    page_sizes=frozenset({16, 64}),
    head_dims=frozenset({64, 128}),
    v_head_dim_differs=False,
    masks=frozenset({MaskKind.CAUSAL}),
    window=False,
    soft_cap=False,
    sinks=False,
    returns_lse=False,
    graph=GraphSupport.DECODE,
    host_plan=False,
)
FITS = AttentionConfig(
    device_type="cuda",
    cuda_arch=(9, 0),
    dtype=torch.bfloat16,
    kv_dtype=torch.bfloat16,
    page_size=64,
    heads=(Heads(8, 2, 128, 128),),
    window=False,
    soft_cap=False,
    sinks=False,
    masks=frozenset({MaskKind.CAUSAL}),
    needs_lse=False,
    graph=GraphSupport.DECODE,
)
REASONS: dict[str, tuple[dict[str, Any], str]] = {
    "device": ({"device_type": "cpu", "cuda_arch": None}, "device must be cuda, got cpu"),
    "arch": ({"cuda_arch": (8, 9)}, "CUDA arch must be at least (9, 0), got (8, 9)"),
    "unknown arch": ({"cuda_arch": None}, "CUDA arch must be at least (9, 0), got (0, 0)"),
    "dtype": (
        {"dtype": torch.float32, "kv_dtype": torch.float16},
        "dtype must be ['torch.bfloat16', 'torch.float16'], got torch.float32",
    ),
    "fp8 cache": (
        {"kv_dtype": torch.float8_e4m3fn},
        "KV dtype must be ['torch.bfloat16'], got torch.float8_e4m3fn",
    ),
    "another cache": (
        {"kv_dtype": torch.float16},
        "KV dtype must be ['torch.bfloat16'], got torch.float16",
    ),
    "page size": ({"page_size": 1}, "page size must be [16, 64], got 1"),
    "head dim": (
        {"heads": (Heads(8, 2, 80, 80),)},
        "head dim must be [64, 128], got 80",
    ),
    "V head dim": ({"heads": (Heads(8, 2, 128, 80),)}, "V head dim must be [64, 128], got 80"),
    "V head dim of K": (
        {"heads": (Heads(8, 2, 128, 64),)},
        "V head dim must be that of K (128), got 64",
    ),
    "window": ({"window": True}, "sliding window must be absent, got present"),
    "chunks": ({"chunks": True}, "chunk-local attention must be absent, got present"),
    "soft cap": ({"soft_cap": True}, "soft cap must be absent, got present"),
    "sinks": ({"sinks": True}, "attention sinks must be absent, got present"),
    "encoder": (
        {"encoder": True},
        "attention to an encoder's rows must be absent, got present",
    ),
    "lse": ({"needs_lse": True}, "log-sum-exp must be not needed, got needed"),
    "mask": (
        {"masks": frozenset({MaskKind.CAUSAL, MaskKind.TREE})},
        "mask kind must be ['causal'], got ['causal', 'tree']",
    ),
    "graph": (
        {"graph": GraphSupport.UNIFORM},
        "graph support must be at least UNIFORM, got DECODE",
    ),
}


def test_nobody_has_chunks_beside_tokens_that_see_ahead() -> None:
    able = replace(NARROW, chunks=ChunkSupport.ALWAYS, masks=frozenset(MaskKind))
    assert capability_reasons(able, replace(FITS, chunks=frozenset({12}))) == []
    ahead = replace(
        FITS, chunks=frozenset({12}), masks=frozenset({MaskKind.CAUSAL, MaskKind.BLOCK})
    )
    assert capability_reasons(able, ahead) == [
        "chunk-local attention beside blocks must be absent, got present"
    ]


def test_a_page_table_is_read_from_a_page_on() -> None:
    able = replace(NARROW, chunks=ChunkSupport.WHOLE_PAGES, page_sizes=None)
    asked = replace(FITS, page_size=16, chunks=frozenset({24, 32, 40}))
    assert capability_reasons(able, asked) == [
        "chunks must be of whole pages of 16 tokens, got 24 tokens",
        "chunks must be of whole pages of 16 tokens, got 40 tokens",
    ]
    assert capability_reasons(able, replace(asked, page_size=8)) == []


def test_chunks_in_a_tree_need_who_masks_by_branch() -> None:
    able = replace(NARROW, chunks=ChunkSupport.ALWAYS, masks=frozenset(MaskKind))
    tree = replace(FITS, chunks=frozenset({12}), masks=frozenset({MaskKind.TREE}))
    assert capability_reasons(replace(able, tree_windows=True), tree) == []
    assert capability_reasons(replace(able, tree_windows=False), tree) == [
        "chunks in a tree must be absent, got present"
    ]


def test_a_chunk_is_no_window_to_who_has_windows_alone() -> None:
    spec = make_case(BatchSpec(prefix_lens=(0,), extend_lens=(1,)), Shape(), seed=0).spec
    assert replace(spec, window=7).sliding == 7
    with pytest.raises(ConfigError, match=r"layer 0 must be a sliding .* got chunks of 7"):
        _ = replace(spec, window=Chunk(7)).sliding


def test_kernels_of_one_generation_refuse_those_behind_it() -> None:
    hopper = replace(NARROW, max_cuda_arch=(9, 9))
    assert capability_reasons(hopper, FITS) == []
    assert capability_reasons(hopper, replace(FITS, cuda_arch=(10, 0))) == [
        "CUDA arch must be at most (9, 9), got (10, 0)"
    ]


def test_a_plan_on_the_host_does_not_know_the_lengths_of_encoders() -> None:
    planned = replace(NARROW, returns_lse=True, host_plan=True)
    assert capability_reasons(planned, FITS) == []
    assert capability_reasons(planned, replace(FITS, encoder=True)) == [
        "plan where layers read an encoder must be made on the device, got a host plan"
    ]


def test_a_configuration_within_the_capabilities_has_no_reason() -> None:
    assert capability_reasons(NARROW, FITS) == []
    assert (
        capability_reasons(NARROW, replace(FITS, cuda_arch=(10, 0), heads=(Heads(8, 2, 64, 64),)))
        == []
    )
    assert capability_reasons(NARROW, replace(FITS, graph=GraphSupport.NEVER)) == []


@pytest.mark.parametrize("name", REASONS)
def test_each_limit_gives_its_reason(name: str) -> None:
    change, reason = REASONS[name]
    assert reason in capability_reasons(NARROW, replace(FITS, **change))


@pytest.mark.parametrize("name", sorted(set(REASONS) - {"head dim", "V head dim"}))
def test_one_limit_gives_one_reason(name: str) -> None:
    change, reason = REASONS[name]
    assert capability_reasons(NARROW, replace(FITS, **change)) == [reason]


def test_each_shape_of_heads_must_be_covered_and_what_two_lack_is_said_once() -> None:
    shapes = (Heads(8, 2, 128, 128), Heads(4, 2, 80, 80), Heads(4, 1, 80, 80))
    lacking = "head dim must be [64, 128], got 80"
    assert capability_reasons(NARROW, replace(FITS, heads=shapes)) == [lacking, f"V {lacking}"]
    assert capability_reasons(NARROW, replace(FITS, heads=(shapes[0], Heads(4, 4, 64, 64)))) == []


def test_a_dtype_it_lacks_is_not_answered_with_a_quantised_cache_alone() -> None:
    can = replace(NARROW, kv_dtypes=NARROW.kv_dtypes | {torch.float8_e4m3fn})
    wanted = replace(FITS, dtype=torch.float32, kv_dtype=torch.float32)
    assert capability_reasons(can, wanted) == [
        "dtype must be ['torch.bfloat16', 'torch.float16'], got torch.float32",
        "KV dtype must be ['torch.bfloat16', 'torch.float16', 'torch.float8_e4m3fn'], got "
        "torch.float32",
    ]


def test_all_reasons_are_told_not_the_first() -> None:
    wanted = replace(
        FITS,
        cuda_arch=(8, 0),
        dtype=torch.float32,
        kv_dtype=torch.float32,
        page_size=5,
        heads=(Heads(8, 2, 96, 80),),
        window=True,
        soft_cap=True,
        sinks=True,
        masks=frozenset({MaskKind.FULL}),
        needs_lse=True,
        graph=GraphSupport.ALWAYS,
    )
    names = [reason.split(" must be ")[0] for reason in capability_reasons(NARROW, wanted)]
    assert names == [
        "CUDA arch",
        "dtype",
        "KV dtype",
        "page size",
        "head dim",
        "V head dim",
        "V head dim",
        "sliding window",
        "soft cap",
        "attention sinks",
        "log-sum-exp",
        "mask kind",
        "graph support",
    ]


def test_no_limit_takes_anything() -> None:
    anything = replace(
        NARROW, page_sizes=None, head_dims=None, min_cuda_arch=None, v_head_dim_differs=True
    )
    wanted = replace(FITS, page_size=7, heads=(Heads(8, 2, 13, 5),), cuda_arch=None)
    assert capability_reasons(anything, wanted) == []


def test_the_torch_backend_serves_any_model_on_a_cpu() -> None:
    wanted = replace(
        FITS,
        device_type="cpu",
        cuda_arch=None,
        page_size=3,
        heads=(Heads(8, 2, 20, 12),),
        window=True,
        soft_cap=True,
        sinks=True,
        kv_dtype=torch.float8_e4m3fn,
        masks=frozenset({MaskKind.CAUSAL, MaskKind.TREE, MaskKind.FULL}),
        needs_lse=True,
        graph=GraphSupport.ALWAYS,
    )
    assert TorchBackend().unsupported_reasons(wanted) == []
    assert TorchBackend().unsupported_reasons(FITS) == ["device must be cpu, got cuda"]


def test_a_backend_that_says_nothing_of_dead_slots_is_taken_to_load_them() -> None:
    assert NARROW.loads_dead_slots
    assert not TorchBackend.capabilities.loads_dead_slots
    assert not TritonBackend.capabilities.loads_dead_slots


def test_the_triton_backend_refuses_what_its_kernels_cannot_do() -> None:
    wanted = replace(FITS, heads=(Heads(8, 2, 20, 20),), dtype=torch.float64)
    reasons = TritonBackend().unsupported_reasons(wanted)
    assert "head dim must be [64, 80, 96, 128, 256], got 20" in reasons
    assert any(reason.startswith("dtype must be ['torch.bfloat16'") for reason in reasons)


@pytest.mark.parametrize("arch", [(8, 0), (8, 9), (9, 0)])
def test_the_triton_backend_reads_an_fp8_cache_where_the_device_converts_it(
    arch: tuple[int, int],
) -> None:
    wanted = replace(FITS, cuda_arch=arch, kv_dtype=torch.float8_e4m3fn)
    reason = "CUDA arch must be at least (8, 9) for an fp8 cache, got (8, 0)"
    assert (reason in TritonBackend().unsupported_reasons(wanted)) == (arch < (8, 9))
    assert not [r for r in TritonBackend().unsupported_reasons(wanted) if r.startswith("KV")]


LATENTS = replace(FITS, heads=(Heads(8, 1, 576, 512, True),))
FP8 = {"kv_dtype": torch.float8_e4m3fn}
FLOAT = {"dtype": torch.float32, "kv_dtype": torch.float32}


@pytest.mark.parametrize(
    ("change", "reasons"),
    [
        ({}, []),
        (
            {"heads": (Heads(8, 1, 640, 512, True),)},
            ["latent dims must be [(64, 16), (128, 64), (256, 32), (256, 64), (512, 64)], got "],
        ),
        (
            {"heads": (Heads(8, 1, 576, 512),)},
            ["head dim must be [64, 80, 96", "V head dim must be [64, 80, 96"],
        ),
        (FP8, []),
        (FLOAT, ["dtype must be of 16 bits with latents, got torch.float32"]),
    ],
    ids=["fits", "dims", "apart", "fp8", "float32"],
)
def test_what_triton_says_of_latents(change: dict[str, Any], reasons: list[str]) -> None:
    found = TritonBackend().unsupported_reasons(replace(LATENTS, **change))
    assert len(found) == len(reasons)
    for said, wanted in zip(found, reasons, strict=True):
        assert said.startswith(wanted)


def test_without_latent_dims_the_head_dims_say_it_all() -> None:
    assert TorchBackend().unsupported_reasons(replace(LATENTS, device_type="cpu")) == []
    narrow = capability_reasons(NARROW, LATENTS)
    assert [reason.partition(" must")[0] for reason in narrow] == ["head dim"] + 2 * ["V head dim"]


@pytest.mark.parametrize(
    "backend",
    [FlashInferBackend(), FlashAttention3Backend(), FlashAttention4Backend()],
    ids=lambda b: b.name,
)
def test_who_sees_no_blocks_says_so(backend: AttentionBackend) -> None:
    asked = replace(FITS, masks=frozenset({MaskKind.CAUSAL, MaskKind.BLOCK}))
    reasons = capability_reasons(backend.capabilities, asked)
    [reason] = [reason for reason in reasons if reason.startswith("mask kind must be")]
    assert reason.endswith("got ['block', 'causal']")
    for other in (TorchBackend(), TritonBackend()):
        assert not [r for r in capability_reasons(other.capabilities, asked) if "mask" in r]


def test_steps_without_a_cache_are_refused_with_latents() -> None:
    """Whatever serves them; nothing in the engine asks for such a step yet."""
    config = replace(FITS, heads=(Heads(16, 1, 576, 512, v_in_k=True),), cache_free=True)
    for can in (
        replace(NARROW, latent_dims=frozenset({(512, 64)})),
        replace(NARROW, head_dims=None),
    ):
        reasons = [text for text in capability_reasons(can, config) if text.startswith("steps")]
        assert reasons == [
            "steps must be with a cache where layers are of latents, got cache-free ones"
        ]
    assert capability_reasons(NARROW, replace(FITS, cache_free=True)) == []


def test_a_backend_of_latents_alone_says_so_once() -> None:
    can = replace(NARROW, head_dims=frozenset(), latent_dims=frozenset({(512, 64)}))
    config = replace(FITS, heads=(Heads(16, 1, 576, 512, v_in_k=True), Heads(8, 2, 128, 128)))
    assert capability_reasons(can, config) == [
        "each layer must be of latents, with V in K, got 8/2 heads of 128"
    ]


def test_a_step_alone_is_refused_to_who_does_not_state_it_and_where_the_cache_rounds() -> None:
    asked = replace(FITS, step_alone=True)
    stated = replace(NARROW, step_alone=True)
    assert capability_reasons(NARROW, asked) == [
        "the step's own rows alone must be absent, got asked for"
    ]
    assert capability_reasons(stated, asked) == []
    fp8 = replace(asked, kv_dtype=torch.float8_e4m3fn)
    able = replace(stated, kv_dtypes=stated.kv_dtypes | {torch.float8_e4m3fn})
    assert capability_reasons(able, fp8) == [
        f"KV dtype of a step read as computed must be {FITS.dtype}, got torch.float8_e4m3fn"
    ]
