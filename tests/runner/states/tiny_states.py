"""A tiny model with recurrent layers, an engine around it, and what it says token by token.

Two layers of running sums stand beside the tiny Llama: what they sum is made of the token ids, the
second takes the first's.  decay is -1 and all numbers are integers, so that no order of summation
changes a bit; the two together weigh each token by its distance.  The sum behind a token chooses a
third of the vocabulary from which the next one is taken.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from example_state_backend import PART, SumBackend
from tiny_runner import CONTEXT, GREEDY, MAX_RUNNING, VOCAB, TinyModel
from torch import Tensor, nn

from paceline.attention.backends.torch_backend import TorchBackend
from paceline.attention.states import StateBackend
from paceline.cache.manager import CacheManager
from paceline.cache.pool import KVFormat
from paceline.core.draft_shape import NO_DRAFTS, DraftShape
from paceline.core.events import EventLog
from paceline.core.model_config import (
    CacheGroupSpec,
    LayerSpec,
    ModelConfig,
    RowPart,
    cache_group_specs,
)
from paceline.core.step import RunKind, Step
from paceline.engine.loop import Launched, TurnFunction, overlapped_turn
from paceline.engine.request import Request
from paceline.engine.scheduler import Scheduler
from paceline.engine.scheduler_config import SchedulerConfig
from paceline.layers.embedding import OverlaidRows
from paceline.models.decoder import Hidden
from paceline.runner.build import RunnerConfig, build_runner
from paceline.runner.proposer import NOBODY, Proposer
from paceline.runner.streams import DeferredStream, InlineStream

WIDTH = 3
CHOICES = 3
DECAY = -1
FACTORS, MODULI = torch.tensor([1, 7, 13]), torch.tensor([11, 5, 7])
MIXED = torch.tensor([1, 3, 7])
TOKENS = torch.arange(VOCAB)


def groups_of(config: ModelConfig, page_size: int, every: int) -> list[CacheGroupSpec]:
    """Those of `config` and of two layers of sums behind its own."""
    sums = LayerSpec(mixer=SumBackend.kind, state=(RowPart(PART, (WIDTH,), dtype="float32"),))
    config = replace(config, layers=(*config.layers, sums, sums))
    *paged, states = cache_group_specs(config, page_size)
    return [*paged, replace(states, state_every=every)]


def brought(ids: Tensor) -> Tensor:
    """[tokens, WIDTH] float32: what the first layer sums."""
    return (ids.unsqueeze(1) * FACTORS % MODULI).float()


def boosts(sums: Tensor) -> Tensor:
    """[rows, VOCAB] float32: the third of the vocabulary that may follow."""
    chosen = (sums.long() * MIXED).sum(1) // 2 % CHOICES
    return 50.0 * (chosen.unsqueeze(1) == TOKENS % CHOICES)


class StateModel(nn.Module):
    """What the runner takes for a CausalLM."""

    def __init__(self, tiny: TinyModel) -> None:
        super().__init__()
        self.inner = tiny.ours
        self.first = tiny.config.num_layers
        self.head = tiny.ours.head

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        ctx: Any,
        taps: tuple[str, ...] = (),
        overlaid: OverlaidRows | None = None,
    ) -> Hidden:
        found = self.inner(input_ids, positions, ctx, taps, overlaid)
        sums = ctx.mix(self.first + 1, ctx.mix(self.first, brought(input_ids)))
        return Hidden(torch.cat([found.hidden, sums], 1), found.taps)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.inner.logits(hidden[:, :-WIDTH].contiguous()) + boosts(hidden[:, -WIDTH:])

    def attention_sinks(self) -> tuple[Tensor | None, ...]:
        return self.inner.attention_sinks()


def said_alone(tiny: TinyModel, prompt: Sequence[int], num_tokens: int) -> list[int]:
    """What transformers' Llama and two sums in Python say, one token after another."""
    known = list(prompt)
    first, second = [0] * WIDTH, [0] * WIDTH

    def take(token: int) -> None:
        for index, x in enumerate(brought(torch.tensor([token]))[0].int().tolist()):
            first[index] = DECAY * first[index] + x
            second[index] = DECAY * second[index] + first[index]

    for token in known:
        take(token)
    for _ in range(num_tokens):
        logits = tiny.theirs(torch.tensor([known])).logits[0, -1]
        token = int((logits + boosts(torch.tensor([second]))[0]).argmax())
        known.append(token)
        take(token)
    return known[len(prompt) :]


