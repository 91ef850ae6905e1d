"""Weights arrive where they belong, and every way a checkpoint can be wrong is told by name."""

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import tiny_checkpoints
import torch
import torch.nn.functional as F
import transformers
from fake_context import FakeContext
from safetensors.torch import load_file, save_file
from torch import Tensor

from paceline.core.errors import WeightsError
from paceline.core.lfs import is_lfs_pointer
from paceline.core.model.config import ModelConfig
from paceline.core.parallel import Parallel
from paceline.models.causal_lm import CausalLM
from paceline.models.checkpoint import open_checkpoint
from paceline.models.config import parse_config
from paceline.models.loader import load_model
from paceline.models.locate import locate
from paceline.models.weight_files import INDEX_NAME

CASE = "llama-gqa2-untied"
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    tiny_checkpoints.save(CASE, folder)
    return folder


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "copy"))


def read_config(folder: Path) -> ModelConfig:
    source = locate(str(folder))
    return parse_config(source.config, source.generation_config)


def load(folder: Path, config: ModelConfig | None = None, **options: object) -> CausalLM:
    settings = {"dtype": torch.float32} | options
    return load_model(
        locate(str(folder)),
        config or read_config(folder),
        parallel=Parallel(),
        device=CPU,
        **settings,
    )


def shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def rewrite(folder: Path, change: Callable[[dict[str, Tensor]], None]) -> None:
    """Apply `change` to all tensors and store them as one file without an index."""
    tensors: dict[str, Tensor] = {}
    for path in shards(folder):
        tensors |= load_file(path)
        path.unlink()
    (folder / INDEX_NAME).unlink(missing_ok=True)
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def test_the_checkpoint_of_these_tests_has_several_shards(saved: Path) -> None:
    assert len(shards(saved)) > 2
    assert (saved / INDEX_NAME).is_file()


