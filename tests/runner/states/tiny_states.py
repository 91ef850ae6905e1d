"""An engine around the tiny model with recurrent layers: scheduler, cache and runner."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from example_state_backend import SumBackend
from sum_model import DECAY, SUMS, SumModel
from tiny_runner import CONTEXT, GREEDY, MAX_RUNNING, TinyModel
from torch import nn

from paceline.attention.backends.torch_backend import TorchBackend
from paceline.attention.states import StateBackend
from paceline.cache.manager import CacheManager
from paceline.cache.pool import KVFormat
from paceline.core.draft_shape import NO_DRAFTS, DraftShape
from paceline.core.events import EventLog
from paceline.core.model.cache_groups import CacheGroupSpec, cache_group_specs
from paceline.core.model.config import ModelConfig
from paceline.core.request.input_rows import EncoderInput
from paceline.core.step import RunKind, Step
from paceline.engine.loop import Launched, TurnFunction, overlapped_turn
from paceline.engine.request import Request
from paceline.engine.scheduler import Scheduler
from paceline.engine.scheduler_config import SchedulerConfig
from paceline.runner.build import build_runner
from paceline.runner.proposer import NOBODY, Proposer
from paceline.runner.runner_config import RunnerConfig
from paceline.runner.streams import DeferredStream, InlineStream


def groups_of(config: ModelConfig, page_size: int, every: int) -> list[CacheGroupSpec]:
    """Those of `config` and of two layers of sums behind its own."""
    config = replace(config, layers=(*config.layers, SUMS, SUMS))
    *paged, states = cache_group_specs(config, page_size)
    return [*paged, replace(states, state_every=every)]


def without_layers(tiny: TinyModel) -> TinyModel:
    """Embedding, norm and head: what tells its tokens apart is the sums alone."""
    theirs, ours = copy.deepcopy(tiny.theirs), copy.deepcopy(tiny.ours)
    theirs.model.layers = nn.ModuleList()
    ours.decoder.layers = nn.ModuleList()
    return TinyModel(replace(tiny.config, layers=()), ours, theirs)


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
        more_pages: tuple[int, ...] = (),
        chunk: int = 16,
        budget: int = 64,
        max_running: int = MAX_RUNNING,
        capture: bool = True,
        ragged_graphs: bool = True,
        sanitize: bool = True,
        deferred: bool = False,
        turn: TurnFunction = overlapped_turn,
        draft: DraftShape = NO_DRAFTS,
        make_proposer: Callable[[RunnerConfig], Proposer] = lambda limits: NOBODY,
        states: StateBackend | None = None,
    ) -> None:
        groups = self.groups_of(tiny.config, page_size, every)
        counts = (num_pages, num_slots, *more_pages)[-len(groups) :]
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
        )
        proposer = make_proposer(replace(limits, num_pages=(num_pages,)))
        self.runner = build_runner(
            self.model_of(tiny),
            self.config_of(tiny.config),
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
            ),
            self.cache,
        )
        self._turn = turn
        self._epoch = 0
        self._in_flight: Launched | None = None
        self.kinds: list[RunKind] = []
        self.steps: list[Step] = []
        self.requests: list[Request] = []

    def groups_of(self, config: ModelConfig, page_size: int, every: int) -> list[CacheGroupSpec]:
        return groups_of(config, page_size, every)

    def model_of(self, tiny: TinyModel) -> nn.Module:
        return SumModel(tiny.ours, tiny.config.num_layers)

    def config_of(self, config: ModelConfig) -> ModelConfig:
        return config

    def add(
        self, prompt: Sequence[int], num_tokens: int, encoder: EncoderInput | None = None
    ) -> Request:
        """Queue a request."""
        params = replace(GREEDY, max_tokens=num_tokens)
        name = f"r{len(self.requests)}"
        request = Request.make(name, prompt, params, context_len=CONTEXT, encoder=encoder)
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