class StateEngine:
    """Scheduler, cache and runner of the model, with the loop around them."""

    def __init__(
        self,
        tiny: TinyModel,
        *,
        page_size: int = 4,
        every: int = 8,
        num_pages: int = 200,
        num_slots: int = 30,
        chunk: int = 16,
        budget: int = 64,
        max_running: int = MAX_RUNNING,
        capture: bool = True,
        ragged_graphs: bool = True,
        sanitize: bool = True,
        deferred: bool = False,
        turn: TurnFunction = overlapped_turn,
        draft: DraftShape = NO_DRAFTS,
        has_blocks: bool = False,
        make_proposer: Callable[[RunnerConfig], Proposer] = lambda limits: NOBODY,
        states: StateBackend | None = None,
    ) -> None:
        groups = groups_of(tiny.config, page_size, every)
        counts = (num_pages, num_slots)
        limits = RunnerConfig(
            max_running=max_running,
            max_batched_tokens=budget,
            context_len=CONTEXT,
            max_join_tokens=4 * CONTEXT,
            num_pages=counts,
            graph_max_reqs=max_running,
            graph_max_tokens=32 if ragged_graphs else 0,
            capture=capture,
            poison_graphs=True,
            sanitize=sanitize,
            draft=draft,
            has_blocks=has_blocks,
        )
        proposer = make_proposer(replace(limits, num_pages=(num_pages,)))
        self.runner = build_runner(
            StateModel(tiny),
            tiny.config,
            groups,
            TorchBackend(),
            limits,
            stream=DeferredStream() if deferred else InlineStream(),
            device=torch.device("cpu"),
            dtype=torch.float32,
            kv=KVFormat(dtype=torch.float32),
            notify=EventLog(),
            proposer=proposer,
            mixers={SumBackend.kind: SumBackend(DECAY) if states is None else states},
        )
        self.runner.boot()
        drafted = [pool.spec for pool in proposer.pools]
        self.cache = CacheManager(
            [*groups, *(replace(spec, draft=True) for spec in drafted)],
            (*counts, *(num_pages for _ in drafted)),
            max_extend_len=max(chunk, draft.reach),
        )
        self.scheduler = Scheduler(
            SchedulerConfig(
                max_running=max_running,
                max_batched_tokens=budget,
                chunked_prefill_size=chunk,
                max_join_tokens=4 * CONTEXT,
                padded_tokens=self.runner.padded_tokens if ragged_graphs else (),
                reserve_ahead=0,
                admission_margin=page_size,
                draft=draft,
                has_blocks=has_blocks,
            ),
            self.cache,
        )
        self._turn = turn
        self._epoch = 0
        self._in_flight: Launched | None = None
        self.kinds: list[RunKind] = []
        self.steps: list[Step] = []
        self.requests: list[Request] = []

    def add(self, prompt: Sequence[int], num_tokens: int) -> Request:
        """Queue a request."""
        params = replace(GREEDY, max_tokens=num_tokens)
        name = f"r{len(self.requests)}"
        request = Request.make(name, prompt, params, context_len=CONTEXT)
        self.requests.append(request)
        self.scheduler.add(request)
        return request

    def turn(self) -> None:
        """One turn of the loop."""
        self._epoch += 1
        launched, _ = self._turn(self.scheduler, self.runner, self._epoch, self._in_flight)
        self._in_flight = launched
        if launched is not None:
            self.kinds.append(launched.run.kind)
            self.steps.append(launched.step)

    def run(self) -> None:
        """Until nothing is left to do."""
        while self.scheduler.has_work or self._in_flight is not None:
            self.turn()
        self.scheduler.check_integrity()


def output(request: Request) -> list[int]:
    return request.token_ids[request.prompt_len :]
