"""From the target's checkpoint to an MtpHead with weights in it."""

from paceline.core.errors import ConfigError
from paceline.core.model.config import ModelConfig
from paceline.layers.weights.dense import DENSE
from paceline.layers.weights.parameter import Placement
from paceline.models.causal_lm import CausalLM
from paceline.models.checkpoint import open_checkpoint
from paceline.models.checkpoint_names import canonical_names
from paceline.models.loader import (
    copy_weights,
    fill_dummy,
    open_numbers,
    weights_folder,
    without_idle,
)
from paceline.models.locate import ModelSource
from paceline.models.registry import architecture
from paceline.models.stacked_experts import UnstackedExperts
from paceline.speculate.drafter import Loading
from paceline.speculate.mtp.head import MtpHead, build_mtp_head
from paceline.speculate.mtp.layout import OTHER_DRAFTERS, Layout


def load_mtp_head(
    source: ModelSource,
    config: ModelConfig,
    layout: Layout,
    target: CausalLM,
    *,
    place: str,
    max_positions: int,
    how: Loading,
) -> MtpHead:
    """The head, ready to run on `target`, whose weights are in place.

    source: the target's; config: as of `read_next_token`; place: how the names of the layer's
    tensors begin.  Raises WeightsError naming the tensors or the file at fault.
    """
    head = build_mtp_head(
        config,
        target,
        parallel=how["parallel"],
        placement=Placement(how["device"], how["dtype"], DENSE),
        max_positions=max_positions,
    )
    if how["load_format"] == "dummy":
        fill_dummy(head, seed=how["seed"])
        return head
    with open_numbers(source) as stored:
        checkpoint = UnstackedExperts(stored)
        file = architecture(config.model_type)
        stored_names = canonical_names(checkpoint.names, file, model=source.name)
        names = layout.names_of(stored_names, place)
        destinations = head.destinations()
        names = without_idle(stored, names, destinations)
        copy_weights(checkpoint, names, destinations, module=head, model=source.name)
    return head


def require_layer(source: ModelSource, model_type: str, layout: Layout, place: str) -> None:
    """Raise ConfigError where the files of `source` hold no such layer: headers are read alone."""
    with open_checkpoint(weights_folder(source)) as checkpoint:
        names = canonical_names(checkpoint.names, architecture(model_type), model=source.name)
    if not layout.names_of(names, place):
        raise ConfigError.about(
            f"weights of '{source.name}'",
            expected=f"with tensors '{place}...', the layer that MTP drafts with",
            got="none: whoever saved them left it out",
            remedy=OTHER_DRAFTERS,
        )
