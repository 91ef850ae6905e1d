"""What a checkpoint with a classifier's head makes of a text: cross-encoders, and others that score
labels."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from paceline.core.errors import ConfigError, ModelError
from paceline.core.model.config import IDENTITY, SIGMOID, ModelConfig
from paceline.core.modes import POOLS, Pooling
from paceline.models.fields import Fields
from paceline.models.locate import ModelSource
from paceline.models.registry import architecture

_OTHER_HEADS = ("Classification", "QuestionAnswering")  # of each token, or of spans
_USUAL_LABELS = 2  # of transformers, where a file says nothing


def is_classifier(config: Mapping[str, Any]) -> bool:
    """Of config.json.  Raises ModelError for a head that is not run."""
    names = config.get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    if not isinstance(name, str) or not name.endswith(_OTHER_HEADS):
        return False
    if name.endswith("ForSequenceClassification"):
        return True
    raise ModelError.about(
        "config.json: architectures",
        expected="a model of tokens, of vectors, or with a head of whole texts",
        got=name,
        remedy="use a ForSequenceClassification, or an embedding model",
    )


def classifying(
    config: ModelConfig, source: ModelSource, modules: list[str], asked: Pooling | None
) -> ModelConfig:
    """`config` of a classifier.  modules: of sentence-transformers' files; asked: --pooling.

    Raises ConfigError for a pooling that is asked for, ModelError for a file that says what is not
    known here.
    """
    if asked is not None:
        raise ConfigError.about(
            "pooling",
            expected="left out for a classifier, whose head says it",
            got=asked.value,
            remedy="remove --pooling",
        )
    others = [name for name in modules if name != "Transformer"]
    if others:
        raise ModelError.about(
            "modules.json",
            expected="Transformer alone, of a classifier",
            got=others[0],
            remedy="use a cross-encoder whose head is in its checkpoint",
        )
    if config.vector_prompt:
        raise ModelError.about(
            "config_sentence_transformers.json: default_prompt_name",
            expected="null, of a classifier",
            got=repr(config.vector_prompt),
            remedy="use a cross-encoder that reads pairs as they are",
        )
    file = architecture(config.model_type)
    fields = Fields(source.config).behind(file.defaults)
    num_labels = _num_labels(fields)
    found = file.classify(fields, num_labels)
    return replace(
        config,
        ends=POOLS,
        pooling=found.pooling,
        pooled_head=found.stages,
        label_act=_activation(fields, num_labels),
    )


def _num_labels(fields: Fields) -> int:
    """As transformers counts them."""
    named = fields.nested("id2label")
    num: int = len(named) or fields.integer("num_labels", _USUAL_LABELS)
    return num


def _activation(fields: Fields, num_labels: int) -> str:
    """As sentence-transformers' CrossEncoder takes it: its key, the one of older versions, or by
    the number of labels."""
    own, key = fields.nested("sentence_transformers"), "sentence_transformers: activation_fn"
    named = own.get("activation_fn")
    if named is None:
        key = "sbert_ce_default_activation_function"
        named = fields.get(key)
    if named is None:
        return SIGMOID if num_labels == 1 else IDENTITY
    last = str(named).rpartition(".")[2].lower()
    if last not in (SIGMOID, IDENTITY):
        fields.fail(key, "torch's Sigmoid or Identity", named)
    return last
