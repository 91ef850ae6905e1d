"""State backends with one fault each: the documentation's example got wrong."""

from dataclasses import replace

import torch
from example_state_backend import PART, SumBackend

from paceline.attention.backends.mamba2_torch import TorchMamba2
from paceline.attention.contract import GraphSupport
from paceline.core.modes import MaskKind
from paceline.kernels.gated_norm import gated_rows_reference


class ReadsWhereItWrites(SumBackend):
    """Right from the second step of a request on."""

    def plan(self, view, group, buffers, *, is_round):
        table = group.page_table[:, [1, 1, 2]]
        return super().plan(view, replace(group, page_table=table), buffers, is_round=is_round)


class StartsFromSlotZero(SumBackend):
    """A request that starts takes what slot 0 holds for its state."""

    def extend(self, inputs, layer, plan):
        before = layer.parts[PART].index_select(0, plan.group.read_slots.long())
        starts = (plan.group.read_slots == 0).unsqueeze(1)
        extra = (before.masked_fill(~starts, 0.0)).index_select(0, plan.req_ids)
        return super().extend(inputs, layer, plan) + plan.decays * extra


class CommitsByLength(SumBackend):
    """As many rows as were accepted, not those."""

    def commit(self, view, group, layer, buffers, *, path, num_kept):
        first = torch.arange(path.shape[1], device=path.device).expand_as(path)
        super().commit(view, group, layer, buffers, path=first, num_kept=num_kept)


class CommitsEveryRow(SumBackend):
    """Drafts that were not accepted, too."""

    def commit(self, view, group, layer, buffers, *, path, num_kept):
        rows = torch.arange(view.max_extend_len, device=path.device)
        whole = rows.expand(path.shape[0], -1)
        num = torch.full_like(num_kept, view.max_extend_len)
        super().commit(view, group, layer, buffers, path=whole, num_kept=num)


class CommitsNothing(SumBackend):
    def commit(self, view, group, layer, buffers, *, path, num_kept):
        super().commit(view, group, layer, buffers, path=path, num_kept=0 * num_kept)


class WritesInARound(SumBackend):
    """Where it reads, while the rows of a round are drafts."""

    def extend(self, inputs, layer, plan):
        return super().extend(inputs, layer, replace(plan, kept=None))


class TakesATreeForAChain(SumBackend):
    def plan(self, view, group, buffers, *, is_round):
        starts = view.cu_seqlens_q.index_select(0, view.req_ids)
        places = torch.arange(view.padded_tokens, device=starts.device) - starts
        begins = view.prefix_lens.index_select(0, view.req_ids)
        chain = replace(view, tree_mask=None, positions=begins + places)
        return super().plan(chain, group, buffers, is_round=is_round)


class KeepsAtEveryLength(SumBackend):
    """Writes the checkpoint slot whenever there is one."""

    def extend(self, inputs, layer, plan):
        sums = super().extend(inputs, layer, plan)
        kept = plan.group.checkpoint_slots.long()
        layer.parts[PART].index_copy_(0, kept, sums.index_select(0, plan.last))
        return sums


class WritesWhatItReads(SumBackend):
    """Into the slot of the prefix tree."""

    def extend(self, inputs, layer, plan):
        sums = super().extend(inputs, layer, plan)
        read = plan.group.read_slots.long()
        layer.parts[PART].index_copy_(0, read, sums.index_select(0, plan.last))
        return sums


class PlansOnce(SumBackend):
    """With the weights of the first step."""

    def __init__(self):
        super().__init__()
        self.first = None

    def plan(self, view, group, buffers, *, is_round):
        found = super().plan(view, group, buffers, is_round=is_round)
        if self.first is None or self.first.shape != found.weights.shape:
            self.first = found.weights.clone()
        return replace(found, weights=self.first)


class OneLayerForAll(SumBackend):
    """Keeps the rows of every layer in one place."""

    def extend(self, inputs, layer, plan):
        return super().extend(inputs, replace(layer, index=0), plan)

    def commit(self, view, group, layer, buffers, *, path, num_kept):
        first = replace(layer, index=0)
        super().commit(view, group, first, buffers, path=path, num_kept=num_kept)


class LiveRowsAlone(SumBackend):
    def extend(self, inputs, layer, plan):
        return super().extend(inputs, layer, plan)[:-1]


class HasNoTrees(SumBackend):
    """Right, and says so."""

    capabilities = replace(
        SumBackend.capabilities,
        masks=frozenset({MaskKind.CAUSAL}),
        graph=GraphSupport.UNIFORM,
    )


class OfAnotherKind(SumBackend):
    kind = "product"


class NeedsADecay(SumBackend):
    def __init__(self, decay):
        super().__init__(decay)


class GatesBeside(TorchMamba2):
    """Right: the gate behind `extend`, at once."""

    def extend_gated(self, inputs, gate, layer, plan):
        return gated_rows_reference(self.extend(inputs, layer, plan).flatten(1), gate)


class GatesWithoutWeight(GatesBeside):
    def extend_gated(self, inputs, gate, layer, plan):
        return super().extend_gated(inputs, gate._replace(weight=gate.weight**0), layer, plan)


class GatesOfAnotherRow(GatesBeside):
    def extend_gated(self, inputs, gate, layer, plan):
        return super().extend_gated(inputs, gate._replace(z=gate.z.flip(0)), layer, plan)


class SquaresOfSomeTiles(GatesBeside):
    def extend_gated(self, inputs, gate, layer, plan):
        found = super().extend_gated(inputs, gate, layer, plan)
        return found._replace(squares=0.75 * found.squares)


class GatesNothingButExtends(GatesBeside):
    """Says that nothing was done, and wrote the slots."""

    def extend_gated(self, inputs, gate, layer, plan):
        self.extend(inputs, layer, plan)


class GatesLiveRowsAlone(GatesBeside):
    def extend_gated(self, inputs, gate, layer, plan):
        found = super().extend_gated(inputs, gate, layer, plan)
        return found._replace(rows=found.rows[:-1])
