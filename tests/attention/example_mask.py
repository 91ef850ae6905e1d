"""The mask of docs/python.md: the first tokens, the last ones, and of half the heads a stride."""

from torch import Tensor

from paceline.attention.backends.flex_backend import FlexBackend


class Strided(FlexBackend):
    """Four tokens at the start and sixteen at the end; odd heads also see every eighth."""

    name = "strided-example"

    @staticmethod
    def mask_mod(batch: Tensor, head: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        is_near = q_idx - kv_idx < 16
        is_stride = (kv_idx % 8 == 0) & (head % 2 == 1)
        return is_near | (kv_idx < 4) | is_stride
