"""A model is found by folder, shape or hub id, or refused with what was expected."""

import json
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path

import pytest

from paceline.core.errors import ConfigError, ModelError
from paceline.models import locate as locate_module
from paceline.models.locate import SourceKind, locate, shape_names

HEAD = "eagle3-llama-3.1-8b"  # the shape of a draft head that is shipped


def write_folder(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    return folder


def test_a_folder_is_found_with_what_it_holds(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model")
    source = locate(str(folder))
    assert (source.kind, source.folder, source.tokenizer) == (SourceKind.FOLDER, folder, None)
    assert source.config == {"model_type": "llama"}
    assert source.generation_config == {}
    (folder / "tokenizer.json").write_text("{}")
    (folder / "generation_config.json").write_text('{"eos_token_id": 3}')
    source = locate(str(folder))
    assert source.tokenizer == folder / "tokenizer.json"
    assert source.generation_config == {"eos_token_id": 3}


def test_a_folder_with_the_form_of_a_hub_id_wins_over_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_folder(tmp_path / "owner" / "name")
    monkeypatch.chdir(tmp_path)
    assert locate("owner/name").kind is SourceKind.FOLDER


def test_a_shape_has_a_configuration_and_nothing_else() -> None:
    source = locate("llama-3.1-8b")
    assert (source.kind, source.folder, source.tokenizer) == (SourceKind.SHAPE, None, None)
    assert source.config["hidden_size"] == 4096


def test_bundled_names_the_folder_in_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(locate_module, "BUNDLED_FOLDER", write_folder(tmp_path / "bundled"))
    assert locate("bundled").kind is SourceKind.BUNDLED


@pytest.mark.parametrize("name", ["llama-9", "./nowhere", "/no/such/folder", "a/b/c"])
def test_an_unknown_name_is_refused_with_the_known_ones(name: str) -> None:
    with pytest.raises(ModelError, match="model must be a hub id, an existing folder") as caught:
        locate(name)
    assert all(shape in str(caught.value) for shape in shape_names())
    assert f"got '{name}'" in str(caught.value)


def test_shapes_of_draft_heads_are_named_to_those_who_look_for_one() -> None:
    for is_draft in (False, True):
        with pytest.raises(ModelError) as caught:
            locate("llama-9", is_draft=is_draft)
        assert (HEAD in str(caught.value)) is is_draft


def test_only_those_who_look_for_a_draft_head_are_led_to_one() -> None:
    for is_draft in (False, True):
        with pytest.raises(ModelError, match="did you mean") as caught:
            locate("llama", is_draft=is_draft)
        assert (HEAD in str(caught.value).partition("did you mean")[2]) is is_draft


@pytest.mark.parametrize(
    ("address", "remedy"),
    [
        ("https://huggingface.co/Qwen/Qwen3-8B/tree/main", "pass Qwen/Qwen3-8B"),
        ("http://www.huggingface.co/Qwen/Qwen3-8B?library=x", "pass Qwen/Qwen3-8B"),
        ("huggingface.co/Qwen/Qwen3-8B#files", "pass Qwen/Qwen3-8B"),
        ("https://hf.co/Qwen/Qwen3-8B/", "pass Qwen/Qwen3-8B"),
        ("https://huggingface.co/gpt2", "a hub id has the form owner/name"),
        ("https://huggingface.co", "a hub id has the form owner/name"),
    ],
)
def test_the_address_of_a_hub_page_is_told_from_its_id(address: str, remedy: str) -> None:
    with pytest.raises(ModelError) as caught:
        locate(address)
    expected = "model must be a hub id, not the address of its page"
    assert str(caught.value) == f"{expected}, got '{address}'; {remedy}"


def test_a_home_folder_that_is_not_there_is_named_in_full() -> None:
    where = Path("~/no-such-model").expanduser()
    with pytest.raises(ModelError, match=rf"got '~/no-such-model', and there is no {where}; check"):
        locate("~/no-such-model")


def test_the_home_of_nobody_is_no_folder() -> None:
    with pytest.raises(ModelError, match="got '~no-such-user/x', and there is no ~no-such-user/x;"):
        locate("~no-such-user/x")


def test_a_folder_without_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"must be a folder with config\.json, got .* without it"):
        locate(str(tmp_path))


@pytest.mark.parametrize(
    ("content", "text"),
    [("{", "config.json must be readable JSON, got"), ("[]", "must be a JSON object, got list")],
)
def test_a_damaged_config_is_refused_by_path(tmp_path: Path, content: str, text: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ModelError, match=text):
        locate(str(tmp_path))


def test_a_revision_of_what_has_none_is_refused(tmp_path: Path) -> None:
    """Accepting it would serve something else than what was asked for."""
    folder = str(write_folder(tmp_path / "model"))
    for name, what in (
        ("bundled", "the bundled model"),
        (folder, "a local folder"),
        ("llama-3.1-8b", "a shape shipped in the package"),
    ):
        with pytest.raises(ConfigError) as caught:
            locate(name, "v2")
        expected = f"revision must be left out for {what} ('{name}'), got 'v2'; remove --revision"
        assert str(caught.value).startswith(expected)


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (OSError(""), "got OSError: no text; check the name"),
        (ValueError("  \nsecond"), "got ValueError: second; check the name"),
    ],
)
def test_a_download_that_fails_without_a_word_is_a_model_error(
    monkeypatch: pytest.MonkeyPatch, error: Exception, text: str
) -> None:
    import huggingface_hub

    def snapshot(model: str, **options: object) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    with pytest.raises(ModelError, match=text):
        locate("owner/name")


