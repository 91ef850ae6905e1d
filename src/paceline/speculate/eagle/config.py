"""config.json of an EAGLE head -> EagleConfig, and whether it fits a target.  Imports no torch.

EAGLE-1 and EAGLE-2 share their weights (Li et al. 2024, arXiv:2401.15077 and 2406.16858); EAGLE-3
(arXiv:2503.01840) taps three layers of the target and has a language-model head of its own over
a part of the vocabulary.  What a file asks for and we do not do is refused by name.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from paceline.core.errors import ConfigError, message
from paceline.core.model.config import ModelConfig
from paceline.models.config import parse_config
from paceline.models.fields import Fields

LAYER_TYPES = ("llama", "mistral", "qwen2", "qwen3")  # model_type of a head's layers
_DEFAULT_TAPS = 3
_OWN_FIELDS = (
    *("draft_vocab_size", "target_hidden_size", "eagle_config", "num_aux_hidden_states"),
    *("eagle_aux_hidden_state_layer_ids", "tie_word_embeddings", "quantization_config"),
)
_IDS = "eagle_aux_hidden_state_layer_ids"

AlgorithmName = Literal["EAGLE", "EAGLE3"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EagleConfig:
    """Everything we need to know of a head before a weight of it is read."""

    version: int  # 1 (EAGLE and EAGLE-2 weights) or 3
    layer: ModelConfig  # widths, heads and rope of the head's layers; vocab_size: the target's
    target_hidden_size: int
    num_taps: int  # hidden states of the target that a feature is made of
    tap_layers: tuple[int, ...] | None  # [num_taps] layers whose output is wanted; None: by default
    draft_vocab_size: int | None  # None: the target's vocabulary and language-model head
    has_own_embedding: bool  # else it looks tokens up in the target's table
    fc_bias: bool
    fc_norm: bool = False  # a norm of each tap before fc
    norm_output: bool = False  # the norm's output is fed back, not the residual stream
    norm_before_residual: bool = False  # the normalised feature starts the residual stream

    @property
    def hidden_size(self) -> int:
        """Width of a feature."""
        return self.layer.hidden_size

    @property
    def tap_width(self) -> int:
        """Columns of all taps of a token."""
        return self.num_taps * self.target_hidden_size

    @property
    def fuses_taps(self) -> bool:
        """Whether fc makes a feature from the taps; else they are it, side by side."""
        return self.version == 3 and self.tap_width != self.hidden_size


def parse_eagle_config(config: Mapping[str, Any], algorithm: AlgorithmName) -> EagleConfig:
    """The head's shape.

    Raises ModelError for a wrong field or an unsupported feature, and ConfigError where the file is
    of a head of the other algorithm.
    """
    fields = Fields(config)
    _refuse_others(fields, algorithm)
    fields.choice("model_type", LAYER_TYPES)
    fields.refuse("quantization_config", "use an unquantised draft head")
    own = {name: value for name, value in config.items() if name not in _OWN_FIELDS}
    layer = parse_config(own)
    target_hidden = fields.integer("target_hidden_size", layer.hidden_size)
    if algorithm == "EAGLE":
        return _eagle1(fields, layer, target_hidden)
    return _eagle3(fields, layer, target_hidden)


def _eagle1(fields: Fields, layer: ModelConfig, target_hidden: int) -> EagleConfig:
    if target_hidden != layer.hidden_size:
        expected = f"hidden_size {layer.hidden_size}: this head shares the target's embedding"
        fields.fail("target_hidden_size", expected, target_hidden)
    return EagleConfig(
        version=1,
        layer=layer,
        target_hidden_size=target_hidden,
        num_taps=1,
        tap_layers=None,
        draft_vocab_size=None,
        has_own_embedding=False,
        fc_bias=fields.flag("bias", True),
    )


def _eagle3(fields: Fields, layer: ModelConfig, target_hidden: int) -> EagleConfig:
    fields.refuse("norm_before_fc", "one norm over all taps is not supported")
    draft_vocab = fields.integer("draft_vocab_size", None)
    if draft_vocab is not None and draft_vocab > layer.vocab_size:
        fields.fail("draft_vocab_size", f"at most vocab_size {layer.vocab_size}", draft_vocab)
    if draft_vocab is None and target_hidden != layer.hidden_size:
        fields.fail("draft_vocab_size", "given where hidden_size is not the target's", None)
    tap_layers, num_taps = _read_taps(fields)
    config = EagleConfig(
        version=3,
        layer=layer,
        target_hidden_size=target_hidden,
        num_taps=num_taps,
        tap_layers=tap_layers,
        draft_vocab_size=draft_vocab,
        has_own_embedding=target_hidden != layer.hidden_size,
        fc_bias=fields.flag("bias", False),
        fc_norm=fields.flag("fc_norm", False) or fields.flag("use_aux_norm", False),
        norm_output=fields.flag("norm_output", False),
        norm_before_residual=fields.flag("norm_before_residual", False),
    )
    if config.fc_norm and not config.fuses_taps:
        fields.fail("fc_norm", "false for a head without fc", True)
    return config


def _read_taps(fields: Fields) -> tuple[tuple[int, ...] | None, int]:
    """(explicit layers or None, number of taps)."""
    inner = Fields(fields.nested("eagle_config"), "config.json: eagle_config")
    ids = inner.get(_IDS) if inner.get(_IDS) is not None else fields.get(_IDS)
    given = fields.integer("num_aux_hidden_states", None)
    if not inner.flag("use_aux_hidden_state", True):
        if ids:
            inner.fail(_IDS, "absent where use_aux_hidden_state is false", ids)
        return None, 1
    if ids is not None and not isinstance(ids, list):
        fields.fail(_IDS, "a list of layers, counted from 0", ids)
    if not ids:
        if given not in (None, _DEFAULT_TAPS):
            fields.fail("num_aux_hidden_states", f"{_DEFAULT_TAPS} unless {_IDS} are given", given)
        return None, _DEFAULT_TAPS
    if any(type(i) is not int or i < 0 for i in ids):
        fields.fail(_IDS, "a list of layers, counted from 0", ids)
    if given not in (None, len(ids)):
        fields.fail("num_aux_hidden_states", f"{len(ids)}, the number of {_IDS}", given)
    return tuple(ids), len(ids)


def _refuse_others(fields: Fields, algorithm: AlgorithmName) -> None:
    """Raise for a head of the other algorithm, or of a format that is not read."""
    for name in ("transformer_layer_config", "speculators_model_type"):
        fields.refuse(name, "use a head in the format of LlamaForCausalLMEagle3")
    architectures = fields.get("architectures") or []
    if not isinstance(architectures, list):
        fields.fail("architectures", "a list of names", architectures)
    architectures = [str(name) for name in architectures]
    is_eagle3 = fields.get("draft_vocab_size") is not None or any(
        "eagle3" in name.lower() for name in architectures
    )
    is_eagle1 = any(name.endswith("Eagle") for name in architectures)
    actual = "EAGLE3" if is_eagle3 else "EAGLE" if is_eagle1 else algorithm
    if actual != algorithm:
        raise ConfigError.about(
            "speculative_algorithm",
            expected=f"{actual}, which the draft head's config.json describes",
            got=algorithm,
            remedy=f"pass --speculative-algorithm {actual}, or another head",
        )


def tap_names(config: EagleConfig, target: ModelConfig) -> tuple[str, ...]:
    """Names of the taps of `models.decoder` that a feature is made of: [num_taps].

    By default, of L layers, the outputs of layers 1, L / 2 - 1 and L - 4, as in the code that
    released EAGLE-3 heads were trained with.  Raises ConfigError for taps the target does not have.
    """
    if config.num_taps == 1 and config.tap_layers is None:
        return ("final",)
    layers, last = config.tap_layers, target.num_layers - 1
    if layers is None:
        layers = (1, target.num_layers // 2 - 1, target.num_layers - 4)
        if not layers[0] < layers[1] < layers[2]:
            raise ConfigError.about(
                "the target",
                expected="deep enough for the default taps 1 < L / 2 - 1 < L - 4",
                got=f"L = {target.num_layers} layers",
                remedy=f"name the layers in the head's config.json: eagle_config.{_IDS}",
            )
    if max(layers) > last:
        raise ConfigError.about(
            f"the draft head's {_IDS}",
            expected=f"layers 0 to {last} of the target",
            got=list(layers),
            remedy="pass --speculative-draft-model-path with a head for this target",
        )
    return tuple(f"layer.{index}" for index in layers)


def eagle_mismatches(config: EagleConfig, target: ModelConfig) -> list[str]:
    """Why the head cannot draft for the target; empty where it can."""
    remedy = "pass --speculative-draft-model-path with a head that was trained for this target"
    facts = {
        "vocab_size": (config.layer.vocab_size, target.vocab_size),
        "target hidden size": (config.target_hidden_size, target.hidden_size),
    }
    found = [
        message(f"the draft head's {name}", expected=f"the target's {has}", got=got, remedy=remedy)
        for name, (got, has) in facts.items()
        if got != has
    ]
    try:
        tap_names(config, target)
    except ConfigError as error:
        found.append(str(error))
    return found


def require_match(config: EagleConfig, target: ModelConfig) -> None:
    """Raise ConfigError with every mismatch."""
    found = eagle_mismatches(config, target)
    if found:
        raise ConfigError("\n".join(found))
