"""How many experts of a layer a decode step reads, and the share of weights that these are.

    python benchmarks/distinct_experts.py --model qwen3-30b-a3b --batch-size 1,8,64

A step of few requests reads some experts of each layer, and its time follows how many: routers of
noise and of trained weights differ, and figures of a routed model are read beside this.  Decodes
without graphs, random prompts, on any device.  Prints a table, and one JSON document as the last
line.
"""

import argparse
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from paceline.bench.latency import random_prompts
from paceline.core.request.sampling_params import SamplingParams
from paceline.layers.moe import SparseMLP
from paceline.llm.llm import LLM
from paceline.plan.machine import versions

STEPS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Distinct:
    """Of one batch size: means over layers and steps."""

    batch_size: int
    experts: int  # of a layer
    distinct: float  # that some request of a step takes
    mib: float  # of their weights, all layers
    of_experts: float  # share of all experts' bytes


class Taken:
    """What the layers of experts are asked for, of steps with `rows` tokens."""

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.layers: dict[SparseMLP, list[int]] = {}  # distinct experts of each step

    def note(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """Before the forward of any module."""
        if isinstance(module, SparseMLP) and args[0].shape[0] == self.rows:
            ids = module._route(module.router(args[0])).expert_ids
            self.layers.setdefault(module, []).append(ids.unique().numel())

    def mean(self) -> Distinct:
        """Of all layers and steps."""
        counts = {layer: sum(found) / len(found) for layer, found in self.layers.items()}
        held = {
            layer: sum(each.nbytes for each in layer.held.weight if isinstance(each, Tensor))
            for layer in counts
        }
        read = sum(held[layer] * count / layer.num_experts for layer, count in counts.items())
        return Distinct(
            batch_size=self.rows,
            experts=max(layer.num_experts for layer in counts),
            distinct=sum(counts.values()) / len(counts),
            mib=read / 2**20,
            of_experts=read / sum(held.values()),
        )


@contextmanager
def taken(rows: int) -> Iterator[Taken]:
    """Layers are listened to meanwhile."""
    found = Taken(rows)
    handle = register_module_forward_pre_hook(found.note)
    try:
        yield found
    finally:
        handle.remove()


def measure(llm: LLM, batch_size: int, input_len: int) -> Distinct:
    """Of STEPS decodes; llm: without graphs, of a model with experts."""
    prompts = random_prompts(batch_size, input_len, llm.prepared.config.vocab_size, seed=1)
    params = SamplingParams(temperature=0.0, max_tokens=STEPS + 1, ignore_eos=True)
    with taken(batch_size) as found:
        llm.generate(prompts, params)
    return found.mean()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="qwen3-30b-a3b")
    parser.add_argument("--load-format", default="dummy")
    parser.add_argument("--quantization", default=None)
    parser.add_argument("--batch-size", default="1,8,64")
    parser.add_argument("--input-len", type=int, default=128)
    args = parser.parse_args()
    sizes = [int(size) for size in args.batch_size.split(",")]
    llm = LLM(
        args.model,
        load_format=args.load_format,
        quantization=args.quantization,
        enforce_eager=True,
        enable_prefix_cache=False,
        max_num_seqs=max(sizes),
        max_num_batched_tokens=max(sizes) * args.input_len,
    )
    rows = [measure(llm, size, args.input_len) for size in sizes]
    print(f"{'batch':>6}{'experts':>9}{'distinct':>10}{'MiB':>10}{'of experts':>12}")
    for row in rows:
        print(
            f"{row.batch_size:>6}{row.experts:>9}{row.distinct:>10.1f}{row.mib:>10.0f}"
            f"{row.of_experts:>12.1%}"
        )
    document = {
        "benchmark": "distinct_experts",
        "arguments": vars(args),
        "device": llm.prepared.device.name,
        "versions": versions(),
        "results": [asdict(row) for row in rows],
    }
    llm.close()
    print(json.dumps(document))


if __name__ == "__main__":
    main()
