"""How long does attention take at the shapes of speculative decoding, beside the peers?

    PYTHONPATH=src python benchmarks/verify_attention.py

One layer of Llama-3.1-8B (32 query heads over 8 KV heads of 128, bfloat16, page 16) in a step whose
requests bring a chain or a tree of rows: what verifies a round, and the drafter's own passes.  Each
backend runs as the engine runs it (buffers once, one plan, forward per layer), meets the definition
in float64 on NaN-poisoned pages, and is then timed in turns with the others, in CUDA graphs of
layers whose K and V exceed the L2 cache.  Page tables are as wide as a context of 16,384 tokens.
A table for people, then one JSON document as the last line.
"""

import argparse
import json
import sys
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from paceline.attention.paged import cache_of
from paceline.bench.attention_contenders import our_make
from paceline.bench.attention_shape import AttentionShape
from paceline.bench.attention_workload import Workload, make_workload
from paceline.bench.interleaved import Timing, time_interleaved
from paceline.core.errors import PacelineError
from paceline.core.modes import MaskKind
from paceline.core.step import Step
from paceline.kernels.paged_attention import PagedRows, Weighing
from paceline.plan.machine import local_device, versions
from paceline.proof.rig.paged import errors

CONTEXT = 16384  # tokens that a page table has room for
LAYERS = (4, 32)  # least and most that a graph holds
GRAPH_KEYS = 36000  # of all its layers and requests, about: 147 MB
ERROR_LIMIT = 2.0  # of the unit of `worst_error`
CHECKED = 8  # requests


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One step: every request brings as many rows behind as many keys."""

    requests: int
    rows: int
    mask: MaskKind
    keys: int = 1100

    @property
    def label(self) -> str:
        kind = "decode" if self.rows == 1 else self.mask.value
        return f"{self.requests:3d} x {self.rows:2d} {kind:6s} {self.keys:6d} keys"


CHAIN, TREE = MaskKind.CAUSAL, MaskKind.TREE
CASES = tuple(
    Case(requests=requests, rows=rows, mask=mask, keys=keys)
    for requests, rows, mask, keys in (
        (1, 1, CHAIN, 1100), (8, 1, CHAIN, 1100), (16, 1, CHAIN, 1100), (64, 1, CHAIN, 1100),
        (1, 4, CHAIN, 1100), (8, 4, CHAIN, 1100), (64, 4, CHAIN, 1100), (1, 8, CHAIN, 1100),
        (8, 8, CHAIN, 1100), (1, 4, TREE, 1100), (8, 4, TREE, 1100), (1, 8, TREE, 1100),
        (8, 8, TREE, 1100), (64, 8, TREE, 1100), (1, 16, TREE, 1100), (1, 32, TREE, 1100),
        (1, 4, CHAIN, 16000), (8, 8, TREE, 8000),
    )
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RoundWork(Workload):
    """A workload whose step verifies drafts."""

    parents: tuple[int, ...] | None  # [rows] of every request's tree

    @property
    def step(self) -> Step:
        """The step as its scheduler would have decided it."""
        step: Step = Workload.step.fget(self)  # type: ignore[attr-defined]
        trees = None if self.parents is None else (self.parents,) * len(self.kv_lens)
        mask = MaskKind.CAUSAL if trees is None else MaskKind.TREE
        layout = replace(step.layout, parents=trees)
        return replace(step, is_ragged=False, mask=mask, layout=layout)


def make_round(case: Case, *, layers: int, device: torch.device) -> RoundWork:
    """Requests of `case.keys` keys and a few less each."""
    shape = AttentionShape(
        batch_size=case.requests, kv_len=case.keys, extend_len=case.rows, page_size=16
    )
    lens = [case.keys - 13 * request % 97 for request in range(case.requests)]
    work = make_workload(shape, lens, layers=layers, device=device, seed=3)
    group = work.view.groups[0]
    table = group.page_table.new_zeros(case.requests, CONTEXT // shape.page_size)
    table[:, : group.page_table.shape[1]] = group.page_table
    view = replace(work.view, groups=(replace(group, page_table=table),))
    parents = None
    if case.mask is MaskKind.TREE:
        parents = (-1, *((row - 1) // 2 for row in range(1, case.rows)))
        mask = ancestors(parents).repeat(case.requests, 1).to(device)
        view = replace(view, mask=MaskKind.TREE, tree_mask=mask)
    fields = {name: getattr(work, name) for name in ("shape", "kv_lens", "layers", "q", "k", "v")}
    return RoundWork(**fields, view=view, parents=parents)


def ancestors(parents: tuple[int, ...]) -> Tensor:
    """[rows, rows] bool: column j is the row itself or an ancestor."""
    mask = torch.eye(len(parents), dtype=torch.bool)
    for row, parent in enumerate(parents):
        if parent >= 0:
            mask[row] |= mask[parent]
    return mask


def worst_error(work: RoundWork, out: Tensor) -> float:
    """The largest error of layer 0, in the unit of `proof.rig.paged.errors`.

    out: [tokens, heads, head_dim].
    """
    reqs = min(CHECKED, len(work.kv_lens))
    tokens = reqs * work.shape.extend_len
    view, layer = work.view, work.layers[0]
    rows = PagedRows(
        view.groups[0].page_table[:reqs],
        view.prefix_lens[:reqs],
        view.kv_lens[:reqs],
        view.cu_seqlens_q[: reqs + 1],
        view.max_extend_len,
        None if view.tree_mask is None else view.tree_mask[:tokens],
        view.mask,
    )
    weighing = Weighing(layer.spec.scale)
    return float(errors(out[:tokens], work.q[:tokens], cache_of(layer), rows, weighing).max())


def measure(case: Case, names: list[str], device: torch.device) -> dict[str, Any]:
    """Check and time every backend that can run the case; one row of the document."""
    most = GRAPH_KEYS // (case.requests * case.keys)
    work = make_round(case, layers=max(LAYERS[0], min(LAYERS[1], most)), device=device)
    runs, errors, refused = {}, {}, {}
    for name in names:
        called = f"cascade({name})" if name == "fa4" and case.mask is MaskKind.TREE else name
        try:
            run = our_make(called)(work)
            errors[called] = worst_error(work, run(0))
        except (PacelineError, ImportError) as error:
            refused[called] = str(error).splitlines()[0]
            continue
        if errors[called] <= ERROR_LIMIT:
            runs[called] = run
    timings = time_interleaved(runs, layers=len(work.layers), device=device)
    best = min((t.median_s for name, t in timings.items() if name != "triton"), default=None)
    print(row_text(case, timings, errors, best), flush=True)
    return {
        "requests": case.requests,
        "rows": case.rows,
        "mask": case.mask.value,
        "keys": case.keys,
        "layers": len(work.layers),
        "us": {name: 1e6 * timing.median_s for name, timing in timings.items()},
        "spread": {name: timing.spread for name, timing in timings.items()},
        "error": errors,
        "refused": refused,
        "ratio": best / timings["triton"].median_s if best and "triton" in timings else None,
    }


def row_text(
    case: Case, timings: dict[str, Timing], errors: dict[str, float], best: float | None
) -> str:
    """One line of the table."""
    wrong = [f"{name} WRONG {error:.3g}" for name, error in errors.items() if name not in timings]
    times = [f"{name} {1e6 * timing.median_s:.2f}" for name, timing in timings.items()]
    ours = timings["triton"].median_s if "triton" in timings else None
    ratio = f"{best / ours:.2f} of the best peer" if best and ours else ""
    return f"{case.label}: {', '.join(times + wrong)} us  {ratio}"


@torch.inference_mode()
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backends", default="triton,flashinfer,fa4", help="in turns")
    arguments = parser.parse_args()
    names = arguments.backends.split(",")
    facts = local_device()
    rows = [measure(case, names, torch.device(facts.device_type)) for case in CASES]
    wrong = [row for row in rows if max(row["error"].values(), default=0.0) > ERROR_LIMIT]
    document = {
        "benchmark": "verify_attention",
        "device": facts.name,
        "versions": versions(),
        "layer": asdict(AttentionShape().layer),
        "rows": rows,
    }
    print(json.dumps(document))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
