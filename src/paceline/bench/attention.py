"""Attention alone: our backend and a peer library, checked first and then timed side by side.

    python -m paceline bench attention --batch-size 64 --kv-len 4096 --peer flashinfer

Every contender first meets the definition (kernels/paged_attention/reference.py) in float64 on a
ragged batch over permuted pages in poisoned memory.  Then all are timed in one process, in turns,
over enough layers that their K and V exceed the L2 cache many times; on CUDA as graphs.  Bytes are
those of K and V, which is all that decode must move.  With --backends several of ours take turns
instead, over a suite of shapes (`bench_backends`).
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

from paceline.attention.registry import choose
from paceline.bench import backends as bench_backends
from paceline.bench import flashinfer_peer
from paceline.bench.attention_contenders import (
    Make,
    attention_config,
    check,
    num_layers,
    our_make,
    require_memory,
    wants_finite,
)
from paceline.bench.attention_shape import AttentionShape, shape_of
from paceline.bench.attention_workload import make_workload
from paceline.bench.interleaved import Timing, time_interleaved
from paceline.core.errors import ConfigError, message
from paceline.core.gpus import DeviceFacts
from paceline.plan.machine import local_device, versions


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """The library beside ours."""

    name: str | None  # None: nothing to compare with
    why: str
    makes: Mapping[str, Make]


def bench_attention(
    shape: AttentionShape,
    *,
    backend: str = "auto",
    peer: str = "auto",
    device: DeviceFacts | None = None,
) -> dict[str, object]:
    """Check and time; returns the JSON document.

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
    errors = check(makes, shape, here, finite=wants_finite(ours))
    work = make_workload(
        shape, [shape.kv_len] * shape.batch_size, layers=layers, device=here, seed=1
    )
    timings = time_interleaved(
        {name: make(work) for name, make in makes.items()}, layers=layers, device=here
    )
    limit_s = shape.limit_s(facts.bandwidth_bytes_s, facts.matmul_flops)
    rows = [_row(name, timings[name], errors[name], shape, limit_s) for name in makes]
    rivals = [timings[name].median_s for name in beside.makes]
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
        "shape": asdict(shape),
        "layers": layers,
        "backend": ours,
        "peer": {"name": beside.name, "why": beside.why},
        "results": rows,
        "ratio": min(rivals) / timings[ours].median_s if rivals else None,
    }


def choose_peer(peer: str, shape: AttentionShape, device_type: str) -> Peer:
    """The peer that was asked for.  Raises ConfigError when it cannot run and was named."""
    if peer == "none":
        return Peer(name=None, why="not asked for", makes={})
    absent = flashinfer_peer.absence(shape, device_type)
    if absent is None:
        makes = flashinfer_peer.variants(shape)
        return Peer(name="flashinfer", why="the better of its kernels is the peer", makes=makes)
    if peer == "auto":
        return Peer(name=None, why=f"no flashinfer: {absent}", makes={})
    raise ConfigError(
        message(
            "peer",
            expected="a library that runs here",
            got=f"{peer} ({absent})",
            remedy="use --peer none, or a machine and a shape that FlashInfer serves",
        )
    )


def table(document: Mapping[str, Any]) -> str:
    """The document for people."""
    if document["benchmark"] == bench_backends.NAME:
        return bench_backends.table(document)
    shape, peer = document["shape"], document["peer"]
    phase = "decode" if shape["extend_len"] == 1 else f"extend of {shape['extend_len']}"
    rows = [
        f"{phase}: {shape['batch_size']} x {shape['kv_len']} keys, {shape['num_heads']}/"
        f"{shape['num_kv_heads']} heads of {shape['head_dim']}, page {shape['page_size']}, "
        f"{shape['dtype']}, cache {shape['kv_dtype']}, {document['layers']} layers",
        f"on {document['device']['name']}; peer {peer['name'] or 'none'} ({peer['why']})",
        f"{'':<26}{'us':>10}{'spread':>9}{'GB/s':>9}{'TFLOP/s':>9}{'of limit':>10}{'error':>8}",
    ]
    for row in document["results"]:
        share = "-" if row["share"] is None else f"{row['share']:.1%}"
        rows.append(
            f"{row['name']:<26}{row['us']:>10.1f}{row['spread']:>9.1%}{row['gb_s']:>9.1f}"
            f"{row['tflop_s']:>9.2f}{share:>10}{row['error']:>8.2f}"
        )
    if document["ratio"] is not None:
        rows.append(f"{document['backend']} runs at {document['ratio']:.3f} of {peer['name']}")
    return "\n".join(rows)


def bench_values(values: Mapping[str, Any]) -> dict[str, object]:
    """Run the benchmark of the values of FLAGS."""
    asked = None if values["device"] == "auto" else values["device"]
    plan = bench_backends.plan_of(values)
    if plan is not None:
        return bench_backends.bench_backends(plan, local_device(asked))
    return bench_attention(
        shape_of(values),
        backend=values["backend"],
        peer=values["peer"],
        device=local_device(asked),
    )


def _row(
    name: str, timing: Timing, error: float, shape: AttentionShape, limit_s: float | None
) -> dict[str, object]:
    return {
        "name": name,
        "us": 1e6 * timing.median_s,
        "spread": timing.spread,
        "gb_s": shape.moved_bytes / timing.median_s / 1e9,
        "tflop_s": shape.flops / timing.median_s / 1e12,
        "share": None if limit_s is None else limit_s / timing.median_s,
        "error": error,
    }
