"""How fast are the matrix products of few tokens, beside cuBLAS?

    PYTHONPATH=src python benchmarks/skinny_products.py

The products of Llama-3.1-8B and of its EAGLE-3 head for as many tokens as steps with drafts have.
Each is compared with float64 first, by the error that cuBLAS has, and then timed in turns with
cuBLAS, in CUDA graphs over enough copies of the weight to exceed the L2 cache; last the products of
a layer as one chain.  GB/s are of the weight alone.
A table for people, then one JSON document as the last line.
"""

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.bench.interleaved import Run, time_interleaved
from paceline.kernels.act_and_mul import act_and_mul
from paceline.kernels.linear import gated_linear, linear
from paceline.kernels.rms_norm import add_rms_norm
from paceline.kernels.skinny_linear import arrival_counters
from paceline.plan.machine import local_device, versions

TOKENS = (1, 4, 8, 32, 64)
SPAN_BYTES = 512 << 20  # of all copies of a weight, at least
CHAIN_LAYERS = 8
DTYPE = torch.bfloat16
ERROR_LIMIT = 1.0  # of twice the error of cuBLAS and one rounding


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """One weight: [rows, inner]; gated: gate rows, then up rows."""

    name: str
    rows: int
    inner: int
    gated: bool = False

    @property
    def bytes(self) -> int:
        return self.rows * self.inner * 2

    def weight(self, device: torch.device) -> Tensor:
        """[rows, inner], such that results are about 1."""
        return (torch.randn(self.rows, self.inner, device=device) * self.inner**-0.5).to(DTYPE)

    def ours(self, x: Tensor, weight: Tensor, counters: Tensor) -> Tensor:
        if self.gated:
            return gated_linear(x, weight, None, "silu")
        return linear(x, weight, None, counters=counters)

    def cublas(self, x: Tensor, weight: Tensor) -> Tensor:
        product = F.linear(x, weight)
        return act_and_mul(product, "silu") if self.gated else product

    def exact(self, x: Tensor, weight: Tensor) -> Tensor:
        product: Tensor = x.double() @ weight.double().T
        if not self.gated:
            return product
        gate, up = product.chunk(2, dim=1)
        gated: Tensor = F.silu(gate) * up
        return gated


LAYER = (
    Product(name="qkv", rows=6144, inner=4096),
    Product(name="o", rows=4096, inner=4096),
    Product(name="gate_up", rows=28672, inner=4096, gated=True),
    Product(name="down", rows=4096, inner=14336),
)
PRODUCTS = (
    *LAYER,
    Product(name="lm_head", rows=128256, inner=4096),
    Product(name="eagle3 qkv", rows=6144, inner=8192),
    Product(name="eagle3 fc", rows=4096, inner=12288),
    Product(name="eagle3 lm_head", rows=32000, inner=4096),
)


def measure(product: Product, tokens: int, device: torch.device) -> dict[str, Any]:
    """Check and time one product."""
    copies = max(2, -(-SPAN_BYTES // product.bytes))
    weights = [product.weight(device) for _ in range(copies)]
    x = torch.randn(tokens, product.inner, device=device).to(DTYPE)
    counters = arrival_counters(product.rows, device=device)
    runs: dict[str, Callable[[int], Tensor]] = {
        "ours": lambda copy: product.ours(x, weights[copy], counters),
        "cublas": lambda copy: product.cublas(x, weights[copy]),
    }
    exact = product.exact(x, weights[0])
    error, plain = (float((runs[name](0).double() - exact).abs().max()) for name in runs)
    error /= 2.0 * plain + torch.finfo(DTYPE).eps * float(exact.abs().max())
    timings = time_interleaved(runs, layers=copies, device=device)
    us = {name: 1e6 * timing.median_s for name, timing in timings.items()}
    rates = {name: product.bytes / time / 1e3 for name, time in us.items()}
    print(
        f"{product.name:15s}{tokens:3d} tokens: {us['ours']:7.2f} us {rates['ours']:5.0f} GB/s, "
        f"cuBLAS {us['cublas']:7.2f} us {rates['cublas']:5.0f} GB/s"
        + ("" if error <= ERROR_LIMIT else f"  WRONG {error:.3g}"),
        flush=True,
    )
    return {
        "product": product.name, "rows": product.rows, "inner": product.inner, "tokens": tokens,
        "us": us, "gb_s": rates, "error": error,
    }  # fmt: skip


class Chain:
    """Norm, QKV, copy, output, norm, gate and up, down, over the weights of several layers."""

    def __init__(self, device: torch.device) -> None:
        self.weights = [[p.weight(device) for p in LAYER] for _ in range(CHAIN_LAYERS)]
        self.counters = [arrival_counters(p.rows, device=device) for p in LAYER]
        self.norm = torch.ones(LAYER[0].inner, dtype=DTYPE, device=device)

    def run(self, x: Tensor, product: Callable[[int, Tensor, Tensor], Tensor]) -> Tensor:
        """x: [tokens, hidden]; product: of the index of LAYER, x and weight."""
        residual = torch.zeros_like(x)
        for weights in self.weights:
            attended = product(0, x, weights[0])[:, : x.shape[1]].contiguous()
            x = add_rms_norm(product(1, attended, weights[1]), residual, self.norm, 1e-5)
            x = product(3, product(2, x, weights[2]), weights[3])
            x = add_rms_norm(x, residual, self.norm, 1e-5)
        return x

    def ours(self, index: int, x: Tensor, weight: Tensor) -> Tensor:
        return LAYER[index].ours(x, weight, self.counters[index])

    def cublas(self, index: int, x: Tensor, weight: Tensor) -> Tensor:
        return LAYER[index].cublas(x, weight)

    def measure(self, tokens: int, device: torch.device) -> dict[str, object]:
        """Microseconds of one layer."""
        x = torch.randn(tokens, LAYER[0].inner, device=device).to(DTYPE)
        runs: dict[str, Run] = {
            name: partial(lambda product, _: self.run(x, product), product)
            for name, product in (("ours", self.ours), ("cublas", self.cublas))
        }
        timings = time_interleaved(runs, layers=1, device=device)
        us = {name: 1e6 * timing.median_s / CHAIN_LAYERS for name, timing in timings.items()}
        print(f"chain{tokens:13d} tokens: {us['ours']:7.2f} us, cuBLAS {us['cublas']:7.2f} us")
        return {"tokens": tokens, "us": us}


@torch.inference_mode()
def main() -> int:
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    torch.manual_seed(0)
    facts = local_device("cuda")
    device = torch.device("cuda")
    rows = [measure(product, tokens, device) for product in PRODUCTS for tokens in TOKENS]
    chain = Chain(device)
    document = {
        "benchmark": "skinny_products",
        "device": facts.name,
        "versions": versions(),
        "products": rows,
        "chain": [chain.measure(tokens, device) for tokens in TOKENS],
    }
    print(json.dumps(document))
    return 1 if any(row["error"] > ERROR_LIMIT for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
