"""Small cases by their names, and cells of classes that a test defines."""

from dataclasses import replace

import torch

from paceline.attention.backends.torch_backend import TorchBackend
from paceline.attention.contract import Part
from paceline.conformance.case import Case
from paceline.conformance.cell import CellResult, Runner
from paceline.conformance.contenders import Contender
from paceline.conformance.harness import run_cell
from paceline.conformance.prepared import prepare_case
from paceline.conformance.rig import Rig
from paceline.conformance.suite import cases

CASES = {f"{case.method}/{case.mode.value}/{case.name}": case for case in cases()}
DECODE = CASES["dense/decode/tiny-page16"]
SINKS = CASES["dense/decode/tiny-page1-sinks"]
FP8 = CASES["dense/decode/tiny-fp8-mha"]
EXTEND = CASES["dense/extend/tiny"]
TREE = CASES["dense/target_verify/tiny-shapes"]  # with frozen rows
FROZEN_KV = CASES["dense/draft_decode/tiny-frozen-kv"]
CPU = torch.device("cpu")
BOTH = (Runner.EAGER, Runner.RECORDED)


def cell(
    backend: type, case: Case = DECODE, runner: Runner = Runner.RECORDED, *, emulated: bool = False
) -> CellResult:
    """The result of a case on a class."""
    who = Contender(name="planted", backend=backend, is_emulated=emulated)
    return run_cell(case, who, runner, CPU)


def rig_of(case: Case, backend: type = TorchBackend, runner: Runner = Runner.RECORDED) -> Rig:
    """A rig that has launched nothing."""
    return Rig(prepare_case(case), backend, runner, CPU)


def free_page(case: Case) -> int:
    """A page of group 0 that no batch uses."""
    free = [set(place.free_pages(0)) for place in prepare_case(case).places]
    return min(set.intersection(*free))


def sum_of(tensor):
    """An operator in another file than the backend that asks for it."""
    return tensor.float().sum()


class Exact(TorchBackend):
    """Attention as it is written down, without windows and caps: masks before every product, reads
    no dead slot into one, and returns its log-sum-exp with either part."""

    name = "exact"
    capabilities = replace(TorchBackend.capabilities, loads_dead_slots=False)

    def make_buffers(self, limits):
        return None

    def plan(self, view, buffers):
        return view

    def forward(self, q, k, v, layer, plan, part):
        spec = layer.spec
        seen, slots = _seen(plan, part, layer), _slots(plan, layer)
        hidden = ~seen[:, :, None, None]
        group = spec.num_heads // spec.num_kv_heads
        keys, values = (
            (cache.flatten(0, 1)[slots].float() * (1.0 if scale is None else scale))
            .masked_fill(hidden, 0.0)
            .repeat_interleave(group, 2)
            for cache, scale in ((layer.k_cache, layer.k_scale), (layer.v_cache, layer.v_scale))
        )
        scores = torch.einsum("thd,tshd->ths", q.float(), keys) * spec.scale
        scores = scores.masked_fill(~seen.unsqueeze(1), -torch.inf)
        lse = torch.logsumexp(scores, 2)
        total = lse
        if layer.sinks is not None and part is Part.ALL:
            total = torch.logaddexp(lse, layer.sinks)
        weights = (scores - total.unsqueeze(2)).exp().nan_to_num(0.0)
        return torch.einsum("ths,tshd->thd", weights, values).to(q.dtype), lse


def _slots(view, layer):
    """[padded_tokens, keys]"""
    page_size = layer.k_cache.shape[1]
    table = view.groups[layer.spec.group].page_table.index_select(0, view.req_ids).long()
    return (table.unsqueeze(2) * page_size + torch.arange(page_size)).flatten(1)


def _seen(view, part, layer):
    """[padded_tokens, keys] bool."""
    prefix = view.prefix_lens.index_select(0, view.req_ids).unsqueeze(1)
    start = view.cu_seqlens_q.index_select(0, view.req_ids).unsqueeze(1)
    row = torch.arange(view.padded_tokens).unsqueeze(1) - start
    column = torch.arange(_slots(view, layer).shape[1]) - prefix
    if part is Part.PREFIX:
        return column < 0
    if view.tree_mask is None:
        return column <= row
    inside = (column >= 0) & (column < view.max_extend_len)
    is_ancestor = view.tree_mask.gather(1, column.clamp(0, view.max_extend_len - 1).long())
    return (column < 0) | (inside & is_ancestor)
