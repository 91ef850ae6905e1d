"""A model with recurrent layers, as an architecture of its own: a Llama and two layers of sums.

What the first layer sums is made of the token ids, the second takes the first's.  decay is -1 and
all numbers are integers, so that no order of summation changes a bit; the two together weigh each
token by its distance.  The sum behind a token chooses a third of the vocabulary from which the next
one is taken.  Of a Llama without layers, the sums are all that knows of earlier tokens.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from example_state_backend import PART, SumBackend
from torch import Tensor, nn

from paceline.attention import mixers
from paceline.core.model.config import SOFTMAX, LayerSpec, ModelConfig, RowPart
from paceline.layers.embedding import OverlaidRows
from paceline.models import registry
from paceline.models.architecture import Architecture, prenorm
from paceline.models.causal_lm import CausalLM
from paceline.models.config_layers import alike
from paceline.models.config_prenorm import read_plain
from paceline.models.decoder import Hidden, read_rows
from paceline.models.fields import Fields

MODEL_TYPE = "llama_sums"
WIDTH = 3
CHOICES = 3
DECAY = -1
FACTORS, MODULI = torch.tensor([1, 7, 13]), torch.tensor([11, 5, 7])
MIXED = torch.tensor([1, 3, 7])
SUMS = LayerSpec(mixer=SumBackend.kind, state=(RowPart(PART, (WIDTH,), dtype="float32"),))


class AlternatingSums(SumBackend):
    """As a registry makes it."""

    def __init__(self) -> None:
        super().__init__(DECAY)


def brought(ids: Tensor) -> Tensor:
    """[tokens, WIDTH] float32: what the first layer sums."""
    return (ids.unsqueeze(1) * FACTORS % MODULI).float()


def boosts(sums: Tensor, vocab_size: int) -> Tensor:
    """[rows, vocab] float32: the third of the vocabulary that may follow."""
    chosen = (sums.long() * MIXED).sum(1) // 2 % CHOICES
    return 50.0 * (chosen.unsqueeze(1) == torch.arange(vocab_size) % CHOICES)


class SumModel(nn.Module):
    """What the runner takes for a CausalLM."""

    def __init__(self, inner: CausalLM, first: int) -> None:
        """first: layer id of the first sum."""
        super().__init__()
        self.inner = inner
        self.first = first
        self.head = inner.head

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        ctx: Any,
        taps: tuple[str, ...] = (),
        overlaid: OverlaidRows | None = None,
        read: Tensor | None = None,
    ) -> Hidden:
        found = self.inner(input_ids, positions, ctx, taps, overlaid, read)
        sums = ctx.mix(self.first + 1, ctx.mix(self.first, brought(input_ids)))
        sums = read_rows(sums, read)
        return Hidden(torch.cat([found.hidden, sums], 1), found.taps)

    def logits(self, hidden: Tensor) -> Tensor:
        logits = self.inner.logits(hidden[:, :-WIDTH].contiguous())
        return logits + boosts(hidden[:, -WIDTH:], logits.shape[1])

    def attention_sinks(self) -> tuple[Tensor | None, ...]:
        return self.inner.attention_sinks()

    def destinations(self) -> dict[str, Tensor]:
        return self.inner.destinations()


def read_sums(fields: Fields) -> dict[str, Any]:
    """Of a Llama's config.json, which may have no layers."""
    attending = fields.integer("num_hidden_layers", minimum=0)
    some = fields.without("num_hidden_layers").behind({"num_hidden_layers": max(1, attending)})
    shared = read_plain(some)
    words = {name: shared.pop(name) for name in [*shared] if name in alike.__annotations__}
    return shared | {"layers": (*alike(**words)[:attending], SUMS, SUMS)}


def build_sums(config: ModelConfig, **where: Any) -> Any:
    attending = tuple(layer for layer in config.layers if layer.mixer == SOFTMAX)
    inner = prenorm(replace(config, layers=attending), **where)
    return SumModel(inner, len(attending))


def register(patch: pytest.MonkeyPatch) -> None:
    """The architecture, and who runs its sums."""
    patch.setitem(
        registry.ARCHITECTURES,
        MODEL_TYPE,
        Architecture(read=read_sums, build=build_sums, defaults={}),
    )
    patch.setitem(mixers.REGISTRIES, SumBackend.kind, {"ours": f"{__name__}:AlternatingSums"})


def add_sums(folder: Path) -> None:
    """Make the Llama of a folder one with sums."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"model_type": MODEL_TYPE}))


def adds_nothing(token: int) -> list[int]:
    return [0] * WIDTH


def said_alone(
    theirs: transformers.PreTrainedModel,
    prompt: Sequence[int],
    num_tokens: int,
    added: Callable[[int], list[int]] = adds_nothing,
) -> list[int]:
    """What transformers' Llama and two sums in Python say, one token after another.

    added: to the second sum behind a token, by what else reads it.
    """
    known = list(prompt)
    first, second = [0] * WIDTH, [0] * WIDTH

    def take(token: int) -> None:
        for index, x in enumerate(brought(torch.tensor([token]))[0].int().tolist()):
            first[index] = DECAY * first[index] + x
            second[index] = DECAY * second[index] + first[index]

    for token in known:
        take(token)
    for _ in range(num_tokens):
        with torch.inference_mode():
            logits = theirs(torch.tensor([known])).logits[0, -1]
        both = torch.tensor([second]) + torch.tensor(added(known[-1]))
        token = int((logits + boosts(both, len(logits))[0]).argmax())
        known.append(token)
        take(token)
    return known[len(prompt) :]
