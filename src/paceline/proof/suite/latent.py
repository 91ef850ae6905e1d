"""Cases of absorbed latent attention (MLA): one KV head, and V in the leading columns of K.

576 and 512 are the widths of DeepSeek-V2 and V3 (kv_lora_rank 512, qk_rope_head_dim 64), 288 and
256 those of MiniCPM3.
"""

from dataclasses import replace

from paceline.proof.suite.build import (
    base_case,
    full,
    interpreted,
    live_sizes_case,
    ragged_case,
    tree_case,
    uniform_case,
    with_frozen,
    with_prefixes,
)
from paceline.proof.suite.case import Case, Inputs, Layer, PageLayout
from paceline.proof.suite.modes import ForwardMode
from paceline.proof.suite.speculate import fixed3
from paceline.proof.suite.trees import VERIFY_TREES, beam, chain, draft_step

_EDGES = (13, 16, 31)


def latent_cases() -> tuple[Case, ...]:
    """Decode, extends, mixed steps, chains and trees over a latent cache."""
    decode, extend = _latent(ForwardMode.DECODE), _latent(ForwardMode.EXTEND)
    verify, draft = _latent(ForwardMode.TARGET_VERIFY), _latent(ForwardMode.DRAFT_DECODE)
    layers = (Layer(),) * 2
    spread = replace(verify, layout=PageLayout.INTERLEAVED)
    rows = ((15, 1), (16, 2), (0, 31))
    return (
        uniform_case(decode, "page-edges", _EDGES),
        ragged_case(extend, "ragged-edges", rows),
        ragged_case(
            _latent(ForwardMode.MIXED), "decode-and-chunks", ((15, 1), (0, 17), (16, 1), (20, 5))
        ),
        tree_case(spread, "topk4", _EDGES, VERIFY_TREES["topk4"]),
        uniform_case(replace(draft, prefix_only=True), "frozen-kv", _EDGES),
        *interpreted(*_tiny()),
        *full(
            uniform_case(replace(decode, layers=layers, page_size=64), "page64", (62, 64, 5)),
            with_frozen(uniform_case(decode, "frozen-rows", (31, 15, 40, 7)), (), (0,), (1, 3)),
            uniform_case(verify, "chain3", _EDGES, extend=3),
            uniform_case(replace(decode, page_size=1), "page1", (5, 8, 1)),
            uniform_case(replace(decode, num_heads=20), "heads20", _EDGES),
            uniform_case(_narrow(decode), "288-256", _EDGES),
            uniform_case(replace(decode, inputs=Inputs.UNEVEN), "uneven", _EDGES),
            ragged_case(replace(extend, dtype="float32"), "float32", rows),
            ragged_case(replace(extend, page_size=1), "page1", ((5, 3), (0, 7), (9, 1))),
            tree_case(_narrow(verify), "288-256-mixed", _EDGES, beam(2, 4), chain(9)),
            tree_case(draft, "topk2-step3", _EDGES, draft_step(beam(2, 4), 3)),
            tree_case(
                replace(draft, page_size=1),
                "topk2-step3-page1",
                (3, 8, 1),
                draft_step(beam(2, 4), 3),
            ),
            *_page_ends(),
            *_layouts(),
            *_sizes(),
            *_speculation(16),
            *_speculation(64),
            *_scaled(),
            *_expanded(),
        ),
    )


def _scaled() -> tuple[Case, ...]:
    """Latents in float8, with a scale for each row."""

    def scaled(mode: ForwardMode) -> Case:
        return replace(_latent(mode), kv_dtype="float8_e4m3fn")

    verify, mixed = scaled(ForwardMode.TARGET_VERIFY), scaled(ForwardMode.MIXED)
    layers = (Layer(),) * 2
    return (
        uniform_case(replace(scaled(ForwardMode.DECODE), layers=layers), "fp8-rows", _EDGES),
        ragged_case(scaled(ForwardMode.EXTEND), "fp8-rows", ((15, 1), (16, 2), (0, 31))),
        ragged_case(mixed, "fp8-rows", ((15, 1), (0, 17), (16, 1), (20, 5))),
        uniform_case(verify, "fp8-rows-chain3", _EDGES, extend=3),
        tree_case(verify, "fp8-rows-topk4", _EDGES, VERIFY_TREES["topk4"]),
    )


