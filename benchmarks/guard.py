"""What the guard costs: one check per replay, beside the replay it guards.

    PYTHONPATH=src python benchmarks/guard.py --requests 8 --layers 2 --repeat 2000

A random llama of the given depth runs one recorded decode graph on the CPU.  First the guard is
shown to refuse a rebound buffer, then it is timed.  Prints a table, then one JSON document as the
last line.
"""

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from paceline.attention.backends.torch_backend import TorchBackend
from paceline.cache.pool import KVFormat
from paceline.core.errors import GraphGuardError
from paceline.core.events import EventLog
from paceline.core.model.cache_groups import cache_group_specs
from paceline.core.model.config import Heads, LayerSpec, ModelConfig
from paceline.core.model.rope import RopeConfig
from paceline.core.parallel import Parallel
from paceline.core.request.sampling_params import SamplerTier, SamplingParams
from paceline.core.step import JoinDelta, PageDelta, Step, StepLayout
from paceline.layers.weights.dense import DENSE
from paceline.layers.weights.parameter import Placement
from paceline.models.loader import fill_dummy
from paceline.models.registry import architecture
from paceline.runner.build import build_runner
from paceline.runner.model_runner import ModelRunner
from paceline.runner.recording.graphs import GraphKey
from paceline.runner.runner_config import RunnerConfig
from paceline.runner.streams import InlineStream

CPU = torch.device("cpu")
PROMPT_LEN = 16
CONTEXT = 1024
WARM_UP = 100


def make_config(num_layers: int) -> ModelConfig:
    """A llama of hidden size 64."""
    layer = LayerSpec(heads=Heads(4, 2, 16, 16), scale=0.25, rope=RopeConfig(), rotary_dim=16)
    return ModelConfig(
        model_type="llama",
        vocab_size=512,
        hidden_size=64,
        intermediate_size=192,
        max_position=CONTEXT,
        rms_norm_eps=1e-5,
        layers=(layer,) * num_layers,
        hidden_act="silu",
        tie_word_embeddings=True,
        eos_token_ids=(),
        dtype="float32",
    )


def make_runner(num_layers: int, num_reqs: int) -> ModelRunner:
    """A runner with one captured decode graph of `num_reqs` rows."""
    config = make_config(num_layers)
    model = architecture(config.model_type).build(
        config, parallel=Parallel(), placement=Placement(CPU, torch.float32, DENSE)
    )
    fill_dummy(model, seed=0)
    pages = num_reqs * CONTEXT // 16 + 1
    runner = build_runner(
        model,
        config,
        cache_group_specs(config, 16),
        TorchBackend(),
        RunnerConfig(
            max_running=num_reqs,
            max_batched_tokens=max(PROMPT_LEN * num_reqs, 64),
            context_len=CONTEXT,
            max_join_tokens=CONTEXT,
            num_pages=(pages,),
            graph_max_reqs=num_reqs,
        ),
        stream=InlineStream(),
        device=CPU,
        dtype=torch.float32,
        kv=KVFormat(dtype=torch.float32),
        notify=EventLog(),
    )
    runner.boot()
    return runner


def prefill(num_reqs: int) -> Step:
    """Every row joins with a prompt and pages for the whole context."""
    params = SamplingParams(temperature=0.0, max_tokens=None)
    pages_per_row = CONTEXT // 16
    deltas: list[JoinDelta | PageDelta] = []
    for row in range(1, num_reqs + 1):
        first = 1 + (row - 1) * pages_per_row
        deltas.append(
            JoinDelta(
                row=row,
                token_ids=tuple(range(3, 3 + PROMPT_LEN)),
                prompt_len=PROMPT_LEN,
                prefix_len=0,
                max_len=CONTEXT,
                params=params,
            )
        )
        deltas.append(
            PageDelta(
                row=row, group=0, start=0, page_ids=tuple(range(first, first + pages_per_row))
            )
        )
    return _step(num_reqs, 1, extend=PROMPT_LEN, prefix=0, deltas=tuple(deltas))


