"""What the file of a model_type states, and the decoders that most of them are.  No torch."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from paceline.core.model.config import ModelConfig
from paceline.core.model.encoder import HeadStage
from paceline.core.modes import Pooling
from paceline.models.fields import Fields

if TYPE_CHECKING:
    from paceline.models.causal_lm import CausalLM

Read = Callable[[Fields], dict[str, Any]]
Build = Callable[..., "CausalLM"]
# Patterns of tensor names.  Older checkpoints store what every engine computes, rope tables and
# causal masks; those of multimodal models have what sees, beside the language model.
COMPUTED = (r"(^|\.)(rotary_emb\.(inv_freq|cos_cached|sin_cached)|\w*attn\.(masked_bias|bias))$",)
SEEING = (r"^(model\.)?(vision_tower|multi_modal_projector)\.",)


def prenorm(config: ModelConfig, **where: Any) -> "CausalLM":
    """The decoder of Llama and its kin; where: as of `build_prenorm`."""
    from paceline.models.prenorm import build_prenorm

    return build_prenorm(config, **where)


def postnorm(config: ModelConfig, **where: Any) -> "CausalLM":
    """The same with norms behind each block instead of before it."""
    from paceline.layers.decoders.postnorm_layer import PostNormLayer
    from paceline.models.prenorm import build_prenorm
    from paceline.models.tensor_names import name_postnorm

    return build_prenorm(config, layer=PostNormLayer, named=name_postnorm, **where)


def sandwich(config: ModelConfig, **where: Any) -> "CausalLM":
    """The decoder of the later Gemmas; where: as of `build_sandwich`."""
    from paceline.models.sandwich import build_sandwich

    return build_sandwich(config, **where)


class Classifier(NamedTuple):
    """What a checkpoint with a classifier's head has behind the last layer."""

    pooling: Pooling
    stages: tuple[HeadStage, ...]


def score_last(fields: Fields, num_labels: int) -> Classifier:
    """Decoders': one product with the last token's row."""
    return Classifier(Pooling.LAST, (HeadStage(name="score", width=num_labels, bias=False),))


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """One supported model_type: a file of its name holds it as ARCHITECTURE."""

    read: Read  # fields of ModelConfig that differ between types
    defaults: Mapping[str, Any]  # of its configuration class in transformers, where a file is
    # silent: released files leave out what equals them.  Only fields that we read stand there; a
    # field set to null is not silent
    build: Build = prenorm  # (config, *, parallel, placement, max_positions); imports torch
    classify: Callable[[Fields, int], Classifier] = score_last  # of a file and its labels, where it
    # is a classifier's
    model_type: str | None = None  # where that is no name of a file
    text_of: str | None = None  # the multimodal model_type whose text_config is one of it
    renamed: tuple[tuple[str, str], ...] = ()  # parts of tensor names, as stored -> as we name them
    ignored: tuple[str, ...] = COMPUTED  # patterns of the tensors that are not used; others are
    # unexpected
    left_out: str | None = None  # a pattern of the tensors, as we name them, that its checkpoints
    # leave out, which are zeros
    names_experts: bool = False  # its checkpoints name each expert's tensors, or stack them
    predicts: str | None = None  # how tensors of a layer that predicts a token further are named
    # where there is one, {} being the number of layers: the model itself does not run it
