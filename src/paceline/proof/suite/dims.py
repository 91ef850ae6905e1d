"""Cases of head dims other than 64, and of groups of heads, over the main modes."""

from dataclasses import replace

from paceline.proof.suite.build import base_case, ragged_case, tree_case, uniform_case
from paceline.proof.suite.case import Case
from paceline.proof.suite.modes import ForwardMode
from paceline.proof.suite.trees import VERIFY_TREES

_DIMS = ((80, 80), (96, 96), (128, 64), (192, 128), (256, 256))  # of K, of V
_HEADS = ((6, 6), (16, 2), (8, 1))  # of queries, of K and V: MHA, GQA, MQA


def dim_cases() -> tuple[Case, ...]:
    """Head dims and groups of heads in extend, decode and tree verify."""
    shaped = tuple(
        (f"dim{dim}" if dim == v_dim else f"dim{dim}-{v_dim}", 4, 2, dim, v_dim)
        for dim, v_dim in _DIMS
    )
    heads = tuple((f"heads{num}-{num_kv}-dim128", num, num_kv, 128, 128) for num, num_kv in _HEADS)
    return tuple(
        replace(case, is_quick=case.name == "dim128-64")
        for name, num, num_kv, dim, v_dim in shaped + heads
        for case in _three_modes(name, (num, num_kv), (dim, v_dim))
    )


def _three_modes(name: str, heads: tuple[int, int], dims: tuple[int, int]) -> tuple[Case, ...]:
    """An extend, a decode and a tree verify of these heads (queries, KV) and dims (K, V)."""

    def base(mode: ForwardMode) -> Case:
        case = replace(base_case(mode), num_heads=heads[0], num_kv_heads=heads[1])
        return replace(case, head_dim=dims[0], v_head_dim=dims[1])

    topk4 = VERIFY_TREES["topk4"]
    return (
        ragged_case(base(ForwardMode.EXTEND), name, ((15, 1), (16, 2), (0, 31))),
        uniform_case(base(ForwardMode.DECODE), name, (15, 16, 47)),
        tree_case(base(ForwardMode.TARGET_VERIFY), f"{name}-topk4", (13, 16, 31), topk4),
    )
