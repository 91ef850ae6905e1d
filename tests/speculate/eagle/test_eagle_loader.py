"""Heads load as they are released, and every way one can be wrong is told by name."""

import shutil
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import eagle_checkpoints as heads
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from paceline.core.errors import WeightsError
from paceline.core.parallel import Parallel
from paceline.models.causal_lm import CausalLM
from paceline.models.config import parse_config
from paceline.models.loader import load_model
from paceline.models.locate import ModelSource, locate
from paceline.speculate.eagle.config import parse_eagle_config
from paceline.speculate.eagle.head import EagleHead
from paceline.speculate.eagle.loader import load_eagle_head

CPU = torch.device("cpu")
Change = Callable[[dict[str, Tensor]], object]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> CausalLM:
    folder = tmp_path_factory.mktemp("target")
    heads.target_model().save_pretrained(folder)
    source = locate(str(folder))
    return load_model(
        source, parse_config(source.config), parallel=Parallel(), device=CPU, dtype=torch.float32
    )


def stored_at(folder: Path) -> ModelSource:
    (folder / "config.json").write_text("{}")
    return locate(str(folder))


def load(
    folder: Path, target: CausalLM, raw: dict[str, Any] | None = None, **options: Any
) -> EagleHead:
    raw = heads.EAGLE3 if raw is None else raw
    settings = {"dtype": torch.float32, "max_positions": 64} | options
    return load_eagle_head(
        stored_at(folder),
        parse_eagle_config(raw, "EAGLE3" if "draft_vocab_size" in raw else "EAGLE"),
        target,
        parallel=Parallel(),
        device=CPU,
        **settings,
    )


def load_changed(folder: Path, target: CausalLM, change: Change) -> EagleHead:
    named = heads.eagle3_tensors(heads.EAGLE3)
    change(named)
    save_file(named, folder / "model.safetensors")
    return load(folder, target)


def assert_same(one: EagleHead, other: EagleHead) -> None:
    for mine, theirs in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    assert (one.d2t is None) == (other.d2t is None)
    assert one.d2t is None or torch.equal(one.d2t, other.d2t)


def renamed(old: str, new: str) -> Change:
    def change(named: dict[str, Tensor]) -> None:
        for name in [name for name in named if name.startswith(old)]:
            named[new + name.removeprefix(old)] = named.pop(name)

    return change


def test_a_head_in_torch_format_loads_like_one_in_safetensors(
    tmp_path: Path, target: CausalLM
) -> None:
    both = {name: tmp_path / name for name in ("new", "old")}
    for folder in both.values():
        folder.mkdir()
    named = heads.eagle3_tensors(heads.EAGLE3)
    torch.save(named, both["old"] / "pytorch_model.bin")
    old = load(both["old"], target)
    assert_same(old, load_changed(both["new"], target, lambda _: None))
    shutil.rmtree(both["old"])
    assert old.norm is not None
    assert torch.equal(old.norm.weight, named["norm.weight"])


@pytest.mark.parametrize(
    "change",
    [
        renamed("midlayer.", "layers.0."),
        renamed("midlayer.", "model.layers.0."),
        lambda named: named.update({"embed_tokens.weight": torch.full((96, 48), 7.0)}),
        lambda named: named.update({"midlayer.self_attn.rotary_emb.inv_freq": torch.ones(8)}),
        lambda named: named.pop("t2d"),
        lambda named: named.update(d2t=named["d2t"].to(torch.int32)),
    ],
    ids=["layers.0", "model.", "embedding", "inv_freq", "no-t2d", "int32"],
)
def test_other_forms_of_a_head_load_alike(tmp_path: Path, target: CausalLM, change: Change) -> None:
    for name in ("plain", "other"):
        (tmp_path / name).mkdir()
    plain = load_changed(tmp_path / "plain", target, lambda _: None)
    assert_same(load_changed(tmp_path / "other", target, change), plain)


