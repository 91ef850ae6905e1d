"""From how many prompt tokens on is latent attention (MLA) faster with expanded keys and values?

    PYTHONPATH=src python benchmarks/expanded_latents.py

Rank 512, 64 columns that turn, heads of 128 + 64 columns and values of 128, bfloat16, pages of 64
in random order, NaN where nothing is cached; lengths differ from request to request.  A case is
requests x tokens + prefix.  Each way is one layer between its projections: the products of its
heads, rotation, what is written, attention.  `expanded:NAME` is a ragged backend, beside backends
that attend absorbed; each is compared with the definition in float64 at some tokens, and then timed
in turns with the others, in CUDA graphs.  --save adds the former to a table of measurements.
--sweep times the kernel of the step's own rows alone, by tiles.  A table
for people, then one JSON document as the last line.
"""

import argparse
import datetime
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.attention.contract import AttentionSpec, LayerCache, Limits
from paceline.attention.expanded import ExpandedPlan, expanded_plan
from paceline.attention.measurements import Measurement, merged, parse_table, write_table
from paceline.attention.ragged.contract import RaggedConfig, RaggedLimits
from paceline.attention.ragged.own import OWN
from paceline.attention.ragged.registry import AUTO_ORDER, layer_shape, load_ragged
from paceline.attention.registry import load_backend
from paceline.bench.backends import TIMED_VERSIONS
from paceline.bench.interleaved import time_interleaved
from paceline.core.errors import BackendUnsupported, PacelineError
from paceline.core.expansion import expansion_of
from paceline.core.modes import MaskKind
from paceline.core.request.sampling_params import SamplerTier
from paceline.core.step import Step, StepLayout
from paceline.kernels.head_products import head_products
from paceline.kernels.latent_rows import LatentNorm
from paceline.kernels.rope import Rope
from paceline.kernels.step_view import GroupView, StepView
from paceline.layers.attention import StepContext
from paceline.plan.machine import installed, local_device, versions
from paceline.proof.rig.paged import permuted_pages

RANK, ROPE, NOPE, V_DIM, PAGE = 512, 64, 128, 128, 64
SCALE = (NOPE + ROPE) ** -0.5
MATRIX_FLOPS = 790e12  # measured bfloat16 products of an H200
PIECE_ROWS = 8192  # of prefixes, as many as an engine's step has tokens
ERROR_LIMIT = 1.0  # roundings to bfloat16, of the norm
SAMPLED = 48  # tokens that are compared
HEADS = "16,128"
CASES = (
    "8x1024+0,8x1024+4096,8x4096+0,8x4096+4096,1x8192+0,1x8192+8192,"
    "1x128+8192,1x256+8192,1x512+8192,1x1024+8192,1x256+0,1x1024+0"
)
TILES = "128x64x8x3,128x64x8x2,128x128x8x2,128x64x4x3,64x64x4x3,64x128x4x2,128x32x8x4"
BY = "expanded:"  # in front of a ragged backend's name
OURS = f"{BY}{OWN.name}"
Run = Callable[[int], Tensor]


