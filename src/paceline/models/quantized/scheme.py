"""Quantization: what a config.json says of how its checkpoint stores weights.  Imports no torch."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from paceline.core.errors import WeightsError
from paceline.models.fields import Fields

if TYPE_CHECKING:
    from torch import Tensor

    from paceline.models.quantized.codes import Coded

FP8, E8M0 = "F8_E4M3", "F8_E8M0"  # as safetensors files spell them
PLAIN = ("F32", "BF16", "F16")  # scales that are numbers
_UNREAD = {"input_scale", "input_zero_point", "input_global_scale", "activation_scale_ub"} | {
    "weight_shape"
}


class Stored(NamedTuple):
    """A tensor, as its file's header has it."""

    shape: tuple[int, ...]
    dtype: str


class Weight(NamedTuple):
    """Numbers that several stored tensors of one module stand for."""

    name: str  # below the module, as a plain checkpoint calls it
    shape: tuple[int, ...]
    parts: tuple[str, ...]  # names of the stored tensors, below the module
    make: "Callable[..., Tensor]"  # of the tensors of `parts`; float32
    coded: "Callable[..., Coded] | None" = None  # likewise, where it has one form with others
    kind: str | None = None  # of those codes: of kernels.packed_weight
    group: int | None = None  # columns that share a scale; None: all
    has_zeros: bool = False
    scale_dtype: str = "F32"  # as files spell it
    shared_rows: int = 1  # that have the same scales
    rounds_inputs: bool = False  # the method has codes for what the weight multiplies, too


@dataclass(frozen=True, slots=True)
class Quantization(ABC):
    """One method, with its settings."""

    method: str  # as quantization_config spells it

    def __str__(self) -> str:
        return f"{self.method}; codes become plain numbers as they are read, at their full size"

    @abstractmethod
    def weights(self, module: str, stored: Mapping[str, Stored]) -> list[Weight]:
        """What the tensors of `module` stand for; none where they are plain.

        stored: all tensors of the module, by their names below it.  A tensor that is in no weight,
        and not `unread`, is plain.  Raises WeightsError for one that is missing or misshapen.
        """


def coded_weight(
    shape: tuple[int, int],
    parts: tuple[str, ...],
    coded: "Callable[..., Coded]",
    *,
    kind: str,
    group: int,
    has_zeros: bool,
    scale_dtype: str,
    shared_rows: int = 1,
    rounds_inputs: bool = False,
) -> Weight:
    """A matrix whose codes can stay codes.  kind: of kernels.packed_weight; group: columns that
    share a scale; shared_rows: rows that do."""
    return Weight(
        "weight",
        shape,
        parts,
        lambda *tensors: coded(*tensors).numbers(),
        coded,
        kind,
        None if group >= shape[1] else group,
        has_zeros,
        scale_dtype,
        shared_rows,
        rounds_inputs,
    )


Read = Callable[[Fields], Quantization | None]  # None: it quantises no weights


def refuse_weight(module: str, expected: str, got: object) -> NoReturn:
    """Raise WeightsError about the tensors of one module."""
    raise WeightsError.about(
        f"the quantised weight '{module}'",
        expected=expected,
        got=got,
        remedy="check that config.json and the weights belong together, or download them again",
    )


def require_shape(module: str, name: str, stored: Stored, *shapes: tuple[int, ...]) -> None:
    """Raise WeightsError unless a tensor has one of `shapes`."""
    if stored.shape not in shapes:
        listed = " or ".join(str(list(shape)) for shape in dict.fromkeys(shapes))
        refuse_weight(module, f"'{name}' of {listed}", f"{stored.dtype} {list(stored.shape)}")


def require_dtype(module: str, name: str, stored: Stored, *dtypes: str) -> None:
    """Raise WeightsError unless a tensor has one of `dtypes`."""
    if stored.dtype not in dtypes:
        refuse_weight(module, f"'{name}' of {' or '.join(dtypes)}", stored.dtype)


def unread(stored: Mapping[str, Stored]) -> set[str]:
    """Tensors of a quantised module that no number comes from: scales of activations, which stay as
    they are, and shapes that headers state."""
    return _UNREAD & stored.keys()


def groups(columns: int, size: int) -> int:
    """How many groups of `size` cover them; the last may be partial."""
    return -(-columns // size)


def refuse_settings(fields: Fields, settings: Mapping[str, tuple[Any, ...]], remedy: str) -> None:
    """Raise ModelError for the first of `settings` whose value is none that is served."""
    for name, served in settings.items():
        if fields.get(name) not in served:
            listed = " or ".join(map(repr, served))
            fields.fail(name, listed, fields.get(name), remedy=remedy)
