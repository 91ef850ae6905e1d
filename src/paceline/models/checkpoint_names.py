"""Names of a checkpoint's tensors, as text-only checkpoints of its architecture spell them."""

import re

from paceline.core.errors import WeightsError
from paceline.models.kv_scales import kv_scale_name

_VISION = ("vision_tower.", "multi_modal_projector.")
_BODY = ("embed_tokens.", "layers.", "norm.")  # of checkpoints of the model without its head
Renamed = tuple[tuple[str, str], ...]  # parts of names, as stored -> as we name them
_LAYER = re.compile(r"^model\.layers\.(\d+)\.")
_UNUSED = re.compile(
    r"(^|\.)(rotary_emb\.(inv_freq|cos_cached|sin_cached)|\w*attn\.(masked_bias|bias))$"
)


def canonical_names(stored: list[str], model: str, *, renamed: Renamed = ()) -> dict[str, str]:
    """Canonical name -> stored name, of the tensors that are needed.

    renamed: of the architecture.  Raises WeightsError where two stored tensors have one canonical
    name; `model` is the name it speaks of.
    """
    names: dict[str, str] = {}
    for name in stored:
        canonical = canonical_name(name, renamed)
        if canonical is None:
            continue
        if canonical in names:
            raise WeightsError.about(
                f"weights of '{model}'",
                expected=f"one tensor for {canonical}",
                got=f"{names[canonical]} and {name}",
                remedy="remove one of them, or download the model again",
            )
        names[canonical] = name
    return names


def canonical_name(name: str, renamed: Renamed = ()) -> str | None:
    """None for a tensor that is not needed: stored rope tables and causal masks, the scales of an
    8-bit KV cache (`models.kv_scales` reads them), and the vision part of a multimodal model, whose
    language part is below `language_model`."""
    if name.removeprefix("model.").startswith(_VISION):
        return None
    if _UNUSED.search(name) is not None or kv_scale_name(name) is not None:
        return None
    if name.startswith("model.language_model."):
        name = "model." + name.removeprefix("model.language_model.")
    name = name.removeprefix("language_model.")
    for stored, ours in renamed:
        name = name.replace(stored, ours)
    return f"model.{name}" if name.startswith(_BODY) else name


def without_layers_behind(names: dict[str, str], num_layers: int) -> dict[str, str]:
    """`names`, as of `canonical_names`, of the first `num_layers` layers and what is in none."""

    def is_behind(name: str) -> bool:
        found = _LAYER.match(name)
        return found is not None and int(found[1]) >= num_layers

    return {name: stored for name, stored in names.items() if not is_behind(name)}
