"""Proposers for a Driver: each function returns what the Driver's `make_proposer` takes."""

import copy
from collections.abc import Callable
from dataclasses import replace

import torch
from tiny_runner import CONTEXT, VOCAB, TinyModel

from paceline.attention.backends.torch_backend import TorchBackend
from paceline.attention.contract import AttentionBackend
from paceline.cache.pool import KVFormat
from paceline.core.draft_shape import DraftShape
from paceline.core.model.cache_groups import CacheGroupSpec, cache_group_specs
from paceline.core.model.config import ModelConfig, kv_parts
from paceline.core.parallel import Parallel
from paceline.layers.weights.dense import DENSE
from paceline.layers.weights.parameter import Placement
from paceline.models.loader import fill_dummy
from paceline.runner.proposer import NOBODY, Proposer
from paceline.runner.runner_config import RunnerConfig, tokens_in_flight
from paceline.speculate.build import DraftPlacement
from paceline.speculate.eagle.config import parse_eagle_config
from paceline.speculate.eagle.drafter import eagle_drafter
from paceline.speculate.eagle.head import EagleHead, build_eagle_head
from paceline.speculate.ngram.proposer import NgramProposer
from paceline.speculate.standalone.drafter import StandaloneDrafter

MakeProposer = Callable[[RunnerConfig], Proposer]

CPU = torch.device("cpu")
DRAFT_VOCAB = 80
CHAIN = DraftShape(num_steps=3, topk=1, num_draft_tokens=4)
TREE = DraftShape(num_steps=3, topk=2, num_draft_tokens=6)

_EAGLE3 = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 1,
    "vocab_size": VOCAB,
    "draft_vocab_size": DRAFT_VOCAB,
    "rms_norm_eps": 1e-6,
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 0, 1]},
}


def eagle3(
    tiny: TinyModel,
    shape: DraftShape,
    *,
    page_size: int = 4,
    backend: AttentionBackend | None = None,
    max_position: int = 128,
) -> MakeProposer:
    """A random EAGLE-3 head, its draft vocabulary every other token: it agrees now and then.

    max_position: of the texts it was trained with; its rope has the sections of the target's.
    """

    def make(limits: RunnerConfig) -> Proposer:
        group = CacheGroupSpec(
            name="draft-full",
            layer_ids=(0,),
            window=None,
            page_size=page_size,
            parts=kv_parts(2, 16, 16),
        )
        place = _placement((group,), limits, backend)
        head = _eagle3_head(tiny, shape, max_position)
        drafter = eagle_drafter("EAGLE3", shape, head.config, target=tiny.config)
        return drafter.proposer(head, place)

    return make


def with_sections(config: ModelConfig, sections: tuple[int, ...]) -> ModelConfig:
    """A model whose ropes have these axes."""
    layers = [
        replace(layer, rope=layer.rope and replace(layer.rope, sections=sections))
        for layer in config.layers
    ]
    return replace(config, layers=tuple(layers))


def _eagle3_head(tiny: TinyModel, shape: DraftShape, max_position: int) -> EagleHead:
    config = parse_eagle_config(_EAGLE3 | {"max_position_embeddings": max_position}, "EAGLE3")
    layer = with_sections(config.layer, tiny.config.ropes[0][0].sections)
    head = build_eagle_head(
        replace(config, layer=layer),
        tiny.ours,
        parallel=Parallel(),
        placement=Placement(CPU, torch.float32, DENSE),
        max_positions=CONTEXT + tokens_in_flight(shape),
    )
    fill_dummy(head, seed=0)
    with torch.no_grad():
        for parameter in head.parameters():
            if parameter.dim() > 1:
                parameter.mul_(5)
    assert head.d2t is not None
    head.d2t.copy_(torch.arange(DRAFT_VOCAB))
    return head


def standalone(
    tiny: TinyModel,
    shape: DraftShape,
    *,
    page_size: int = 4,
    noise: float = 0.0,
    backend: AttentionBackend | None = None,
) -> MakeProposer:
    """The target itself, its parameters shaken by `noise` of their spread."""

    def make(limits: RunnerConfig) -> Proposer:
        groups = tuple(
            replace(group, name=f"draft-{group.name}")
            for group in cache_group_specs(tiny.config, page_size)
        )
        model = copy.deepcopy(tiny.ours)
        generator = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for parameter in model.parameters():
                shaken = torch.randn(parameter.shape, generator=generator)
                parameter.add_(shaken * noise * parameter.std())
        place = _placement(groups, limits, backend)
        drafter = StandaloneDrafter(algorithm="STANDALONE", shape=shape, model=tiny.config)
        return drafter.proposer(model, place)

    return make


def ngram(shape: DraftShape) -> MakeProposer:
    """Prompt lookup."""
    return lambda limits: NgramProposer(shape, min_n=1, max_n=3)


def nobody(limits: RunnerConfig) -> Proposer:
    """Proposes nothing."""
    return NOBODY


def _placement(
    groups: tuple[CacheGroupSpec, ...], limits: RunnerConfig, backend: AttentionBackend | None
) -> DraftPlacement:
    return DraftPlacement(
        groups=groups,
        num_pages=limits.num_pages[:1] * len(groups),
        backend=backend or TorchBackend(),
        limits=limits,
        kv=KVFormat(dtype=torch.float32),
        dtype=torch.float32,
        device=CPU,
    )
