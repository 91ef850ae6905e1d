"""Attention alone: our backend and a peer library, checked first and then timed side by side.

    python -m paceline bench attention --batch-size 64 --kv-len 4096 --peer flashinfer

Every contender first meets the definition (kernels/paged_attention/reference.py) in float64 on a
ragged batch over permuted pages in poisoned memory.  Then all are timed in one process, in turns,
over enough layers that their K and V exceed the L2 cache many times; on CUDA as graphs.  Bytes are
those of K and V, which is all that decode must move.  With --backends several of ours take turns
instead, over a suite of shapes (`bench_backends`).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from paceline.attention.registry import choose
from paceline.bench import flashinfer_peer
from paceline.bench.attention_contenders import (
    Make,
    attention_config,
    num_layers,
    our_make,
    require_memory,
    wants_finite,
    worst_errors,
)
from paceline.bench.attention_shape import AttentionShape, attention_shape
from paceline.bench.attention_workload import make_workload
from paceline.bench.backends import BackendsReport, bench_backends, plan_of
from paceline.bench.interleaved import Timing, time_interleaved
from paceline.bench.page import Bars, bars
from paceline.bench.subject import document_fields
from paceline.core.errors import ConfigError
from paceline.core.gpus import DeviceFacts
from paceline.plan.machine import local_device, versions


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerLibrary:
    """The library beside ours."""

    name: str | None  # None: nothing to compare with
    why: str
    makes: Mapping[str, Make]


@dataclass(frozen=True, slots=True, kw_only=True)
class ContenderResult:
    name: str
    us: float  # of one layer, the median
    spread: float  # (slowest - fastest) / median
    gb_s: float  # of K and V
    tflop_s: float
    share: float | None  # of what the device could do at most; None: not known
    error: float  # in the unit of Workload.worst_error


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionReport:
    """What was found."""

    facts: DeviceFacts
    shape: AttentionShape
    layers: int
    backend: str  # ours
    peer: PeerLibrary
    results: tuple[ContenderResult, ...]
    ratio: float | None  # the peer's time over ours
    is_cut: bool = False  # it is all or nothing

    def to_json(self) -> dict[str, object]:
        """The document."""
        facts = self.facts
        return {
            "benchmark": "attention",
            "device": {
                "name": facts.name,
                "type": facts.device_type,
                "total_bytes": facts.total_bytes,
                "bandwidth_bytes_s": facts.bandwidth_bytes_s,
                "matmul_flops": facts.matmul_flops,
            },
            "versions": {**versions(), "flashinfer": flashinfer_peer.version()},
            **document_fields(self, without=("facts", "peer", "is_cut")),
            "peer": {"name": self.peer.name, "why": self.peer.why},
        }

    def table(self) -> str:
        """For people."""
        shape, peer = self.shape, self.peer
        phase = "decode" if shape.extend_len == 1 else f"extend of {shape.extend_len}"
        rows = [
            f"{phase}: {shape.batch_size} x {shape.kv_len} keys, {shape.num_heads}/"
            f"{shape.num_kv_heads} heads of {shape.head_dim}, page {shape.page_size}, "
            f"{shape.dtype}, cache {shape.kv_dtype}, {self.layers} layers"
            + ("" if shape.lookback is None else f", {shape.lookback}"),
            f"on {self.facts.name}; peer {peer.name or 'none'} ({peer.why})",
            f"{'':<26}{'us':>10}{'spread':>9}{'GB/s':>9}{'TFLOP/s':>9}{'of limit':>10}{'error':>8}",
        ]
        for each in self.results:
            share = "-" if each.share is None else f"{each.share:.1%}"
            rows.append(
                f"{each.name:<26}{each.us:>10.1f}{each.spread:>9.1%}{each.gb_s:>9.1f}"
                f"{each.tflop_s:>9.2f}{share:>10}{each.error:>8.2f}"
            )
        if self.ratio is not None:
            rows.append(f"{self.backend} runs at {self.ratio:.3f} of {peer.name}")
        return "\n".join(rows)

    def drawings(self) -> list[Bars]:
        """Of each contender."""
        rows = [(each.name, each) for each in self.results]
        return [
            bars("One layer's attention [µs]", rows, "us"),
            bars("Keys and values read [GB/s]", rows, "gb_s"),
        ]


def bench_attention(
    shape: AttentionShape,
    *,
    backend: str = "auto",
    peer: str = "auto",
    device: DeviceFacts | None = None,
) -> AttentionReport:
    """Check and time.

    Raises ConfigError for what cannot run here, IntegrityError for a wrong answer of any contender.
    """
    facts = device or local_device()
    here = torch.device(facts.device_type)
    wanted = attention_config(shape, device_type=facts.device_type, cuda_arch=facts.cuda_arch)
    ours = choose(wanted, backend, phase=shape.phase, gpu=facts.name).name
    beside = choose_peer(peer, shape, facts.device_type)
    makes = {ours: our_make(ours), **beside.makes}
    layers = num_layers(shape, facts)
    require_memory(shape, layers, facts)
    errors = worst_errors(makes, shape, here, finite=wants_finite(ours))
    work = make_workload(
        shape, [shape.kv_len] * shape.batch_size, layers=layers, device=here, seed=1
    )
    timings = time_interleaved(
        {name: make(work) for name, make in makes.items()}, layers=layers, device=here
    )
    limit_s = shape.limit_s(facts.bandwidth_bytes_s, facts.matmul_flops)
    rows = [_result(name, timings[name], errors[name], shape, limit_s) for name in makes]
    rivals = [timings[name].median_s for name in beside.makes]
    return AttentionReport(
        facts=facts,
        shape=shape,
        layers=layers,
        backend=ours,
        peer=beside,
        results=tuple(rows),
        ratio=min(rivals) / timings[ours].median_s if rivals else None,
    )


def choose_peer(peer: str, shape: AttentionShape, device_type: str) -> PeerLibrary:
    """The peer that was asked for.  Raises ConfigError when it cannot run and was named."""
    if peer == "none":
        return PeerLibrary(name=None, why="not asked for", makes={})
    absent = flashinfer_peer.absence(shape, device_type)
    if absent is None:
        makes = flashinfer_peer.variants(shape)
        return PeerLibrary(
            name="flashinfer", why="the better of its kernels is the peer", makes=makes
        )
    if peer == "auto":
        return PeerLibrary(name=None, why=f"no flashinfer: {absent}", makes={})
    raise ConfigError.about(
        "peer",
        expected="a library that runs here",
        got=f"{peer} ({absent})",
        remedy="use --peer none, or a machine and a shape that FlashInfer serves",
    )


def bench_values(values: Mapping[str, Any]) -> AttentionReport | BackendsReport:
    """Run the benchmark of the values of FLAGS."""
    asked = None if values["device"] == "auto" else values["device"]
    plan = plan_of(values)
    if plan is not None:
        return bench_backends(plan, local_device(asked))
    return bench_attention(
        attention_shape(values),
        backend=values["backend"],
        peer=values["peer"],
        device=local_device(asked),
    )


def _result(
    name: str, timing: Timing, error: float, shape: AttentionShape, limit_s: float | None
) -> ContenderResult:
    return ContenderResult(
        name=name,
        us=1e6 * timing.median_s,
        spread=timing.spread,
        gb_s=shape.moved_bytes / timing.median_s / 1e9,
        tflop_s=shape.flops / timing.median_s / 1e12,
        share=None if limit_s is None else limit_s / timing.median_s,
        error=error,
    )
