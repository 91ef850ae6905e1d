"""Tiny checkpoints with a tokenizer, engines on them, and how their answers are compared.

The tokenizer's tokens are pairs of letters: id 0 is "aa", id 1 is "ab", id 26 is "ba".
"""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import tiny_checkpoints
import tokenizers
import torch
import transformers
from torch import Tensor

from covers import Cell
from paceline.attention.backends.torch_backend import TorchBackend
from paceline.attention.contract import AttentionBackend, Capabilities
from paceline.core.model.config import ModelConfig
from paceline.core.request.sampling_params import SamplingParams
from paceline.core.step import Step
from paceline.engine.answers.outputs import RequestOutput
from paceline.llm.boot import Knobs
from paceline.llm.llm import LLM
from paceline.models.config import parse_config
from paceline.runner.recording.graphs import AHEAD
from paceline.runner.streams import DeferredStream

# And what tells them apart; a context with long factors must be asked for, see test_llm_longrope.
ARCHITECTURES = sorted(tiny_checkpoints.CASES.keys() - {"phi3-longrope-long"})
CONTEXT = tiny_checkpoints.CONTEXT
VOCAB = 160
EOS = (2, 3)
TIE_ULPS = 32  # of float32 at the largest logit: what another order of summation may move
GREEDY = SamplingParams(temperature=0.0, max_tokens=46, ignore_eos=True)
Tokens = tuple[int, ...]


def token_text(token_id: int) -> str:
    """The two letters of a token."""
    return chr(97 + token_id // 26) + chr(97 + token_id % 26)


def text_of(token_ids: Sequence[int]) -> str:
    return "".join(map(token_text, token_ids))


def save_tokenizer(folder: Path) -> None:
    """Two letters a token; encodes what decodes, and nothing else."""
    vocab = {token_text(i): i for i in range(VOCAB)}
    core = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token=token_text(1)))
    core.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex(".."), "isolated")
    core.decoder = tokenizers.decoders.Fuse()
    core.save(str(folder / "tokenizer.json"))


@dataclass(frozen=True)
class Checkpoint:
    """One model on disk, and transformers' own instance of it (float32)."""

    folder: Path
    theirs: transformers.PreTrainedModel
    _answers: dict[Tokens, Tokens] = field(default_factory=dict, init=False, compare=False)

    def generate(self, prompt: Sequence[int], num_tokens: int, **options: Any) -> Tokens:
        """What transformers generates greedily; end tokens are tokens like any other.

        What it said to a prompt without options is kept: the weights must be what they were.
        """
        key = tuple(prompt)
        if not options and len(known := self._answers.get(key, ())) >= num_tokens:
            return known[:num_tokens]
        ids = torch.tensor([list(prompt)])
        wanted: dict[str, Any] = {"eos_token_id": None, "pad_token_id": 0, "do_sample": False}
        found = self.theirs.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=num_tokens,
            **wanted | options,
        )
        answer: Tokens = tuple(found[0, len(prompt) :].tolist())
        if not options:
            self._answers[key] = answer
        return answer

    @property
    def config(self) -> ModelConfig:
        """As the engine reads it."""
        return parse_config(self.theirs.config.to_dict() | {"dtype": "float32"})

    def logits(self, token_ids: Sequence[int]) -> Tensor:
        """[num_tokens, vocab]  float32"""
        with torch.inference_mode():
            found: Tensor = self.theirs(torch.tensor([list(token_ids)])).logits[0]
        return found

    def gap(self, prompt: Sequence[int]) -> "GapOf":
        """How far below the best logit the lower of two tokens lies, behind prompt and output."""

        def gap_of(output: Tokens, pair: tuple[int, int]) -> tuple[float, float]:
            logits = self.logits([*prompt, *output])[-1]
            return (logits.max() - logits[list(pair)].min()).item(), logits.abs().max().item()

        return gap_of


GapOf = Callable[[Tokens, tuple[int, int]], tuple[float, float]]  # -> gap, largest logit


def make_checkpoint(
    case: str, folder: Path, *, change: Callable[[transformers.PreTrainedModel], None] | None = None
) -> Checkpoint:
    """A case of tiny_checkpoints on disk, with a tokenizer; `change` edits the weights first."""
    theirs = tiny_checkpoints.save(case, folder)
    if change is not None:
        change(theirs)
        theirs.save_pretrained(folder, max_shard_size="100KB")
    save_tokenizer(folder)
    return Checkpoint(folder, theirs)


def make_head64_checkpoint(folder: Path, *, context: int = CONTEXT) -> Checkpoint:
    """A llama with heads of 64, which the Triton kernels take."""
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=72,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=64,
        max_position_embeddings=context,
        initializer_range=0.15,
        eos_token_id=list(EOS),
    )
    torch.manual_seed(0)
    theirs = transformers.LlamaForCausalLM(config).eval().requires_grad_(False)
    theirs.save_pretrained(folder)
    save_tokenizer(folder)
    return Checkpoint(folder, theirs)


def assert_same_or_tie(a: Sequence[int], b: Sequence[int], gap_of: GapOf) -> None:
    """Equal, or parting at a position where the reference cannot tell the two tokens apart.

    A tie needs both tokens within TIE_ULPS float32 ulps of the largest logit below the best one;
    it is printed, and what follows it is not compared.
    """
    a, b = tuple(a), tuple(b)
    if a == b:
        return
    at = next((i for i, pair in enumerate(zip(a, b, strict=False)) if pair[0] != pair[1]), None)
    assert at is not None, f"one answer is longer: {len(a)} and {len(b)} tokens"
    gap, scale = gap_of(a[:at], (a[at], b[at]))
    bound = TIE_ULPS * torch.finfo(torch.float32).eps * scale
    told = f"token {at} is {a[at]} or {b[at]}: logit gap {gap:.3e}, a tie below {bound:.3e}"
    assert gap < bound, told
    print("tie:", told)


