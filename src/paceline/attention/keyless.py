"""Tokens without a key: libraries give anything for them, the contract 0 and −inf."""

import math

from torch import Tensor

from paceline.kernels.step_view import StepView


def without_prefix(view: StepView) -> Tensor:
    """[padded_tokens] bool: the token's request has no prefix."""
    return view.prefix_lens.index_select(0, view.req_ids).eq(0)


def blank_keyless_(out: Tensor, lse: Tensor, keyless: Tensor | None) -> tuple[Tensor, Tensor]:
    """out [tokens, heads, v_head_dim] and lse [tokens, heads], with 0 and −inf in place of what a
    library made of tokens without a key.  keyless: [tokens] bool; None: each has one.  Mutates
    both."""
    if keyless is not None:
        out.masked_fill_(keyless.view(-1, 1, 1), 0.0)
        lse.masked_fill_(keyless.unsqueeze(1), -math.inf)
    return out, lse
