"""Ranks that share a model compute what one process computes: of every architecture, on two and on
four ranks, which here are threads of one process."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import tiny_checkpoints
import torch
from fake_context import FakeContext
from torch import Tensor, nn

from paceline.core.errors import ConfigError
from paceline.core.model.cache_groups import cache_group_specs
from paceline.core.model.config import LayerSpec, ModelConfig, RowPart
from paceline.core.parallel import Parallel, Span, of_rank, rank_sizes
from paceline.kernels.all_reduce import Exchange, open_exchange
from paceline.kernels.custom_op import DispatchMode
from paceline.layers.rank_sum import RankSum
from paceline.layers.weights import dense
from paceline.layers.weights.dense import DENSE
from paceline.layers.weights.parameter import Placement
from paceline.models.causal_lm import CausalLM
from paceline.models.config import parse_config
from paceline.models.coverage import require_filled_once
from paceline.models.loader import load_model
from paceline.models.locate import ModelSource, SourceKind, locate
from paceline.models.packed_layers import PLAIN
from paceline.models.registry import ARCHITECTURES, architecture
from paceline.plan.exchanged import exchanged

CPU = torch.device("cpu")
TOKENS = 24
TOLERANCE = 1e-5  # of the largest logit: sums of float32 in another order
EVEN = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}  # in place of odd ones


@cache
def config_of(case: str) -> ModelConfig:
    raw = tiny_checkpoints.make(case).config.to_dict() | {"dtype": "float32"}
    config = parse_config(raw)
    if any(heads.num_heads % 4 for heads in config.heads):
        config = parse_config(raw | EVEN)
    return config


def build(config: ModelConfig, parallel: Parallel, exchange: Exchange | None = None) -> CausalLM:
    placement = Placement(CPU, torch.float32, DENSE, exchange)
    return architecture(config.model_type).build(config, parallel=parallel, placement=placement)


def stored_for(model: CausalLM) -> dict[str, Tensor]:
    """A checkpoint of the model: noise, around 1 where it is a norm's."""
    torch.manual_seed(7)
    return {
        name: torch.randn(target.shape) * 0.1 + (1.0 if "norm" in name else 0.0)
        for name, target in model.destinations().items()
    }


def fill(model: CausalLM, stored: dict[str, Tensor]) -> CausalLM:
    named = model.destinations()
    assert named.keys() == stored.keys()
    for name, target in named.items():
        assert target.shape == tuple(stored[name].shape), name
        target.copy_(stored[name])
    return model


def ranks_of(config: ModelConfig, size: int, stored: dict[str, Tensor]) -> list[CausalLM]:
    capacity = TOKENS * max(config.hidden_size, config.vocab_size)
    exchanges = open_exchange(size, capacity, dtype=torch.float32, device=CPU)
    return [
        fill(build(config, Parallel(rank, size), exchange), stored)
        for rank, exchange in enumerate(exchanges)
    ]


def logits(model: CausalLM, config: ModelConfig) -> Tensor:
    """[TOKENS, vocab] of a prompt in three chunks.  config: as the caches of `model` see it."""
    ids, positions = torch.arange(TOKENS) * 37 % 146 + 4, torch.arange(TOKENS)
    ctx = FakeContext(config, model.attention_sinks())
    chunks = (15, TOKENS - 16, 1)
    with torch.inference_mode():
        hidden = [
            model(part, at, ctx).hidden
            for part, at in zip(ids.split(chunks), positions.split(chunks), strict=True)
        ]
        return model.logits(torch.cat(hidden))


@cache
def alone(case: str) -> tuple[dict[str, Tensor], Tensor]:
    """A checkpoint, and [TOKENS, vocab] of logits by one process."""
    config = config_of(case)
    model = build(config, Parallel())
    stored = stored_for(model)
    return stored, logits(fill(model, stored), config)


def together(models: Sequence[CausalLM], config: ModelConfig) -> list[Tensor]:
    """[ranks] of logits, each computed by a thread."""
    size = len(models)
    seen = [of_rank(config, Parallel(rank, size)) for rank in range(size)]
    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(logits, models, seen))


def require_equal(ranks: list[Tensor], alone: Tensor) -> None:
    for logits_of_rank in ranks:
        assert torch.equal(logits_of_rank, ranks[0])
    error = (ranks[0] - alone).abs().max() / alone.abs().max()
    assert error < TOLERANCE, f"relative error {error:.2e}"
    assert torch.equal(ranks[0].argmax(-1), alone.argmax(-1))


# Layers of these have no split.
ALONE = ("falcon_h1", "granitemoehybrid", "mamba2")
EVERY = sorted(tiny_checkpoints.CASES)
CASES = [case for case in EVERY if not case.startswith(ALONE)]


def test_every_architecture_is_among_the_cases() -> None:
    encoders = {"bert", "modernbert", "roberta", "xlm-roberta"}  # which no ranks share
    readers = {"mllama_text_model", "whisper"}  # nor these, see tests/llm/cross
    known = {config_of(case).model_type for case in EVERY}
    assert known == ARCHITECTURES.keys() - encoders - readers


