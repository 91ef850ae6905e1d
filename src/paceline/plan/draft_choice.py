"""Draft choice: who drafts, how deep and how wide, where nobody says."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

from paceline.core.draft_shape import MOST_DRAFT_TOKENS, DraftShape
from paceline.core.errors import ConfigError, ModelError
from paceline.core.option_spec import spec_of
from paceline.core.options import OFF, EngineOptions
from paceline.models.locate import BUNDLED_FOLDER, ModelSource, SourceKind, locate

BUNDLED = "bundled"
BUNDLED_HEAD = BUNDLED_FOLDER / "eagle3"
# Each draft of a head or a small model costs a pass, and fewer are accepted the deeper they are.  A
# search costs nothing, but what it finds is verified all the same.
USUAL_STEPS = {"EAGLE": 3, "EAGLE3": 3, "STANDALONE": 3, "NGRAM": 5}
USUAL_NGRAM = (2, 4)  # one equal token is chance; behind four, most texts go on alike
Chosen = tuple[object, str]  # what an option became that was left open, and why


@dataclass(frozen=True, slots=True, kw_only=True)
class Drafter:
    """Who drafts."""

    algorithm: str  # one of DRAFT_ALGORITHMS
    source: ModelSource | None  # None: NGRAM
    chosen: Mapping[str, Chosen]


def choose_drafter(options: EngineOptions, source: ModelSource, *, weights: bool) -> Drafter | None:
    """Who drafts for the model of `source`; None: nobody.  Raises ConfigError, ModelError."""
    algorithm, path = options.speculative_algorithm, options.speculative_draft_model_path
    if algorithm == OFF:
        _refuse_settings(options, f"left out with --speculative-algorithm {OFF}")
        return None
    if algorithm is None and path is None:
        return _own_head(options, source)
    if algorithm == "NGRAM":
        if path is not None:
            raise _bad_path(
                "left out: NGRAM has no draft model", path, "remove it, or name its algorithm"
            )
        return Drafter(algorithm=algorithm, source=None, chosen={})
    chosen: dict[str, Chosen] = {}
    if path is None:
        if algorithm != "EAGLE3" or source.kind is not SourceKind.BUNDLED:
            expected = f"a draft model for {algorithm}: a hub id, a folder, or a shape"
            remedy = "add --speculative-draft-model-path, or name NGRAM, which needs none"
            raise _bad_path(expected, "none", remedy)
        path = BUNDLED
        chosen["speculative_draft_model_path"] = (path, "the bundled model's own head")
    found = _find(path, head=algorithm != "STANDALONE", weights=weights)
    if algorithm is None:
        algorithm, why = _told_by(found)
        chosen["speculative_algorithm"] = (algorithm, why)
    return Drafter(algorithm=algorithm, source=found, chosen=chosen)


def choose_shape(options: EngineOptions, algorithm: str) -> tuple[DraftShape, dict[str, Chosen]]:
    """The shape of the drafts, and which of its numbers were left open.  Raises ConfigError."""
    topk = options.speculative_eagle_topk or 1
    steps, tokens = options.speculative_num_steps, options.speculative_num_draft_tokens
    chosen: dict[str, Chosen] = {"speculative_eagle_topk": (topk, "a chain")}
    if steps is None:
        steps, why = USUAL_STEPS[algorithm], f"usual for {algorithm}"
        if topk == 1 and tokens is not None:
            steps, why = tokens - 1, "all of --speculative-num-draft-tokens but the root"
        chosen["speculative_num_steps"] = (steps, why)
    if tokens is None:
        tokens, why = _tokens_of(algorithm, steps, topk)
        chosen["speculative_num_draft_tokens"] = (tokens, why)
    return DraftShape(num_steps=steps, topk=topk, num_draft_tokens=tokens), chosen


def _tokens_of(algorithm: str, steps: int, topk: int) -> tuple[int, str]:
    if topk == 1:
        return steps + 1, "the chain and its root"
    if algorithm == "NGRAM":
        tokens = min(1 + topk * steps, MOST_DRAFT_TOKENS)
        return tokens, "a root, and a chain for each of topk"
    # Beyond twice the width, one more node is accepted in few rounds and costs a row in all.
    candidates = topk + (steps - 1) * topk**2
    return min(max(2 * topk, steps + 1), candidates + 1), "twice the width, at least a whole path"


def choose_ngram(
    options: EngineOptions, algorithm: str
) -> tuple[tuple[int, int] | None, dict[str, Chosen]]:
    """(shortest, longest) end of the text that is looked for; None unless NGRAM drafts."""
    if algorithm != "NGRAM":
        return None, {}
    low, high = options.speculative_ngram_min, options.speculative_ngram_max
    usual_low, usual_high = USUAL_NGRAM
    low = min(usual_low, high or usual_low) if low is None else low
    high = max(usual_high, low) if high is None else high
    why = "shorter ones match by chance, longer ones seldom"
    return (low, high), {"speculative_ngram_min": (low, why), "speculative_ngram_max": (high, why)}


def _own_head(options: EngineOptions, source: ModelSource) -> Drafter | None:
    """The bundled model's own head, where its weights are real and a step holds its drafts."""
    is_ready = source.kind is SourceKind.BUNDLED and (BUNDLED_HEAD / "config.json").is_file()
    if not is_ready or options.load_format == "dummy" or not _holds_drafts(options):
        _refuse_settings(options, "left out where nobody drafts")
        return None
    why = "the bundled model has a head"
    chosen: dict[str, Chosen] = {
        "speculative_algorithm": ("EAGLE3", why),
        "speculative_draft_model_path": (BUNDLED, why),
    }
    head = _find(BUNDLED, head=True, weights=True)
    return Drafter(algorithm="EAGLE3", source=head, chosen=chosen)


