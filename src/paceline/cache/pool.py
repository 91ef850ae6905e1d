"""KVPool, StatePool: the device tensors of one cache group; who may use which page or slot is the
manager's."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from paceline.core.dtypes import FP8
from paceline.core.model.cache_groups import CacheGroupSpec
from paceline.core.model.config import ROW_SCALES, RowPart


class Scales(NamedTuple):
    """What the stored numbers of one layer are multiplied by."""

    k: float = 1.0
    v: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class KVFormat:
    """How K and V are stored."""

    dtype: torch.dtype  # the model's, or float8_e4m3fn
    scales: Mapping[int, Scales] = field(default_factory=dict)  # by layer; float8 only, else 1

    @property
    def is_scaled(self) -> bool:
        """Whether what is stored is value / scale."""
        return self.dtype is torch.float8_e4m3fn


def torch_kv_dtype(name: str) -> torch.dtype:
    """The torch dtype of a value of EngineOptions.kv_cache_dtype."""
    dtype: torch.dtype = torch.float8_e4m3fn if name == FP8 else getattr(torch, name)
    return dtype


def _dtype_of(part: RowPart, dtype: torch.dtype) -> torch.dtype:
    """Of a part in a cache of `dtype`."""
    return dtype if part.dtype is None else torch_kv_dtype(part.dtype)


class LayerPages(NamedTuple):
    """One layer's share of a pool, by the names of parts."""

    parts: Mapping[str, Tensor]  # of [num_pages, page_size, *part.shape]
    scales: Mapping[str, Tensor]  # of [1] float32: true number = stored * scale; empty unless
    # stored as float8, and of latents, whose rows have scales of their own among the parts


class KVPool:
    """The pages of every layer in a group, a tensor for each part that is stored.  Page 0 is
    reserved for padding.

    Each: [num_layers, num_pages, page_size, *part.shape]; of K and V [num_kv_heads, dim], NHD.
    Zeroed once: the reserved page is read by padded rows and must hold finite numbers.
    """

    def __init__(
        self, spec: CacheGroupSpec, num_pages: int, *, kv: KVFormat, device: torch.device
    ) -> None:
        self.spec = spec
        self.num_pages = num_pages
        head = (len(spec.layer_ids), num_pages, spec.page_size)
        self.parts = {
            part.name: torch.zeros(
                *head, *part.shape, dtype=_dtype_of(part, kv.dtype), device=device
            )
            for part in spec.stored
        }
        self._scales: Tensor | None = None  # [num_layers, num_parts, 1]  float32
        if kv.is_scaled and ROW_SCALES not in self.parts:
            known = [kv.scales.get(layer, Scales())._asdict() for layer in spec.layer_ids]
            scales = [[of[part.of or part.name] for part in spec.parts] for of in known]
            self._scales = torch.tensor(scales, dtype=torch.float32, device=device).unsqueeze(2)

    def layer(self, layer_id: int) -> LayerPages:
        """The pages of one model layer."""
        index = self.spec.layer_ids.index(layer_id)
        names = [part.name for part in self.spec.parts]
        scales = () if self._scales is None else self._scales[index].unbind()
        return LayerPages(
            parts={
                part.name: self.parts[part.of or part.name][index][..., : part.shape[-1]]
                for part in self.spec.parts
            },
            scales=dict(zip(names, scales, strict=False)),
        )

    def named_tensors(self) -> dict[str, Tensor]:
        """The pool's tensors by name, for guards."""
        scales = {} if self._scales is None else {"scales": self._scales}
        return {f"kv.{self.spec.name}.{n}": t for n, t in (self.parts | scales).items()}


class StatePool:
    """The slots of every layer in a STATE group, a tensor for each part that is stored.  Slot 0 is
    reserved: padded rows write it.

    Each: [num_layers, num_slots, *part.shape].
    lens: [num_slots] int32 tokens that each slot stands for; 0: none.
    """

    def __init__(
        self, spec: CacheGroupSpec, num_slots: int, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        """dtype: of parts that name none."""
        self.spec = spec
        self.num_slots = num_slots
        self.lens = torch.zeros(num_slots, dtype=torch.int32, device=device)
        self.parts = {
            part.name: torch.zeros(
                len(spec.layer_ids),
                num_slots,
                *part.shape,
                dtype=_dtype_of(part, dtype),
                device=device,
            )
            for part in spec.stored
        }

    def layer(self, layer_id: int) -> dict[str, Tensor]:
        """The slots of one model layer, by the names of parts: of [num_slots, *part.shape]."""
        index = self.spec.layer_ids.index(layer_id)
        return {name: part[index] for name, part in self.parts.items()}

    def named_tensors(self) -> dict[str, Tensor]:
        """The pool's tensors by name, for guards."""
        return {
            f"kv.{self.spec.name}.{n}": t for n, t in (self.parts | {"lens": self.lens}).items()
        }