def test_the_older_names_of_the_norms_before_fc_are_read(tmp_path: Path, target: CausalLM) -> None:
    raw = heads.EAGLE3 | {"use_aux_norm": True}
    named = heads.eagle3_tensors(raw | {"fc_norm": True})
    weights = [named.pop(f"fc_norm.{i}.weight") for i in range(3)]
    old = ("aux_norm_high", "aux_norm_low", "aux_norm_mid")
    order = (weights[2], weights[0], weights[1])
    named |= {f"{name}.weight": weight for name, weight in zip(old, order, strict=True)}
    save_file(named, tmp_path / "model.safetensors")
    head = load(tmp_path, target, raw)
    assert head.fusion is not None
    for norm, weight in zip(head.fusion.norms, weights, strict=True):
        assert torch.equal(norm.weight, weight)


def test_a_later_layer_with_both_norms_takes_the_one_on_its_stream(
    tmp_path: Path, target: CausalLM
) -> None:
    raw = heads.EAGLE3 | {"num_hidden_layers": 2}
    named = heads.eagle3_tensors(raw)
    named["layers.1.input_layernorm.weight"] = torch.zeros(48)
    save_file(named, tmp_path / "model.safetensors")
    assert load(tmp_path, target, raw).later[0].input_norm.weight.abs().min() > 0


def test_copies_of_the_targets_tables_beside_an_eagle1_head_are_not_read(
    tmp_path: Path, target: CausalLM
) -> None:
    named = heads.eagle1_tensors(heads.HEAD)
    named |= {"embed_tokens.weight": torch.ones(96, 48), "lm_head.weight": torch.ones(96, 48)}
    save_file(named, tmp_path / "model.safetensors")
    head = load(tmp_path, target, heads.HEAD)
    features = torch.randn(2, 48)
    assert torch.equal(head.logits(features), target.logits(features))


def test_an_eagle1_head_without_a_stored_bias_has_none(tmp_path: Path, target: CausalLM) -> None:
    named = heads.eagle1_tensors(heads.HEAD | {"bias": False})
    save_file(named, tmp_path / "model.safetensors")
    assert "fc.bias" not in load(tmp_path, target, heads.HEAD).destinations()


def test_a_full_draft_vocabulary_needs_no_map(tmp_path: Path, target: CausalLM) -> None:
    raw = heads.EAGLE3 | {"draft_vocab_size": heads.VOCAB}
    named = heads.eagle3_tensors(raw)
    del named["d2t"], named["t2d"]
    save_file(named, tmp_path / "model.safetensors")
    head = load(tmp_path, target, raw)
    assert head.d2t is not None
    assert head.d2t.tolist() == [0] * heads.VOCAB


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            lambda named: named.pop("d2t"),
            r"with a tensor d2t: its vocabulary has 40 of 96 tokens, got none; download the head",
        ),
        (
            lambda named: named["d2t"].__setitem__(39, 57),
            r"'d2t' must be offsets to target ids 0 to 95, got 96; check that the head's",
        ),
        (
            lambda named: named["d2t"].__setitem__(0, -1),
            r"'d2t' must be offsets to target ids 0 to 95, got -1",
        ),
        (
            lambda named: named["d2t"].copy_(named["d2t"] + torch.arange(40)),
            r"'d2t' must be offsets to",
        ),
        (
            lambda named: named["d2t"].__setitem__(7, named["d2t"][6] - 1),
            r"'d2t' must be offsets to 40 different target ids, got 39",
        ),
        (
            lambda named: named.update(t2d=named["t2d"].roll(1)),
            r"'t2d' must be true at the target ids of d2t alone, got \d+ that differ",
        ),
        (
            lambda named: named.update(t2d=torch.zeros(40, dtype=torch.bool)),
            r"'t2d' must be BOOL \[96\], got BOOL \[40\]",
        ),
        (
            lambda named: named.update(d2t=torch.zeros(40)),
            r"'d2t' must be I64 or I32 \[40\], got F32 \[40\]",
        ),
        (
            lambda named: named.update(d2t=torch.zeros(41, dtype=torch.int64)),
            r"'d2t' must be I64 or I32 \[40\], got I64 \[41\]",
        ),
        (
            lambda named: named.pop("midlayer.hidden_norm.weight"),
            r"weights of '.*' must be the 13 tensors.* 1 missing \(layers\.0\.hidden_norm\.weight",
        ),
        (
            lambda named: named.update({"fc2.weight": torch.zeros(2)}),
            r"got 1 unexpected \(fc2\.weight\)",
        ),
        (
            lambda named: named.update({"fc.weight": torch.zeros(48, 96)}),
            r"'fc\.weight' must be floating point \[48, 144\], got F32 \[48, 96\]",
        ),
    ],
)
def test_a_wrong_checkpoint_is_refused(
    tmp_path: Path, target: CausalLM, change: Change, text: str
) -> None:
    with pytest.raises(WeightsError, match=text):
        load_changed(tmp_path, target, change)


