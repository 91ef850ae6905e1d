"""Draft footprint: how many bytes a drafter takes beside the model it drafts for, by formula.

Upper bounds, as in `plan.footprint`; the drafter's KV is counted with the target's, by its cache
groups, and its attention backend's buffers by the backend.  No torch.
"""

from paceline.core.model_config import ModelConfig
from paceline.core.options import REJECTION
from paceline.plan.footprint import (
    GRAPH_NODE_BYTES,
    LOGITS_BYTES,
    StepLimits,
    activation_bytes,
)
from paceline.plan.speculation import Speculation

_ROW_BYTES = 64  # allowance, per row of a draft pass: ids, positions, slots, parents, sequences
_CANDIDATE_BYTES = 16  # token, score and parent
# What draft_topk allocates on a CPU per logit: at its peak; in all, without noise.
DRAFT_PEAK, DRAFT_TOTAL = 48, 72
_Q_PEAK = 8  # what rejection allocates per draft and vocabulary entry: q and what it is made of


def draft_workspace_bytes(speculation: Speculation | None, limits: StepLimits, element: int) -> int:
    """What stays allocated: features, rows of the passes, candidates, tables of rope and ids."""
    if speculation is None or speculation.drafter.model is None:
        return 0
    model, shape = speculation.drafter.model, speculation.shape
    features = (limits.rows + 1) * model.hidden_size * element
    rows = limits.rows * shape.reach
    passes = speculation.drafter.passes * rows * (_ROW_BYTES + shape.reach)
    candidates = limits.rows * shape.num_candidates * _CANDIDATE_BYTES
    tables = 1 if model.rope_local is None else 2
    rope = tables * limits.length * model.rotary_dim * 4
    ids = 8 * speculation.drafter.vocab_size  # a head's d2t
    return features + passes + candidates + rope + ids


def draft_step_bytes(speculation: Speculation | None, limits: StepLimits, element: int) -> int:
    """What the drafter adds to the largest eager step: the target's hidden states that it reads,
    its own layers over them, and the logits and noise of one depth of its drafts."""
    if speculation is None or speculation.drafter.model is None:
        return 0
    return (
        _layers_bytes(speculation, speculation.drafter.model, limits.tokens, element)
        + _logits_bytes(speculation, limits.rows, DRAFT_PEAK)
        + _q_bytes(speculation, limits.rows, _Q_PEAK)
    )


def draft_graph_bytes(
    speculation: Speculation | None,
    element: int,
    *,
    rows: int,
    tokens: int,
    device_type: str,
    reserve: int,
) -> int:
    """What a drafter adds to `footprint.graph_bytes`.  rows: requests of a round; tokens: of the
    ragged step, 0 for none."""
    if speculation is None or speculation.drafter.model is None:
        return 0
    model, shape = speculation.drafter.model, speculation.shape
    if device_type == "cuda":
        nodes = model.num_layers * (speculation.drafter.passes + (tokens > 0)) * GRAPH_NODE_BYTES
        widest = max(rows * shape.reach, tokens)
        shared = _layers_bytes(speculation, model, widest, element)
        shared += _logits_bytes(speculation, rows, DRAFT_PEAK)
        return reserve * (shared + nodes) + nodes + _q_bytes(speculation, rows, _Q_PEAK)
    # A recorded graph keeps what every pass allocates.
    computed = speculation.drafter.passes * rows * shape.reach + tokens
    forward = 2 * model.num_layers * _layers_bytes(speculation, model, computed, element)
    greedy = shape.num_steps * _logits_bytes(speculation, rows, DRAFT_TOTAL)
    return forward + greedy


def _layers_bytes(speculation: Speculation, model: ModelConfig, tokens: int, element: int) -> int:
    """Hidden states of the target, side by side too; the layers' input; the layers."""
    width = 2 * speculation.drafter.tap_width + 3 * model.hidden_size
    return tokens * width * element + activation_bytes(model, tokens, element)


def _logits_bytes(speculation: Speculation, rows: int, per_entry: int) -> int:
    wide = rows * speculation.shape.topk
    return wide * speculation.drafter.vocab_size * (LOGITS_BYTES + per_entry)


def _q_bytes(speculation: Speculation, rows: int, per_entry: int) -> int:
    """The distributions that rejection compares with the target's."""
    if speculation.acceptance != REJECTION:
        return 0
    assert speculation.drafter.model is not None, "drafts without a model have none"
    return rows * speculation.shape.num_steps * speculation.drafter.model.vocab_size * per_entry
