"""Ranks hold whole experts in codes where their part of the columns would cut words or groups, and
compute what one process computes of the same codes.  Ranks are threads of one process here."""

import json
from collections import Counter
from pathlib import Path

import jsonschema
import pytest
import test_ranks
import torch
from test_packed_checkpoints import load, packings, quantise, save
from test_ranks import require_equal, together
from torch import Tensor

from paceline.core.parallel import Parallel, Span, rank_of
from paceline.kernels.all_reduce import open_exchange
from paceline.layers.weights.packed_experts import PackedExperts, PackedStack
from paceline.layers.weights.weight_format import held_by
from paceline.models.causal_lm import CausalLM
from paceline.models.config import parse_config
from paceline.models.coverage import require_filled_once
from paceline.models.locate import locate
from paceline.models.packed_layers import Packings
from paceline.models.quantized.repacked import Repacked
from paceline.models.size import as_built
from paceline.plan.explain import explain_model, show

ROOT = Path(__file__).parents[3]
CPU = torch.device("cpu")
SIZES = {"hidden_size": 64, "head_dim": 32, "intermediate_size": 96}
HEADS = {"num_attention_heads": 6, "num_key_value_heads": 3}
QWEN3 = "qwen3_moe-normalised-dense-layer"
# A format, a model, its sizes, ranks: 192 and 96 columns are cut within a chunk of words, blocks of
# 128 columns in the middle.
CASES = {
    "w4a16-groups": ("w4a16-asym", QWEN3, HEADS | {"moe_intermediate_size": 192}, 3),
    "fp8-blocks-beside-a-shared-expert": (
        "fp8-block",
        "qwen2_moe-shared-expert-dense-layer",
        {"moe_intermediate_size": 384, "shared_expert_intermediate_size": 64, "num_experts": 5},
        2,
    ),
    "fp8-rows": ("fp8-rows", QWEN3, HEADS | {"moe_intermediate_size": 96, "num_experts": 4}, 3),
}


def saved(folder: Path, case: str) -> tuple[Path, int]:
    """A quantised checkpoint, and how many ranks share it."""
    format_, model, sizes, ranks = CASES[case]
    quantise(save(folder / "plain", model, **(SIZES | sizes)), format_, folder / "codes")
    return folder / "codes", ranks


def load_ranks(folder: Path, kept: Packings, size: int) -> list[CausalLM]:
    ways = open_exchange(size, test_ranks.TOKENS * 160, dtype=torch.float32, device=CPU)
    return [
        load(folder, kept, parallel=Parallel(rank, size), exchange=way)
        for rank, way in enumerate(ways)
    ]


def experts_of(model: CausalLM) -> list[PackedStack]:
    """Of each layer that has some, all in codes."""
    found = [held for held in held_by(model).values() if isinstance(held.weight, PackedStack)]
    assert all(isinstance(held.format, PackedExperts) for held in found)
    return [held.weight for held in found]


def num_bytes(model: CausalLM) -> int:
    """Of experts."""
    tensors = [each for stack in experts_of(model) for each in stack if isinstance(each, Tensor)]
    return sum(each.nbytes for each in tensors)


@pytest.mark.parametrize("case", CASES)
def test_ranks_with_whole_experts_compute_what_one_process_computes(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, size = saved(tmp_path, case)
    kept, config = packings(folder), parse_config(locate(str(folder)).config)
    assert config.moe is not None
    alone = load(folder, kept)
    read: Counter[str] = Counter()
    tensor = Repacked.tensor
    monkeypatch.setattr(
        Repacked, "tensor", lambda self, name: (read.update([name]), tensor(self, name))[1]
    )
    ranks = load_ranks(folder, kept, size)
    require_equal(together(ranks, config), test_ranks.logits(alone, config))

    total = config.moe.num_experts
    spans = [{stack.experts for stack in experts_of(model)} for model in ranks]
    assert spans == [{Parallel(rank, size).spread(total)} for rank in range(size)]
    assert all(stack.inter.size == stack.inter.total for stack in experts_of(ranks[0]))
    for model, (span,) in zip(ranks, spans, strict=True):
        assert num_bytes(model) * total == num_bytes(alone) * span.size
        require_filled_once(model, model.destinations(), model=case)
    of_experts = {name: count for name, count in read.items() if ".experts." in name}
    named = {name for name in alone.destinations() if ".experts." in name}
    assert of_experts == dict.fromkeys(named, 1), "each is read, and packed, by one rank"


def test_a_rank_with_anothers_experts_is_seen(tmp_path: Path) -> None:
    """That the comparison can fail."""
    folder, size = saved(tmp_path, "fp8-rows")
    kept, config = packings(folder), parse_config(locate(str(folder)).config)
    ranks = load_ranks(folder, kept, size)
    mine, theirs = experts_of(ranks[1])[0], experts_of(ranks[2])[0]
    mine.down_words.copy_(theirs.down_words)
    with pytest.raises(AssertionError, match="relative error"):
        require_equal(together(ranks, config), test_ranks.logits(load(folder, kept), config))


def test_a_plan_says_which_experts_a_rank_holds_and_counts_them(tmp_path: Path) -> None:
    folder, size = saved(tmp_path, "w4a16-groups")
    asked = {"model": str(folder), "max_model_len": 64}
    one, some = (explain_model(asked | {"tp": n}, gpu="h200") for n in (1, size))
    assert some.exchanged is not None
    reason = "a part of their 192 columns would begin or end within a chunk of words or a group"
    kind = "int4, a scale for 32 columns"
    assert some.exchanged.experts == {f"2 of 6 experts, whole: {reason} ({kind})": 2}
    assert f"\n  of 2 layers it holds 2 of 6 experts, whole: {reason}" in show(some)
    schema = json.loads((ROOT / "docs" / "schemas" / "explain.json").read_text())
    said = json.loads(json.dumps(some.to_json()))
    jsonschema.validate(said["ranks"], schema["properties"]["ranks"])
    assert one.exchanged is None
    plain = explain_model(asked | {"tp": size, "load_format": "dummy"}, gpu="h200")
    assert plain.exchanged is not None
    assert plain.exchanged.experts == {"64 of 192 columns of each of 6 experts": 2}
    kept, all_of_them = (
        {name for name in plan.packings.by_module if ".experts." in name} for plan in (some, one)
    )
    assert kept == all_of_them, "none becomes plain numbers for the sake of ranks"
    assert some.fit.weights_bytes < plain.fit.weights_bytes


def test_fewer_experts_than_ranks_become_plain_numbers(tmp_path: Path) -> None:
    sizes = {"moe_intermediate_size": 192, "num_experts": 2}
    quantise(save(tmp_path / "plain", QWEN3, **SIZES, **HEADS, **sizes), "w4a16", tmp_path / "c")
    kept, config = packings(tmp_path / "c"), parse_config(locate(str(tmp_path / "c")).config)
    built = as_built(kept, config, Parallel(2, 3))
    assert {name for name in kept.by_module if ".experts." in name}.isdisjoint(built.by_module)
    assert "become plain numbers, since no layer reads them as codes" in str(built)


def test_things_that_stay_whole_are_spread_evenly_the_first_ranks_have_one_more() -> None:
    spans = [Parallel(rank, 4).spread(10) for rank in range(4)]
    assert spans == [Span(0, 3, 10), Span(3, 3, 10), Span(6, 2, 10), Span(8, 2, 10)]
    assert rank_of(Parallel(2, 4).share(96, "columns")) == Parallel(2, 4)
