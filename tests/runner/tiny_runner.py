"""A ModelRunner on a tiny random model, and a driver that makes Steps by hand.

The driver keeps the books a scheduler would keep: rows, pages (permuted), known lengths, epochs.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers

from paceline.attention.backends.torch_backend import TorchBackend
from paceline.attention.contract import AttentionBackend
from paceline.cache.pool import KVFormat
from paceline.core.draft_shape import NO_DRAFTS, DraftShape
from paceline.core.events import EventLog
from paceline.core.model.cache_groups import cache_group_specs
from paceline.core.model.config import ModelConfig
from paceline.core.parallel import Parallel
from paceline.core.request.sampling_params import SamplerTier, SamplingParams
from paceline.core.step import Delta, FinishCode, JoinDelta, PageDelta, Step, StepLayout
from paceline.core.step import StepOutputs as Outputs
from paceline.models.causal_lm import CausalLM
from paceline.models.config import parse_config
from paceline.models.loader import load_model
from paceline.models.locate import locate
from paceline.runner.build import build_runner
from paceline.runner.outputs_ring import LaunchedStep
from paceline.runner.proposer import NOBODY, Proposer
from paceline.runner.recording.graph_sizes import GraphSizes
from paceline.runner.recording.graphs import AHEAD, CapturePolicy
from paceline.runner.runner_config import RunnerConfig
from paceline.runner.staging import RING_DEPTH
from paceline.runner.streams import InlineStream, Stream

VOCAB = 160
CONTEXT = 120
MAX_RUNNING = 8
GREEDY = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True, seed=0)

_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", _SIZES | {"num_hidden_layers": 2}),
    "gemma3": (  # two cache groups: one windowed layer, one full
        "Gemma3",
        _SIZES
        | {"num_hidden_layers": 2, "head_dim": 16, "sliding_window": 7}
        | {"layer_types": ["sliding_attention", "full_attention"]},
    ),
}


@dataclass(frozen=True)
class TinyModel:
    """One random checkpoint in both implementations."""

    config: ModelConfig
    ours: CausalLM
    theirs: transformers.PreTrainedModel

    def greedy(self, prompt: Sequence[int], num_tokens: int) -> list[int]:
        """What transformers generates."""
        ids = torch.tensor([list(prompt)])
        found = self.theirs.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=num_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        return found[0, len(prompt) :].tolist()


def make_tiny(family: str, folder: Path) -> TinyModel:
    """Save a random checkpoint with transformers and load it with ours."""
    name, settings = FAMILIES[family]
    config_name = f"{name}TextConfig" if name == "Gemma3" else f"{name}Config"
    config = getattr(transformers, config_name)(**settings)
    config._attn_implementation = "eager"
    torch.manual_seed(sorted(FAMILIES).index(family))
    theirs = getattr(transformers, f"{name}ForCausalLM")(config).eval().requires_grad_(False)
    theirs.save_pretrained(folder)
    source = locate(str(folder))
    ours_config = parse_config(source.config, source.generation_config)
    ours = load_model(
        source,
        ours_config,
        parallel=Parallel(),
        device=torch.device("cpu"),
        dtype=torch.float32,
        progress=False,
    )
    return TinyModel(ours_config, ours, theirs)


def random_prompts(lengths: Sequence[int], seed: int = 0) -> list[list[int]]:
    """One prompt of each length."""
    rng = random.Random(seed)
    return [[rng.randrange(3, VOCAB) for _ in range(length)] for length in lengths]


class Driver:
    """Rows 1..max_running of one runner; `tokens[row]` is what the row has emitted so far."""

    def __init__(
        self,
        tiny: TinyModel,
        *,
        graph_max_reqs: int | None = MAX_RUNNING,
        graph_max_tokens: int = 0,
        sizes: GraphSizes | None = None,
        stream: Stream | None = None,
        backend: AttentionBackend | None = None,
        page_size: int = 4,
        staging_depth: int = RING_DEPTH,
        poison: bool = True,
        sanitize: bool = True,
        boot: bool = True,
        max_running: int = MAX_RUNNING,
        capture_policy: CapturePolicy = AHEAD,
        recorded_bytes: int | None = None,
        draft: DraftShape = NO_DRAFTS,
        make_proposer: Callable[[RunnerConfig], Proposer] = lambda limits: NOBODY,
    ) -> None:
        """make_proposer: of a driver whose `launch_round` drafts; draft: its shape."""
        groups = cache_group_specs(tiny.config, page_size)
        pages_per_row = -(-(CONTEXT + draft.reach) // page_size)
        num_pages = 1 + max_running * pages_per_row
        self.events = EventLog()
        limits = RunnerConfig(
            max_running=max_running,
            max_batched_tokens=256,
            context_len=CONTEXT,
            max_join_tokens=CONTEXT,
            num_pages=(num_pages,) * len(groups),
            graph_max_reqs=MAX_RUNNING if graph_max_reqs is None else graph_max_reqs,
            capture=graph_max_reqs is not None,
            capture_policy=capture_policy,
            recorded_bytes=recorded_bytes,
            graph_max_tokens=graph_max_tokens,
            sizes=sizes,
            poison_graphs=poison,
            sanitize=sanitize,
            staging_depth=staging_depth,
            draft=draft,
        )
        self.runner = build_runner(
            tiny.ours,
            tiny.config,
            groups,
            backend or TorchBackend(),
            limits,
            stream=stream or InlineStream(),
            device=torch.device("cpu"),
            dtype=torch.float32,
            kv=KVFormat(dtype=torch.float32),
            notify=self.events,
            proposer=make_proposer(limits),
        )
        self._draft = draft
        if boot:
            self.runner.boot()
        self._pages = [
            {row: ids[(row - 1) * pages_per_row :][:pages_per_row] for row in range(1, 9)}
            for ids in (
                random.Random(g).sample(range(1, num_pages), num_pages - 1)
                for g in range(len(self.parts.all_pools))
            )
        ]
        self._deltas: list[Delta] = []
        self._known: dict[int, int] = {}  # tokens in the cache, an upper bound once frozen
        self._params: dict[int, SamplingParams] = {}
        self._epoch = 0
        self.tokens: dict[int, list[int]] = {}
        self.finish: dict[int, FinishCode] = {}

    @property
    def parts(self) -> Any:
        """The device-side parts, for tests that look at or break what graphs hold."""
        return self.runner._parts

    def join(
        self,
        row: int,
        prompt: Sequence[int],
        params: SamplingParams = GREEDY,
        *,
        max_len: int = CONTEXT,
    ) -> None:
        """Put a request into a row with the next step."""
        self._deltas.append(
            JoinDelta(
                row=row,
                token_ids=tuple(prompt),
                prompt_len=len(prompt),
                prefix_len=0,
                max_len=max_len,
                params=params,
            )
        )
        for group, pages in enumerate(self._pages):
            self._deltas.append(
                PageDelta(row=row, group=group, start=0, page_ids=tuple(pages[row]))
            )
        self._known[row] = 0
        self._params[row] = params
        self.tokens[row] = []
        self.finish[row] = FinishCode.RUNNING

    def make_step(
        self, extend_lens: Mapping[int, int], *, is_ragged: bool = False, emits: bool = True
    ) -> Step:
        """The next step over rows -> extend length; takes the deltas of joins since the last."""
        self._epoch += 1
        rows = tuple(extend_lens)
        params = [self._params[row] for row in rows]
        step = Step(
            epoch=self._epoch,
            layout=StepLayout(
                rows=rows, extend_lens=tuple(extend_lens.values()), emits=(emits,) * len(rows)
            ),
            is_ragged=is_ragged,
            prefix_lens_bound=tuple(self._known[row] for row in rows),
            sampler=max((p.sampler_tier for p in params), default=SamplerTier.GREEDY),
            logprobs=any(p.logprobs is not None for p in params),
            deltas=tuple(self._deltas),
        )
        self._deltas.clear()
        for row, extend in extend_lens.items():
            self._known[row] += extend
        return step

    def launch_prefill(self, extend_lens: Mapping[int, int], *, emits: bool = True) -> LaunchedStep:
        """Queue a ragged step."""
        step = self.make_step(extend_lens, is_ragged=True, emits=emits)
        return self.runner.launch(step)

    def launch_decode(self, rows: Sequence[int]) -> LaunchedStep:
        """Queue one decode step."""
        return self.runner.launch(self.make_step(dict.fromkeys(rows, 1)))

    def launch_round(self, rows: Sequence[int]) -> LaunchedStep:
        """Queue one round of the proposer."""
        step = self.make_step(dict.fromkeys(rows, self._draft.num_draft_tokens))
        return self.runner.launch(replace(step, mask=self._draft.mask, is_round=True))

    def rounds(self, rows: Sequence[int], num: int) -> list[Outputs]:
        """Rounds, each waited for."""
        return [self.collect(self.launch_round(rows)) for _ in range(num)]

    def collect(self, launched: LaunchedStep) -> Outputs:
        """Wait, and add what was emitted to `tokens`."""
        outputs = launched.wait()
        rows = launched.step.layout.rows
        if launched.step.is_round:
            for row, tokens, extend in zip(
                rows, outputs.token_ids, launched.step.layout.extend_lens, strict=True
            ):
                self._known[row] += len(tokens) - extend
        for row, tokens, finish in zip(rows, outputs.token_ids, outputs.finish, strict=True):
            self.tokens[row].extend(tokens)
            if finish != FinishCode.RUNNING:
                self.finish[row] = finish
        return outputs

    def prefill(self, prompts: Mapping[int, Sequence[int]]) -> Outputs:
        """Join rows and run their prompts in one step."""
        for row, prompt in prompts.items():
            self.join(row, prompt)
        return self.collect(
            self.launch_prefill({row: len(prompt) for row, prompt in prompts.items()})
        )

    def decode(self, rows: Sequence[int], steps: int = 1) -> None:
        """Decode steps, each waited for."""
        for _ in range(steps):
            self.collect(self.launch_decode(rows))

    def decode_overlapped(self, batches: Sequence[Sequence[int]]) -> None:
        """Decode steps with two in flight: each is waited for after the next is launched."""
        in_flight: list[LaunchedStep] = []
        for rows in batches:
            in_flight.append(self.launch_decode(rows))
            if len(in_flight) == 2:
                self.collect(in_flight.pop(0))
        for launched in in_flight:
            self.collect(launched)


def with_logprobs(num: int) -> SamplingParams:
    """Greedy, with log-probabilities."""
    return replace(GREEDY, logprobs=num)