def _expanded() -> tuple[Case, ...]:
    """Long prompts, expanded: without a prefix, behind one of a page, and behind one of several
    pieces, in which others are exhausted; beside rows that decode."""

    def expanded(mode: ForwardMode, layout: PageLayout, by: str = "own") -> Case:
        case = replace(_latent(mode), num_heads=4, head_dim=192, v_head_dim=128, layout=layout)
        return replace(case, latent_expand_from=4, ragged_backend=by)

    extend, mixed = ForwardMode.EXTEND, ForwardMode.MIXED
    rows = ((0, 9), (16, 5), (150, 6), (40, 4))
    beside = ((15, 1), (64, 1), (33, 1), (0, 11), (90, 4), (20, 2))
    return (
        *(
            ragged_case(expanded(extend, layout), f"expanded-{layout.value}", rows)
            for layout in (PageLayout.CONTIGUOUS, PageLayout.SHUFFLED, PageLayout.INTERLEAVED)
        ),
        ragged_case(
            replace(expanded(mixed, PageLayout.SHUFFLED), layers=(Layer(),) * 2),
            "expanded-behind-decode",
            beside,
        ),
        *(
            ragged_case(expanded(mixed, PageLayout.SHUFFLED, by), f"expanded-by-{by}", beside)
            for by in ("flashinfer", "fa3", "fa4")
        ),
    )


