"""Which library path is fastest for a linear layer on this CPU, per number of tokens?

    python benchmarks/cpu_linear.py --threads 1

Times torch's `F.linear` and oneDNN's linear on the bundled model's four matrices per layer, weights
of all layers in turn so that no cache holds them.  Checks that both agree first.  JSON last.
"""

import argparse
import json
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.engine.machine import cpu_facts, versions

SHAPES = ((320, 192), (192, 192), (1280, 192), (192, 640))  # [out, in] of the bundled model
NUM_LAYERS = 12


def onednn(x: Tensor, weight: Tensor) -> Tensor:
    """oneDNN's linear as torch carries it."""
    return torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")


def check(x: Tensor, weight: Tensor) -> None:
    """Both differ from float64 by no more than a few roundings of the sum's length."""
    exact = x.double() @ weight.double().t()
    limit = 4 * torch.finfo(x.dtype).eps * exact.abs().max()
    for function in (F.linear, onednn):
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
    torch.set_num_threads(args.threads)
    rows = []
    print(f"{'dtype':<16}{'tokens':>7}{'F.linear us':>13}{'oneDNN us':>11}")
    for dtype in (torch.float32, torch.bfloat16):
        weights = [torch.randn(o, i).to(dtype) for _ in range(NUM_LAYERS) for o, i in SHAPES]
        for tokens in (1, 8, 16, 32, 64, 256):
            work = [(torch.randn(tokens, w.shape[1]).to(dtype), w) for w in weights]
            for x, weight in work[:4]:
                check(x, weight)
            plain, dnn = (best_us(f, work, args.repeats) for f in (F.linear, onednn))
            rows.append(
                {"dtype": str(dtype), "tokens": tokens, "linear_us": plain, "onednn_us": dnn}
            )
            print(f"{dtype!s:<16}{tokens:>7}{plain:>13.1f}{dnn:>11.1f}")
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
