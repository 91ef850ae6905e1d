"""A model whose layers differ in heads, head dims, windows and rope, served by the runner.

The reference is made of transformers' Llama attention, one configuration a layer.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from tiny_runner import FAMILIES, Driver, TinyModel, random_prompts
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaRotaryEmbedding

from paceline.core.model.cache_groups import cache_group_specs
from paceline.core.model.config import Heads, LayerSpec, ModelConfig
from paceline.core.model.rope import RopeConfig
from paceline.core.parallel import Parallel
from paceline.layers.weights.dense import DENSE
from paceline.layers.weights.parameter import Placement
from paceline.models.config import parse_config
from paceline.models.prenorm import build_prenorm

# heads, KV heads, head dim, window, whether rope turns; two layers share a cache group
SHAPES = (
    (4, 2, 16, None, True),
    (2, 1, 32, 7, True),
    (8, 2, 16, None, False),
    (4, 4, 8, None, True),
    (2, 1, 32, 5, True),
)


def specs() -> tuple[LayerSpec, ...]:
    return tuple(
        LayerSpec(
            heads=Heads(heads, kv_heads, dim, dim),
            scale=dim**-0.5,
            window=window,
            rope=RopeConfig() if turns else None,
            rotary_dim=dim,
        )
        for heads, kv_heads, dim, window, turns in SHAPES
    )


def reference() -> transformers.LlamaForCausalLM:
    """Llama with an attention of its own in each layer."""
    settings = FAMILIES["llama"][1] | {"num_hidden_layers": len(SHAPES)}
    settings |= {"attn_implementation": "eager"}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**settings))
    for index, (heads, kv_heads, dim, window, turns) in enumerate(SHAPES):
        own = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": dim}
        config = transformers.LlamaConfig(**(settings | own))
        attention = LlamaAttention(config, index)
        for linear in attention.children():
            torch.nn.init.normal_(linear.weight, std=0.2)
        rotary = LlamaRotaryEmbedding(config)

        def as_its_own(
            module: torch.nn.Module,
            args: tuple[Any, ...],
            kwargs: dict[str, Any],
            rotary: torch.nn.Module = rotary,
            window: int | None = window,
            turns: bool = turns,
        ) -> tuple[tuple[Any, ...], dict[str, Any]]:
            hidden = kwargs["hidden_states"]
            at = torch.arange(hidden.shape[1])
            cos, sin = rotary(hidden, at[None])
            if not turns:
                cos, sin = torch.ones_like(cos), torch.zeros_like(sin)
            hides = at[None, :] > at[:, None]
            if window is not None:
                hides |= at[None, :] <= at[:, None] - window
            mask = torch.zeros(1, 1, *hides.shape).masked_fill(hides, float("-inf"))
            return args, kwargs | {"position_embeddings": (cos, sin), "attention_mask": mask}

        attention.register_forward_pre_hook(as_its_own, with_kwargs=True)
        model.model.layers[index].self_attn = attention
    return model.eval().requires_grad_(False)


@pytest.fixture(scope="module")
def mixed() -> TinyModel:
    torch.manual_seed(5)
    theirs = reference()
    uniform = parse_config(theirs.config.to_dict() | {"dtype": "float32"})
    config: ModelConfig = replace(uniform, layers=specs())
    ours = build_prenorm(
        config,
        parallel=Parallel(),
        placement=Placement(torch.device("cpu"), torch.float32, DENSE),
    )
    tensors, into = theirs.state_dict(), ours.destinations()
    assert tensors.keys() == into.keys()
    with torch.no_grad():
        for name, tensor in tensors.items():
            into[name].copy_(tensor)
    return TinyModel(config, ours.eval().requires_grad_(False), theirs)


def greedy(model: transformers.LlamaForCausalLM, prompt: list[int], num_tokens: int) -> list[int]:
    ids = list(prompt)
    for _ in range(num_tokens):
        logits = model(torch.tensor([ids]), use_cache=False).logits
        ids.append(int(logits[0, -1].argmax()))
    return ids[len(prompt) :]


def test_layers_of_other_rows_or_windows_have_groups_of_their_own(mixed: TinyModel) -> None:
    groups = cache_group_specs(mixed.config, 4)
    found = {group.name: group.layer_ids for group in groups}
    assert found == {"full-0": (0, 2), "full-3": (3,), "window-5": (4,), "window-7": (1,)}


@pytest.mark.parametrize("graph_max_reqs", [None, 4], ids=["eager", "recorded"])
def test_such_a_model_gives_the_tokens_of_transformers(
    mixed: TinyModel, graph_max_reqs: int | None
) -> None:
    driver = Driver(mixed, graph_max_reqs=graph_max_reqs)
    prompts = dict(zip([3, 1, 2], random_prompts([13, 1, 6]), strict=True))
    driver.prefill(prompts)
    driver.decode([3, 1, 2], steps=9)
    expected = {row: greedy(mixed.theirs, prompt, 10) for row, prompt in prompts.items()}
    assert driver.tokens == expected


@pytest.mark.parametrize(
    "change",
    [{"window": 6}, {"scale": 0.5}, {"rope": RopeConfig(theta=100.0)}],
    ids=["window", "scale", "rope"],
)
def test_each_fact_of_a_single_layer_matters(mixed: TinyModel, change: dict[str, Any]) -> None:
    """The test above is sharp: layer 1 alone with another fact gives other tokens."""
    layers = list(mixed.config.layers)
    layers[1] = replace(layers[1], **change)
    config = replace(mixed.config, layers=tuple(layers))
    other = build_prenorm(
        config,
        parallel=Parallel(),
        placement=Placement(torch.device("cpu"), torch.float32, DENSE),
    )
    other.load_state_dict(mixed.ours.state_dict())
    driver = Driver(replace(mixed, config=config, ours=other.requires_grad_(False)))
    (prompt,) = random_prompts([13])
    driver.prefill({3: prompt})
    driver.decode([3], steps=20)
    assert driver.tokens[3] != greedy(mixed.theirs, prompt, 21)
