"""GraphKeys: under which key a step is captured and replayed."""

from collections.abc import Sequence
from dataclasses import replace

from paceline.attention.contract import GraphSupport, needed_support
from paceline.core.draft_shape import NO_DRAFTS, DraftShape
from paceline.core.modes import End, MaskKind
from paceline.core.request.sampling_params import SamplerTier
from paceline.core.sharing import MIN_SHARERS
from paceline.core.step import Step, StepLayout
from paceline.runner.extents import PaddedSize
from paceline.runner.program import Parts
from paceline.runner.recording.graph_sizes import GraphSizes
from paceline.runner.recording.graphs import GraphKey


class GraphKeys:
    """What of a step is frozen into a graph, for one engine's parts and padded sizes."""

    def __init__(self, parts: Parts, sizes: GraphSizes) -> None:
        self._parts = parts
        self._sizes = sizes
        of_states = [mixer.backend.capabilities.graph for mixer in parts.mixers]
        self._support = min(parts.backend.capabilities.graph, *of_states, GraphSupport.ALWAYS)

    @property
    def ragged_tokens(self) -> tuple[int, ...]:
        """Ascending sizes that ragged steps are padded to, up to the last; (): they are not."""
        return self._sizes.tokens if self._supports(None) else ()

    def longest_extend(self) -> GraphKey | None:
        """The key of the longest ragged step of the most rows; None: these run eagerly."""
        if not self.ragged_tokens:
            return None
        return self._key(self._sizes.full(self._sizes.tokens[-1]), is_ragged=True)

    def largest_decode(self) -> GraphKey | None:
        """What brings requests forward: a round where there is a drafter, else one token each.
        None: nothing generates."""
        if not self._parts.generates:
            return None
        return self._decode(self._sizes.sizes[-1], self._parts.proposer.shape)

    def ahead(self) -> list[GraphKey]:
        """Keys whose steps launch every variant of every kernel between them.

        Tiles are powers of two, so a size of each; every other sampler with one of them.
        """
        sizes, longest = self._sizes.sizes, self._parts.buffers.input_ids.shape[0]
        keys, decode = [], self.largest_decode()
        if decode is not None:
            shapes = dict.fromkeys((NO_DRAFTS, self._parts.proposer.shape))
            keys = [self._decode(reqs, shape) for shape in shapes for reqs in _one_per_power(sizes)]
            wider = [tier for tier in SamplerTier if tier is not SamplerTier.GREEDY]
            keys += [replace(decode, sampler=tier) for tier in wider]
            if self._parts.shares_prefixes:
                crowds = [size for size in _one_per_power(sizes) if size >= MIN_SHARERS]
                keys += [replace(self._decode(n, NO_DRAFTS), shares_prefix=True) for n in crowds]
            masked = (
                SamplerTier.GREEDY,
                SamplerTier.BY_ROW,
            )  # plug-ins launch no kernel themselves
            keys += [replace(decode, sampler=tier, masked=True) for tier in masked]
            if self._parts.pooling is not None:
                both = frozenset({End.GENERATE, End.POOL})
                keys.append(self._key(PaddedSize.ragged(1, longest), is_ragged=True, ends=both))
        if self.ragged_tokens:
            powers = _one_per_power(self._sizes.tokens)
            ragged = [size for tokens in powers for size in self._sizes.few(tokens)]
            ragged += [PaddedSize.ragged(size.reqs, longest) for size in ragged[:2]]
            ragged += [self._sizes.full(self._sizes.tokens[index]) for index in (0, -1)]
            seen = [MaskKind.CAUSAL]
            if self._parts.table.block_ends is not None:
                seen.append(MaskKind.BLOCK)
            keys += [self._key(size, is_ragged=True, mask=mask) for mask in seen for size in ragged]
        return keys

    def _decode(self, reqs: int, shape: DraftShape) -> GraphKey:
        size = PaddedSize.uniform(reqs, shape.num_draft_tokens)
        return self._key(size, mask=shape.mask, is_round=shape.has_drafts)

    def of(self, step: Step) -> GraphKey | None:
        """The key a step replays under, or would; None when it can be no graph."""
        size = self.size_of(step)
        if size is None or step.prompt_spans:  # their number is host data of this step alone
            return None
        return self._key(
            size,
            is_ragged=step.is_ragged,
            mask=step.mask,
            is_round=step.is_round,
            sampler=step.sampler,
            logprobs=step.logprobs,
            observed=step.observed,
            shares_prefix=step.shares_prefix and self._parts.shares_prefixes,
            masked=step.masks is not None,
            has_overlay=step.has_overlay,
            ends=step.ends,
        )

    def size_of(self, step: Step) -> PaddedSize | None:
        """What a step is padded to as a graph, were no prompt of it scored; None: it is none."""
        layout = step.layout
        extend_len = max(layout.extend_lens)
        if not self._supports(None if step.is_ragged else extend_len):
            return None
        if step.is_ragged:
            return self._sizes.pad_ragged(layout.num_reqs, layout.num_tokens)
        return self._sizes.pad(layout.num_reqs, extend_len)

    def _supports(self, extend_len: int | None) -> bool:
        """Whether steps of so many tokens a row, None: ragged, may be captured."""
        return self._support >= needed_support(extend_len)

    def _key(
        self,
        size: PaddedSize,
        *,
        is_ragged: bool = False,
        mask: MaskKind = MaskKind.CAUSAL,
        is_round: bool = False,
        sampler: SamplerTier = SamplerTier.GREEDY,
        logprobs: bool = False,
        observed: bool = True,
        shares_prefix: bool = False,
        masked: bool = False,
        has_overlay: bool = False,
        ends: frozenset[End] | None = None,
    ) -> GraphKey:
        """ends: None: the usual."""
        return GraphKey(
            padded_reqs=size.reqs,
            extend_len=None if is_ragged else size.max_extend_len,
            ragged_tokens=size.tokens if is_ragged else None,
            pad_len=size.pad_len,
            mask=mask,
            is_round=is_round,
            backend=self._parts.backend.name,
            sampler=sampler,
            logprobs=logprobs,
            taps=self._parts.taps,
            observed=observed,
            shares_prefix=shares_prefix,
            masked=masked,
            has_overlay=has_overlay,
            ends=self._parts.usual_ends if ends is None else ends,
        )


def _one_per_power(sizes: Sequence[int]) -> list[int]:
    """The largest of the sizes that are rounded up to the same power of two, ascending."""
    return list({(size - 1).bit_length(): size for size in sorted(sizes)}.values())


def empty_step(key: GraphKey) -> Step:
    """The step of a key before anything is in it."""
    return Step(
        epoch=0,
        layout=StepLayout(
            rows=(),
            extend_lens=(),
            emits=(),
            parents=() if key.mask is MaskKind.TREE and not key.is_round else None,
        ),
        is_ragged=key.extend_len is None,
        mask=key.mask,
        is_round=key.is_round,
        prefix_lens_bound=(),
        sampler=key.sampler,
        logprobs=key.logprobs,
        deltas=(),
        observed=key.observed,
        shares_prefix=key.shares_prefix,
        masks=() if key.masked else None,
        has_overlay=key.has_overlay,
        ends=key.ends,
    )
