"""Finding a model by name: bundled, a local folder, a shipped shape, or a hub id, in this order."""

import json
import re
from dataclasses import dataclass, field, fields
from enum import Enum
from pathlib import Path
from typing import Any

from paceline.core.errors import ConfigError, ModelError
from paceline.core.near import did_you_mean
from paceline.models.quantized.config import KEY, SIDE_FILES, from_side_file, said_of
from paceline.models.weight_files import gguf_refusal

_HERE = Path(__file__).parent
BUNDLED_FOLDER = _HERE / "bundled"
SHAPES_FOLDER = _HERE / "shapes"
_MODULES, _PROMPTS = "modules.json", "config_sentence_transformers.json"
# Of its Transformer module; sentence-transformers takes the first that says something, too.
_TRANSFORMER = (
    "sentence_bert_config.json",
    "sentence_roberta_config.json",
    "sentence_xlm-roberta_config.json",
)
_SMALL_FILES = [
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
    _MODULES,
    _PROMPTS,
    *(f"*{name}" for name in _TRANSFORMER),
    "*_Pooling/config.json",
    "*_Dense/config.json",
    *SIDE_FILES,
]
_WEIGHT_FILES = ["*.safetensors", "model.safetensors.index.json"]
_HUB_PAGE = re.compile(r"(https?://)?(www\.)?(huggingface\.co|hf\.co)(?=/|$)/*")
_HEAD_SHAPES = "eagle"  # names of draft heads' shapes start so
_DRAFT_FILES = [*_WEIGHT_FILES, "pytorch_model.bin"]  # the form that many draft heads come in


class SourceKind(Enum):
    """Where a model came from."""

    BUNDLED = "bundled"
    FOLDER = "folder"
    HUB = "hub"
    SHAPE = "shape"  # a configuration without weights or tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSource:
    """A model that was found; nothing of it but JSON has been read."""

    name: str  # as asked for
    kind: SourceKind
    folder: Path | None  # None: there are no weights
    config: dict[str, Any]
    generation_config: dict[str, Any]
    tokenizer: Path | None  # tokenizer.json
    modules: list[Any] | None = None  # modules.json of sentence-transformers; None: there is none
    pooling_config: dict[str, Any] = field(default_factory=dict)  # of its Pooling module
    dense: dict[str, dict[str, Any]] = field(default_factory=dict)  # by folder, the config.json of
    # each of its Dense modules, in their order
    transformer_config: dict[str, Any] = field(default_factory=dict)  # of its Transformer module
    tokenizer_config: dict[str, Any] = field(default_factory=dict)  # beside modules, else unread
    prompts_config: dict[str, Any] = field(default_factory=dict)  # of what stands before texts

    @property
    def said(self) -> dict[str, Any]:
        """All JSON that was read, by what it is: two that make one model say the same."""
        places = {"name", "kind", "folder", "tokenizer"}
        return {
            each.name: getattr(self, each.name) for each in fields(self) if each.name not in places
        }


def shape_names() -> tuple[str, ...]:
    """The shipped shapes of models."""
    return tuple(name for name in _shapes() if not name.startswith(_HEAD_SHAPES))


def _shapes() -> list[str]:
    return sorted(path.stem for path in SHAPES_FOLDER.glob("*.json"))


def locate(
    model: str, revision: str | None = None, *, weights: bool = True, is_draft: bool = False
) -> ModelSource:
    """Find `model`; with weights=False a hub model's weights are not downloaded.

    is_draft: its weights may be those of a draft head.

    Raises ModelError when there is no such model, or its files cannot be read, and ConfigError for
    a revision of a model that has none.
    """
    if model == "bundled":
        _refuse_revision(model, "the bundled model", revision)
        return _from_folder(model, SourceKind.BUNDLED, BUNDLED_FOLDER)
    path = _expanded(model)
    if path.is_dir():
        _refuse_revision(model, "a local folder", revision)
        return _from_folder(model, SourceKind.FOLDER, path)
    if model in _shapes():
        _refuse_revision(model, "a shape shipped in the package", revision)
        config = _read_json(SHAPES_FOLDER / f"{model}.json")
        return ModelSource(
            name=model,
            kind=SourceKind.SHAPE,
            folder=None,
            config=config,
            generation_config={},
            tokenizer=None,
        )
    _refuse_near_misses(model, path)
    if model.count("/") != 1 or model.startswith((".", "/")):
        shapes = _shapes() if is_draft else shape_names()
        raise ModelError.about(
            "model",
            expected=f"a hub id, an existing folder, 'bundled' or one of {', '.join(shapes)}",
            got=repr(model),
            remedy=did_you_mean(
                model,
                ("bundled", *shapes),
                otherwise="check the spelling; a hub id has the form owner/name",
            ),
        )
    files = _DRAFT_FILES if is_draft else _WEIGHT_FILES
    folder = _download(model, revision, _SMALL_FILES + (files if weights else []))
    found = _from_folder(model, SourceKind.HUB, folder)
    if weights and found.dense:
        _download(
            model, revision, [f"{path}/model.safetensors" for path in found.dense], ignored=[]
        )
    return found


def _expanded(model: str) -> Path:
    """With the home folder in place of ~; as it is where nobody has that home."""
    try:
        return Path(model).expanduser()
    except RuntimeError:
        return Path(model)