def test_an_input_norm_that_an_eagle1_head_cannot_have_is_refused(
    tmp_path: Path, target: CausalLM
) -> None:
    named = heads.eagle1_tensors(heads.HEAD) | {"layers.0.input_layernorm.weight": torch.ones(48)}
    save_file(named, tmp_path / "model.safetensors")
    with pytest.raises(WeightsError, match=r"1 unexpected \(layers\.0\.input_layernorm\.weight\)"):
        load(tmp_path, target, heads.HEAD)


def test_a_head_without_its_own_vocabulary_brings_no_map(tmp_path: Path, target: CausalLM) -> None:
    save_file(heads.eagle3_tensors(heads.EAGLE3), tmp_path / "model.safetensors")
    with pytest.raises(WeightsError, match=r"3 unexpected \(d2t, lm_head\.weight, t2d\)"):
        load(tmp_path, target, heads.EAGLE3 | {"draft_vocab_size": None})


def test_a_head_of_another_width_must_ship_its_embedding(tmp_path: Path, target: CausalLM) -> None:
    raw = heads.EAGLE3 | {"hidden_size": 32, "target_hidden_size": 48}
    named = heads.eagle3_tensors(raw)
    del named["embed_tokens.weight"]
    save_file(named, tmp_path / "model.safetensors")
    with pytest.raises(WeightsError, match=r"1 missing \(embed_tokens\.weight\)"):
        load(tmp_path, target, raw)


def test_a_folder_without_weights_and_a_shape_are_refused(tmp_path: Path, target: CausalLM) -> None:
    with pytest.raises(WeightsError, match=r"must be \*\.safetensors files, got none"):
        load(tmp_path, target)
    shape = locate("eagle3-llama-3.1-8b")
    with pytest.raises(WeightsError, match=r"got a shape; add --load-format dummy"):
        load_eagle_head(
            shape,
            parse_eagle_config(shape.config, "EAGLE3"),
            target,
            parallel=Parallel(),
            device=CPU,
            dtype=torch.float32,
            max_positions=64,
        )


def test_a_dummy_head_is_deterministic_and_leaves_the_target_alone(
    tmp_path: Path, target: CausalLM
) -> None:
    before = [parameter.clone() for parameter in target.parameters()]

    def dummy(seed: int) -> EagleHead:
        return load(tmp_path, target, load_format="dummy", seed=seed)

    first, again, other = dummy(0), dummy(0), dummy(1)
    assert_same(first, again)
    assert first.head is not None
    assert other.head is not None
    assert not torch.equal(first.head.weight, other.head.weight)
    assert first.norm is not None
    assert (first.norm.weight == 1.0).all()
    assert all(map(torch.equal, before, target.parameters()))


def test_a_dummy_vocabulary_is_spread_over_the_targets(tmp_path: Path, target: CausalLM) -> None:
    d2t = load(tmp_path, target, load_format="dummy").d2t
    assert d2t is not None
    ids = (d2t + torch.arange(heads.DRAFT_VOCAB)).tolist()
    gaps = {after - before for before, after in pairwise(ids)}
    assert ids[0] == 0
    assert ids[-1] < heads.VOCAB
    assert gaps == {2, 3}


def test_rope_tables_have_the_asked_number_of_rows_beyond_the_heads_own_context(
    tmp_path: Path, target: CausalLM
) -> None:
    head = load(tmp_path, target, load_format="dummy", max_positions=50)
    assert head.first.attention.cos_sin.shape == (50, 16)
