"""Rounds of a Driver in changing company, and what they must leave: recomputed densely."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from fake_context import FakeContext
from tiny_drafters import MakeProposer
from tiny_runner import CONTEXT, GREEDY, Driver, TinyModel, random_prompts
from torch import Tensor

from paceline.cache.pool import KVPool
from paceline.core.draft_shape import DraftShape
from paceline.core.request.sampling_params import SamplingParams
from paceline.core.step import Step
from paceline.runner.proposer import DraftTree, Observed, Proposer, RoundState

ROWS = (2, 5, 7)
LENGTHS = (5, 11, 3)


class Spy(Proposer):
    """Another proposer, with the trees it proposed."""

    def __init__(self, inner: Proposer) -> None:
        self.name, self.shape = inner.name, inner.shape
        self.pools, self.taps, self.model = inner.pools, inner.taps, inner.model
        self.observes, self.backend = inner.observes, inner.backend
        self.inner = inner
        self.trees: list[DraftTree] = []

    def propose(self, state: RoundState) -> DraftTree:
        tree = self.inner.propose(state)
        self.trees.append(DraftTree(*(None if part is None else part.clone() for part in tree)))
        return tree

    def observe(self, observed: Observed) -> None:
        self.inner.observe(observed)

    def host_plan(self, step: Step) -> None:
        self.inner.host_plan(step)

    def named_tensors(self) -> dict[str, Tensor]:
        return self.inner.named_tensors()

    def request_state(self) -> dict[str, Tensor]:
        return self.inner.request_state()


def spied(make: MakeProposer) -> MakeProposer:
    """`make`'s proposer, and what it proposes."""
    return lambda limits: Spy(make(limits))


@dataclass
class Requests:
    """A driver with its prompts."""

    driver: Driver
    prompts: Mapping[int, list[int]]

    def known(self, row: int) -> list[int]:
        """Every token of a row, the newest sampled one last."""
        return [*self.prompts[row], *self.driver.tokens[row]]

    def committed(self, row: int) -> int:
        return int(self.driver.parts.table.kv_committed[row])


def prefilled(
    tiny: TinyModel,
    shape: DraftShape,
    make: MakeProposer,
    *,
    params: Sequence[SamplingParams] = (GREEDY,) * 3,
    max_lens: Sequence[int] = (CONTEXT,) * 3,
    lengths: Sequence[int] = LENGTHS,
    **settings: object,
) -> Requests:
    """Three requests behind prompts in two chunks."""
    settings = {"graph_max_reqs": None, "boot": False, "sanitize": False} | settings
    driver = Driver(tiny, draft=shape, make_proposer=make, **settings)
    prompts = dict(zip(ROWS, random_prompts(lengths), strict=True))
    for row, wanted, max_len in zip(ROWS, params, max_lens, strict=True):
        driver.join(row, prompts[row], wanted, max_len=max_len)
    driver.collect(driver.launch_prefill({r: len(p) - 2 for r, p in prompts.items()}, emits=False))
    driver.collect(driver.launch_prefill(dict.fromkeys(ROWS, 2)))
    return Requests(driver, prompts)


def rounds_in_changing_company(requests: Requests) -> None:
    """Rounds of all, plain steps of some, rounds of others."""
    driver = requests.driver
    driver.rounds(ROWS, 3)
    driver.decode(ROWS[1:])
    driver.rounds((7, 2), 3)


def cached(pool: KVPool, layer_id: int, page_ids: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """[length, kv_heads, dim] each: K and V of a request's first tokens.

    page_ids: [max_pages] integers, its row of the page table.
    """
    parts = pool.layer(layer_id).parts
    pages = page_ids.long()
    return tuple(parts[side][pages].flatten(0, 1)[:length].clone() for side in "kv")


def cache_of(requests: Requests, row: int, length: int) -> dict[str, Tensor]:
    """K and V of a row in every layer of both models, by name."""
    parts = requests.driver.parts
    found = {}
    for pool, table in zip(parts.all_pools, parts.table.page_tables, strict=True):
        for layer_id in pool.spec.layer_ids:
            sides = cached(pool, layer_id, table[row], length)
            for name, side in zip("kv", sides, strict=True):
                found[f"{pool.spec.name}.{name}.{layer_id}"] = side
    return found


class HeadState(NamedTuple):
    """What an EAGLE head keeps of a request."""

    feature: Tensor  # [hidden]
    keys: Tensor  # [length, kv_heads, dim]
    values: Tensor  # [length, kv_heads, dim]


def dense_state(tiny: TinyModel, head: Callable, tokens: Sequence[int]) -> HeadState:
    """One pass over everything, the target's layers by transformers.

    tokens: those committed, and the one behind them.
    """
    length, ids = len(tokens) - 1, torch.tensor(tokens)
    outputs = _layer_outputs(tiny, ids[:length])
    layers = head.config.tap_layers
    context = FakeContext(head.config.layer)
    fused = head.fuse([outputs[layer] for layer in layers])
    features = head(ids[1:], torch.arange(length), fused, context)
    return HeadState(features[-1], torch.cat(context._keys[0]), torch.cat(context._values[0]))


def _layer_outputs(tiny: TinyModel, ids: Tensor) -> list[Tensor]:
    """[num_layers] of [tokens, hidden]: hidden states behind each layer, none of them normed."""
    outputs: list[Tensor] = []

    def note(module: object, given: object, result: Tensor | tuple[Tensor, ...]) -> None:
        outputs.append((result if isinstance(result, Tensor) else result[0])[0])

    hooks = [layer.register_forward_hook(note) for layer in tiny.theirs.model.layers]
    tiny.theirs(ids.unsqueeze(0))
    for hook in hooks:
        hook.remove()
    return outputs