def _refuse_near_misses(model: str, path: Path) -> None:
    """Raise for what is told by its look: a GGUF file, a page of the hub, a folder below home."""
    if path.suffix == ".gguf" and path.is_file():
        raise gguf_refusal("model", model)
    page = _HUB_PAGE.match(model)
    if page is not None:
        parts = [part for part in re.split(r"[/?#]", model[page.end() :])[:2] if part]
        remedy = (
            f"pass {'/'.join(parts)}" if len(parts) == 2 else "a hub id has the form owner/name"
        )
        raise ModelError.about(
            "model",
            expected="a hub id, not the address of its page",
            got=repr(model),
            remedy=remedy,
        )
    if model.startswith("~"):
        raise ModelError.about(
            "model",
            expected="an existing folder",
            got=f"{model!r}, and there is no {path}",
            remedy="check the path; a hub id has the form owner/name",
        )


def _refuse_revision(model: str, what: str, revision: str | None) -> None:
    if revision is not None:
        raise ConfigError.about(
            "revision",
            expected=f"left out for {what} ('{model}')",
            got=repr(revision),
            remedy="remove --revision, or name a hub id with --model",
        )


def _from_folder(name: str, kind: SourceKind, folder: Path) -> ModelSource:
    config_path = folder / "config.json"
    if not config_path.is_file():
        raise ModelError.about(
            f"model '{name}'",
            expected="a folder with config.json",
            got=f"{folder} without it",
            remedy="point --model at a folder in Hugging Face format",
        )
    tokenizer = folder / "tokenizer.json"
    modules = _read_list(folder / _MODULES)
    dense = paths_of(modules or [], "Dense")
    beside = folder if modules is not None else None
    return ModelSource(
        name=name,
        kind=kind,
        folder=folder,
        config=_with_side_file(folder, _read_json(config_path)),
        generation_config=_read_beside(folder, "generation_config.json"),
        tokenizer=tokenizer if tokenizer.is_file() else None,
        modules=modules,
        pooling_config=_of_module(folder, modules or [], "Pooling", "config.json"),
        dense={path: _read_json(folder / path / "config.json") for path in dense},
        transformer_config=_of_module(folder, modules or [], "Transformer", *_TRANSFORMER),
        tokenizer_config=_read_beside(beside, "tokenizer_config.json"),
        prompts_config=_read_beside(beside, _PROMPTS),
    )


def _of_module(folder: Path, modules: list[Any], kind: str, *names: str) -> dict[str, Any]:
    """What the first of these files says that says something, beside the first module of a kind."""
    paths = [folder / path for path in paths_of(modules, kind)]
    found = (_read_beside(path, name) for path in paths[:1] for name in names)
    return next(filter(None, found), {})


def _read_beside(folder: Path | None, name: str) -> dict[str, Any]:
    """Empty where there is no such file."""
    return {} if folder is None or not (folder / name).is_file() else _read_json(folder / name)


def paths_of(modules: list[Any], kind: str) -> list[str]:
    """The folders of modules of sentence-transformers whose type has this last name, in their
    order."""
    named = [each for each in modules if isinstance(each, dict)]
    found = [each for each in named if str(each.get("type")).rpartition(".")[2] == kind]
    return [str(each.get("path", "")) for each in found]


def _with_side_file(folder: Path, config: dict[str, Any]) -> dict[str, Any]:
    """Older files say beside config.json how weights are quantised."""
    if said_of(config):
        return config
    for name in SIDE_FILES:
        path = folder / name
        if path.is_file():
            return {**config, KEY: from_side_file(name, _read_json(path))}
    return config


def _read_json(path: Path) -> dict[str, Any]:
    data: dict[str, Any] = _read(path, dict, "a JSON object")
    return data


def _read_list(path: Path) -> list[Any] | None:
    """None: there is no such file."""
    return _read(path, list, "a JSON list") if path.is_file() else None


def _read(path: Path, kind: type, expected: str) -> Any:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError.about(
            str(path), expected="readable JSON", got=str(error), remedy="restore the file"
        ) from error
    if not isinstance(data, kind):
        got = type(data).__name__
        raise ModelError.about(str(path), expected=expected, got=got, remedy="restore the file")
    return data


_ASIDE = ["*/*.safetensors", "consolidated*"]  # a pattern's * goes into folders, too


def _download(
    model: str, revision: str | None, wanted: list[str], *, ignored: list[str] = _ASIDE
) -> Path:
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise ModelError.about(
            f"model '{model}'",
            expected="a local folder when huggingface_hub is not installed",
            got="a hub id",
            remedy="pip install huggingface_hub, or pass the path of a downloaded folder",
        ) from error
    try:
        folder = snapshot_download(
            model, revision=revision, allow_patterns=wanted, ignore_patterns=ignored
        )
    except (OSError, ValueError) as error:
        at = f" at revision '{revision}'" if revision else ""
        raise ModelError.about(
            f"model '{model}'{at}",
            expected="a hub model that can be reached or is in the local cache",
            got=f"{type(error).__name__}: {_first_line(error)}",
            remedy="check the name, the network, HF_HUB_OFFLINE and HF_TOKEN, "
            "or pass a local folder",
        ) from error
    return Path(folder)


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else "no text"
