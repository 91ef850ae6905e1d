"""Cases of positions with several axes: a token's index says where it is cached and what it sees,
whatever its prompt says of where it stands."""

from dataclasses import replace

from paceline.core.step import PromptPositions
from paceline.proof.suite.build import base_case, ragged_case, tree_case, uniform_case
from paceline.proof.suite.case import Batch, Case
from paceline.proof.suite.modes import ForwardMode
from paceline.proof.suite.trees import beam

_AXES = 3


def rope_cases() -> tuple[Case, ...]:
    """Prompts, decode behind them, and a tree."""

    def base(mode: ForwardMode) -> Case:
        return replace(base_case(mode, 20), rope_axes=_AXES)

    edges = (13, 16, 31)
    decode, verify = base(ForwardMode.DECODE), base(ForwardMode.TARGET_VERIFY)
    return (
        _standing(ragged_case(base(ForwardMode.EXTEND), "rope3", ((15, 3), (16, 2), (0, 31)))),
        _standing(uniform_case(decode, "rope3", edges)),
        _standing(tree_case(verify, "rope3-topk2", edges, beam(2, 2))),
    )


def _standing(case: Case) -> Case:
    return replace(case, batches=tuple(replace(each, rope=_rope(each)) for each in case.batches))


def _rope(batch: Batch) -> tuple[PromptPositions | None, ...]:
    """[num_reqs] rows of pictures four tokens wide; a prompt that ends within the step, or before
    it; every third request has none."""
    found: list[PromptPositions | None] = []
    for request, kv_len in enumerate(batch.kv_lens):
        tokens = range(max(1, kv_len - 1))
        axes = [at // 8 for at in tokens], [at // 4 for at in tokens], [at % 4 for at in tokens]
        positions = PromptPositions(tuple(map(tuple, axes)), -(len(tokens) // 2))
        found.append(None if request % 3 == 2 else positions)
    return tuple(found)