@dataclass(frozen=True, slots=True)
class Case:
    heads: int
    requests: int
    tokens: int  # of a request's step
    prefix: int

    @property
    def extend_lens(self) -> tuple[int, ...]:
        return tuple(self.tokens - 13 * request % 31 for request in range(self.requests))

    @property
    def prefix_lens(self) -> tuple[int, ...]:
        """The second of several has none."""
        return tuple(
            0 if request == 1 else max(0, self.prefix - 37 * request % 101)
            for request in range(self.requests)
        )

    @property
    def pairs(self) -> int:
        """Of a query and a key that it sees."""
        lens = zip(self.prefix_lens, self.extend_lens, strict=True)
        return sum(num * prefix + num * (num + 1) // 2 for prefix, num in lens)

    @property
    def flops(self) -> dict[str, int]:
        """Of products, by way."""
        new, kept = sum(self.extend_lens), sum(self.prefix_lens)
        of_head = RANK * (NOPE + V_DIM)
        return {
            "absorbed": 2 * self.heads * (self.pairs * (2 * RANK + ROPE) + new * of_head),
            "expanded": 2
            * self.heads
            * (self.pairs * (NOPE + ROPE + V_DIM) + (new + kept) * of_head),
        }

    def __str__(self) -> str:
        return f"{self.heads} heads {self.requests} x {self.tokens} + {self.prefix}"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Work:
    """One layer of one step, its projections behind it."""

    case: Case
    step: Step
    view: StepView
    layer: LayerCache
    q: Tensor  # [tokens, heads, NOPE + ROPE]
    row: Tensor  # [tokens, RANK + ROPE]
    kv_b: Tensor  # [heads, NOPE + V_DIM, RANK]
    norm: LatentNorm
    rope: Rope

    @property
    def keys(self) -> Tensor:
        """[heads, NOPE, RANK]"""
        return self.kv_b[:, :NOPE]

    @property
    def values(self) -> Tensor:
        """[heads, RANK, V_DIM]"""
        return self.kv_b[:, NOPE:].mT

    def expand(self, latents: Tensor) -> tuple[Tensor, Tensor]:
        """As a layer's weights do."""
        made = torch.nn.functional.linear(latents, self.kv_b.flatten(0, 1))
        keys, values = made.unflatten(1, (-1, NOPE + V_DIM)).split((NOPE, V_DIM), 2)
        return keys, values


def make_work(case: Case, device: torch.device) -> Work:
    torch.manual_seed(0)
    extends, prefixes = case.extend_lens, case.prefix_lens
    lens = [prefix + num for prefix, num in zip(prefixes, extends, strict=True)]
    table, num_pages = permuted_pages(lens, PAGE, torch.Generator().manual_seed(0), spare=0)
    slots, positions = [], []
    cache = torch.full((num_pages, PAGE, 1, RANK + ROPE), float("nan"), dtype=torch.bfloat16)
    for row, (prefix, length) in enumerate(zip(prefixes, lens, strict=True)):
        at = torch.arange(length)
        of_request = table[row, at // PAGE].long() * PAGE + at % PAGE
        cache.view(-1, RANK + ROPE)[of_request[:prefix]] = torch.randn(
            prefix, RANK + ROPE
        ).bfloat16()
        slots.append(of_request[prefix:])
        positions.append(at[prefix:])

    def noise(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(*shape, device=device) * scale).bfloat16()

    def ints(values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    tokens, reqs = sum(extends), case.requests
    cache = cache.to(device)
    prefix_lens, kv_lens, at = ints(prefixes), ints(lens), torch.cat(positions).to(device)
    group = GroupView(
        page_table=torch.nn.functional.pad(table, (0, 1)).to(device),
        out_cache_loc=torch.cat(slots).to(device),
        prefix_lens=prefix_lens,
        kv_lens=kv_lens,
    )
    spec = AttentionSpec(
        layer_id=0,
        group=0,
        num_heads=case.heads,
        num_kv_heads=1,
        head_dim=RANK + ROPE,
        v_head_dim=RANK,
        scale=SCALE,
        window=None,
        soft_cap=None,
        v_in_k=True,
    )
    angles = torch.rand(max(lens), ROPE // 2, device=device) * 6.0
    return Work(
        case=case,
        step=Step(
            epoch=1,
            layout=StepLayout(
                rows=tuple(range(1, reqs + 1)), extend_lens=extends, emits=(True,) * reqs
            ),
            is_ragged=True,
            prefix_lens_bound=prefixes,
            sampler=SamplerTier.GREEDY,
            logprobs=False,
            deltas=(),
        ),
        view=StepView(
            row_ids=torch.arange(1, reqs + 1, device=device),
            prefix_lens=prefix_lens,
            extend_lens=ints(extends),
            kv_lens=kv_lens,
            cu_seqlens_q=ints([0, *accumulate(extends)]),
            req_ids=torch.repeat_interleave(torch.arange(reqs), torch.tensor(extends)).to(device),
            positions=at,
            rope_positions=at,
            input_ids=at,
            logits_loc=ints(extends).cumsum(0) - 1,
            groups=(group,),
            mask=MaskKind.CAUSAL,
            tree_mask=None,
            max_extend_len=max(extends),
            kv_len_bound=max(lens),
        ),
        layer=LayerCache(
            spec=spec,
            k_cache=cache,
            v_cache=cache[..., :RANK],
            k_scale=None,
            v_scale=None,
            sinks=None,
        ),
        q=noise(tokens, case.heads, NOPE + ROPE),
        row=noise(tokens, RANK + ROPE),
        kv_b=noise(case.heads, NOPE + V_DIM, RANK, scale=RANK**-0.5),
        norm=LatentNorm(torch.ones(RANK, dtype=torch.bfloat16, device=device), 1e-6),
        rope=Rope(torch.cat((angles.cos(), angles.sin()), 1), at),
    )


def context(
    work: Work, backend: Any, plan: Any, expanded: ExpandedPlan | None = None
) -> StepContext:
    return StepContext(
        view=work.view, backend=backend, plan=plan, layers=(work.layer,), expanded=expanded
    )


def absorbed(work: Work, name: str) -> Run:
    """A backend of latents over the cache, as a layer calls it."""
    backend, view, case = load_backend(name), work.view, work.case
    buffers = backend.make_buffers(
        Limits(
            device=work.q.device,
            dtype=torch.bfloat16,
            kv_dtype=torch.bfloat16,
            layers=(work.layer.spec,),
            max_reqs=case.requests,
            max_tokens=view.padded_tokens,
            max_pages=(view.groups[0].page_table.shape[1],),
            windows=(None,),
            page_size=PAGE,
        )
    )
    if backend.capabilities.host_plan:
        backend.host_plan(work.step, buffers)
    ctx = context(work, backend, backend.plan(view, buffers))
    nope, turning = work.q.split((NOPE, ROPE), 2)

    def absorb(into: Tensor) -> None:
        head_products(nope, work.keys, into)

    def run(_: int) -> Tensor:
        attended = ctx.attend_latents(
            0,
            work.q.new_empty(*work.q.shape[:2], RANK + ROPE),
            turning,
            work.row,
            norm=work.norm,
            rope=work.rope,
            pairs=True,
            absorb=absorb,
        )
        values = work.q.new_empty(*work.q.shape[:2], V_DIM)
        head_products(attended, work.values, values)
        return values

    return run


def expanded(work: Work, name: str) -> Run:
    """Keys and values of every head, of the step and of its prefixes in pieces, by the ragged
    backend of a name."""
    expansion = expansion_of(work.step, least=2, most_rows=PIECE_ROWS)
    assert expansion is not None, "steps of prompts are expanded"
    backend, case = load_ragged(name), work.case
    reasons = backend.unsupported_reasons(asked_of(case.heads))
    if reasons:
        raise BackendUnsupported(name, reasons)
    buffers = backend.make_buffers(
        RaggedLimits(
            device=work.q.device,
            dtype=torch.bfloat16,
            max_reqs=case.requests,
            max_tokens=max(work.view.padded_tokens, PIECE_ROWS),
            max_pieces=len(expansion.pieces),
            num_heads=case.heads,
            head_dim=NOPE + ROPE,
            v_head_dim=V_DIM,
            scale=SCALE,
        )
    )
    ctx = context(work, None, None, expanded_plan(work.view, expansion, backend, buffers))
    nope, turning = work.q.split((NOPE, ROPE), 2)

    def run(_: int) -> Tensor:
        return ctx.attend_expanded(
            0,
            nope,
            turning,
            work.row,
            norm=work.norm,
            rope=work.rope,
            pairs=True,
            expand=work.expand,
        )

    return run


def is_expanded(name: str) -> bool:
    return name.startswith(BY)


def error_of(work: Work, out: Tensor) -> float:
    """Roundings to bfloat16 that `out` is from the definition, of the norm over some tokens.

    The definition in float64, from what the cache holds by now: scores over latents, values of what
    is attended.
    """
    view, group = work.view, work.view.groups[0]
    some = torch.linspace(0, view.padded_tokens - 1, SAMPLED, device=out.device).long().unique()
    cache = work.layer.k_cache.view(-1, RANK + ROPE)
    keys, values = work.keys.double(), work.values.double()
    wanted = []
    for token in some.tolist():
        at = torch.arange(int(view.positions[token]) + 1, device=out.device)
        pages = group.page_table[view.req_ids[token], at // PAGE].long()
        rows = cache[pages * PAGE + at % PAGE].double()
        nope, turning = work.q[token].double().split((NOPE, ROPE), 1)
        cos, sin = work.rope.cos_sin[view.positions[token]].double().chunk(2)
        first, second = turning[:, 0::2], turning[:, 1::2]
        turned = torch.cat((first * cos - second * sin, second * cos + first * sin), 1)
        queries = torch.cat((torch.einsum("hn,hnr->hr", nope, keys), turned), 1)
        weights = (queries @ rows.T * SCALE).softmax(1)
        wanted.append(torch.einsum("hr,hrv->hv", weights @ rows[:, :RANK], values))
    exact = torch.stack(wanted)
    error = (out[some].double() - exact).norm() / exact.norm() / torch.finfo(torch.bfloat16).eps
    return float(error.nan_to_num(float("inf")))


def measure(case: Case, names: Sequence[str], device: torch.device) -> dict[str, Any]:
    """One row: microseconds, errors and shares of the machine of each contender."""
    work = make_work(case, device)
    runs: dict[str, Run] = {}
    errors: dict[str, float] = {}
    refused: dict[str, str] = {}
    for name in names:
        try:
            run = expanded(work, name[len(BY) :]) if is_expanded(name) else absorbed(work, name)
            errors[name] = error_of(work, run(0))
        except (ImportError, RuntimeError, ValueError, PacelineError) as error:
            refused[name] = f"{type(error).__name__}: {error}".splitlines()[0][:300]
            continue
        if errors[name] <= ERROR_LIMIT:
            runs[name] = run
    timed = time_interleaved(runs, layers=1, device=device)
    us = {name: 1e6 * timing.median_s for name, timing in timed.items()}
    ways = {name: "expanded" if is_expanded(name) else "absorbed" for name in us}
    flops = {name: case.flops[way] for name, way in ways.items()}
    limits = {name: flops[name] / us[name] * 1e6 / MATRIX_FLOPS for name in us}
    gains = {name: us[name] / us[OURS] for name in us if name != OURS and OURS in us}
    shown = [f"{name} {us[name]:.0f} us ({limits[name]:.2f} mat)" for name in us]
    gained = ", ".join(f"{gain:.2f} x {name}" for name, gain in gains.items())
    print(f"{case!s:28}{', '.join(shown)}; {gained} {errors} {refused}", flush=True)
    return {
        "heads": case.heads,
        "requests": case.requests,
        "tokens": case.tokens,
        "prefix": case.prefix,
        "us": us,
        "spread": {name: timing.spread for name, timing in timed.items()},
        "of_matrix_limit": limits,
        "fewer_flops": case.flops["absorbed"] / case.flops["expanded"],
        "faster_than": gains,
        "error": errors,
        "refused": refused,
    }


def sweep(case: Case, tiles: str, device: torch.device) -> dict[str, Any]:
    """Microseconds of the kernel over the step's own rows, by tiles: rows x keys x warps x stages;
    each agrees with the first."""
    from triton.runtime.errors import TritonError

    from paceline.kernels._triton.ragged_attention import launch_ragged_attention
    from paceline.kernels._triton.runtime import TileConfig

    work = make_work(case, device)
    nope, turning = work.q.split((NOPE, ROPE), 2)
    turned, shared = turning.contiguous(), work.row[:, RANK:]
    keys, values = work.expand(work.row[:, :RANK])
    cu = work.view.cu_seqlens_q
    out = work.q.new_empty(*work.q.shape[:2], V_DIM)
    lse = torch.empty(work.q.shape[:2], device=device)

    def by(config: TileConfig) -> Run:
        def run(_: int) -> Tensor:
            operands = (nope, keys, values, turned, shared, cu, cu, None, None)
            launch_ragged_attention(*operands, SCALE, None, None, 1, out, lse, tiles=config)
            return out

        return run

    runs: dict[str, Run] = {}
    refused, first = {}, None
    for name in tiles.split(","):
        rows, num_keys, warps, stages = map(int, name.split("x"))
        run = by(
            TileConfig(block_rows=rows, block_keys=num_keys, num_warps=warps, num_stages=stages)
        )
        try:
            found = run(0).clone()
        except (RuntimeError, TritonError) as error:
            refused[name] = f"{type(error).__name__}: {error}".splitlines()[0][:200]
            continue
        first = found if first is None else first
        torch.testing.assert_close(found, first, rtol=0.02, atol=0.02)
        runs[name] = run
    timed = time_interleaved(runs, layers=1, device=device)
    flops = 2 * case.heads * case.pairs * (NOPE + ROPE + V_DIM)
    us = {name: 1e6 * timing.median_s for name, timing in timed.items()}
    limits = {name: flops / each * 1e6 / MATRIX_FLOPS for name, each in us.items()}
    shown = ", ".join(f"{name} {us[name]:.0f} us ({limits[name]:.2f} mat)" for name in us)
    print(f"{case!s:28}{shown} {refused}", flush=True)
    return {"case": str(case), "us": us, "of_matrix_limit": limits, "refused": refused}


def cases_of(heads: str, cases: str) -> list[Case]:
    found = []
    for num in map(int, heads.split(",")):
        for word in cases.split(","):
            step, prefix = word.split("+")
            requests, tokens = map(int, step.split("x"))
            found.append(Case(num, requests, tokens, int(prefix)))
    return found


def asked_of(heads: int) -> RaggedConfig:
    """What layers of so many heads ask of a ragged backend on this machine."""
    facts = local_device()
    return RaggedConfig(
        device_type=facts.device_type,
        cuda_arch=facts.cuda_arch,
        dtype=torch.bfloat16,
        num_heads=heads,
        head_dim=NOPE + ROPE,
        v_head_dim=V_DIM,
    )


def save(path: Path, rows: Sequence[dict[str, Any]], gpu: str) -> None:
    """Add what ragged backends took, as `choose_ragged` reads it."""
    known = parse_table(path.read_text(), source=str(path)) if path.exists() else ()
    found = [
        Measurement(
            gpu=gpu,
            phase="expanded",
            batch_size=row["requests"],
            kv_len=row["tokens"] + row["prefix"],
            extend_len=row["tokens"],
            **asdict(layer_shape(asked_of(row["heads"]))),
            backend=name[len(BY) :],
            us=round(us, 3),
            error=round(row["error"][name], 4),
            date=datetime.date.today().isoformat(),
            versions=installed(TIMED_VERSIONS),
        )
        for row in rows
        for name, us in row["us"].items()
        if is_expanded(name)
    ]
    write_table(path, merged(known, found))


@torch.inference_mode()
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--contenders",
        default=",".join([*(f"{BY}{name}" for name in AUTO_ORDER), "triton", "flashinfer_mla"]),
        help=f"{BY}NAME of ragged backends, and backends that attend absorbed",
    )
    parser.add_argument("--heads", default=HEADS)
    parser.add_argument("--cases", default=CASES, help="requests x tokens + prefix")
    parser.add_argument("--save", type=Path, help="the table of the package, or a new one")
    parser.add_argument("--sweep", action="store_true", help="tiles of the kernel, not layers")
    parser.add_argument("--tiles", default=TILES, help="rows x keys x warps x stages")
    asked = parser.parse_args()
    facts = local_device()
    device = torch.device(facts.device_type)
    cases, names = cases_of(asked.heads, asked.cases), asked.contenders.split(",")
    if asked.sweep:
        rows = [sweep(case, asked.tiles, device) for case in cases]
    else:
        rows = [measure(case, names, device) for case in cases]
    document = {
        "benchmark": "expanded_latents",
        "device": facts.name,
        "versions": versions(),
        "rank": RANK,
        "rope": ROPE,
        "head_dims": [NOPE, V_DIM],
        "page_size": PAGE,
        "piece_rows": PIECE_ROWS,
        "rows": rows,
    }
    if asked.save is not None:
        save(asked.save, rows, facts.name)
    print(json.dumps(document))
    errors = [error for row in rows for error in row.get("error", {}).values()]
    return 1 if max(errors, default=0.0) > ERROR_LIMIT else 0


if __name__ == "__main__":
    sys.exit(main())
