"""How long do layers of linear attention take in our kernels, beside torch, fla and the machine?

    PYTHONPATH=src python benchmarks/linear_attention.py

A gated delta net of Qwen 3 Next's shape and Mamba 2 of 2.7B, bfloat16, states in shuffled slots.
Ours first meets torch's backend on the same step, then all are timed in turns, in CUDA graphs of
layers whose states exceed the L2 cache; both make rates of what a layer projects.  `fla` is the
recurrence alone, of gated delta nets, without convolution, slots and rates; it is left out where it
cannot be imported.  A table for people, then one JSON document as the last line.
"""

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paceline.attention.linear.inputs import GdnInputs, Mamba2Inputs, made_rates
from paceline.attention.linear.shape import CONV, GDN, MAMBA2, STATE, LinearShape
from paceline.attention.mixers import load_state_backend
from paceline.attention.states import StateBackend, StateLayer, StateLimits
from paceline.bench.interleaved import time_interleaved
from paceline.core.modes import MaskKind
from paceline.kernels.decay_rates import ENDLESS, RawRates
from paceline.kernels.step_view import GroupView, StepView
from paceline.plan.machine import local_device, versions

COPY_BYTES_S = 4.23e12  # measured copy bandwidth of an H200
COLD_BYTES = 150e6  # of all layers together
MOST_LAYERS = 24
ERROR_LIMIT = 2e-2  # of the largest number of the answer
ROUND, LONGEST = 8, 4  # rows of a round; of them accepted
SHAPES = {
    GDN: LinearShape(key_heads=16, value_heads=32, key_dim=128, value_dim=128, conv_width=4),
    MAMBA2: LinearShape(key_heads=1, value_heads=80, key_dim=128, value_dim=64, conv_width=4),
}
# what, requests, rows of each
CASES = (
    *(("decode", reqs, 1) for reqs in (1, 8, 64)),
    ("commit", 64, ROUND),
    ("prefill", 8, 8192),
)
Run = Callable[[int], Any]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Work:
    """One step over several layers."""

    kind: str
    what: str
    view: StepView
    layers: list[StateLayer]
    inputs: Any
    limits: StateLimits

    @property
    def group(self) -> GroupView:
        return self.view.groups[0]


def make_work(kind: str, what: str, reqs: int, rows: int, device: torch.device) -> Work:
    """Every request reads and writes a slot of its own, in no order."""
    shape, tokens = SHAPES[kind], reqs * rows
    torch.manual_seed(0)
    state = (shape.value_heads, shape.key_dim, shape.value_dim)
    conv = (shape.channels, shape.conv_width - 1)
    slot_bytes = 4 * shape.value_heads * shape.key_dim * shape.value_dim
    num = min(MOST_LAYERS, max(2, int(COLD_BYTES / (slot_bytes * reqs)) + 1))
    num = 1 if what == "prefill" else num
    layers = [
        StateLayer(
            layer_id=index,
            index=index,
            parts={
                STATE: torch.randn(reqs + 1, *state, device=device) * 0.1,
                CONV: torch.randn(reqs + 1, *conv, device=device).bfloat16(),
            },
        )
        for index in range(num)
    ]
    slots = (torch.randperm(reqs, device=device) + 1).int()
    table = torch.stack((slots, slots, torch.zeros_like(slots)), dim=1)
    lens = torch.full((reqs,), rows, dtype=torch.int32, device=device)
    prefix = torch.full_like(lens, 64)
    none = torch.empty(0, dtype=torch.int64, device=device)
    req_ids = torch.arange(reqs, device=device).repeat_interleave(rows)
    positions = torch.arange(rows, device=device).repeat(reqs) + 64
    starts = torch.arange(reqs + 1, dtype=torch.int32, device=device) * rows
    group = GroupView(
        page_table=table, out_cache_loc=none, prefix_lens=prefix, kv_lens=prefix + lens
    )
    view = StepView(
        row_ids=torch.arange(reqs, device=device),
        prefix_lens=prefix,
        extend_lens=lens,
        kv_lens=prefix + lens,
        cu_seqlens_q=starts,
        req_ids=req_ids,
        positions=positions,
        rope_positions=positions,
        input_ids=positions,
        logits_loc=starts[1:].long() - 1,
        groups=(group,),
        mask=MaskKind.CAUSAL,
        tree_mask=None,
        max_extend_len=rows,
        kv_len_bound=64 + rows,
    )
    limits = StateLimits(
        device=device,
        dtype=torch.bfloat16,
        num_layers=num,
        parts={STATE: state, CONV: conv},
        max_reqs=reqs,
        max_tokens=tokens,
        max_round_tokens=tokens if what == "commit" else 0,
    )
    return Work(
        kind=kind,
        what=what,
        view=view,
        layers=layers,
        inputs=_inputs(kind, tokens, device),
        limits=limits,
    )


def _inputs(kind: str, tokens: int, device: torch.device) -> Any:
    shape = SHAPES[kind]
    rows = torch.randn(tokens, shape.channels, device=device).bfloat16()
    weight = torch.randn(shape.channels, shape.conv_width, device=device).bfloat16()
    parts, numbers = (shape.key_heads, 2 * shape.per_key) if kind == GDN else (1, shape.value_heads)
    rates = RawRates(
        torch.randn(tokens, parts, numbers, device=device).bfloat16(),
        torch.randn(shape.value_heads, device=device),
        torch.zeros(shape.value_heads, device=device),
        ENDLESS,
        has_beta=kind == GDN,
    )
    if kind == GDN:
        return GdnInputs(rows.view(tokens, shape.key_heads, -1), weight, rates)
    skip = torch.randn(shape.value_heads, device=device)
    return Mamba2Inputs(rows, weight, None, rates, skip)