def _page_ends() -> tuple[Case, ...]:
    """Prefixes and totals at the ends of pages, and across them."""
    cases = []
    for size in (16, 64):
        extend = replace(_latent(ForwardMode.EXTEND), page_size=size)
        mixed = replace(_latent(ForwardMode.MIXED), page_size=size)
        decode = replace(_latent(ForwardMode.DECODE), page_size=size)
        ends = ((0, size), (size, 5), (size - 4, 4), (size - 6, size // 2 + 8))
        cases += [
            ragged_case(extend, f"page{size}-ends", ends),
            ragged_case(
                extend, f"page{size}-zero-prefix", ((0, size - 1), (0, size), (0, size + 1))
            ),
            ragged_case(mixed, f"page{size}-mixed", ((size - 1, 1), (0, size + 1), (size, 1))),
            uniform_case(decode, f"page{size}-ends", (size - 2, size - 1, size)),
            uniform_case(replace(decode, captured_reqs=2), f"page{size}-one", (2 * size + 5,)),
        ]
    return tuple(cases)


def _layouts() -> tuple[Case, ...]:
    """Of pages of 64, which all can read; the trees' own rows lie anywhere in them."""
    cases = []
    for layout in PageLayout:
        for mode in (ForwardMode.DECODE, ForwardMode.EXTEND, ForwardMode.TARGET_VERIFY):
            base, name = replace(_latent(mode), page_size=64, layout=layout), layout.value
            if mode is ForwardMode.EXTEND:
                cases.append(ragged_case(base, name, ((130, 3), (64, 70), (128, 1))))
            else:
                extend = 3 if mode is ForwardMode.TARGET_VERIFY else 1
                cases.append(uniform_case(base, name, (190, 128, 64), extend=extend))
    return tuple(cases)


def _sizes() -> tuple[Case, ...]:
    """Pages, heads and lengths."""
    decode, extend = _latent(ForwardMode.DECODE), _latent(ForwardMode.EXTEND)
    verify = replace(_latent(ForwardMode.TARGET_VERIFY), page_size=64)
    wide = replace(decode, page_size=64, num_heads=128)
    long = replace(wide, num_heads=16, captured_reqs=2)
    half = replace(decode, page_size=64, dtype="float16")
    large = replace(decode, page_size=128)
    return (
        *(
            uniform_case(replace(decode, page_size=size), f"page{size}", (size - 1, size, 7))
            for size in (32, 128, 256)
        ),
        ragged_case(replace(extend, page_size=32), "page32-cross", ((30, 5), (0, 40), (32, 1))),
        uniform_case(wide, "heads128", (62, 64, 200)),
        uniform_case(half, "float16", (62, 64, 5)),
        uniform_case(long, "long-8k", (8100, 63)),
        uniform_case(replace(large, captured_reqs=2), "page128-one", (2 * 128 + 5,)),
        ragged_case(replace(extend, page_size=128), "page128-ends", ((0, 128), (128, 5), (120, 9))),
        uniform_case(replace(verify, page_size=128), "page128-chain3", (125, 128), extend=3),
        ragged_case(replace(extend, page_size=64, num_heads=128), "heads128", ((62, 2), (0, 20))),
        ragged_case(replace(extend, page_size=64, num_heads=2), "long-1k", ((64, 1100), (0, 30))),
        tree_case(replace(verify, num_heads=128), "heads128", (61, 64), VERIFY_TREES["topk4"]),
    )


def _speculation(size: int) -> tuple[Case, ...]:
    """Chains, trees, draft steps and both draft extends over pages of `size`."""

    def paged(mode: ForwardMode) -> Case:
        return replace(_latent(mode), page_size=size)

    verify, draft = paged(ForwardMode.TARGET_VERIFY), paged(ForwardMode.DRAFT_DECODE)
    frozen = replace(draft, prefix_only=True)
    fixed, ragged = paged(ForwardMode.DRAFT_EXTEND_V2), paged(ForwardMode.DRAFT_EXTEND)
    edges = (size - 3, size, 2 * size - 1)
    none = ((0, size, size + 9), (0, 7), (size + 9, 0, 2 * size))
    return (
        live_sizes_case(verify, f"page{size}-chain3", (15, 48, 7, 33), extend=3),
        uniform_case(verify, f"page{size}-chain17", edges, extend=17),
        *(
            tree_case(verify, f"page{size}-{name}", edges, VERIFY_TREES[name])
            for name in ("topk2", "topk4", "topk8", "irregular")
        ),
        uniform_case(draft, f"page{size}-chain-step2", edges, extend=3),
        tree_case(draft, f"page{size}-topk2-step3", edges, draft_step(beam(2, 4), 3)),
        uniform_case(frozen, f"page{size}-frozen-kv", edges),
        with_prefixes(frozen, f"page{size}-frozen-kv-no-prefix", none, extend=1),
        ragged_case(ragged, f"page{size}-accepted", ((size - 3, 4), (size, 1), (31, 6))),
        *(
            replace(each, name=f"page{size}-{each.name}")
            for times in (1, 2, 4)
            for fill in ("real", "scratch")
            for each in (fixed3(fixed, times, fill),)
        ),
    )


def _tiny() -> tuple[Case, ...]:
    """Of 64 and 16 columns, for Triton's interpreter."""

    def small(mode: ForwardMode) -> Case:
        case = replace(_latent(mode), num_heads=4, head_dim=80, v_head_dim=64)
        return replace(case, dtype="float16", page_size=4, captured_reqs=2, is_quick=False)

    verify = small(ForwardMode.TARGET_VERIFY)
    return (
        uniform_case(small(ForwardMode.DECODE), "tiny", (5, 8)),
        ragged_case(small(ForwardMode.EXTEND), "tiny", ((3, 4), (0, 5))),
        tree_case(verify, "tiny-topk2", (3, 8), beam(2, 1)),
    )


def _latent(mode: ForwardMode) -> Case:
    return replace(
        base_case(mode),
        method="mla",
        num_heads=16,
        num_kv_heads=1,
        head_dim=576,
        v_head_dim=512,
        v_in_k=True,
    )


def _narrow(case: Case) -> Case:
    return replace(case, head_dim=288, v_head_dim=256)
