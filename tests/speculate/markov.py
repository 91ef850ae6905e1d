"""Rounds over a target whose logits depend on the token before alone: its text is a Markov chain.

The runner, its rounds and the choice of drafts are the engine's own; nothing reads a cache, so all
requests share a page.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from paceline.attention.backends.torch_backend import TorchBackend
from paceline.cache.pool import KVFormat
from paceline.core.draft_shape import DraftShape
from paceline.core.events import EventLog
from paceline.core.model.cache_groups import cache_group_specs
from paceline.core.request.sampling_params import SamplingParams
from paceline.core.step import Delta, JoinDelta, PageDelta, Step, StepLayout, StepOutputs
from paceline.models.config import parse_config
from paceline.models.decoder import Hidden
from paceline.runner.build import build_runner
from paceline.runner.proposer import DraftTree, Proposer, RoundState
from paceline.runner.recording.graph_sizes import GraphSizes
from paceline.runner.runner_config import RunnerConfig
from paceline.runner.streams import InlineStream
from paceline.speculate.drafting import DraftRun, propose

VOCAB, ROOT = 6, 1
SHAPE = DraftShape(num_steps=3, topk=1, num_draft_tokens=4)
DRAFT_IDS = torch.tensor([0, 2, 3, 5])  # of the draft vocabulary
PAGE_SIZE = 16

_generator = torch.Generator().manual_seed(7)
TARGET = torch.randn(VOCAB, VOCAB, generator=_generator) * 1.2  # logits by the token before
DRAFT = TARGET + torch.randn(VOCAB, VOCAB, generator=_generator) * 0.7

_CONFIG = {
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "max_position_embeddings": 4096,
}


class MarkovModel:
    """What a round asks of a CausalLM; its hidden state is the token."""

    def __call__(self, input_ids: Tensor, *rest: object) -> Hidden:
        return Hidden(input_ids.unsqueeze(1), {})

    def logits(self, hidden: Tensor) -> Tensor:
        return TARGET[hidden[:, 0]]

    def attention_sinks(self) -> tuple[None, ...]:
        return (None,)


class _Run(DraftRun):
    def __init__(self, roots: Tensor, ids: Tensor, logits: Tensor) -> None:
        self.d2t = ids - torch.arange(len(ids))
        self._roots, self._table = roots, logits[:, ids]

    def first_logits(self) -> Tensor:
        return self._table[self._roots]

    def next_logits(self, tokens: Tensor, origin: Tensor) -> Tensor:
        return self._table[tokens.flatten()]


class MarkovDrafter(Proposer):
    """Drafts by the engine's own rules from logits that depend on the token before."""

    name, shape = "MARKOV", SHAPE

    def __init__(self, ids: Tensor, logits: Tensor) -> None:
        self._ids, self._logits = ids, logits

    def propose(self, state: RoundState) -> DraftTree:
        roots = state.view.input_ids.view(state.view.padded_reqs, -1)[:, 0]
        return propose(_Run(roots, self._ids, self._logits), state, SHAPE)


@dataclass
class Said:
    """Texts of requests that ran side by side, and how they came about."""

    texts: list[list[int]]  # [requests] the root included
    rounds: list[int]  # [requests] until each ended

    def pairs(self) -> tuple[Tensor, Tensor]:
        """Every token, and the one behind it."""
        found = [pair for text in self.texts for pair in pairwise(text)]
        before, after = torch.tensor(found).T
        return before, after

    def tokens_per_round(self) -> float:
        return sum(len(text) - 2 for text in self.texts) / sum(self.rounds)

    def note(self, outputs: StepOutputs) -> None:
        for text, tokens in zip(self.texts, outputs.token_ids, strict=True):
            text.extend(tokens)


def speak(
    params: Sequence[SamplingParams],
    *,
    length: int,
    rejects: bool,
    ids: Tensor | None = None,
    draft: Tensor = DRAFT,
    capture: bool = False,
) -> Said:
    """One request of `length` tokens for each of the parameters: a root, a decode step, rounds.

    ids: [draft vocab] int64 the drafter's tokens, None: all; draft: [vocab, vocab] its logits by
    the token before; capture: rounds run as a graph.
    """
    num, config = len(params), parse_config(_CONFIG)
    limits = RunnerConfig(
        max_running=num,
        max_batched_tokens=num,
        context_len=length,
        max_join_tokens=num,
        num_pages=(2,),
        graph_max_reqs=num,
        sizes=GraphSizes.up_to(num, every=0),
        capture=capture,
        draft=SHAPE,
        rejects=rejects,
    )
    runner = build_runner(
        MarkovModel(),
        config,
        cache_group_specs(config, PAGE_SIZE),
        TorchBackend(),
        limits,
        stream=InlineStream(),
        device=torch.device("cpu"),
        dtype=torch.float32,
        kv=KVFormat(dtype=torch.float32),
        notify=EventLog(),
        proposer=MarkovDrafter(torch.arange(VOCAB) if ids is None else ids, draft),
    )
    said = Said([[ROOT] for _ in params], [0 for _ in params])
    step = _first_step(params, length)
    said.note(runner.launch(step).wait())
    while min(map(len, said.texts)) < length:
        step = _next_round(step, length)
        said.rounds = [
            rounds + (len(text) < length)
            for rounds, text in zip(said.rounds, said.texts, strict=True)
        ]
        said.note(runner.launch(step).wait())
    return said


def _first_step(params: Sequence[SamplingParams], length: int) -> Step:
    """Everybody joins with a root, and decodes one token."""
    num, pages = len(params), (1,) * -(-length // PAGE_SIZE)
    deltas: list[Delta] = []
    for row, one in enumerate(params, start=1):
        deltas.append(
            JoinDelta(
                row=row, token_ids=(ROOT,), prompt_len=1, prefix_len=0, max_len=length, params=one
            )
        )
        deltas.append(PageDelta(row=row, group=0, start=0, page_ids=pages))
    rows = tuple(range(1, num + 1))
    return Step(
        epoch=1,
        layout=StepLayout(rows=rows, extend_lens=(1,) * num, emits=(True,) * num),
        is_ragged=False,
        prefix_lens_bound=(0,) * num,
        sampler=max(one.sampler_tier for one in params),
        logprobs=False,
        deltas=tuple(deltas),
    )


def _next_round(step: Step, length: int) -> Step:
    num = len(step.layout.rows)
    lens = (SHAPE.num_draft_tokens,) * num
    return replace(
        step,
        epoch=step.epoch + 1,
        layout=replace(step.layout, extend_lens=lens),
        mask=SHAPE.mask,
        is_round=True,
        prefix_lens_bound=(length - 1,) * num,
        deltas=(),
    )