def make_llm(checkpoint: Checkpoint, *, knobs: Knobs | None = None, **options: Any) -> LLM:
    """A small engine on one thread, whose graphs are captured as on a GPU: answers are short."""
    knobs = replace(knobs or Knobs(), capture=AHEAD)
    return LLM(str(checkpoint.folder), knobs=knobs, **{"threads": 1, "max_num_seqs": 8} | options)


def pages_of(checkpoint: Checkpoint, size: int, *, every: int | None = None) -> dict[str, Any]:
    """Options of a cache with pages of `size` tokens, and states at each `every`, with room for
    many; of a model that keeps nothing but states a page is what lies between."""
    config = checkpoint.config
    kept = {"state_checkpoint_every": every, "max_num_seqs": 32}
    states = kept if config.has_states and every else {}
    return states | ({"page_size": size} if config.heads else {})


def assert_idle(llm: LLM) -> None:
    """Nothing runs, nothing is owned, and every page is free or cached."""
    engine = llm.engine
    while engine.has_work:
        engine.step()
    engine.scheduler.check_integrity()
    assert engine.scheduler.num_running == engine.scheduler.num_waiting == 0
    for pool in engine.scheduler._cache.stats().groups:
        assert (pool.owned, pool.queued) == (0, 0)
        assert pool.free + pool.cached == pool.total
    assert not engine._trackers


def tokens_of(outputs: Sequence[RequestOutput]) -> list[Tokens]:
    return [output.outputs[0].token_ids for output in outputs]


def assert_grows(shown: list[RequestOutput], answer: Tokens) -> None:
    """Snapshots of one request: each longer than the one before, all parts of the answer."""
    tokens = [output.outputs[0].token_ids for output in shown]
    lengths = [len(ids) for ids in tokens]
    assert lengths == sorted(lengths)
    assert len(set(lengths)) >= len(lengths) - 1  # an end alone may add nothing
    assert [output.finished for output in shown] == [False] * (len(shown) - 1) + [True]
    for output, ids in zip(shown, tokens, strict=True):
        assert ids == answer[: len(ids)]
        assert output.outputs[0].text == text_of(ids)
        assert (output.metrics is not None) == output.finished


def random_prompts(lengths: Sequence[int], seed: int = 0) -> list[list[int]]:
    """One prompt of each length, without end tokens."""
    rng = random.Random(seed)
    return [[rng.randrange(4, VOCAB) for _ in range(length)] for length in lengths]


def shared_prompts() -> list[list[int]]:
    """Six prompts, some with a common beginning: 17 tokens, and 66 (a page of 64 and more)."""
    prompts = random_prompts((20, 26, 23, 31, 70, 72))
    prompts[2][:17] = prompts[0][:17]
    prompts[5][:66] = prompts[4][:66]
    return prompts


@contextmanager
def recorded_steps(llm: LLM) -> Iterator[list[Step]]:
    """Every step launched meanwhile."""
    steps: list[Step] = []
    engine = llm.engine
    runner = engine._runner

    class Recorder:
        def launch(self, step: Step) -> Any:
            steps.append(step)
            return runner.launch(step)

    engine._runner = Recorder()
    try:
        yield steps
    finally:
        engine._runner = runner


AXES: dict[str, tuple[Any, ...]] = {
    "enforce_eager": (False, True),
    "page_size": (1, 16, 64),
    "enable_prefix_cache": (True, False),
    "chunked_prefill_size": (7, 16, 1024),
    "overlap": (True, False),
    "pool": ("roomy", "tight"),
    "stream": ("inline", "deferred"),
}


def llm_of(
    checkpoint: Checkpoint,
    cell: Cell,
    *,
    tight_pages: Mapping[int, tuple[int, ...]],
    margin: int | None = None,
    **options: Any,
) -> LLM:
    """The engine of one cell.

    tight_pages: page size -> pages of each group's pool; margin: room admission asks for.
    """
    chosen = dict(cell)
    pool, stream = chosen.pop("pool", "roomy"), chosen.pop("stream", "inline")
    knobs = Knobs(poison_graphs=stream == "deferred", admission_margin=margin)
    if stream == "deferred":
        knobs = replace(knobs, stream=DeferredStream())
        chosen["sanitize"] = True
    if pool == "tight":  # nothing is held ahead, so that more are admitted than can stay
        tight = tight_pages[chosen.get("page_size", 16)]
        knobs = replace(knobs, num_pages=tight, reserve_ahead=0)
    return make_llm(checkpoint, knobs=knobs, **chosen, **options)


class PagesOf64(AttentionBackend):
    """A third-party backend: the `torch` backend behind another name, for pages of 64 tokens."""

    name = "pages-of-64"
    capabilities: Capabilities = replace(TorchBackend.capabilities, page_sizes=frozenset({64}))

    def make_buffers(self, limits: Any) -> Any:
        return TorchBackend().make_buffers(limits)

    def plan(self, view: Any, buffers: Any) -> Any:
        return TorchBackend().plan(view, buffers)

    def forward(self, q: Any, k: Any, v: Any, layer: Any, plan: Any, part: Any) -> Any:
        return TorchBackend().forward(q, k, v, layer, plan, part)
