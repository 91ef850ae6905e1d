"""Cases of absorbed latent attention (MLA): one KV head, and V in the leading columns of K.

576 and 512 are the widths of DeepSeek-V2 and V3 (kv_lora_rank 512, qk_rope_head_dim 64), 288 and
256 those of MiniCPM3.
"""

from dataclasses import replace

from paceline.proof.suite.build import (
    base_case,
    full,
    interpreted,
    ragged_case,
    tree_case,
    uniform_case,
    with_frozen,
)
from paceline.proof.suite.case import Case, Inputs, Layer, PageLayout
from paceline.proof.suite.modes import ForwardMode
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
