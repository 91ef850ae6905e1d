"""Which library path is fastest for a linear layer on this CPU, per number of tokens?

    python benchmarks/cpu_linear.py --threads 1

Times torch's `F.linear` and oneDNN's linear, with weights stored by rows and by columns, and
numpy's product of float32 with weights by columns, on the bundled model's four matrices per layer;
the weights of all layers in turn, as a step reads them.  Checks all against float64 first.  JSON
last.
"""

import argparse
import json
import time
from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.kernels.openblas import set_num_threads
from paceline.plan.machine import cpu_facts, versions

SHAPES = ((320, 192), (192, 192), (1280, 192), (192, 640))  # [out, in] of the bundled model
NUM_LAYERS = 12


def onednn(x: Tensor, weight: Tensor) -> Tensor:
    """oneDNN's linear as torch carries it."""
    return torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")


def numpys(x: Tensor, weight: Tensor) -> Tensor:
    """numpy's product, which its BLAS computes."""
    out = x.new_empty(x.shape[0], weight.shape[0])
    np.dot(x.numpy(), weight.t().numpy(), out=out.numpy())
    return out


def check(function: Callable[[Tensor, Tensor], Tensor], x: Tensor, weight: Tensor) -> None:
    """`function` differs from float64 by no more than roundings over the sum's length."""
    exact = x.double() @ weight.double().t()
    limit = x.shape[1] * torch.finfo(x.dtype).eps * exact.abs().max()
    error = (function(x, weight).double() - exact).abs().max()
    assert error <= limit, f"{function.__name__} is off by {error:.3g}, limit {limit:.3g}"


def best_us(function: Callable[[Tensor, Tensor], Tensor], work: list, repeats: int) -> float:
    """Best mean microseconds of one product over all layers."""
    best = float("inf")
    for _ in range(repeats):
        began = time.perf_counter()
        for x, weight in work:
            function(x, weight)
        best = min(best, time.perf_counter() - began)
    return best * 1e6 / len(work)


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=20)
    args = parser.parse_args()
    set_num_threads(args.threads)
    rows = []
    heads = ("linear us", "by columns", "oneDNN us", "by columns", "numpy us")
    print(f"{'dtype':<16}{'tokens':>7}" + "".join(f"{head:>11}" for head in heads))
    for dtype in (torch.float32, torch.bfloat16):
        weights = [torch.randn(o, i).to(dtype) for _ in range(NUM_LAYERS) for o, i in SHAPES]
        by_columns = [weight.t().contiguous().t() for weight in weights]
        for tokens in (1, 2, 4, 8, 16, 32, 256):
            inputs = [torch.randn(tokens, weight.shape[1]).to(dtype) for weight in weights]
            times = []
            for function in (F.linear, onednn):
                for stored in (weights, by_columns):
                    work = list(zip(inputs, stored, strict=True))
                    check(function, *work[0])
                    times.append(best_us(function, work, args.repeats))
            names = ["linear_us", "linear_columns_us", "onednn_us", "onednn_columns_us"]
            if dtype == torch.float32:
                work = list(zip(inputs, by_columns, strict=True))
                check(numpys, *work[0])
                times.append(best_us(numpys, work, args.repeats))
                names.append("numpy_columns_us")
            named = dict(zip(names, times, strict=True))
            rows.append({"dtype": str(dtype), "tokens": tokens, **named})
            print(f"{dtype!s:<16}{tokens:>7}" + "".join(f"{us:>11.1f}" for us in times))
    print(
        json.dumps(
            {
                "benchmark": "cpu_linear",
                "cpu": cpu_facts().name,
                "threads": args.threads,
                "versions": versions(),
                "rows": rows,
            }
        )
    )


if __name__ == "__main__":
    main()
