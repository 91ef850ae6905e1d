"""PooledHead: what a classifier, or a vector's last modules, make of one pooled row."""

from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.core.model.config import ModelConfig
from paceline.core.model.encoder import HEAD_ACTS, HeadStage
from paceline.layers.layer_norm import LayerNorm
from paceline.layers.weights.parameter import Placement, empty_parameter
from paceline.layers.weights.weight_format import Named, wholly

_ACTS: dict[str, Callable[[Tensor], Tensor]] = dict(
    zip(HEAD_ACTS, (F.gelu, F.relu, F.silu, torch.tanh), strict=True)
)


class PooledHead(nn.Module):
    """The stages of a model's head, in float32 whatever the model's dtype: scores are compared, and
    those of neighbours differ by little."""

    def __init__(self, config: ModelConfig, placement: Placement) -> None:
        super().__init__()
        place = replace(placement, dtype=torch.float32)
        widths = [config.hidden_size, *(stage.width for stage in config.pooled_head)]
        self.stages = nn.ModuleList(
            _Stage(stage, width, config.rms_norm_eps, place)
            for stage, width in zip(config.pooled_head, widths, strict=False)
        )

    def forward(self, rows: Tensor) -> Tensor:
        """rows [reqs, hidden] float32 -> [reqs, pooled_width] float32."""
        for stage in self.stages:
            rows = stage(rows)
        return rows

    def destinations(self) -> Named:
        """What a checkpoint fills."""
        named: Named = {}
        for stage in self.stages:
            assert isinstance(stage, _Stage), "it is made of them"
            named |= stage.destinations()
        return named


class _Stage(nn.Module):
    def __init__(self, stage: HeadStage, width: int, eps: float, place: Placement) -> None:
        super().__init__()
        self.told = stage
        self.weight = empty_parameter(stage.width, width, placement=place)
        self.bias = empty_parameter(stage.width, placement=place) if stage.bias else None
        self.norm: LayerNorm | None = None
        if stage.norm is not None:
            self.norm = LayerNorm(stage.width, eps, bias=stage.norm_bias, placement=place)

    def forward(self, rows: Tensor) -> Tensor:
        rows = F.linear(rows, self.weight, self.bias)
        if self.told.act is not None:
            rows = _ACTS[self.told.act](rows)
        return rows if self.norm is None else self.norm(rows)

    def destinations(self) -> Named:
        name = self.told.name
        named = {f"{name}.weight": wholly(self.weight)}
        if self.bias is not None:
            named[f"{name}.bias"] = wholly(self.bias)
        if self.norm is not None:
            assert self.told.norm is not None, "it has a norm of that name"
            named |= self.norm.fill(self.told.norm)
        return named
