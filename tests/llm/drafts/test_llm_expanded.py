"""Latents of long prompts, expanded to keys and values: every number is transformers'."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from llm_cases import (
    GREEDY,
    Checkpoint,
    assert_idle,
    assert_same_or_tie,
    make_checkpoint,
    make_llm,
    random_prompts,
)

import paceline.layers.attention
from paceline.attention.backends.torch_backend import TorchBackend
from paceline.attention.contract import AttentionBackend, Limits
from paceline.attention.ragged.contract import RaggedLimits, RaggedPart
from paceline.attention.ragged.own import OwnPlan, OwnRagged
from paceline.cache.pool import KVFormat
from paceline.core.step import Step
from paceline.kernels.step_view import StepView
from paceline.llm.boot import Knobs
from paceline.plan.assemble import decide
from paceline.plan.memory.rehearsal import allocated, largest_steps, rehearse
from paceline.runner.streams import DeferredStream


class PlannedRows(AttentionBackend):
    """The `torch` backend behind a host plan, which must be of the rows that it is asked about."""

    name = "planned-rows"
    capabilities = replace(TorchBackend.capabilities, host_plan=True)

    def make_buffers(self, limits: Limits) -> Any:
        return TorchBackend().make_buffers(limits), []

    def host_plan(self, step: Step, buffers: Any) -> None:
        buffers[1].append(step.layout.extend_lens)

    def plan(self, view: StepView, buffers: Any) -> Any:
        inner, planned = buffers
        if not view.positions.is_meta:
            assert planned.pop() == tuple(view.extend_lens.tolist())
            assert view.max_extend_len >= view.extend_lens.max()
            assert not planned
        return TorchBackend().plan(view, inner)

    def forward(self, *operands: Any) -> Any:
        return TorchBackend().forward(*operands)


class WholeRows(OwnRagged):
    """Ours, of keys that have their shared columns beside their own, planned on the host."""

    name = "whole-rows"
    capabilities = replace(OwnRagged.capabilities, shared_columns=False, host_plan=True)

    def plan(self, part: RaggedPart, buffers: RaggedLimits) -> OwnPlan:
        assert part.cu_q.diff().tolist() == list(part.q_lens)
        assert part.cu_k.diff().tolist() == list(part.k_lens)
        assert sum(part.q_lens) <= buffers.max_tokens >= sum(part.k_lens)
        return super().plan(part, buffers)

    def attend(self, q: Any, k: Any, v: Any, *rest: Any, **how: Any) -> Any:
        assert q.shape[2] == k.shape[2]
        return super().attend(q, k, v, *rest, **how)


ODD = {"chunked_prefill_size": 7, "max_num_batched_tokens": 19, "page_size": 1}
KNOBS = Knobs(stream=DeferredStream(), num_pages=(25,), reserve_ahead=0, admission_margin=0)
TIGHT = {"knobs": KNOBS, "page_size": 4, "max_num_batched_tokens": 40, "sanitize": True}
GRAPH_TOKENS = 8
WAYS: dict[str, dict[str, Any]] = {
    "absorbed": {"latent_expand_from": 0},
    "whole prompts": {},
    "odd chunks, beside decode": ODD,
    "planned on the host, beside graphs": ODD
    | {"attention_backend": f"{__name__}:PlannedRows", "enforce_eager": True}
    | {"cuda_graph_max_tokens": GRAPH_TOKENS},
    "preempted, sanitized": TIGHT,
    "odd chunks, by another's kernel": ODD | {"latent_expand_backend": f"{__name__}:WholeRows"},
}
CELLS = [
    *(("deepseek_v3-bias-groups", way) for way in list(WAYS)[:-1]),
    ("deepseek_v2-no-query-latent", "odd chunks, by another's kernel"),
]
PARAMS = replace(GREEDY, max_tokens=9, logprobs=0)
SCORED = replace(PARAMS, prompt_logprobs=0)
LIMIT = 1e-5  # natural log units: float32 sums in another order


@pytest.fixture(scope="module")
def checkpoint(request, tmp_path_factory) -> Checkpoint:
    return make_checkpoint(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """What plans of expanded rows were, by layer and step."""
    counts: Counter[str] = Counter()
    attend = paceline.layers.attention.attend_expanded

    def counted(q, turned, rows, layer, plan, expand):
        if q.is_meta:  # the memory budget's
            return attend(q, turned, rows, layer, plan, expand)
        counts["steps"] += 1
        counts["beside decode"] += plan.first_token > 0
        counts["may be graphs"] += plan.first_token + len(q) <= GRAPH_TOKENS
        counts["several pieces"] += len(plan.pieces) > 1
        for piece in plan.pieces:
            counts["exhausted"] += bool((piece.starts.diff() == 0).any())
        return attend(q, turned, rows, layer, plan, expand)

    monkeypatch.setattr(paceline.layers.attention, "attend_expanded", counted)
    return counts


@pytest.mark.parametrize(("checkpoint", "way"), CELLS, indirect=["checkpoint"])
def test_log_probabilities_are_transformers(checkpoint: Checkpoint, seen, way: str) -> None:
    """Of prompts, hits of their prefixes, and answers; in steps of several requests."""
    prompts = random_prompts((31, 3, 44, 20), seed=5)
    later = [prompts[2][:40] + prompts[0][:9], prompts[0][:17] + prompts[3]]
    preempted = 0
    with make_llm(checkpoint, **{"latent_expand_from": 2} | WAYS[way]) as llm:
        for asked in (prompts, later, prompts[1:2]):
            for prompt, output in zip(asked, llm.generate(asked, PARAMS), strict=True):
                answer = output.outputs[0]
                preempted += output.metrics.preemptions
                ids = list(answer.token_ids)
                logits = checkpoint.logits([*prompt, *ids])[len(prompt) - 1 : -1]
                assert_same_or_tie(ids, logits.argmax(1).tolist(), checkpoint.gap(prompt))
                theirs = logits.log_softmax(1)[range(len(ids)), ids]
                mine = torch.tensor([each.chosen for each in answer.logprobs])
                assert (mine - theirs).abs().max() < LIMIT
        llm.generate(prompts[:1], SCORED)  # in pieces of which a graph could compute each
        assert_idle(llm)
    assert (seen["steps"] > 0) == (way != "absorbed")
    assert (preempted > 0) == (way == "preempted, sanitized")
    if "cuda_graph_max_tokens" in WAYS[way]:
        assert seen["may be graphs"] == 0
    if WAYS[way].keys() >= ODD.keys():
        assert min(seen[what] for what in ("beside decode", "several pieces", "exhausted")) > 0


@pytest.mark.parametrize("checkpoint", CELLS[0][:1], indirect=True)
def test_the_budget_counts_what_an_expanded_step_takes(checkpoint: Checkpoint) -> None:
    """To the byte, on parts without memory as on the engine's own."""
    with make_llm(checkpoint, latent_expand_from=2, max_num_batched_tokens=64) as llm:
        prepared, parts = llm.prepared, llm._live.runner.parts
        pages = tuple(group.num_pages for group in prepared.fit.groups)
        kv = KVFormat(dtype=torch.float32)
        decided = decide(prepared.config, prepared.options, None, num_pages=pages, kv=kv)
        empty = rehearse(decided, TorchBackend(), prepared.device).parts
        (step,) = [each for each in largest_steps(decided.limits) if each.expansion]
        here, there = (allocated(each, step, prepared.device) for each in (parts, empty))
    assert (here.peak, here.total) == (there.peak, there.total)
    plain = allocated(empty, replace(step, expansion=None), prepared.device)
    assert plain.total < there.total
