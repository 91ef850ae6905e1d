"""What several processes cannot serve is refused with what they can, before a weight is read; so
are processes that are not alike."""

import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from example_processor import LengthDecay
from llm_cases import Checkpoint, make_checkpoint
from msgspec import structs

from paceline.core.errors import ConfigError, PacelineError
from paceline.llm import ranks as rank_module
from paceline.llm.boot import Knobs, planned_pages
from paceline.llm.llm import LLM
from paceline.llm.prepare import prepare
from paceline.llm.rank_setup import planned, require_alike, started
from paceline.plan.contradictions import refuse_ranks
from paceline.plan.explain import explain_model, show


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (
            {"tensor_parallel_size": 3},
            r"tensor_parallel_size must be one of 1, 2, got 3: there are 4 heads; there are 2 KV "
            r"heads; choose one of these",
        ),
        (
            {"tensor_parallel_size": 5},
            r"must be one of 1, 2, 4, got 5: intermediate_size is 72; there are 4 heads; ",
        ),
        ({"tp": 65}, r"tensor_parallel_size must be from 1 to 64 processes, got 65"),
        (
            {"compare_ranks_every": 4},
            r"compare_ranks_every must be given with --tensor-parallel-size, got 4 with one",
        ),
    ],
)
def test_a_number_that_cannot_be_is_refused_before_weights_are_read(
    checkpoint: Checkpoint, options: dict[str, Any], told: str, tmp_path: Path
) -> None:
    for path in checkpoint.folder.iterdir():
        if path.suffix != ".safetensors":
            (tmp_path / path.name).write_bytes(path.read_bytes())
    weights = [path.name for path in checkpoint.folder.glob("*.safetensors")]
    for name in weights:
        (tmp_path / name).write_bytes(b"no weights")
    with pytest.raises(ConfigError, match=told):
        LLM(str(tmp_path), threads=1, **options)


def test_a_plug_in_that_a_rank_does_not_find_is_told(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = ModuleType("only_here")
    module.LengthDecay = LengthDecay  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "only_here", module)
    told = r"^rank 1 of the model must be running, got ended: logits processor .*only_here"
    with pytest.raises(PacelineError, match=told):
        LLM(
            str(checkpoint.folder),
            threads=1,
            tensor_parallel_size=2,
            logits_processors=["only_here:LengthDecay"],
        )


def test_several_gpus_are_planned_and_no_more_are_taken_than_there_are() -> None:
    model = {"model": "llama-3.1-8b", "max_num_seqs": 16, "max_model_len": 4096}
    one, two, sixteen = (explain_model(model | {"tp": n}, gpu="h200") for n in (1, 2, 16))
    assert two.fit.total_bytes == one.fit.total_bytes  # each has a GPU of its own
    assert one.fit.weights_bytes / 2 < two.fit.weights_bytes < one.fit.weights_bytes
    assert two.fit.groups[0].page_bytes * 2 == one.fit.groups[0].page_bytes
    assert one.exchanged is None
    assert two.exchanged is not None
    assert sixteen.exchanged is not None
    assert (two.exchanged.heads, two.exchanged.kv_heads) == (16, 4)
    assert (sixteen.exchanged.heads, sixteen.exchanged.kv_heads) == (2, 1)
    assert "KV heads that ranks side by side share" in sixteen.exchanged.whole
    text = show(two)
    assert "each holds 16 heads and 4 KV heads of a layer, and all of the embedding, norms" in text
    assert "64 all-reduces, in which each sends 524288 bytes per token" in text  # 64 * 4096 * 2
    assert "an all-gather of logits, 128256 bytes per row that is sampled" in text
    refuse_ranks(two.resolution.options, two.config, 2)
    with pytest.raises(ConfigError, match="tensor_parallel_size must be at most 1, the GPUs that"):
        refuse_ranks(two.resolution.options, two.config, 1)


