"""KVPool: the device tensors of one cache group; who may use which page is the manager's."""

import torch
from torch import Tensor

from paceline.core.model_config import CacheGroupSpec


class KVPool:
    """K and V pages of every layer in a group.  Page 0 is reserved for padding.

    k: [num_layers, num_pages, page_size, num_kv_heads, head_dim]; v the same with v_head_dim; NHD.
    Zeroed once: the reserved page is read by padded rows and must hold finite numbers.
    """

    def __init__(
        self, spec: CacheGroupSpec, num_pages: int, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.spec = spec
        self.num_pages = num_pages
        head = (len(spec.layer_ids), num_pages, spec.page_size, spec.num_kv_heads)
        self._k = torch.zeros(*head, spec.head_dim, dtype=dtype, device=device)
        self._v = torch.zeros(*head, spec.v_head_dim, dtype=dtype, device=device)

    def layer(self, layer_id: int) -> tuple[Tensor, Tensor]:
        """(k, v) of one model layer: [num_pages, page_size, num_kv_heads, head_dim]."""
        index = self.spec.layer_ids.index(layer_id)
        return self._k[index], self._v[index]

    def named_tensors(self) -> dict[str, Tensor]:
        """The pool's tensors by name, for guards and poisoning."""
        return {f"kv.{self.spec.name}.k": self._k, f"kv.{self.spec.name}.v": self._v}