def decode(num_reqs: int, number: int) -> Step:
    """Decode step `number`, from 0."""
    prefix = PROMPT_LEN + number
    return _step(num_reqs, 2 + number, extend=1, prefix=prefix, deltas=())


def _step(
    num_reqs: int,
    epoch: int,
    *,
    extend: int,
    prefix: int,
    deltas: tuple[JoinDelta | PageDelta, ...],
) -> Step:
    return Step(
        epoch=epoch,
        layout=StepLayout(
            rows=tuple(range(1, num_reqs + 1)),
            extend_lens=(extend,) * num_reqs,
            emits=(True,) * num_reqs,
        ),
        is_ragged=extend > 1,
        prefix_lens_bound=(prefix,) * num_reqs,
        sampler=SamplerTier.GREEDY,
        logprobs=False,
        deltas=deltas,
    )


def check_the_guard_bites(runner: ModelRunner, key: GraphKey, step: Step) -> None:
    """The guard passes a good step and refuses a rebound buffer; otherwise there is no cost."""
    runner._guard.check(key, step)
    table = runner._parts.table
    kept, table.token_ids = table.token_ids, table.token_ids.clone()
    try:
        runner._guard.check(key, step)
    except GraphGuardError:
        table.token_ids = kept
        return
    raise SystemExit("the guard let a rebound buffer pass")


def time_calls(call: Callable[[], object], repeat: int) -> dict[str, float]:
    """Microseconds per call, after a warm-up: least, median, 90th percentile."""
    for _ in range(WARM_UP):
        call()
    times = []
    for _ in range(repeat):
        start = time.perf_counter_ns()
        call()
        times.append((time.perf_counter_ns() - start) / 1000)
    times.sort()
    return {
        "min_us": round(times[0], 2),
        "median_us": round(statistics.median(times), 2),
        "p90_us": round(times[len(times) * 9 // 10], 2),
    }


def measure(num_layers: int, num_reqs: int, repeat: int) -> dict[str, Any]:
    """The guard's check, and the replay beside it."""
    runner = make_runner(num_layers, num_reqs)
    runner.launch(prefill(num_reqs)).wait()
    runner.launch(decode(num_reqs, 0)).wait()
    store = runner._graphs
    assert store is not None
    ((key, graph),) = store.graphs.items()
    step = decode(num_reqs, 1)
    check_the_guard_bites(runner, key, step)
    guard = time_calls(lambda: runner._guard.check(key, step), repeat)
    # The rows grow by one token per replay; their pages cover all of them.
    replays = min(repeat, CONTEXT - PROMPT_LEN - WARM_UP - 8)
    replay = time_calls(graph.replay, replays)
    return {"guard": guard, "replay": replay, "tensors": len(runner._guard._places)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=8, help="rows of the graph")
    parser.add_argument("--layers", type=int, default=2, help="layers of the model")
    parser.add_argument("--repeat", type=int, default=2000, help="timed checks")
    args = parser.parse_args()
    torch.set_num_threads(1)
    found = measure(args.layers, args.requests, args.repeat)
    share = found["guard"]["median_us"] / found["replay"]["median_us"]
    print(f"device cpu ({platform.machine()}), float32, torch {torch.__version__}, 1 thread")
    print(
        f"llama hidden 64, {args.layers} layers, {args.requests} requests, "
        f"{found['tensors']} guarded tensors, {WARM_UP} warm-up calls"
    )
    print(f"{'':8}{'min':>12}{'median':>12}{'p90':>12}")
    for name in ("guard", "replay"):
        row = found[name]
        cells = "".join(f"{row[k]:>9.1f} us" for k in ("min_us", "median_us", "p90_us"))
        print(f"{name:8}{cells}")
    print(f"the guard is {100 * share:.1f} % of a replay")
    document = {
        "device": "cpu",
        "dtype": "float32",
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "layers": args.layers,
        "requests": args.requests,
        "share": round(share, 4),
        **found,
    }
    print(json.dumps(document))


if __name__ == "__main__":
    main()
