"""moe_choose: the Routing of DeepSeek's routers, which choose groups of experts first.

DeepSeek-V2 (arXiv:2405.04434, 2.2.2, device-limited routing): softmax scores, a group counts as
much as its best expert.  DeepSeek-V3 (arXiv:2412.19437, 2.1.2): sigmoid scores, a bias per expert
that counts for the choice alone, a group counts as much as its two best.  Composed of torch's
operators.
"""

import math

import torch
from torch import Tensor

from paceline.core.model.config import ExpertChoice
from paceline.kernels.moe_route import Routing


def moe_choose(
    logits: Tensor,
    bias: Tensor | None,
    experts_per_token: int,
    choice: ExpertChoice,
    *,
    renormalize: bool,
) -> Routing:
    """The Routing of every token.

    logits: [tokens, num_experts]; bias: [num_experts] float32, added to the scores that choose.
    renormalize: a token's weights sum to choice.scale.  Experts of groups that are not chosen get
    nothing, even where too few others are left.  Device-only, static shapes; mutates nothing.
    """
    logits = logits.float()
    scores = logits.sigmoid() if choice.sigmoid else logits.softmax(-1)
    chooses = scores if bias is None else scores + bias
    if bias is None and choice.num_groups == 1:
        chooses = logits  # in the order of their scores, of which the largest may round to one
    if choice.num_groups > 1:
        groups = chooses.view(len(logits), choice.num_groups, -1)
        best = groups.topk(choice.best_of_group, dim=-1).values.sum(-1)
        chosen = best.topk(choice.groups_per_token, dim=-1).indices
        outside = torch.ones_like(best, dtype=torch.bool).scatter(1, chosen, False)
        chooses = groups.masked_fill(outside.unsqueeze(-1), -math.inf).flatten(1)
    ids = chooses.topk(experts_per_token, dim=-1).indices
    weights = scores.gather(1, ids)
    if renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return Routing(weights * choice.scale, ids.int())