def test_a_plan_for_a_cpu_is_that_of_one_of_the_processes(checkpoint: Checkpoint) -> None:
    asked = {"model": str(checkpoint.folder), "device": "cpu", "max_num_seqs": 4}
    one = explain_model(asked, gpu=None)
    two = explain_model(asked | {"tp": 2}, gpu=None)
    assert two.fit.weights_bytes < one.fit.weights_bytes < 2 * two.fit.weights_bytes
    assert two.fit.groups[0].page_bytes * 2 == one.fit.groups[0].page_bytes
    assert two.fit.total_bytes == one.fit.total_bytes // 2
    assert two.fit.workspace_bytes > one.fit.workspace_bytes / 2  # the exchange among it


def test_weights_of_other_files_are_other_weights(tmp_path: Path) -> None:
    checkpoint = make_checkpoint("llama-gqa2-untied", tmp_path)
    prepared = prepare({"model": str(checkpoint.folder)})
    pages = planned_pages(prepared, Knobs())
    first = planned(prepared, pages, None)
    assert first == planned(prepared, pages, None)
    shard = sorted(tmp_path.glob("*.safetensors"))[0]
    shard.write_bytes(shard.read_bytes() + b"\0")
    assert planned(prepared, pages, None).weights != first.weights
    assert planned(prepared, pages, None).options == first.options


def test_files_of_dense_modules_are_weights_and_the_targets_count_once(tmp_path: Path) -> None:
    """MTP's drafter is of the target's own files."""
    make_checkpoint("llama-gqa2-untied", tmp_path)
    (tmp_path / "2_Dense").mkdir()
    weights = tmp_path / "2_Dense" / "model.safetensors"
    weights.write_bytes(b"\0")
    plain = prepare({"model": str(tmp_path)})
    dense = {"2_Dense": {"in_features": 64}}
    own = {"modules": [{"type": "a.Dense"}], "pooling_config": {"mode": "cls"}, "dense": dense}
    limit, prompts = {"max_seq_length": 16}, {"prompts": {"q": "Q: "}, "default_prompt_name": "q"}
    own |= {"transformer_config": limit, "prompts_config": prompts}
    own |= {"tokenizer_config": {"model_max_length": 16}}

    def told(drafted: bool = False, **own: Any) -> str:
        source = replace(plain.source, **own)
        drafter = SimpleNamespace(drafter=SimpleNamespace(source=source)) if drafted else None
        return planned(replace(plain, source=source, speculation=drafter), (), None).weights

    first = told()
    assert len({first, *(told(**{name: said}) for name, said in own.items())}) == 7
    assert told(drafted=True) == first
    before = told(**own)
    weights.write_bytes(b"\0\0")
    assert told(**own) != before


def test_every_difference_of_every_rank_is_told() -> None:
    ours = {"dtype": "y", "torch": "2.11", "weights": "a"}
    require_alike([ours, ours, ours])
    with pytest.raises(ConfigError) as caught:
        require_alike([ours, {**ours, "torch": "2.9"}, ours, {"torch": "2.11", "weights": "b"}])
    assert str(caught.value) == (
        "ranks of the model must be alike, got of rank 1 torch 2.9, not 2.11; of rank 3 dtype "
        "None, not y; of rank 3 weights b, not a; start all of them from one installation and one "
        "copy of the weights"
    )


@pytest.mark.parametrize("what", ["versions", "weights"])
def test_a_rank_that_differs_is_refused_before_it_loads(
    checkpoint: Checkpoint, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here the leader believes that it is another."""
    ours = started()
    other = structs.replace(ours, versions=ours.versions | {"torch": "1.0"}, layout=ours.layout + 1)
    told = r"got of rank 1 layout of steps \d+, not \d+; of rank 1 torch \S+, not 1\.0; start all"
    if what == "versions":
        monkeypatch.setattr(rank_module, "started", lambda: other)
    else:
        told = r"got of rank 1 weights \w+, not another; start all"
        exact = rank_module.planned
        monkeypatch.setattr(
            rank_module, "planned", lambda *each: structs.replace(exact(*each), weights="another")
        )
    loaded: list[str] = []
    monkeypatch.setattr(
        "paceline.llm.stored_weights.load_model", lambda *_, **__: loaded.append("it")
    )
    with pytest.raises(ConfigError, match=told):
        LLM(str(checkpoint.folder), threads=1, tensor_parallel_size=2)
    assert not loaded
