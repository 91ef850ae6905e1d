"""Names of a checkpoint's tensors, as text-only checkpoints of its architecture spell them."""

import re

from paceline.core.errors import WeightsError
from paceline.core.model.encoder import HeadStage
from paceline.models.architecture import Architecture
from paceline.models.kv_scales import is_cache_scale

_BODY = ("embed_tokens.", "layers.", "norm.")  # of checkpoints of the model without its head
_LAYER = re.compile(r"^model\.layers\.(\d+)\.")


def canonical_names(
    stored: list[str], file: Architecture, *, model: str, head: tuple[HeadStage, ...] = ()
) -> dict[str, str]:
    """Canonical name -> stored name, of all tensors but those that `file` ignores and `head` does
    not take.

    Raises WeightsError where two stored tensors have one canonical name; `model` is the name it
    speaks of.
    """
    taken = {name for stage in head for name in (stage.name, stage.norm)}
    names: dict[str, str] = {}
    for name in stored:
        canonical = _renamed(name, file)
        if canonical.rpartition(".")[0] not in taken and _is_ignored(name, file):
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


def _is_ignored(name: str, file: Architecture) -> bool:
    """So are the scales of an 8-bit KV cache, which `models.kv_scales` reads."""
    if is_cache_scale(name):
        return True
    return any(re.search(pattern, name) is not None for pattern in file.ignored)


def _renamed(name: str, file: Architecture) -> str:
    """The language part of a multimodal model is below `language_model`."""
    if name.startswith("model.language_model."):
        name = "model." + name.removeprefix("model.language_model.")
    name = name.removeprefix("language_model.")
    for stored, ours in file.renamed:
        name = name.replace(stored, ours)
    return f"model.{name}" if name.startswith(_BODY) else name


def of_the_model(names: dict[str, str], file: Architecture, num_layers: int) -> dict[str, str]:
    """`names`, as of `canonical_names`, without those of layers that predict a token further."""
    if file.predicts is None:
        return names
    has_own_place = "{}" not in file.predicts

    def is_further(name: str) -> bool:
        if has_own_place:
            return name.startswith(str(file.predicts))
        found = _LAYER.match(name)
        return found is not None and int(found[1]) >= num_layers

    return {name: stored for name, stored in names.items() if not is_further(name)}
