"""Small cases by their names, and cells of classes that a test defines."""

from dataclasses import replace

import torch

from paceline.attention.backends.torch_backend import TorchBackend
from paceline.attention.contract import Part
from paceline.proof.check.cell import CellResult, RunnerKind
from paceline.proof.rig.contenders import Contender
from paceline.proof.rig.harness import run_cell
from paceline.proof.rig.prepared import prepare_case
from paceline.proof.rig.rig import Rig
from paceline.proof.suite.case import Case
from paceline.proof.suite.cases import cases

CASES = {f"{case.method}/{case.mode.value}/{case.name}": case for case in cases()}
DECODE = CASES["dense/decode/tiny-page16"]
SINKS = CASES["dense/decode/tiny-page1-sinks"]
FP8 = CASES["dense/decode/tiny-fp8-mha"]
EXTEND = CASES["dense/extend/tiny"]
TREE = CASES["dense/target_verify/tiny-shapes"]  # with frozen rows
FROZEN_KV = CASES["dense/draft_decode/tiny-frozen-kv"]
CPU = torch.device("cpu")
BOTH = (RunnerKind.EAGER, RunnerKind.RECORDED)


def cell(
    backend: type,
    case: Case = DECODE,
    runner: RunnerKind = RunnerKind.RECORDED,
    *,
    emulated: bool = False,
) -> CellResult:
    """The result of a case on a class."""
    who = Contender(name="planted", backend=backend(), is_emulated=emulated)
    return run_cell(case, who, runner, CPU)


def rig_of(
    case: Case, backend: type = TorchBackend, runner: RunnerKind = RunnerKind.RECORDED
) -> Rig:
    """A rig that has launched nothing."""
    return Rig(prepare_case(case), backend(), runner, CPU)


def free_page(case: Case) -> int:
    """A page of group 0 that no batch uses."""
    places = prepare_case(case).places
    held = {page for place in places for pages in place.pages[0] for page in pages}
    return min(set(range(1, places[0].pool_pages[0])) - held)


def sum_of(tensor):
    """An operator in another file than the backend that asks for it."""
    return tensor.float().sum()


class Exact(TorchBackend):
    """Attention as it is written down: masks before every product, reads no dead slot into one, and
    returns its log-sum-exp with either part.  Each method is a part that can be got wrong."""

    name = "exact"
    capabilities = replace(TorchBackend.capabilities, loads_dead_slots=False)

    def make_buffers(self, limits):
        return None

    def plan(self, view, buffers):
        return view

    def forward(self, q, k, v, layer, plan, part):
        spec = layer.spec
        seen = self.seen(plan, part, layer)  # [tokens, keys]
        hidden, owner = ~seen[:, :, None, None], self.owner(spec)
        slots = _slots(plan, layer)
        keys, values = (
            (cache.flatten(0, 1)[slots].float() * (1.0 if scale is None else scale))
            .masked_fill(hidden, 0.0)
            .index_select(2, owner)
            for cache, scale in ((layer.k_cache, layer.k_scale), (layer.v_cache, layer.v_scale))
        )
        scores = torch.einsum("thd,tshd->ths", q.float(), keys) * self.scale(spec)
        scores = self.capped(scores, spec).masked_fill(~seen.unsqueeze(1), -torch.inf)
        lse = torch.logsumexp(scores, 2)
        sinks = None if layer.sinks is None else self.sinks(layer.sinks, part)
        total = lse if sinks is None else torch.logaddexp(lse, sinks)
        out = torch.einsum("ths,tshd->thd", self.weights(scores, total), values)
        return out.to(q.dtype), self.lse(lse)

    def owner(self, spec):
        """[num_heads] the KV head of each query head."""
        return torch.arange(spec.num_heads) // (spec.num_heads // spec.num_kv_heads)

    def scale(self, spec):
        return spec.scale

    def capped(self, scores, spec):
        return scores if spec.soft_cap is None else spec.soft_cap * (scores / spec.soft_cap).tanh()

    def sinks(self, sinks, part):
        return sinks if part is Part.ALL else None

    def weights(self, scores, total):
        return (scores - total.unsqueeze(2)).exp().nan_to_num(0.0)

    def lse(self, lse):
        return lse

    def seen(self, view, part, layer):
        """[padded_tokens, keys] bool."""
        prefix, start = _begins(view)
        row = torch.arange(view.padded_tokens).unsqueeze(1) - start
        column = torch.arange(_slots(view, layer).shape[1]) - prefix
        if part is Part.PREFIX:
            seen = column < 0
        elif view.tree_mask is None:
            seen = column <= row
        else:
            inside = (column >= 0) & (column < view.max_extend_len)
            last = view.max_extend_len - 1
            seen = (column < 0) | (inside & view.tree_mask.gather(1, column.clamp(0, last).long()))
        window = layer.spec.window
        if window is None:
            return seen
        edge = self.query_positions(view, part).unsqueeze(1) - window
        return seen & (self.key_positions(view, layer) > edge)

    def query_positions(self, view, part):
        """[padded_tokens]"""
        return view.positions

    def key_positions(self, view, layer):
        """[padded_tokens, keys]"""
        index = torch.arange(_slots(view, layer).shape[1])
        prefix, start = _begins(view)
        step = (start + index - prefix).clamp(0, view.padded_tokens - 1)
        return torch.where(index < prefix, index, view.positions[step.long()])


def _begins(view):
    """([padded_tokens, 1] keys before the step, likewise tokens before the request)"""
    prefix = view.prefix_lens.index_select(0, view.req_ids).unsqueeze(1)
    return prefix, view.cu_seqlens_q.index_select(0, view.req_ids).unsqueeze(1)


def _slots(view, layer):
    """[padded_tokens, keys]"""
    page_size = layer.k_cache.shape[1]
    table = view.groups[layer.spec.group].page_table.index_select(0, view.req_ids).long()
    return (table.unsqueeze(2) * page_size + torch.arange(page_size)).flatten(1)