def test_one_file_and_many_shards_load_alike(folder: Path) -> None:
    sharded = load(folder)
    rewrite(folder, lambda tensors: None)
    single = load(folder)
    for ours, theirs in zip(sharded.parameters(), single.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_weights_are_cast_to_the_asked_dtype(folder: Path) -> None:
    exact, rounded = load(folder), load(folder, dtype=torch.float16)
    for wide, narrow in zip(exact.parameters(), rounded.parameters(), strict=True):
        assert torch.equal(wide.half(), narrow)


def test_loaded_weights_do_not_depend_on_the_files_any_more(folder: Path) -> None:
    model = load(folder)
    before = [parameter.clone() for parameter in model.parameters()]
    for path in shards(folder):
        path.write_bytes(b"\0" * path.stat().st_size)
    assert all(map(torch.equal, before, model.parameters()))


def test_a_missing_tensor_is_named(folder: Path) -> None:
    rewrite(folder, lambda tensors: tensors.pop("model.layers.1.self_attn.k_proj.weight"))
    with pytest.raises(WeightsError, match=r"1 missing \(model\.layers\.1\.self_attn\.k_proj\.wei"):
        load(folder)


def test_an_untied_model_without_a_head_is_refused(folder: Path) -> None:
    rewrite(folder, lambda tensors: tensors.pop("lm_head.weight"))
    with pytest.raises(WeightsError, match=r"1 missing \(lm_head\.weight\)"):
        load(folder)


def test_an_unexpected_tensor_is_named(folder: Path) -> None:
    rewrite(folder, lambda tensors: tensors.update({"model.extra": torch.zeros(2)}))
    with pytest.raises(WeightsError, match=r"got 1 unexpected \(model\.extra\); check that"):
        load(folder)


def test_missing_and_unexpected_tensors_are_listed_up_to_ten(folder: Path) -> None:
    config = read_config(folder)
    config = replace(config, layers=config.layers[:1] * 4)
    rewrite(folder, lambda tensors: tensors.update({"odd": torch.zeros(2)}))
    with pytest.raises(WeightsError) as caught:
        load(folder, config)
    text = str(caught.value)
    assert "18 missing (" in text
    assert "and 8 more) and 1 unexpected (odd)" in text
    assert text.count("model.layers.") == 10


def test_a_tensor_of_another_shape_is_named_with_both_shapes(folder: Path) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    rewrite(folder, lambda tensors: tensors.update({name: torch.zeros(3, 5)}))
    with pytest.raises(
        WeightsError, match=r"up_proj\.weight' must be .*\[72, 64\], got F32 \[3, 5"
    ):
        load(folder)


def test_an_integer_tensor_is_refused(folder: Path) -> None:
    rewrite(folder, lambda t: t.update({"model.norm.weight": torch.zeros(64, dtype=torch.int8)}))
    with pytest.raises(
        WeightsError, match=r"'model\.norm\.weight' must be floating.*got I8 \[64\]"
    ):
        load(folder)


@pytest.mark.parametrize("keep", [0, 5, 300, -8])
def test_a_truncated_shard_is_named(folder: Path, keep: int) -> None:
    victim = shards(folder)[1]
    victim.write_bytes(victim.read_bytes()[:keep])
    with pytest.raises(WeightsError, match=f"{victim.name} must be a complete safetensors file"):
        load(folder)


def test_an_absent_shard_is_named(folder: Path) -> None:
    victim = shards(folder)[1]
    victim.unlink()
    with pytest.raises(WeightsError, match=f"must be every shard.*got no {victim.name}"):
        load(folder)


@pytest.mark.parametrize("text", ["{", "[]", '{"weight_map": 3}', "{}"])
def test_a_damaged_index_is_named(folder: Path, text: str) -> None:
    (folder / INDEX_NAME).write_text(text)
    with pytest.raises(WeightsError, match=r"index\.json must be an index with a weight_map"):
        load(folder)


def test_a_folder_without_weights_is_refused(folder: Path) -> None:
    for path in [*shards(folder), folder / INDEX_NAME]:
        path.unlink()
    (folder / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(WeightsError, match=r"must be \*\.safetensors files, got none; convert"):
        load(folder)


@pytest.mark.parametrize("name", ["adapter_model.safetensors", "consolidated.safetensors"])
def test_a_folder_with_other_weights_alone_names_them(folder: Path, name: str) -> None:
    for path in folder.glob("model*"):
        path.unlink()
    save_file({"w": torch.zeros(2)}, folder / name)
    with pytest.raises(WeightsError) as caught:
        load(folder)
    assert str(caught.value) == (
        f"weights in {folder} must be *.safetensors files, got {name} alone; "
        "add the model's own: these are not read"
    )


def test_a_folder_of_gguf_files_is_refused_with_what_to_name(folder: Path) -> None:
    for path in [*shards(folder), folder / INDEX_NAME]:
        path.unlink()
    (folder / "model.Q4_K_M.gguf").write_bytes(b"GGUF")
    text = r"files, got model\.Q4_K_M\.gguf, which is GGUF; name the model it was converted from"
    with pytest.raises(WeightsError, match=text):
        load(folder)
    file = str(folder / "model.Q4_K_M.gguf")
    with pytest.raises(WeightsError, match=r"model must be \*\.safetensors files, got .* is GGUF"):
        locate(file)


def test_a_git_lfs_pointer_is_told_from_a_damaged_file(folder: Path) -> None:
    victim = shards(folder)[0]
    victim.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    text = f"{victim.name} must be .*got a Git LFS pointer.*; run git lfs pull there"
    with pytest.raises(WeightsError, match=text):
        load(folder)


def test_what_cannot_be_read_is_no_git_lfs_pointer(folder: Path) -> None:
    assert not is_lfs_pointer(folder)
    assert not is_lfs_pointer(folder / "absent")


def test_a_shape_has_no_weights_to_load() -> None:
    source = locate("gemma-3-1b")
    with pytest.raises(WeightsError, match=r"'gemma-3-1b' must be .*--load-format dummy"):
        load_model(
            source,
            parse_config(source.config),
            parallel=Parallel(),
            device=CPU,
            dtype=torch.float32,
        )


def test_stored_tensors_that_are_computed_are_not_unexpected(folder: Path) -> None:
    layer = "model.layers.0.self_attn"
    junk = (f"{layer}.rotary_emb.inv_freq", f"{layer}.masked_bias", f"{layer}.bias")
    junk += ("rotary_emb.inv_freq", f"{layer}.rotary_emb.cos_cached")
    rewrite(folder, lambda tensors: tensors.update({name: torch.zeros(8) for name in junk}))
    load(folder)


@pytest.mark.parametrize("name", ["vision_tower.norm.weight", "model.vision_tower.norm.weight"])
def test_a_tensor_that_another_architecture_ignores_is_unexpected(folder: Path, name: str) -> None:
    rewrite(folder, lambda tensors: tensors.update({name: torch.zeros(8)}))
    with pytest.raises(WeightsError, match=rf"got 1 unexpected \({re.escape(name)}\)"):
        load(folder)


def test_names_without_the_models_prefix_are_read(folder: Path) -> None:
    def shorten(tensors: dict[str, Tensor]) -> None:
        for name in list(tensors):
            tensors[name.removeprefix("model.")] = tensors.pop(name)

    before = load(folder)
    rewrite(folder, shorten)
    assert all(map(torch.equal, before.parameters(), load(folder).parameters()))


def test_a_tensor_under_two_names_is_refused(folder: Path) -> None:
    rewrite(folder, lambda tensors: tensors.update({"norm.weight": torch.zeros(64)}))
    with pytest.raises(
        WeightsError, match=r"one tensor for model\.norm\.weight, got (model\.)?norm"
    ):
        load(folder)


@pytest.fixture
def tied(tmp_path: Path) -> Path:
    tiny_checkpoints.save("llama-gqa7-tied", tmp_path)
    return tmp_path


def test_a_copy_of_a_tied_head_is_read_as_the_embedding(tied: Path) -> None:
    table = "model.embed_tokens.weight"
    rewrite(tied, lambda tensors: tensors.update({"lm_head.weight": tensors[table].clone()}))
    model = load(tied)
    assert model.head.held is None
    hidden = torch.randn(3, 112)
    wanted = F.linear(hidden, model.decoder.embedding.weight)
    torch.testing.assert_close(model.logits(hidden), wanted)


def test_a_tied_model_that_stores_its_head_alone_is_read(tied: Path) -> None:
    before = load(tied).decoder.embedding.weight
    table = "model.embed_tokens.weight"
    rewrite(tied, lambda tensors: tensors.update({"lm_head.weight": tensors.pop(table)}))
    assert torch.equal(load(tied).decoder.embedding.weight, before)


def test_a_tied_head_of_other_numbers_is_refused_and_untied_it_is_read(tied: Path) -> None:
    head = torch.randn(160, 112)
    rewrite(tied, lambda tensors: tensors.update({"lm_head.weight": head}))
    with pytest.raises(WeightsError) as caught:
        load(tied)
    assert str(caught.value) == (
        "tensor 'lm_head.weight' must be equal to model.embed_tokens.weight, which config.json "
        'ties it to, got other numbers; write "tie_word_embeddings": false into config.json to '
        "use both"
    )
    rewrite(tied, lambda tensors: tensors.update({"lm_head.weight": head[:8].clone()}))
    with pytest.raises(WeightsError, match=r"ties it to, got \[8, 112\], not \[160, 112\];"):
        load(tied)
    rewrite(tied, lambda tensors: tensors.update({"lm_head.weight": head}))
    untied = replace(read_config(tied), tie_word_embeddings=False)
    assert torch.equal(load(tied, untied).head.weight, head)


@pytest.mark.parametrize("case", ["llama-gqa7-tied", CASE])
@pytest.mark.parametrize("rows", [150, 160, 170])
def test_tables_of_another_padding_are_cut_or_end_in_copies_of_their_last_row(
    tmp_path: Path, case: str, rows: int
) -> None:
    tiny_checkpoints.save(case, tmp_path)
    plain = load(tmp_path)
    seen = load(tmp_path, replace(read_config(tmp_path), vocab_size=rows, stored_vocab_size=160))
    shared = min(rows, 160)
    for ours, stored in zip(seen.parameters(), plain.parameters(), strict=True):
        if stored.shape[0] != 160:  # no table
            continue
        assert ours.shape[0] == rows
        assert torch.equal(ours[:shared], stored[:shared])
        assert all(torch.equal(row, stored[-1]) for row in ours[160:])


def test_other_files_beside_the_weights_are_not_read(folder: Path) -> None:
    before = load(folder)
    rewrite(folder, lambda tensors: None)
    zeros = {name: torch.zeros(2) for name in ("model.norm.weight", "lora_A")}
    for name in ("adapter_model", "optimizer", "another"):
        save_file(zeros, folder / f"{name}.safetensors")
    assert all(map(torch.equal, before.parameters(), load(folder).parameters()))
    (folder / "model.safetensors").rename(folder / "weights.safetensors")
    (folder / "another.safetensors").unlink()
    assert all(map(torch.equal, before.parameters(), load(folder).parameters()))


def test_a_tensor_in_two_files_is_named_with_both(folder: Path) -> None:
    rewrite(folder, lambda tensors: None)
    (folder / "model.safetensors").rename(folder / "weights.safetensors")
    save_file({"model.norm.weight": torch.zeros(64)}, folder / "extra.safetensors")
    with pytest.raises(WeightsError) as caught:
        load(folder)
    assert str(caught.value) == (
        "tensor 'model.norm.weight' must be in one of the weight files, got in extra.safetensors "
        "and in weights.safetensors; remove the file that is not part of the model"
    )


def test_shards_are_read_without_their_index_and_a_missing_one_is_named(folder: Path) -> None:
    before = load(folder)
    (folder / INDEX_NAME).unlink()
    assert all(map(torch.equal, before.parameters(), load(folder).parameters()))
    victim = folder / f"model-00002-of-{len(shards(folder)):05}.safetensors"
    victim.unlink()
    with pytest.raises(WeightsError, match=f"must be every shard.*got no {victim.name}"):
        load(folder)


def test_one_whole_file_comes_before_an_index_that_does_not_name_it(folder: Path) -> None:
    """As in transformers: someone saved again into the folder of a sharded model."""
    tensors: dict[str, Tensor] = {}
    for path in shards(folder):
        tensors |= load_file(path)
    tensors["model.norm.weight"] = torch.full((64,), 0.5)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert torch.equal(load(folder).decoder.norm.weight, theirs.model.norm.weight)


def test_the_language_part_of_a_multimodal_gemma_is_loaded(tmp_path: Path) -> None:
    text = tiny_checkpoints.make("gemma3-windows-two-ropes")
    config = transformers.Gemma3Config(
        text_config=text.config.to_dict() | {"final_logit_softcapping": None},
        vision_config={
            "hidden_size": 8,
            "intermediate_size": 8,
            "num_hidden_layers": 1,
            "num_attention_heads": 1,
            "image_size": 28,
            "patch_size": 14,
        },
        mm_tokens_per_image=4,
    )
    config._attn_implementation = "eager"
    theirs = transformers.Gemma3ForConditionalGeneration(config).eval().requires_grad_(False)
    theirs.save_pretrained(tmp_path)
    ours_config = read_config(tmp_path)
    ours = load(tmp_path, ours_config)
    tokens = torch.arange(4, 40)
    hidden = ours(tokens, torch.arange(36), FakeContext(ours_config)).hidden
    expected = theirs(input_ids=tokens[None]).logits[0]
    error = (ours.logits(hidden) - expected).abs().max() / expected.abs().max()
    assert error < 1e-5


def test_the_language_part_of_a_mistral_3_is_loaded(tmp_path: Path) -> None:
    sizes = tiny_checkpoints.CASES["mistral-window-odd-heads"][1]
    config = transformers.Mistral3Config(
        text_config=sizes | {"model_type": "mistral"},
        vision_config={
            "model_type": "pixtral",
            "hidden_size": 8,
            "intermediate_size": 8,
            "num_hidden_layers": 1,
            "num_attention_heads": 1,
            "head_dim": 8,
            "image_size": 28,
            "patch_size": 14,
        },
        tie_word_embeddings=False,
    )
    config._attn_implementation = "eager"
    theirs = transformers.Mistral3ForConditionalGeneration(config).eval().requires_grad_(False)
    theirs.save_pretrained(tmp_path)
    ours_config = read_config(tmp_path)
    ours = load(tmp_path, ours_config)
    tokens = torch.arange(4, 40)
    hidden = ours(tokens, torch.arange(36), FakeContext(ours_config)).hidden
    expected = theirs(input_ids=tokens[None]).logits[0]
    error = (ours.logits(hidden) - expected).abs().max() / expected.abs().max()
    assert error < 1e-5


def test_the_language_part_of_a_llama_4_is_loaded(tmp_path: Path) -> None:
    text = tiny_checkpoints.make("llama4_text-chunk11")
    config = transformers.Llama4Config(
        text_config=text.config.to_dict(),
        vision_config={
            "hidden_size": 8,
            "intermediate_size": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 1,
            "image_size": 28,
            "patch_size": 14,
            "vision_output_dim": 8,
            "projector_input_dim": 8,
            "projector_output_dim": 8,
        },
    )
    theirs = transformers.Llama4ForConditionalGeneration(config)
    theirs.language_model.load_state_dict(text.state_dict())
    theirs.save_pretrained(tmp_path)
    ours_config = read_config(tmp_path)
    ours = load(tmp_path, ours_config)
    tokens = torch.arange(4, 40)
    hidden = ours(tokens, torch.arange(36), FakeContext(ours_config)).hidden
    expected = text(input_ids=tokens[None]).logits[0]
    error = (ours.logits(hidden) - expected).abs().max() / expected.abs().max()
    assert error < 1e-5


def test_dummy_weights_are_deterministic_finite_and_need_no_files() -> None:
    source = locate("llama-3.2-1b")
    config = parse_config(
        source.config
        | {"num_hidden_layers": 1, "vocab_size": 50, "hidden_size": 128, "intermediate_size": 64}
    )

    def dummy(seed: int) -> CausalLM:
        return load_model(
            source,
            config,
            parallel=Parallel(),
            device=CPU,
            dtype=torch.float32,
            load_format="dummy",
            max_positions=64,
            seed=seed,
        )

    first, again, other = dummy(0), dummy(0), dummy(1)
    assert all(map(torch.equal, first.parameters(), again.parameters()))
    tables = first.decoder.embedding.weight, other.decoder.embedding.weight
    assert not torch.equal(*tables)
    assert (first.decoder.norm.weight == 1.0).all()
    result = first(torch.arange(20), torch.arange(20), FakeContext(config))
    logits = first.logits(result.hidden)
    assert logits.isfinite().all()
    assert 0.01 < logits.std() < 10


def test_rope_tables_have_the_asked_number_of_rows(folder: Path) -> None:
    model = load(folder, max_positions=200)
    assert model.decoder.layers[0].attention.cos_sin.shape == (200, 16)
    assert load(folder).decoder.layers[0].attention.cos_sin.shape == (128, 16)


def test_layers_share_one_rope_table(folder: Path) -> None:
    tables = {layer.attention.cos_sin.data_ptr() for layer in load(folder).decoder.layers}
    assert len(tables) == 1


def test_progress_reaches_the_end_when_shown_and_is_silent_otherwise(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    load(folder)
    assert capsys.readouterr().err == ""
    load(folder, progress=True)
    shown = capsys.readouterr().err
    assert "loading weights: 100%" in shown


def test_shards_of_one_name_in_two_folders_are_two(folder: Path) -> None:
    index = json.loads((folder / INDEX_NAME).read_text())
    for number, name in enumerate(sorted(set(index["weight_map"].values()))):
        (folder / str(number)).mkdir()
        (folder / name).rename(folder / str(number) / "model.safetensors")
        moved = {
            key: f"{number}/model.safetensors"
            for key, at in index["weight_map"].items()
            if at == name
        }
        index["weight_map"] |= moved
    (folder / INDEX_NAME).write_text(json.dumps(index))
    with open_checkpoint(folder) as checkpoint:
        assert sorted(checkpoint.names) == sorted(index["weight_map"])


def test_the_index_names_the_files_that_are_read(folder: Path) -> None:
    save_file({"stray": torch.zeros(1)}, folder / "stray.safetensors")
    load(folder)
    index = json.loads((folder / INDEX_NAME).read_text())
    assert "stray.safetensors" not in index["weight_map"].values()
