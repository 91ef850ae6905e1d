"""A budget by rehearsal: an engine on the meta device, beside the formulas and beside real ones."""

from dataclasses import replace

import pytest
from draft_models import CPU, H200, drafted, planned

from paceline.attention.registry import load_backend
from paceline.cache.pool import KVFormat, torch_kv_dtype
from paceline.core.gpus import GIB, DeviceFacts
from paceline.core.model_config import cache_group_specs
from paceline.core.options import known
from paceline.core.sampling_params import SamplerTier
from paceline.models.config import parse_config
from paceline.models.locate import locate, shape_names
from paceline.plan.assemble import Decided, runner_config
from paceline.plan.fit import Fit
from paceline.plan.rehearsal import Rehearsed, StepShape, allocated, rehearse
from paceline.runner.buffers import PaddedSize
from paceline.runner.build import RunnerConfig

LARGE_CPU = replace(CPU, total_bytes=256 * GIB, free_bytes=256 * GIB, native_bf16=True)
DEVICES = {"gpu": (H200, "triton"), "cpu": (LARGE_CPU, "torch")}
HEAD = "eagle3-llama-3.1-8b"
COUNTERS = 1 << 14  # bytes of split products, which the formula forgets
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
    speculation = drafted(model, **asked)
    pages = tuple(group.num_pages for group in fit.groups)
    num_groups = len(cache_group_specs(config, known(options.page_size)))
    limits = runner_config(options, speculation, num_pages=pages[:num_groups], processors=())
    decided = Decided(
        config=config,
        options=options,
        speculation=speculation,
        limits=limits,
        draft_pages=pages[num_groups:],
        kv=KVFormat(dtype=torch_kv_dtype(known(options.kv_cache_dtype))),
    )
    return rehearse(decided, load_backend(backend), device), limits, fit


def largest_steps(limits: RunnerConfig) -> list[StepShape]:
    """The largest with the widest sampler, one prompt that is scored, and the largest round."""
    ragged = PaddedSize.ragged(limits.padded_reqs, limits.max_tokens)
    prompt = PaddedSize.ragged(1, limits.max_tokens)
    wide = StepShape(size=ragged, sampler=SamplerTier.PLUG_INS, logprobs=True)
    shapes = [wide, replace(wide, size=prompt, scored=limits.max_tokens)]
    if limits.draft is not None:
        rows = PaddedSize.uniform(limits.max_running, limits.draft.num_draft_tokens)
        shapes += [replace(wide, size=rows, mask=limits.draft.mask, is_round=True)]
    return shapes


@pytest.mark.parametrize("where", DEVICES)
@pytest.mark.parametrize(("model", "asked"), CASES, ids=str)
def test_a_rehearsal_says_what_the_formulas_say_or_less(model, asked, where):
    device, backend = DEVICES[where]
    seen, limits, fit = rehearsed(model, device, backend, asked)
    assert seen.weights == fit.weights_bytes
    assert seen.draft_weights == fit.draft_weights_bytes
    assert seen.kv == fit.kv_bytes
    assert 0.3 * fit.workspace_bytes < seen.workspace <= fit.workspace_bytes + COUNTERS
    peaks = [allocated(seen.parts, shape, device).peak for shape in largest_steps(limits)]
    assert 0.05 * fit.activations_bytes < max(peaks) <= fit.activations_bytes
