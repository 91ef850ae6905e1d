"""The tiny model with sums, and two layers that look up rows of an encoder.

A row has a key, a place on a circle of 16, and three integers.  A token looks up the row whose key
is nearest to its id on the circle, a little further on: no two are as near, and scores are so far
apart that softmax attention is a lookup.  A token of a request without rows finds zeros.
"""

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from sum_model import WIDTH, SumModel, said_alone
from tiny_runner import TinyModel
from tiny_states import StateEngine, groups_of
from torch import Tensor

from paceline.core.model.cache_groups import CacheGroupSpec, cache_group_specs
from paceline.core.model.config import Heads, LayerSpec, ModelConfig
from paceline.core.request.input_rows import EncoderInput
from paceline.models.decoder import Hidden, read_rows

PLACES = 16  # of the circle
OFFSETS = (0.25, 5.25)  # by layer
SHARPNESS = 400.0
DIM = 16
HEADS = Heads(num_heads=2, num_kv_heads=1, head_dim=DIM, v_head_dim=DIM)
MOST_ROWS = 8  # whole pages: a table of no more than these


def rows_of(seed: int, num_rows: int) -> EncoderInput:
    """[num_rows, 1 + WIDTH]: keys, and the integers of each."""
    rng = random.Random(seed)
    keys = rng.sample(range(0, 2 * PLACES, 2), num_rows)
    rows = [[key / 2, *(float(rng.randrange(9)) for _ in range(WIDTH))] for key in keys]
    data = torch.tensor(rows).view(num_rows, 1 + WIDTH)
    return EncoderInput(num_rows=num_rows, media_hash=f"{seed}", data=data)


def on_circle(places: Tensor) -> Tensor:
    """[..., DIM] of [...]."""
    angles = places * (2 * math.pi / PLACES)
    flat = torch.stack([angles.cos(), angles.sin()], -1)
    return torch.nn.functional.pad(flat, (0, DIM - 2))


class EncoderModel(SumModel):
    """What the layers find is added to the sums."""

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        ctx: Any,
        taps: tuple[str, ...] = (),
        overlaid: Any = None,
        read: Tensor | None = None,
    ) -> Hidden:
        found = super().forward(input_ids, positions, ctx, taps, overlaid)
        hidden = found.hidden.clone()
        for layer, offset in enumerate(OFFSETS):
            q = on_circle(input_ids % PLACES + offset).unsqueeze(1).expand(-1, 2, -1)
            rows = ctx.attend_encoder(self.first + 2 + layer, q.contiguous())
            hidden[:, -WIDTH:] += rows[:, 1, :WIDTH].round()
        return Hidden(read_rows(hidden, read), found.taps)

    def encoder_kv(self, given: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
        for layer in range(len(OFFSETS)):
            k = on_circle(given[:, 0]).unsqueeze(1)
            v = torch.nn.functional.pad(given[:, 1:], (0, DIM - WIDTH)).unsqueeze(1)
            yield self.first + 2 + layer, k, v


def looked_up(token: int, given: EncoderInput | None) -> list[int]:
    """[WIDTH]: what both layers add for a token."""
    total = [0] * WIDTH
    rows = [] if given is None else given.data.tolist()
    for offset in OFFSETS if rows else ():
        place = token % PLACES + offset
        apart = [abs((row[0] - place + PLACES / 2) % PLACES - PLACES / 2) for row in rows]
        nearest = rows[apart.index(min(apart))]
        total = [sum_ + int(x) for sum_, x in zip(total, nearest[1:], strict=True)]
    return total


def said_of(
    tiny: TinyModel, prompt: Sequence[int], num_tokens: int, given: EncoderInput | None
) -> list[int]:
    """What the model of sums says alone, with the lookups in Python."""
    return said_alone(tiny.theirs, prompt, num_tokens, lambda token: looked_up(token, given))


class EncoderEngine(StateEngine):
    """Scheduler, cache and runner of the model, whose pools have `num_encoded` pages of rows."""

    def __init__(self, tiny: TinyModel, *, num_encoded: int = 60, **options: Any) -> None:
        super().__init__(tiny, more_pages=(num_encoded,), **options)

    def config_of(self, config: ModelConfig) -> ModelConfig:
        """With two layers that look rows up, behind those of sums."""
        sums = LayerSpec(mixer="none")  # groups of states are given apart
        cross = LayerSpec(heads=HEADS, scale=SHARPNESS, reads_encoder=True)
        layers = (*config.layers, sums, sums, cross, cross)
        return replace(config, layers=layers, max_encoder_len=MOST_ROWS)

    def groups_of(self, config: ModelConfig, page_size: int, every: int) -> list[CacheGroupSpec]:
        encoded = [
            spec
            for spec in cache_group_specs(self.config_of(config), page_size)
            if spec.encoder_len is not None
        ]
        return [*groups_of(config, page_size, every), *encoded]

    def model_of(self, tiny: TinyModel) -> EncoderModel:
        return EncoderModel(tiny.ours, tiny.config.num_layers)