@pytest.mark.parametrize("case", [case for case in EVERY if case.startswith(ALONE)])
def test_a_model_with_layers_that_are_not_split_is_refused(case: str) -> None:
    config = config_of(case)
    assert rank_sizes(config, 4) == [1]
    with pytest.raises(ConfigError, match=r"one of 1, got 2: .*layers of mamba2 are not split"):
        of_rank(config, Parallel(0, 2))


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("case", CASES)
def test_ranks_compute_what_one_process_computes(case: str, size: int) -> None:
    config, (stored, expected) = config_of(case), alone(case)
    ranks = ranks_of(config, size, stored)
    require_equal(together(ranks, config), expected)
    planned = exchanged(config, size, torch.float32, PLAIN)
    assert planned is not None
    sums = [module for module in ranks[0].modules() if isinstance(module, RankSum)]
    assert sums[0].exchange.sent.tolist() == [3 * planned.sums + 1] * size  # of three chunks


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("case", CASES)
def test_what_ranks_read_is_every_number_of_the_checkpoint(case: str, size: int) -> None:
    config, (stored, _) = config_of(case), alone(case)
    times = {name: torch.zeros(tensor.shape, dtype=torch.int64) for name, tensor in stored.items()}
    for model in ranks_of(config, size, stored):
        require_filled_once(model, model.destinations(), model=case)
        for name, target in model.destinations().items():
            for block in target.blocks:
                times[name][tuple(slice(span.first, span.end) for span in block.cut)] += 1
    for name, counts in times.items():
        assert counts.min() >= 1, name
        assert counts.max() == counts.min() or "qkv_proj" in name, (
            f"{name}: KV heads alone are held again"
        )
        if name.endswith(("o_proj.bias", "down_proj.bias", "down_proj_bias")):
            assert counts.max() == 1, f"{name} is added once"


SHAPE = ModelSource(
    name="a shape",
    kind=SourceKind.SHAPE,
    folder=None,
    config={},
    generation_config={},
    tokenizer=None,
)
DUMMY: dict[str, Any] = {
    "device": CPU,
    "dtype": torch.float32,
    "load_format": "dummy",
    "seed": 3,
}


@cache
def dummy_alone(case: str) -> Tensor:
    """[TOKENS, vocab] of logits by one process."""
    config = replace(config_of(case), vocab_size=157)
    return logits(load_model(SHAPE, config, parallel=Parallel(), **DUMMY), config)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("case", CASES)
def test_dummy_weights_are_one_model_for_any_number_of_ranks(case: str, size: int) -> None:
    config = replace(config_of(case), vocab_size=157)
    ways = open_exchange(size, TOKENS * 512, dtype=torch.float32, device=CPU)
    ranks = [
        load_model(SHAPE, config, parallel=Parallel(rank, size), exchange=way, **DUMMY)
        for rank, way in enumerate(ways)
    ]
    require_equal(together(ranks, config), dummy_alone(case))


@pytest.mark.parametrize(
    "case",
    [
        "llama-gqa2-untied",
        "qwen3_moe-window-every-second-layer",
        "gpt-oss-sinks-alternating-windows",
    ],
)
def test_a_rank_reads_its_part_of_a_checkpoint(case: str, tmp_path: Path) -> None:
    tiny_checkpoints.save(case, tmp_path)
    source = locate(str(tmp_path))
    config = parse_config(source.config, source.generation_config)
    ways = open_exchange(2, TOKENS * 160, dtype=torch.float32, device=CPU)
    alone, *ranks = (
        load_model(source, config, parallel=parallel, device=CPU, dtype=torch.float32, exchange=way)
        for parallel, way in zip(
            (Parallel(), Parallel(0, 2), Parallel(1, 2)), (None, *ways), strict=True
        )
    )
    require_equal(together(ranks, config), logits(alone, config))