OFFLINE = """
from paceline.core.errors import ModelError
from paceline.models.locate import locate
try:
    locate("owner/name", revision="v2")
except ModelError as error:
    print(error)
"""


def test_an_uncached_hub_model_offline_is_refused_with_a_remedy(tmp_path: Path) -> None:
    """In a process of its own: the hub client reads its environment when imported."""
    import os

    environment = dict(os.environ, HF_HUB_OFFLINE="1", HF_HOME=str(tmp_path))
    result = subprocess.run(
        [sys.executable, "-c", OFFLINE], env=environment, capture_output=True, text=True, check=True
    )
    assert "model 'owner/name' at revision 'v2' must be a hub model" in result.stdout
    assert "HF_HUB_OFFLINE" in result.stdout


def test_a_hub_id_without_the_client_installed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ModelError, match=r"when huggingface_hub is not installed.*pip install"):
        locate("owner/name")


def test_a_hub_model_is_a_downloaded_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub

    asked: list[list[str]] = []

    def snapshot(model: str, **options: object) -> str:
        asked.append(options["allow_patterns"])
        return str(write_folder(tmp_path / model))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    assert locate("owner/name").kind is SourceKind.HUB
    assert locate("owner/name", weights=False).folder == tmp_path / "owner/name"
    assert locate("owner/name", is_draft=True).kind is SourceKind.HUB
    assert "*.safetensors" in asked[0]
    assert "*.safetensors" not in asked[1]
    assert ["pytorch_model.bin" in patterns for patterns in asked] == [False, False, True]


def test_weights_of_dense_modules_are_downloaded_for_themselves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What lies in folders is left out else: other formats of the same weights."""
    import huggingface_hub

    asked: list[tuple[list[str], list[str]]] = []

    def snapshot(model: str, **options: object) -> str:
        asked.append((options["allow_patterns"], options["ignore_patterns"]))
        folder = write_folder(tmp_path / model)
        (folder / "2_Dense").mkdir(exist_ok=True)
        (folder / "2_Dense" / "config.json").write_text("{}")
        modules = '[{"type": "a.Transformer", "path": ""}, {"type": "a.Dense", "path": "2_Dense"}]'
        (folder / "modules.json").write_text(modules)
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    assert locate("owner/name", weights=False).dense == {"2_Dense": {}}
    assert locate("owner/name").dense == {"2_Dense": {}}
    assert len(asked) == 3
    for name in (
        "2_Dense/config.json",
        "sentence_bert_config.json",
        "1_X/sentence_bert_config.json",
    ):
        assert any(fnmatch(name, pattern) for pattern in asked[0][0])
    assert "config_sentence_transformers.json" in asked[0][0]
    assert "*/*.safetensors" in asked[1][1]
    assert asked[2] == (["2_Dense/model.safetensors"], [])


def test_finding_and_reading_a_model_imports_neither_torch_nor_the_hub_client() -> None:
    code = (
        "import sys\n"
        "from paceline.models import config, locate, registry\n"
        "parsed = config.parse_config(locate.locate('gemma-3-1b').config)\n"
        "assert parsed.num_layers and registry.architecture(parsed.model_type)\n"
        "assert not {'torch', 'huggingface_hub', 'safetensors'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