def backend_run(work: Work, name: str) -> tuple[Run, Callable[[], list[Tensor]]]:
    """(what is timed, what the first layer answers and leaves in its slots on the first call)."""
    backend: StateBackend = load_state_backend(name, kind=work.kind)
    buffers = backend.make_buffers(work.limits)
    is_round = work.what == "commit"
    plan = backend.plan(work.view, work.group, buffers, is_round=is_round)
    reqs = work.view.padded_reqs
    path = torch.arange(LONGEST, device=work.view.req_ids.device).repeat(reqs, 1)
    num_kept = torch.full((reqs,), LONGEST, dtype=torch.int32, device=path.device)

    def extend(layer: int) -> Tensor:
        return backend.extend(work.inputs, work.layers[layer], plan)

    def commit(layer: int) -> None:
        backend.commit(
            work.view, work.group, work.layers[layer], buffers, path=path, num_kept=num_kept
        )

    def answers() -> list[Tensor]:
        held = {name: part.clone() for name, part in work.layers[0].parts.items()}
        found = [extend(0)]
        if is_round:
            for layer in range(1, len(work.layers)):
                extend(layer)
            commit(0)
        found += [part.clone() for part in work.layers[0].parts.values()]
        for part, before in held.items():
            work.layers[0].parts[part].copy_(before)
        return found

    return (commit if is_round else extend), answers


def fla_run(work: Work) -> Run:
    """The recurrence of fla over rows that are convolved already.  Raises ImportError."""
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule

    if work.kind != GDN or work.what == "commit":
        raise ImportError("nothing of fla does this")
    shape, reqs = SHAPES[GDN], work.view.padded_reqs
    tokens, device = work.view.padded_tokens, work.view.req_ids.device
    rows = (reqs, tokens // reqs)
    key, value = (shape.key_heads, shape.key_dim), (shape.value_heads, shape.value_dim)
    q, k = (torch.randn(*rows, *key, device=device).bfloat16() for _ in range(2))
    v = torch.randn(*rows, *value, device=device).bfloat16()
    g, beta = (each.view(*rows, -1) for each in made_rates(work.inputs.rates))
    call = fused_recurrent_gated_delta_rule if rows[1] == 1 else chunk_gated_delta_rule

    def run(layer: int) -> Any:
        state = work.layers[layer].parts[STATE][1:]
        return call(
            q, k, v, g=g, beta=beta, initial_state=state, output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        )  # fmt: skip

    return run


def measure(kind: str, case: tuple[str, int, int], device: torch.device) -> dict[str, Any]:
    """One row: microseconds, errors of ours against torch's, shares of the memory limit."""
    what, reqs, rows = case
    work, shape = make_work(kind, *case, device), SHAPES[kind]
    torch_run, wanted = backend_run(work, "torch")
    ours, found = backend_run(work, "triton")
    errors = [
        float((a.float() - b.float()).abs().max() / b.float().abs().max())
        for a, b in zip(found(), wanted(), strict=True)
    ]
    refused: dict[str, str] = {}
    runs: dict[str, Run] = {"torch": torch_run}
    if max(errors) <= ERROR_LIMIT:
        runs["triton"] = ours
    try:
        runs["fla"] = fla_run(work)
    except ImportError as error:
        refused["fla"] = str(error)
    timed = time_interleaved(runs, layers=len(work.layers), device=device)
    moved = 2 * reqs * 4 * shape.value_heads * shape.key_dim * shape.value_dim
    per_row = 2 * (shape.channels + shape.value_size)
    moved += reqs * rows * per_row if what != "commit" else 0
    least_s = moved / COPY_BYTES_S
    row = {
        "kind": kind,
        "what": what,
        "requests": reqs,
        "rows": rows,
        "us": {name: 1e6 * timing.median_s for name, timing in timed.items()},
        "spread": {name: timing.spread for name, timing in timed.items()},
        "of_memory_limit": {name: least_s / timing.median_s for name, timing in timed.items()},
        "error": max(errors),
        "refused": refused,
    }
    limits = row["of_memory_limit"]
    shown = [f"{name} {us:.1f} us ({limits[name]:.2f} mem)" for name, us in row["us"].items()]
    print(f"{kind:7} {what:8}{reqs:3d} x {rows:5d}: {', '.join(shown)}  error {max(errors):.1e}")
    return row


@torch.inference_mode()
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kinds", default=f"{GDN},{MAMBA2}")
    parser.add_argument("--what", default="decode,commit,prefill")
    given = parser.parse_args()
    facts = local_device()
    asked = given.what.split(",")
    rows = [
        measure(kind, case, torch.device(facts.device_type))
        for kind in given.kinds.split(",")
        for case in CASES
        if case[0] in asked
    ]
    document = {
        "benchmark": "linear_attention",
        "device": facts.name,
        "versions": versions(),
        "rows": rows,
    }
    print(json.dumps(document))
    return 1 if any(row["error"] > ERROR_LIMIT for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