def _holds_drafts(options: EngineOptions) -> bool:
    """Whether a step as large as was asked holds a round of the usual chain."""
    tokens, rows = options.max_num_batched_tokens, options.max_num_seqs or 1
    return tokens is None or tokens >= rows * (USUAL_STEPS["EAGLE3"] + 1)


def _find(path: str, *, head: bool, weights: bool) -> ModelSource:
    """The draft model; head: 'bundled' means the bundled head; weights: a shape is not enough."""
    try:
        if path == BUNDLED and head:
            source = replace(locate(str(BUNDLED_HEAD)), name=f"{BUNDLED}/{BUNDLED_HEAD.name}")
        else:
            source = locate(path, weights=weights, is_draft=True)
    except ModelError as error:
        raise ModelError(f"--speculative-draft-model-path {path}: {error}") from error
    if source.folder is None and weights:
        remedy = "add --load-format dummy, or name a folder or a hub id"
        raise _bad_path("a draft model with weights", f"{path}, a shape", remedy)
    return source


def _told_by(source: ModelSource) -> tuple[str, str]:
    """(algorithm, why) by the draft model's config.json."""
    config, where = source.config, f"config.json of {source.name}"
    names = [str(name) for name in config.get("architectures") or []]
    if config.get("draft_vocab_size") is not None or any("Eagle3" in name for name in names):
        return "EAGLE3", f"{where} describes an EAGLE-3 head"
    if any("Eagle" in name for name in names):
        return "EAGLE", f"{where} describes an EAGLE head"
    layers = config.get("num_hidden_layers")
    if isinstance(layers, int) and layers > 1:
        return "STANDALONE", f"{where} describes a whole model"
    raise ConfigError.about(
        "speculative_algorithm",
        expected="named for a draft model of one layer, which may be a head or a model",
        got=f"auto, and {where} of {', '.join(names) or 'no architectures'}",
        remedy="add --speculative-algorithm EAGLE, or STANDALONE",
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
            "--speculative-algorithm: NGRAM needs no draft model",
        )


def _bad_path(expected: str, got: str, remedy: str) -> ConfigError:
    return ConfigError.about(
        "speculative_draft_model_path", expected=expected, got=got, remedy=remedy
    )