def test_ranks_beyond_the_kv_heads_hold_them_again_in_order() -> None:
    config = config_of("llama-gqa2-untied")
    stored = stored_for(build(config, Parallel()))
    dim = config.heads[0].head_dim
    heads = stored["model.layers.0.self_attn.v_proj.weight"].split(dim)
    held = [
        model.decoder.layers[0].attention.qkv.weight[-dim:] for model in ranks_of(config, 4, stored)
    ]
    assert len(heads) == 2
    assert [torch.equal(v, heads[rank // 2]) for rank, v in enumerate(held)] == [True] * 4


@pytest.mark.parametrize("case", ["llama-gqa2-untied", "gemma3-windows-two-ropes"])
def test_a_vocabulary_that_ranks_cannot_share_evenly_is_gathered_whole(case: str) -> None:
    config = replace(config_of(case), vocab_size=157)
    alone = build(config, Parallel())
    stored = stored_for(alone)
    require_equal(
        together(ranks_of(config, 4, stored), config), logits(fill(alone, stored), config)
    )


@pytest.mark.parametrize("missing", range(3))
def test_a_rank_that_reads_anothers_part_is_seen(missing: int) -> None:
    """That the comparison can fail: one rank's own part of one tensor is rank 0's."""
    config = config_of("llama-gqa2-untied")
    alone = build(config, Parallel())
    stored = stored_for(alone)
    ranks = ranks_of(config, 2, stored)
    layers = [model.decoder.layers[1] for model in ranks]
    pairs = [
        [layer.attention.qkv.weight for layer in layers],
        [layer.mlp.part.down.weight for layer in layers],
        [model.head.weight for model in ranks],
    ]
    with torch.no_grad():
        pairs[missing][1].copy_(pairs[missing][0])
    with pytest.raises(AssertionError, match="relative error"):
        require_equal(together(ranks, config), logits(fill(alone, stored), config))


class Seen(DispatchMode):
    """Names of the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(func._schema.name)
        return func(*args, **(kwargs or {}))


def test_one_process_has_nothing_of_ranks() -> None:
    config = config_of("qwen2_moe-shared-expert-dense-layer")
    model = build(config, Parallel())
    fill(model, stored_for(model))
    assert not any(isinstance(module, RankSum) for module in model.modules())
    with Seen() as seen:
        logits(model, config)
    assert not {"paceline::all_reduce", "paceline::all_gather"} & seen.names


def test_a_mixture_of_experts_sums_once_with_its_shared_expert() -> None:
    config = config_of("qwen2_moe-shared-expert-dense-layer")
    stored = stored_for(build(config, Parallel()))
    model = ranks_of(config, 2, stored)[0]
    sums = [module for module in model.modules() if isinstance(module, RankSum)]
    assert len(sums) == 2 * config.num_layers


@pytest.mark.parametrize(
    ("case", "left"),
    [
        ("llama-gqa2-untied", True),
        ("granite-multipliers", False),
        ("gemma2-soft-caps-alternating-windows", False),
    ],
)
def test_sums_are_left_to_norms_that_add_them_as_they_are(case: str, left: bool) -> None:
    config = config_of(case)
    model = ranks_of(config, 2, stored_for(build(config, Parallel())))[0]
    sums = [module for module in model.modules() if isinstance(module, RankSum)]
    assert [each.is_left for each in sums] == [left] * (2 * config.num_layers)


def test_ranks_leave_no_products_to_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """But sums, whose parts are whole products, also where one process would leave these."""
    monkeypatch.setattr(dense, "fits_add_linear", lambda x: True)
    config, (stored, expected) = config_of("llama-gqa2-untied"), alone("llama-gqa2-untied")
    require_equal(together(ranks_of(config, 2, stored), config), expected)


def test_ranks_cache_their_heads_and_all_of_every_latent() -> None:
    config = config_of("llama-gqa2-untied")
    for size, kv_heads in ((2, 1), (4, 1)):
        seen = of_rank(config, Parallel(1, size))
        [group] = cache_group_specs(seen, 16)
        assert [part.shape for part in group.parts] == [(kv_heads, 16)] * 2
        assert all(part.by_heads for part in group.parts)
        assert seen.heads[0].num_heads == 4 // size
    latent = config_of("deepseek_v3-halves")
    seen = of_rank(latent, Parallel(1, 4))
    assert cache_group_specs(seen, 16) == cache_group_specs(latent, 16)
    assert not any(part.by_heads for part in cache_group_specs(latent, 16)[0].parts)
    assert seen.heads[0].num_heads == 1


def test_ranks_keep_their_part_of_states_but_what_has_no_heads_whole() -> None:
    state = (RowPart("s", (4, 8, 8)), RowPart("clock", (3,), by_heads=False))
    config = config_of("llama-gqa2-untied")
    layers = (*config.layers, LayerSpec(mixer="toy", state=state))
    seen = of_rank(replace(config, layers=layers), Parallel(1, 2))
    assert [part.shape for part in seen.layers[-1].state] == [(2, 8, 8), (3,)]


def test_sizes_that_cannot_share_a_model_are_refused_with_every_reason() -> None:
    config = config_of("qwen2-gqa7-window")
    config = parse_config(
        tiny_checkpoints.make("qwen2-gqa7-window").config.to_dict()
        | {"dtype": "float32", "intermediate_size": 70}
    )
    with pytest.raises(ConfigError) as caught:
        of_rank(config, Parallel(0, 4))
    assert str(caught.value) == (
        "tensor_parallel_size must be one of 1, 2, got 4: intermediate_size is 70; there are 14 "
        "heads; choose one of these"
    )
    assert rank_sizes(config, 8) == [1, 2]


def test_kv_heads_and_ranks_that_do_not_divide_each_other_are_refused() -> None:
    assert Parallel(3, 4).share_kv(2, "num_kv_heads") == Span(1, 1, 2)
    with pytest.raises(ConfigError, match=r"num_kv_heads must be a divisor of 4, .* got 3"):
        Parallel(0, 4).share_kv(3, "num_kv_heads")
    with pytest.raises(ConfigError, match="num_heads must be divisible by 4, got 6"):
        Parallel(0, 4).share(6, "num_heads")


def test_an_exchange_of_another_size_than_the_model_has_ranks_is_no_model() -> None:
    config = config_of("llama-gqa2-untied")
    with pytest.raises(AssertionError, match="with an exchange of 1"):
        build(config, Parallel(0, 2))
    assert isinstance(build(config, Parallel()), nn.Module)
