"""Extents: what the entries of each step buffer are for, and how many of them a step uses."""

from dataclasses import dataclass
from enum import Enum

from paceline.core.step import StepLayout


class Extent(Enum):
    """What the entries of a step buffer are for, of which a step uses the first."""

    CONSTANT = "nothing of a step: written when it is made, and never after"
    REQUEST = "a request"
    BOUND = "the start of a request, and the end of the last"
    TOKEN = "a token"
    TREE_TOKEN = "a token of a step of trees"
    TREE_PAIR = "a token of a step of trees, and a row of its request"
    OVERLAID = "a token of a step that reads the overlay"
    AHEAD = "a token of a step that sees ahead"
    EMITTED = "a token that may be emitted"
    RESULT = "a number of a request's results"
    POOLED = "a request of a step that pools"
    SAMPLED = "a row that is sampled, of a step with masks"
    MASK = "a mask"
    GIVEN = "a row of a round with masks"
    GIVEN_TREE = "a row of a round of trees with masks"


# By the field of StepBuffers: views, named_tensors and the sanitizer follow.
EXTENTS = {
    "facts": Extent.REQUEST,
    "parents": Extent.TREE_TOKEN,
    "results": Extent.RESULT,
    "pooled": Extent.POOLED,
    "arange": Extent.CONSTANT,
    "row_ids": Extent.REQUEST,
    "prefix_lens": Extent.REQUEST,
    "extend_lens": Extent.REQUEST,
    "kv_lens": Extent.REQUEST,
    "cu_seqlens_q": Extent.BOUND,
    "req_ids": Extent.TOKEN,
    "positions": Extent.TOKEN,
    "chain_positions": Extent.TREE_TOKEN,
    "rope_positions": Extent.TOKEN,
    "chain_rope_positions": Extent.TREE_TOKEN,
    "input_ids": Extent.TOKEN,
    "token_types": Extent.TOKEN,
    "overlay_slot": Extent.OVERLAID,
    "visible_end": Extent.AHEAD,
    "logits_loc": Extent.REQUEST,
    "tree_mask": Extent.TREE_PAIR,
    "encoder_lens": Extent.REQUEST,
    "encoder_kv_lens": Extent.REQUEST,
    "page_tables": Extent.REQUEST,
    "out_cache_locs": Extent.TOKEN,
    "state_lens": Extent.REQUEST,
    "chosen_logprobs": Extent.EMITTED,
    "top_ids": Extent.EMITTED,
    "top_logprobs": Extent.EMITTED,
    "mask_ids": Extent.SAMPLED,
    "mask_words": Extent.MASK,
    "given_ids": Extent.GIVEN,
    "given_parents": Extent.GIVEN_TREE,
}


@dataclass(frozen=True, slots=True)
class PaddedSize:
    reqs: int
    tokens: int
    max_extend_len: int  # no row extends further; exact where all rows extend alike
    pad_len: int = 0  # tokens of a padded row of a ragged step at most; 0: any number

    @staticmethod
    def exact(layout: StepLayout) -> "PaddedSize":
        """No padding: a ragged step as it is."""
        return PaddedSize(layout.num_reqs, layout.num_tokens, max(layout.extend_lens))

    @staticmethod
    def uniform(reqs: int, extend_len: int) -> "PaddedSize":
        """`reqs` rows of `extend_len` tokens."""
        return PaddedSize(reqs, reqs * extend_len, extend_len)

    @staticmethod
    def ragged(reqs: int, tokens: int, pad_len: int = 0) -> "PaddedSize":
        """`reqs` rows, each with its own number, of `tokens` tokens in all."""
        return PaddedSize(reqs, tokens, tokens, pad_len)

    def sampled(self, *, is_round: bool) -> int:
        """Rows that are sampled: of a round all, else one of each request."""
        return self.tokens if is_round else self.reqs

    def pad_lens(self, layout: StepLayout) -> tuple[int, ...]:
        """[padded rows] tokens of each: the stride where all rows extend alike, else the first
        take what is left and the others none."""
        num, left = self.reqs - layout.num_reqs, self.tokens - layout.num_tokens
        if left == num * self.max_extend_len:
            return (self.max_extend_len,) * num
        needed = rows_left_over(left, self.pad_len)
        assert needed <= num, (
            f"{left} tokens are left of {self.tokens}, and {num} rows to hold them"
        )
        each = self.pad_len or left
        lens = [each] * (needed - 1) + [left - each * (needed - 1)] * (needed > 0)
        return (*lens, *(0,) * (num - needed))


def rows_left_over(tokens: int, pad_len: int) -> int:
    """Padded rows that so many tokens are left over for; pad_len: as of `PaddedSize`."""
    return -(-tokens // pad_len) if pad_len else int(tokens > 0)


@dataclass(frozen=True, slots=True)
class StepUse:
    """How much of its buffers a step uses."""

    size: PaddedSize
    has_tree: bool
    max_emitted: int  # tokens that a row emits at most
    num_sampled: int = 0  # rows that are sampled, of a step with masks
    num_masks: int = 0
    is_round: bool = False
    has_overlay: bool = False
    sees_ahead: bool = False
    pools: bool = False

    def entries(self, extent: Extent) -> int:
        """The first so many."""
        size = self.size
        tree_tokens = size.tokens if self.has_tree else 0
        given = self.num_sampled if self.is_round else 0
        return {
            Extent.CONSTANT: 0,
            Extent.REQUEST: size.reqs,
            Extent.BOUND: size.reqs + 1,
            Extent.TOKEN: size.tokens,
            Extent.TREE_TOKEN: tree_tokens,
            Extent.TREE_PAIR: tree_tokens * size.max_extend_len,
            Extent.OVERLAID: size.tokens if self.has_overlay else 0,
            Extent.AHEAD: size.tokens if self.sees_ahead else 0,
            Extent.EMITTED: size.reqs * self.max_emitted,
            Extent.RESULT: size.reqs * (2 + self.max_emitted),
            Extent.POOLED: size.reqs if self.pools else 0,
            Extent.SAMPLED: self.num_sampled,
            Extent.MASK: self.num_masks,
            Extent.GIVEN: given,
            Extent.GIVEN_TREE: given if self.has_tree else 0,
        }[extent]
