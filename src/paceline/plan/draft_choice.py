"""Draft choice: who drafts, how deep and how wide, where nobody says."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

from paceline.core.draft_shape import MOST_STEPS, DraftShape
from paceline.core.errors import ConfigError, ModelError
from paceline.core.options.engine_options import OFF, EngineOptions
from paceline.core.options.spec import spec_of
from paceline.models.locate import ModelSource, SourceKind, locate
from paceline.speculate.drafter import Algorithm, Chosen
from paceline.speculate.registry import ALGORITHMS

BUNDLED = "bundled"
_NO_MODEL = " or ".join(name for name, each in ALGORITHMS.items() if not each.has_model)


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftChoice:
    """Who drafts."""

    algorithm: Algorithm
    source: ModelSource | None  # of the draft model; None: it has none
    chosen: Mapping[str, Chosen]


def choose_drafter(
    options: EngineOptions, source: ModelSource, *, weights: bool
) -> DraftChoice | None:
    """Who drafts for the model of `source`; None: nobody.  Raises ConfigError, ModelError."""
    name, path = options.speculative_algorithm, options.speculative_draft_model_path
    if name == OFF:
        _refuse_settings(options, f"left out with --speculative-algorithm {OFF}")
        return None
    if name is None and path is None:
        return _own_head(options, source)
    algorithm = None if name is None else ALGORITHMS[name]
    if algorithm is not None and not algorithm.takes_path:
        if path is not None:
            has = "layers of the model itself" if algorithm.is_within else "no draft model"
            remedy = "remove it, or name its algorithm"
            raise _bad_path(f"left out: {name} has {has}", path, remedy)
        return DraftChoice(algorithm=algorithm, source=None, chosen={})
    chosen: dict[str, Chosen] = {}
    if path is None:
        if algorithm is None or not algorithm.is_own or source.kind is not SourceKind.BUNDLED:
            expected = f"a draft model for {name}: a hub id, a folder, or a shape"
            remedy = f"add --speculative-draft-model-path, or name {_NO_MODEL}, which needs none"
            raise _bad_path(expected, "none", remedy)
        path = BUNDLED
        chosen["speculative_draft_model_path"] = (path, "the bundled model's own head")
    found = _find(path, algorithm or _own(), weights=weights)
    if algorithm is None:
        algorithm, why = _told_by(found)
        chosen["speculative_algorithm"] = (algorithm.name, why)
    return DraftChoice(algorithm=algorithm, source=found, chosen=chosen)


def choose_shape(
    options: EngineOptions, algorithm: Algorithm
) -> tuple[DraftShape, dict[str, Chosen]]:
    """The shape of the drafts, and which of its numbers were left open.  Raises ConfigError."""
    topk = options.speculative_eagle_topk or 1
    steps, tokens = options.speculative_num_steps, options.speculative_num_draft_tokens
    chosen: dict[str, Chosen] = {"speculative_eagle_topk": (topk, "a chain")}
    if steps is None:
        steps, why = algorithm.usual_steps, f"usual for {algorithm.name}"
        if topk == 1 and tokens is not None:
            steps, why = tokens - 1, "all of --speculative-num-draft-tokens but the root"
        chosen["speculative_num_steps"] = (steps, why)
    if tokens is None:
        tokens, why = steps + 1, "the chain and its root"
        if topk > 1:
            tokens, why = algorithm.usual_tokens(steps, topk)
        chosen["speculative_num_draft_tokens"] = (tokens, why)
    if steps > MOST_STEPS:
        raise ConfigError.about(
            "speculative_num_steps",
            expected=f"from 1 to {MOST_STEPS}",
            got=steps,
            remedy="lower --speculative-num-draft-tokens, or raise --speculative-eagle-topk",
        )
    return DraftShape(num_steps=steps, topk=topk, num_draft_tokens=tokens), chosen


def _own() -> Algorithm:
    """Whose draft model comes with the bundled model."""
    return next(each for each in ALGORITHMS.values() if each.is_own)


def _own_head(options: EngineOptions, source: ModelSource) -> DraftChoice | None:
    """The bundled model's own head, where its weights are real and a step holds its drafts."""
    own, is_ready = _own(), False
    if source.kind is SourceKind.BUNDLED and own.bundled is not None:
        is_ready = (own.bundled / "config.json").is_file()
    if not is_ready or options.load_format == "dummy" or not _holds_drafts(options, own):
        _refuse_settings(options, "left out where nobody drafts")
        return None
    why = "the bundled model has a head"
    chosen: dict[str, Chosen] = {
        "speculative_algorithm": (own.name, why),
        "speculative_draft_model_path": (BUNDLED, why),
    }
    return DraftChoice(algorithm=own, source=_find(BUNDLED, own, weights=True), chosen=chosen)


def _holds_drafts(options: EngineOptions, algorithm: Algorithm) -> bool:
    """Whether a step as large as was asked holds a round of the usual chain."""
    tokens, rows = options.max_num_batched_tokens, options.max_num_seqs or 1
    return tokens is None or tokens >= rows * (algorithm.usual_steps + 1)


def _find(path: str, algorithm: Algorithm, *, weights: bool) -> ModelSource:
    """The draft model; weights: a shape is not enough."""
    try:
        if path == BUNDLED and algorithm.bundled is not None:
            own = algorithm.bundled
            source = replace(locate(str(own)), name=f"{BUNDLED}/{own.name}")
        else:
            source = locate(path, weights=weights, is_draft=True)
    except ModelError as error:
        raise ModelError(f"--speculative-draft-model-path {path}: {error}") from error
    if source.folder is None and weights:
        remedy = "add --load-format dummy, or name a folder or a hub id"
        raise _bad_path("a draft model with weights", f"{path}, a shape", remedy)
    return source


def _told_by(source: ModelSource) -> tuple[Algorithm, str]:
    """(algorithm, why) by the draft model's config.json."""
    config, where = source.config, f"config.json of {source.name}"
    names = [str(name) for name in config.get("architectures") or []]
    for algorithm in ALGORITHMS.values():
        told = algorithm.told_by(config)
        if told is not None:
            return algorithm, f"{where} describes {told}"
    silent = [
        each.name for each in ALGORITHMS.values() if each.takes_path and not each.tells_itself
    ]
    raise ConfigError.about(
        "speculative_algorithm",
        expected="named for a draft model of one layer, which may be a head or a model",
        got=f"auto, and {where} of {', '.join(names) or 'no architectures'}",
        remedy=f"add --speculative-algorithm {', or '.join(silent)}",
    )


def _refuse_settings(options: EngineOptions, expected: str) -> None:
    """Raise ConfigError for the first setting of a drafter where there is none."""
    for field in fields(EngineOptions):
        value, name = getattr(options, field.name), field.name
        is_setting = name.startswith("speculative_") or name == "force_accept_len"
        if not is_setting or name == "speculative_algorithm" or value == field.default:
            continue
        raise ConfigError.about(
            name,
            expected=expected,
            got=value,
            remedy=f"remove {spec_of(field).flags[0]}, or name a drafter with "
            f"--speculative-algorithm: {_NO_MODEL} needs no draft model",
        )


def _bad_path(expected: str, got: str, remedy: str) -> ConfigError:
    return ConfigError.about(
        "speculative_draft_model_path", expected=expected, got=got, remedy=remedy
    )
