"""KVPool: the device tensors of one cache group; who may use which page is the manager's."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from paceline.core.model_config import CacheGroupSpec
from paceline.core.options import FP8


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


class LayerPages(NamedTuple):
    """One layer's part of a pool."""

    k: Tensor  # [num_pages, page_size, num_kv_heads, head_dim]
    v: Tensor  # [num_pages, page_size, num_kv_heads, v_head_dim]
    k_scale: Tensor | None  # [1]  float32  true K = stored * scale; None unless stored as float8
    v_scale: Tensor | None  # [1]  float32


class KVPool:
    """K and V pages of every layer in a group.  Page 0 is reserved for padding.

    k: [num_layers, num_pages, page_size, num_kv_heads, head_dim]; v the same with v_head_dim; NHD.
    Zeroed once: the reserved page is read by padded rows and must hold finite numbers.
    """

    def __init__(
        self, spec: CacheGroupSpec, num_pages: int, *, kv: KVFormat, device: torch.device
    ) -> None:
        self.spec = spec
        self.num_pages = num_pages
        head = (len(spec.layer_ids), num_pages, spec.page_size, spec.num_kv_heads)
        self._k = torch.zeros(*head, spec.head_dim, dtype=kv.dtype, device=device)
        self._v = torch.zeros(*head, spec.v_head_dim, dtype=kv.dtype, device=device)
        self._scales: Tensor | None = None  # [num_layers, 2, 1]  float32  of K, of V
        if kv.is_scaled:
            scales = [kv.scales.get(layer, Scales()) for layer in spec.layer_ids]
            self._scales = torch.tensor(scales, dtype=torch.float32, device=device).unsqueeze(2)

    def layer(self, layer_id: int) -> LayerPages:
        """The pages of one model layer."""
        index = self.spec.layer_ids.index(layer_id)
        scales = (None, None) if self._scales is None else self._scales[index].unbind()
        return LayerPages(self._k[index], self._v[index], *scales)

    @property
    def tensors(self) -> list[Tensor]:
        """K and V: [num_layers, num_pages, page_size, num_kv_heads, *head_dim] each."""
        return [self._k, self._v]

    def named_tensors(self) -> dict[str, Tensor]:
        """The pool's tensors by name, for guards."""
        named = {"k": self._k, "v": self._v, "scales": self._scales}
        return {f"kv.{self.spec.name}.{n}": t for n, t in named.items() if t is not None}
