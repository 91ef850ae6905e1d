"""A budget by rehearsal: an engine on the meta device, beside what is planned and real ones."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
from draft_models import CPU, H200, drafted, named, planned, shallow

from paceline.attention.registry import load_backend
from paceline.cache.pool import KVFormat, torch_kv_dtype
from paceline.core.gpus import GIB, DeviceFacts
from paceline.core.model.config import ModelConfig
from paceline.core.options.engine_options import EngineOptions, known
from paceline.core.request.sampling_params import SamplerTier
from paceline.kernels.linear import LEAST_ADDED
from paceline.llm.boot import Knobs
from paceline.llm.llm import LLM
from paceline.models.config import parse_config
from paceline.models.locate import locate, shape_names
from paceline.plan.assemble import Decided, decide
from paceline.plan.memory.fit import Fit
from paceline.plan.memory.rehearsal import (
    Rehearsed,
    allocated,
    graphs_held,
    largest_graphs,
    largest_steps,
    rehearse,
    steps_held,
)
from paceline.plan.speculation import Speculation
from paceline.runner.extents import PaddedSize
from paceline.runner.recording.graphs import AHEAD
from paceline.runner.runner_config import RunnerConfig

LARGE_CPU = replace(CPU, total_bytes=256 * GIB, free_bytes=256 * GIB, native_bf16=True)
DEVICES = {"gpu": (H200, "triton"), "cpu": (LARGE_CPU, "torch")}
HEAD = "eagle3-llama-3.1-8b"
CASES = [(name, {"algorithm": "off"}) for name in shape_names()]
CASES += [
    ("llama-3.1-8b", {"algorithm": "EAGLE3", "path": HEAD}),
    ("llama-3.1-8b", {"algorithm": "EAGLE3", "path": HEAD, "topk": 4}),
    ("llama-3.1-8b", {"algorithm": "EAGLE3", "path": HEAD, "acceptance": "rejection"}),
    ("llama-3.1-8b", {"algorithm": "NGRAM"}),
    ("llama-3.1-8b", {"algorithm": "STANDALONE", "path": "llama-3.2-1b"}),
    ("llama-3.1-8b", {"algorithm": "STANDALONE", "path": "llama-3.2-1b", "topk": 2}),
    ("gemma-3-1b", {"algorithm": "NGRAM", "page_size": 1}),
]


def rehearsed(
    model: str, device: DeviceFacts, backend: str, asked: dict[str, object]
) -> tuple[Rehearsed, RunnerConfig, Fit]:
    """An engine as it is planned, without weights."""
    asked = {"load_format": "dummy", "attention_backend": backend} | asked
    resolution, fit = planned(model, device, **asked)
    options, config = resolution.options, parse_config(locate(model).config)
    decided = decided_of(config, options, drafted(model, **asked), fit)
    return rehearse(decided, load_backend(backend), device), decided.limits, fit


def decided_of(
    config: ModelConfig, options: EngineOptions, speculation: Speculation | None, fit: Fit
) -> Decided:
    return decide(
        config,
        options,
        speculation,
        num_pages=tuple(group.num_pages for group in fit.groups),
        kv=KVFormat(dtype=torch_kv_dtype(known(options.kv_cache_dtype))),
    )


@pytest.mark.parametrize("where", DEVICES)
@pytest.mark.parametrize(("model", "asked"), CASES, ids=str)
def test_the_plan_is_a_rehearsal_with_the_backend_that_runs(model, asked, where, tmp_path):
    """It knows of a backend what it declares."""
    device, backend = DEVICES[where]
    folder = shallow(tmp_path, model)
    seen, limits, fit = rehearsed(folder, device, backend, asked)
    assert seen.weights == fit.weights_bytes
    assert seen.draft_weights == fit.draft_weights_bytes
    assert seen.kv == fit.kv_bytes
    assert seen.workspace == fit.workspace_bytes
    config = parse_config(locate(folder).config)
    assert steps_held(seen.parts, config, largest_steps(limits), device) == fit.activations_bytes


@pytest.mark.parametrize("tokens", [LEAST_ADDED - 1, LEAST_ADDED])
def test_the_plan_has_what_products_take_that_are_not_made_into_the_stream(tokens, tmp_path):
    """Of fewer tokens than the longest step, which needs less; before a prompt is scored."""
    folder = shallow(tmp_path, "llama-3.1-8b")
    asked = {"algorithm": "off", "max_num_batched_tokens": LEAST_ADDED, "max_num_seqs": 1}
    seen, limits, fit = rehearsed(folder, H200, "triton", asked)
    steps, config = largest_steps(limits), parse_config(locate(folder).config)
    steps.insert(1, replace(steps[0], size=PaddedSize.ragged(1, tokens)))
    assert steps_held(seen.parts, config, steps, H200) == fit.activations_bytes


DRAFTERS = {
    "nobody": {"algorithm": "off"},
    "ngram": {"algorithm": "NGRAM"},
    "chain": {"algorithm": "EAGLE3"},
    "tree": {"algorithm": "EAGLE3", "topk": 4},
    "rejection": {"algorithm": "EAGLE3", "acceptance": "rejection"},
}


@pytest.fixture(scope="module", params=DRAFTERS)
def engine(request: pytest.FixtureRequest) -> Iterator[LLM]:
    """A small one with weights; what it captures at boot are its largest graphs."""
    asked = named("bundled", {"max_num_seqs": 3, "threads": 1} | DRAFTERS[request.param])
    with LLM(**asked, max_num_batched_tokens=64, knobs=Knobs(capture=AHEAD)) as llm:
        yield llm


@pytest.fixture
def twin(engine: LLM) -> tuple[Rehearsed, RunnerConfig]:
    """The same without weights."""
    prepared = engine.prepared
    decided = decided_of(prepared.config, prepared.options, prepared.speculation, prepared.fit)
    return rehearse(decided, load_backend("torch"), prepared.device), decided.limits


def test_what_stays_is_what_is_measured_after_loading(engine, twin):
    measured, (seen, _) = engine.report()["memory"]["measured"], twin
    assert measured["weights"] == seen.weights
    assert measured.get("draft weights", 0) == seen.draft_weights
    assert measured["KV"] == seen.kv
    assert measured["workspace"] == seen.workspace


@pytest.mark.parametrize("sampler", SamplerTier)
def test_a_step_allocates_on_the_meta_device_what_it_does_here(sampler, engine, twin):
    seen, limits = twin
    real, device = engine._live.runner.parts, engine.prepared.device
    for shape in largest_steps(limits):
        step = replace(shape, sampler=sampler)
        here, there = (allocated(parts, step, device) for parts in (real, seen.parts))
        assert (here.peak, here.total) == (there.peak, there.total)
        assert here.peak > 0


def test_recorded_graphs_hold_what_the_largest_greedy_step_allocates_in_all(engine, twin):
    seen, limits = twin
    held, _ = graphs_held(seen.parts, largest_graphs(limits), engine.prepared.device)
    assert engine.report()["memory"]["measured"]["graphs"] == held
