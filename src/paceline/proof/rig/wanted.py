"""A padded step in host integers, derived from the case alone.

Nothing of the runner, the kernels or the layouts computes anything here.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from paceline.core.padding import PAD_PREFIX_LEN, PAD_ROW
from paceline.core.step import PromptPositions
from paceline.kernels.step_view import StepView
from paceline.proof.rig.placement import BatchPlacement
from paceline.proof.suite.case import Batch, Spans
from paceline.proof.suite.trees import depths

Ids = Sequence[Sequence[int]]  # [num_reqs][kv_len] token ids
_PAD_ID = 0


class Cut(NamedTuple):
    """Tokens of a request whose keys begin together."""

    request: int
    tokens: int
    first: int  # key, as a position
    keys: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What every list of a step must hold; padded rows behind the live ones."""

    rows: list[int]  # [padded_reqs] of the request table; frozen rows: PAD_ROW
    prefix_lens: list[int]  # [padded_reqs]
    extend_lens: list[int]  # [padded_reqs]
    host_prefix_lens: list[int]  # [padded_reqs] a frozen row's as the host has it
    parents: list[list[int]] | None  # [padded_reqs][extend]
    blocks: list[Spans] | None  # [padded_reqs] of the live ones
    input_ids: list[int]  # [padded_tokens]
    pages: list[list[list[int]]]  # [num_groups][padded_reqs] page ids of kv_len
    encoder_lens: list[int] | None  # [padded_reqs]
    rope: list[PromptPositions | None]  # [padded_reqs]

    @property
    def of_encoder(self) -> "Wanted":
        """What a plan is made from whose layers read an encoder's rows: these for the prefix, and
        nothing of a tree."""
        assert self.encoder_lens is not None, "its tokens see one another"
        return replace(self, prefix_lens=self.encoder_lens, parents=None)

    @property
    def kv_lens(self) -> list[int]:
        """[padded_reqs]"""
        return [p + e for p, e in zip(self.prefix_lens, self.extend_lens, strict=True)]

    @property
    def host_kv_lens(self) -> list[int]:
        """[padded_reqs] what a host plan attends by."""
        return [p + e for p, e in zip(self.host_prefix_lens, self.extend_lens, strict=True)]

    @property
    def offsets(self) -> list[int]:
        """[padded_reqs + 1] tokens before each request."""
        found = [0]
        for extend in self.extend_lens:
            found.append(found[-1] + extend)
        return found

    @property
    def positions(self) -> list[int]:
        """[padded_tokens] prefix + depth in the tree, or place in the chain."""
        return [
            prefix + step
            for request, prefix in enumerate(self.prefix_lens)
            for step in self._depths(request)
        ]

    def rope_positions(self, axis: int) -> list[int]:
        """[padded_tokens] where each token stands: as its request brought, or behind that."""
        found = []
        for token, position in enumerate(self.positions):
            request = next(r for r, end in enumerate(self.offsets[1:]) if token < end)
            given = self.rope[request]
            if given is None:
                found.append(position)
            elif position < len(given.axes[axis]):
                found.append(given.axes[axis][position])
            else:
                found.append(position + given.delta)
        return found

    @property
    def visible_end(self) -> list[int]:
        """[padded_tokens] the end of a token's block, or the position behind its own."""
        assert self.blocks is not None, "nobody sees ahead"
        found = []
        for spans, prefix, kv_len in zip(self.blocks, self.prefix_lens, self.kv_lens, strict=True):
            ends = {at: stop for start, stop in spans for at in range(start, stop)}
            found += [ends.get(at, at + 1) for at in range(prefix, kv_len)]
        return found

    def slots(self, group: int, page_size: int) -> list[int | None]:
        """[padded_tokens] slot of each new token; None: a padded or frozen row's."""
        found: list[int | None] = []
        for request, (prefix, kv_len) in enumerate(
            zip(self.prefix_lens, self.kv_lens, strict=True)
        ):
            pages = self.pages[group][request]
            for at in range(prefix, kv_len):
                is_live = self.rows[request] != PAD_ROW
                page = pages[at // page_size] if is_live else 0
                found.append(page * page_size + at % page_size if is_live else None)
        return found

    def tree_rows(self, width: int) -> list[list[bool]]:
        """[padded_tokens][width] whether a row of the request is the token or an ancestor."""
        assert self.parents is not None, "a chain has no tree mask"
        found = []
        for tree in self.parents:
            for node in range(len(tree)):
                path = [node]
                while tree[path[-1]] >= 0:
                    path.append(tree[path[-1]])
                found.append([column in path for column in range(width)])
        return found

    def in_chunks(self, size: int, *, by_host: bool) -> list[Cut]:
        """The runs of tokens that lie in one chunk, in order.  by_host: at its lengths."""
        found: list[Cut] = []
        prefixes = self.host_prefix_lens if by_host else self.prefix_lens
        for request, (prefix, extend) in enumerate(zip(prefixes, self.extend_lens, strict=True)):
            for at in range(prefix, prefix + extend):
                begins = at == prefix or at % size == 0
                tokens = 0 if begins else found.pop().tokens
                found.append(Cut(request, tokens + 1, at - at % size, at % size + 1))
        return found

    def prefix_in_chunks(self, size: int, *, by_host: bool) -> list[Cut]:
        """What each request has of its prefix in the chunk of its next token."""
        prefixes = self.host_prefix_lens if by_host else self.prefix_lens
        lens = zip(prefixes, self.extend_lens, strict=True)
        return [
            Cut(request, extend, prefix - prefix % size, prefix % size)
            for request, (prefix, extend) in enumerate(lens)
        ]

    def _depths(self, request: int) -> list[int]:
        if self.parents is None:
            return list(range(self.extend_lens[request]))
        return list(depths(tuple(self.parents[request])))


def wanted_step(batch: Batch, placement: BatchPlacement, ids: Ids, view: StepView) -> Wanted:
    """The live rows, then the padding rule: prefix 1 and the stride, or what is left over."""
    num_pad = view.padded_reqs - batch.num_reqs
    left = view.padded_tokens - batch.num_tokens
    pad = [view.max_extend_len] * num_pad
    if sum(pad) != left:
        pad = [left] + [0] * (num_pad - 1) if num_pad else []
    parents = None
    if batch.parents is not None:
        parents = [list(tree) for tree in batch.parents] + [[-1] * extend for extend in pad]
    is_live = [request not in batch.frozen for request in range(batch.num_reqs)]
    blocks: list[Spans] | None = None
    if batch.blocks is not None:
        pairs = zip(batch.blocks, is_live, strict=True)
        blocks = [spans if live else () for spans, live in pairs] + [()] * num_pad
    encoder_lens = None
    if batch.encoder_lens is not None:
        lens = zip(batch.encoder_lens, is_live, strict=True)
        encoder_lens = [rows if live else PAD_PREFIX_LEN for rows, live in lens]
        encoder_lens += [PAD_PREFIX_LEN] * num_pad
    rope = batch.rope or (None,) * batch.num_reqs
    prefixes = zip(batch.prefix_lens, is_live, strict=True)
    return Wanted(
        rows=[row if live else PAD_ROW for row, live in zip(placement.rows, is_live, strict=True)]
        + [PAD_ROW] * num_pad,
        prefix_lens=[prefix if live else PAD_PREFIX_LEN for prefix, live in prefixes]
        + [PAD_PREFIX_LEN] * num_pad,
        extend_lens=[*batch.extend_lens, *pad],
        host_prefix_lens=[*batch.prefix_lens, *[PAD_PREFIX_LEN] * num_pad],
        parents=parents,
        blocks=blocks,
        input_ids=_new_ids(batch, ids) + [_PAD_ID] * left,
        pages=[
            [list(row) if live else [] for row, live in zip(pages, is_live, strict=True)]
            + [[] for _ in range(num_pad)]
            for pages in placement.pages
        ],
        encoder_lens=encoder_lens,
        rope=[each if live else None for each, live in zip(rope, is_live, strict=True)]
        + [None] * num_pad,
    )


def _new_ids(batch: Batch, ids: Ids) -> list[int]:
    """[num_tokens] ids of the step's own tokens; a frozen row has none."""
    found: list[int] = []
    for request, prefix in enumerate(batch.prefix_lens):
        is_frozen = request in batch.frozen
        new = ids[request][prefix:]
        found += [_PAD_ID] * len(new) if is_frozen else new
    return found
