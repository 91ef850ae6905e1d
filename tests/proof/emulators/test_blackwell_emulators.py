"""The emulators of kernels for Blackwell GPUs refuse what their libraries would get wrong, and
answer as torch's own attention does in float64."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from paceline.core.errors import KernelArgumentError
from paceline.proof.emulators import cutlass_mla, tokenspeed_mla, trtllm_mha, trtllm_mla

BF16 = torch.bfloat16
SCALE = 0.05
Call = Callable[..., Any]
Changes = dict[str, Any]


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(BF16)


TABLE = torch.tensor([[2, 1], [3, 0]], dtype=torch.int32)
LENS = ints(70, 5)
PAGES = normal(4, 64, 576, seed=1)


def rows_of(pages: Tensor, size: int) -> list[Tensor]:
    """Of each request, its keys in order: pages [num_pages, size, ...]."""
    needed = [-(-keys // size) for keys in LENS.tolist()]
    tables = zip(TABLE.tolist(), needed, LENS.tolist(), strict=True)
    return [pages[ids[:count]].flatten(0, 1)[:keys] for ids, count, keys in tables]


def by_torch(q: Tensor, k: Tensor, v: Tensor, *, scale: float = SCALE) -> Tensor:
    """q [queries, heads, dim], k and v [keys, dim]: the last query is at the last key."""
    seen = torch.arange(len(k)) <= torch.arange(len(q)).unsqueeze(1) + len(k) - len(q)
    q, k, v = (x.double() for x in (q.transpose(0, 1), k, v))
    keys, values = (x.expand(len(q), *x.shape) for x in (k, v))
    out = scaled_dot_product_attention(q, keys, values, attn_mask=seen, scale=scale)
    return out.transpose(0, 1)


def lse_of(q: Tensor, k: Tensor) -> Tensor:
    """[heads] natural, of one query [heads, dim] over all keys [keys, dim]."""
    return (q.double() @ k.double().T * SCALE).logsumexp(-1)


# --- FlashInfer's decode function -----------------------------------------------------------------


def latents(**changes: Any) -> Any:
    given: Changes = {
        "query": normal(2, 2, 4, 576),
        "kv_cache": PAGES,
        "workspace_buffer": torch.zeros(512, dtype=torch.int8),
        "qk_nope_head_dim": 128,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "block_tables": TABLE,
        "seq_lens": LENS,
        "max_seq_len": 128,
        "bmm1_scale": SCALE,
        "backend": "trtllm-gen",
    }
    return trtllm_mla.trtllm_batch_decode_with_kv_cache_mla(**(given | changes))


def one_query(**changes: Any) -> Any:
    return latents(query=normal(2, 1, 4, 576), **changes)


def test_queries_of_a_row_are_masked_from_bottom_right() -> None:
    out, query = latents(), normal(2, 2, 4, 576)
    for request, rows in enumerate(rows_of(PAGES, 64)):
        wanted = by_torch(query[request], rows, rows[:, :512])
        assert (out[request].double() - wanted).abs().max() < 0.02


@pytest.mark.parametrize(("kernel", "unit"), [("trtllm-gen", math.log(2)), ("cute-dsl", 1.0)])
def test_each_kernel_has_a_base_of_its_own(kernel: str, unit: float) -> None:
    _, lse = one_query(backend=kernel, return_lse=True)
    query = normal(2, 1, 4, 576)
    wanted = [lse_of(query[i, 0], rows) for i, rows in enumerate(rows_of(PAGES, 64))]
    assert (lse.double() * unit - torch.stack(wanted)).abs().max() < 1e-4


def test_a_row_without_a_key_is_junk() -> None:
    out, lse = one_query(seq_lens=ints(70, 0), return_lse=True)
    assert out[0].isfinite().all()
    assert out[1].isnan().all()
    assert lse[1].isnan().all()


def test_a_workspace_is_not_shared_by_kernels() -> None:
    """That in the CuTe DSL leaves numbers where that of TensorRT-LLM counts."""
    workspace = torch.zeros(512, dtype=torch.int8)
    latents(workspace_buffer=workspace)
    one_query(workspace_buffer=workspace, backend="cute-dsl")
    with pytest.raises(KernelArgumentError, match="trtllm-gen counters in the workspace must be"):
        latents(workspace_buffer=workspace)


def narrow(width: int, size: int) -> Changes:
    return {"kv_cache": normal(4, size, 576), "block_tables": torch.zeros(2, width).int()}


OF_LATENTS: list[tuple[Changes, str]] = [
    ({"backend": "auto"}, "auto kernel must be"),
    ({"query": normal(4, 4, 576)}, "dims of query must be"),
    ({"query": normal(2, 2, 4, 576).half()}, "query dtype must be torch.bfloat16"),
    ({"kv_cache": PAGES.half()}, "kv_cache dtype must be torch.bfloat16"),
    ({"qk_nope_head_dim": 192}, "qk_nope_head_dim must be 128, got 192"),
    ({"kv_lora_rank": 256, "qk_rope_head_dim": 32}, "rank and rope dims must be"),
    ({"kv_lora_rank": 256}, "width of query and kv_cache must be 320"),
    ({"backend": "cute-dsl"}, "cute-dsl queries of a row must be 1, got 2"),
    ({"backend": "cute-dsl", "kv_lora_rank": 256}, "cute-dsl rank and rope dims must be"),
    (narrow(2, 128), r"page size must be \(32, 64\), got 128"),
    (narrow(6, 32), "width of block_tables must be a multiple of 4, got 6"),
    ({"query": normal(2, 4, 2, 576).transpose(1, 2)}, "query must be contiguous"),
    ({"kv_cache": normal(4, 576, 64).mT}, "last stride of kv_cache must be 1"),
    ({"block_tables": TABLE.long()}, "block_tables dtype must be torch.int32"),
    ({"block_tables": TABLE[:1]}, "rows of block_tables must be 2, got 1"),
    ({"block_tables": TABLE + 2}, "page ids must be below 4"),
    ({"seq_lens": ints(70, 129)}, "keys of a row must be at most 128, got 129"),
    ({"seq_lens": ints(70, 129), "max_seq_len": 999}, "width of tables must be at least 3 pages"),
    ({"seq_lens": ints(70, 0, 5)[::2]}, "last stride of seq_lens must be 1, got 2"),
    ({"bmm1_scale": torch.ones(1)}, "bmm1_scale must be a float, got Tensor"),
]


# --- TokenSpeed's decode function -----------------------------------------------------------------


def tokens(**changes: Any) -> Any:
    given: Changes = {
        "query": normal(2, 1, 4, 576),
        "kv_cache": PAGES,
        "workspace_buffer": torch.zeros(4 * 4 * 513 * 4, dtype=torch.int8),
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "block_tables": TABLE,
        "seq_lens": LENS,
        "max_seq_len": 128,
        "softmax_scale": SCALE,
    }
    return tokenspeed_mla.tokenspeed_mla_decode(**(given | changes))


def test_tokenspeed_equals_the_definition() -> None:
    (out, lse), query = tokens(return_lse=True), normal(2, 1, 4, 576)
    for request, rows in enumerate(rows_of(PAGES, 64)):
        wanted = by_torch(query[request], rows, rows[:, :512])
        assert (out[request].double() - wanted).abs().max() < 0.02
        natural = lse[request, 0].double() * math.log(2)
        assert (natural - lse_of(query[request, 0], rows)).abs().max() < 1e-4


OF_TOKENS: list[tuple[Changes, str]] = [
    ({"query": normal(2, 2, 4, 576)}, "queries of a row in 16 bits must be 1, got 2"),
    ({"query": normal(2, 1, 4, 576).float()}, "query dtype must be a 16-bit float"),
    ({"kv_cache": PAGES.half()}, "kv_cache dtype must be torch.bfloat16"),
    ({"kv_lora_rank": 256}, "rank and rope dims must be"),
    ({"kv_cache": normal(4, 64, 512)}, "width of query and kv_cache must be 576"),
    ({"kv_cache": normal(4, 16, 576)}, "page size must be"),
    ({"max_seq_len": 0}, "max_seq_len must be at least 1"),
    ({"workspace_buffer": torch.zeros(40000).byte()}, "workspace_buffer dtype must be torch.int8"),
    ({"workspace_buffer": torch.zeros(9).char()}, "bytes of workspace_buffer must be at least"),
    ({"query": normal(2, 1, 576, 4).mT}, "query must be contiguous"),
    ({"block_tables": TABLE.long()}, "block_tables dtype must be torch.int32"),
    ({"seq_lens": ints(70, 129)}, "keys of a row must be at most 128, got 129"),
]


# --- the CUTLASS kernel ---------------------------------------------------------------------------

LARGE = normal(4, 128, 576, seed=1)


def cutlass(**changes: Any) -> Any:
    query = normal(2, 4, 576)
    given: Changes = {
        "q_nope": query[..., :512],
        "q_pe": query[..., 512:],
        "kv_c_and_k_pe_cache": LARGE,
        "seq_lens": LENS,
        "page_table": TABLE,
        "workspace": torch.zeros(1024, dtype=torch.uint8),
        "sm_scale": SCALE,
    }
    return cutlass_mla.cutlass_mla_decode(**(given | changes))


def test_cutlass_equals_the_definition_and_divides_nothing_by_nothing() -> None:
    out, query = cutlass(), normal(2, 4, 576)
    for request, rows in enumerate(rows_of(LARGE, 128)):
        wanted = by_torch(query[request, None], rows, rows[:, :512])
        assert (out[request].double() - wanted[0]).abs().max() < 0.02
    assert cutlass(seq_lens=ints(70, 0))[1].isnan().all()


OF_CUTLASS: list[tuple[Changes, str]] = [
    ({"q_pe": normal(2, 1, 4, 64)}, "dims of q_nope, q_pe and the cache must be"),
    ({"q_pe": normal(3, 4, 64)}, "rows and heads of q_pe must be"),
    ({"q_pe": normal(2, 4, 32)}, "width of q_nope and q_pe must be"),
    ({"kv_c_and_k_pe_cache": PAGES}, r"page must be \(128, 576\), got \(64, 576\)"),
    ({"q_nope": normal(2, 129, 512), "q_pe": normal(2, 129, 64)}, "heads must be at most 128"),
    ({"q_nope": normal(2, 4, 512).float()}, "q_nope dtype must be a 16-bit float"),
    ({"q_pe": normal(2, 4, 64).half()}, "dtype of q_pe and the cache must be torch.bfloat16"),
    ({"q_pe": normal(2, 64, 4).mT}, "last stride of q_pe must be 1"),
    ({"seq_lens": LENS.long()}, "seq_lens dtype must be torch.int32"),
    ({"page_table": TABLE[:, :0]}, "width of page_table must be at least 1"),
    ({"workspace": torch.zeros(1023, dtype=torch.uint8)}, "bytes of workspace must be at least"),
    ({"seq_lens": ints(70, 257)}, "keys of a row must be at most 256, got 257"),
]


def test_a_workspace_of_no_call_is_refused() -> None:
    with pytest.raises(KernelArgumentError, match="cutlass_mla num_batches must be at least 1"):
        cutlass_mla.cutlass_mla_get_workspace_size(128, 0)


# --- TensorRT-LLM's dense kernels -----------------------------------------------------------------

K, V = normal(4, 2, 64, 64, seed=2), normal(4, 2, 64, 64, seed=3)
BOTH: Changes = {
    "kv_cache": (K, V),
    "workspace_buffer": torch.zeros(512, dtype=torch.uint8),
    "block_tables": TABLE,
    "seq_lens": LENS,
    "bmm1_scale": SCALE,
    "bmm2_scale": 1.0,
}


def decode(**changes: Any) -> Any:
    given = BOTH | {"query": normal(4, 4, 64), "max_seq_len": 128, "q_len_per_req": 2}
    return trtllm_mha.trtllm_batch_decode_with_kv_cache(**(given | changes))


def context(**changes: Any) -> Any:
    given = BOTH | {"query": normal(4, 4, 64), "max_q_len": 3, "max_kv_len": 128, "batch_size": 2}
    given |= {"cum_seq_lens_q": ints(0, 3, 4), "cum_seq_lens_kv": ints(0, 70, 75)}
    return trtllm_mha.trtllm_batch_context_with_kv_cache(**(given | changes))


@pytest.mark.parametrize(("call", "extends"), [(decode, (2, 2)), (context, (3, 1))])
def test_dense_kernels_equal_the_definition(call: Call, extends: tuple[int, int]) -> None:
    out, query = call(), normal(4, 4, 64)
    both = [rows_of(cache.transpose(1, 2), 64) for cache in (K, V)]
    start = 0
    for extend, k, v in zip(extends, *both, strict=True):
        rows, start = slice(start, start + extend), start + extend
        for head in range(4):  # two of queries to one of keys
            q = query[rows, head : head + 1]
            wanted = by_torch(q, k[:, head // 2], v[:, head // 2])
            assert (out[rows, head : head + 1].double() - wanted).abs().max() < 0.02


def test_windows_count_the_keys_left_of_a_query_and_sinks_take_weight() -> None:
    alone, query = decode(window_left=0), normal(4, 4, 64)
    values = rows_of(V.transpose(1, 2), 64)[0]
    assert torch.equal(alone[1], values[69].repeat_interleave(2, 0))
    halved, lse = decode(window_left=0, sinks=torch.zeros(4), return_lse=True)
    keys = rows_of(K.transpose(1, 2), 64)[0][69].repeat_interleave(2, 0)
    score = (query[1].double() * keys.double()).sum(-1) * SCALE
    wanted = alone[1].double() * score.sigmoid().unsqueeze(1)
    assert (halved[1].double() - wanted).abs().max() < 0.02
    assert (lse[1].double() * math.log(2) - score).abs().max() < 1e-4


def one_head(cache: Tensor) -> Tensor:
    """Of one KV head, transposed: its stride is a token's, not a page's."""
    return cache[:, :1].transpose(1, 2).contiguous().transpose(1, 2)


OF_DECODE: list[tuple[Changes, str]] = [
    ({"q_len_per_req": 3}, "rows of query must be 2 of 3, got 4"),
    ({"query": normal(4, 4, 64).float()}, "query dtype must be a 16-bit float"),
    ({"query": normal(4, 64, 4).mT}, "query must be contiguous"),
    ({"query": normal(4, 4, 96)}, r"head dim must be \(64, 128, 256\), got 96"),
    ({"kv_layout": "NHD"}, "kv_layout must be HND"),
    ({"kv_cache": (K, V.half())}, "V dtype must be torch.bfloat16"),
    ({"kv_cache": (K, V[..., :32])}, "head dim of V must be 64, got 32"),
    ({"kv_cache": (normal(4, 2, 128, 64),) * 2}, r"page size must be \(16, 32, 64\), got 128"),
    ({"kv_cache": (normal(4, 3, 64, 64),) * 2}, "heads must be a multiple of 3"),
    ({"kv_cache": (normal(4, 2, 64, 64).mT,) * 2}, "last stride of K must be 1"),
    ({"kv_cache": (one_head(K), one_head(V))}, "stride of heads of K must be at least 4096"),
    ({"block_tables": TABLE.long()}, "block_tables dtype must be torch.int32"),
    ({"block_tables": TABLE[:1]}, "rows of block_tables must be 2, got 1"),
    ({"seq_lens": ints(70, 129)}, "keys of a row must be at most 128, got 129"),
    ({"sinks": torch.zeros(4).half()}, "sinks must be float32"),
    ({"workspace_buffer": torch.ones(512).byte()}, "counters in the workspace must be all 0"),
]
OF_CONTEXT: list[tuple[Changes, str]] = [
    ({"batch_size": 3}, "rows of seq_lens must be 3, got 2"),
    ({"cum_seq_lens_q": ints(0, 3, 4).long()}, "cum_seq_lens_q dtype must be torch.int32"),
    ({"cum_seq_lens_q": ints(0, 4)}, "rows of cum_seq_lens_q must be 3, got 2"),
    ({"cum_seq_lens_q": ints(0, 3, 5)}, "query offsets must be from 0 to 4"),
    ({"max_q_len": 2}, "queries of a request must be at most 2, got 3"),
    ({"cum_seq_lens_kv": ints(0, 70, 76)}, "cum_seq_lens_kv must be"),
]


@pytest.mark.parametrize(
    ("call", "changes", "text"),
    [
        (call, *broken)
        for call, rules in (
            (latents, OF_LATENTS),
            (tokens, OF_TOKENS),
            (cutlass, OF_CUTLASS),
            (decode, OF_DECODE),
            (context, OF_CONTEXT),
        )
        for broken in rules
    ],
)
def test_a_call_that_a_library_would_get_wrong_is_refused(
    call: Call, changes: Changes, text: str
) -> None:
    with pytest.raises(KernelArgumentError, match=text):
        call(**changes)
