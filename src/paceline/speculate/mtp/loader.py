"""From the target's checkpoint to an MtpHead with weights in it."""

from paceline.core.model.config import ModelConfig
from paceline.models.causal_lm import CausalLM
from paceline.models.checkpoint import StoredTensors
from paceline.models.checkpoint_names import canonical_names
from paceline.models.loader import copy_weights, fill_dummy, open_numbers
from paceline.models.locate import ModelSource
from paceline.models.registry import architecture
from paceline.models.stacked_experts import UnstackedExperts
from paceline.speculate.drafter import Loading
from paceline.speculate.mtp.head import MtpHead, build_mtp_head
from paceline.speculate.mtp.layout import Layout


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
        device=how["device"],
        dtype=how["dtype"],
        max_positions=max_positions,
    )
    if how["load_format"] == "dummy":
        fill_dummy(head, seed=how["seed"])
        return head
    with open_numbers(source) as stored:
        checkpoint = UnstackedExperts(stored)
        names = _names(checkpoint, source, config, layout, place)
        copy_weights(checkpoint, names, head.destinations(), module=head, model=source.name)
    return head


def _names(
    checkpoint: StoredTensors, source: ModelSource, config: ModelConfig, layout: Layout, place: str
) -> dict[str, str]:
    file = architecture(config.model_type)
    found = {}
    for name, stored in canonical_names(checkpoint.names, file, model=source.name).items():
        own = layout.canonical(name, place)
        if own is not None:
            found[own] = stored
    return found
