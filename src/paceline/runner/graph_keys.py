"""GraphKeys: under which key a step is captured and replayed."""

from paceline.attention.contract import NEEDED_SUPPORT
from paceline.core.modes import ExtendShape, ForwardMode, MaskKind
from paceline.core.sampling_params import SamplerTier
from paceline.core.step import Step, StepLayout
from paceline.runner.buffers import PaddedSize
from paceline.runner.graph_sizes import GraphSizes
from paceline.runner.graphs import GraphKey
from paceline.runner.program import Parts


class GraphKeys:
    """What of a step is frozen into a graph, for one engine's parts and padded sizes."""

    def __init__(self, parts: Parts, sizes: GraphSizes) -> None:
        self._parts = parts
        self._sizes = sizes

    def longest_extend(self) -> GraphKey | None:
        """The key of the longest ragged step; None: these run eagerly."""
        if not self._sizes.tokens or not self._supports(ForwardMode.EXTEND):
            return None
        return self._key(ForwardMode.EXTEND, PaddedSize.ragged(1, self._sizes.tokens[-1]))

    def largest_decode(self) -> GraphKey:
        """What brings requests forward: a round where there is a drafter, else one token each."""
        reqs, proposer = self._sizes.sizes[-1], self._parts.proposer
        if proposer is None:
            return self._key(ForwardMode.DECODE, PaddedSize.uniform(reqs, 1))
        shape = proposer.shape
        size = PaddedSize.uniform(reqs, shape.num_draft_tokens)
        mode = ForwardMode.TARGET_VERIFY
        return self._key(mode, size, mask=shape.mask, is_round=True)

    def of(self, step: Step) -> GraphKey | None:
        """The key a step replays under, or would; None when it can be no graph."""
        if not self._supports(step.mode):
            return None
        if step.prompt_spans:  # their number is host data of this step alone
            return None
        layout = step.layout
        if step.mode.facts.extend is ExtendShape.RAGGED:
            size = self._sizes.pad_ragged(layout.num_reqs, layout.num_tokens)
        else:
            size = self._sizes.pad(layout.num_reqs, max(layout.extend_lens))
        if size is None:
            return None
        return self._key(
            step.mode,
            size,
            mask=step.mask,
            is_round=step.is_round,
            sampler=step.sampler,
            logprobs=step.logprobs,
            observed=step.observed,
        )

    def _supports(self, mode: ForwardMode) -> bool:
        """Whether steps of this mode may be captured with this backend."""
        needed = NEEDED_SUPPORT.get(mode.facts.extend)
        if needed is None or not mode.facts.graphable:
            return False
        return self._parts.backend.capabilities.graph >= needed

    def _key(
        self,
        phase: ForwardMode,
        size: PaddedSize,
        *,
        mask: MaskKind = MaskKind.CAUSAL,
        is_round: bool = False,
        sampler: SamplerTier = SamplerTier.GREEDY,
        logprobs: bool = False,
        observed: bool = True,
    ) -> GraphKey:
        is_ragged = phase.facts.extend is ExtendShape.RAGGED
        return GraphKey(
            phase=phase,
            padded_reqs=size.reqs,
            extend_len=None if is_ragged else size.max_extend_len,
            ragged_tokens=size.tokens if is_ragged else None,
            mask=mask,
            is_round=is_round,
            backend=self._parts.backend.name,
            sampler=sampler,
            logprobs=logprobs,
            taps=self._parts.taps,
            observed=observed,
        )


def empty_step(key: GraphKey) -> Step:
    """The step of a key before anything is in it."""
    return Step(
        epoch=0,
        mode=key.phase,
        layout=StepLayout(
            rows=(),
            extend_lens=(),
            emits=(),
            parents=() if key.mask is MaskKind.TREE and not key.is_round else None,
            drafts=key.mask if key.is_round else None,
        ),
        prefix_lens_bound=(),
        sampler=key.sampler,
        logprobs=key.logprobs,
        deltas=(),
        observed=key.observed,
    )
