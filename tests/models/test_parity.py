"""Logits, hidden states and greedy tokens equal transformers' on every architecture."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import tiny_checkpoints
import torch
import transformers
from fake_context import FakeContext
from torch import Tensor

from paceline.core.errors import ModelError
from paceline.core.model.config import GateOrder, ModelConfig, MoEConfig, QKNorm
from paceline.core.model.lookback import Chunk, Lookback, most_visible
from paceline.core.model.rope import RopeConfig, RopeKind
from paceline.core.parallel import Parallel
from paceline.layers.weights import dense
from paceline.models.causal_lm import CausalLM
from paceline.models.config import parse_config
from paceline.models.decoder import Hidden
from paceline.models.loader import load_model
from paceline.models.locate import locate

PROMPT_LEN = 40
NUM_GREEDY = 24
TOLERANCE = 1e-5  # of the largest logit; the two differ in the order of float32 sums


@dataclass(frozen=True)
class Pair:
    """One checkpoint in both implementations."""

    folder: Path
    config: ModelConfig
    ours: CausalLM
    theirs: transformers.PreTrainedModel
    prompt: Tensor  # [PROMPT_LEN]


def load(folder: Path, config: ModelConfig, dtype: torch.dtype) -> CausalLM:
    return load_model(
        locate(str(folder)),
        config,
        parallel=Parallel(),
        device=torch.device("cpu"),
        dtype=dtype,
    )


@pytest.fixture(scope="module", params=sorted(tiny_checkpoints.CASES))
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    folder = tmp_path_factory.mktemp(request.param)
    theirs = tiny_checkpoints.save(request.param, folder)
    source = locate(str(folder))
    config = parse_config(source.config, source.generation_config)
    prompt = torch.randint(4, config.vocab_size, (PROMPT_LEN,))
    return Pair(folder, config, load(folder, config, torch.float32), theirs, prompt)


def run(
    model: CausalLM, config: ModelConfig, tokens: Tensor, chunks: list[int]
) -> tuple[Tensor, Tensor]:
    """(logits [tokens, vocab], hidden) of `tokens` fed in chunks of the given sizes."""
    ctx = FakeContext(config, model.attention_sinks())
    positions = torch.arange(tokens.shape[0])
    hidden = [
        model(ids, at, ctx).hidden
        for ids, at in zip(tokens.split(chunks), positions.split(chunks), strict=True)
    ]
    return model.logits(torch.cat(hidden)), torch.cat(hidden)


def assert_close(ours: Tensor, theirs: Tensor) -> None:
    assert ours.dtype == torch.float32
    error = (ours - theirs).abs().max() / theirs.abs().max()
    assert error < TOLERANCE, f"relative error {error:.2e}"


@pytest.mark.parametrize(("fits", "each"), [("fits_parts", 1), ("fits_add_linear", 2)])
def test_products_that_are_left_give_the_same(
    pair: Pair, fits: str, each: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Taken wherever a norm stands behind, which adds them; of hidden states that are tapped or
    read, too.  each: products of a layer."""
    taken: list[tuple[Tensor, ...]] = []

    def forward(*taps: str, read: Tensor | None = None) -> Hidden:
        ctx = FakeContext(pair.config, pair.ours.attention_sinks())
        return pair.ours(pair.prompt, torch.arange(PROMPT_LEN), ctx, taps, read=read)

    def take(*operands: Tensor) -> bool:
        taken.append(operands)
        return True

    whole = forward(*pair.ours.decoder.tap_names)
    monkeypatch.setattr(dense, fits, take)
    assert_close(forward().hidden, whole.hidden)
    if pair.config.model_type == "llama" and not pair.config.mlp_bias:
        assert len(taken) == each * pair.config.num_layers
    read = torch.tensor([PROMPT_LEN - 1, 2])
    assert_close(forward(read=read).hidden, whole.hidden[read])
    for name, tapped in forward(*whole.taps).taps.items():
        assert_close(tapped, whole.taps[name])


def test_prefill_logits_equal_transformers(pair: Pair) -> None:
    ours, _ = run(pair.ours, pair.config, pair.prompt, [PROMPT_LEN])
    assert_close(ours, pair.theirs(pair.prompt[None]).logits[0])


def test_chunked_prefill_logits_equal_transformers(pair: Pair) -> None:
    ours, _ = run(pair.ours, pair.config, pair.prompt, [1, 12, 7, 20])
    assert_close(ours, pair.theirs(pair.prompt[None]).logits[0])


@pytest.mark.slow  # of the engine: llm/test_llm_parity has more, test_llm_longrope the last case
def test_24_greedy_tokens_equal_transformers(pair: Pair) -> None:
    sequence = pair.theirs.generate(
        pair.prompt[None],
        attention_mask=torch.ones(1, PROMPT_LEN, dtype=torch.int64),
        max_new_tokens=NUM_GREEDY,
        do_sample=False,
        eos_token_id=None,
    )[0]
    assert sequence.shape[0] == PROMPT_LEN + NUM_GREEDY
    fed = sequence[:-1]
    ours, _ = run(pair.ours, pair.config, fed, [PROMPT_LEN] + [1] * (NUM_GREEDY - 1))
    assert_close(ours, pair.theirs(fed[None]).logits[0])
    chosen, wanted = ours[PROMPT_LEN - 1 :].argmax(-1), sequence[PROMPT_LEN:]
    for step in (chosen != wanted).nonzero().flatten().tolist():
        row = ours[PROMPT_LEN - 1 + step]
        gap = (row.max() - row[wanted[step]]).item()
        assert gap < TOLERANCE * row.abs().max(), f"token {step} differs with a gap of {gap}"


def test_taps_are_the_hidden_states_of_transformers(pair: Pair) -> None:
    names = pair.ours.decoder.tap_names
    ctx = FakeContext(pair.config, pair.ours.attention_sinks())
    result = pair.ours(pair.prompt, torch.arange(PROMPT_LEN), ctx, taps=names)
    states = pair.theirs(pair.prompt[None], output_hidden_states=True).hidden_states
    if pair.config.model_type == "mamba2":  # the output of every layer, then the final norm's
        embedded = pair.theirs.get_input_embeddings()(pair.prompt[None])
        states = (embedded, *states[:-2], states[-1])
    # theirs: the input of every layer, then the final norm's output in place of the last stream
    assert_close(result.taps["embed"], states[0][0])
    for index in range(pair.config.num_layers - 1):
        assert_close(result.taps[f"layer.{index}"], states[index + 1][0])
    assert_close(result.taps["final"], states[-1][0])
    last = result.taps[f"layer.{pair.config.num_layers - 1}"]
    assert_close(pair.ours.decoder.norm(last), states[-1][0])
    assert torch.equal(result.hidden, result.taps["final"])


def test_taps_do_not_change_the_result(pair: Pair) -> None:
    at = torch.arange(PROMPT_LEN)
    plain = pair.ours(pair.prompt, at, FakeContext(pair.config))
    tapped = pair.ours(pair.prompt, at, FakeContext(pair.config), taps=pair.ours.decoder.tap_names)
    assert torch.equal(plain.hidden, tapped.hidden)
    assert plain.taps == {}


def test_rows_that_are_read_equal_transformers_and_the_last_block_has_no_others(
    pair: Pair,
) -> None:
    read = torch.tensor([PROMPT_LEN - 1, 3])
    at, last = torch.arange(PROMPT_LEN), pair.ours.decoder.layers[-1]
    wanted = pair.theirs(pair.prompt[None]).logits[0]
    fed: list[int] = []
    blocks = [last.mlp] if hasattr(last, "mlp") else []  # Mamba 2 has none behind its mixer
    hooks = [
        block.register_forward_pre_hook(lambda _, given: fed.append(given[0].shape[0]))
        for block in blocks
    ]
    for taps in ((), ("final",)):
        ctx = FakeContext(pair.config, pair.ours.attention_sinks())
        result = pair.ours(pair.prompt, at, ctx, taps, read=read)
        assert_close(pair.ours.logits(result.hidden), wanted[read])
        assert [tap.shape[0] for tap in result.taps.values()] == [PROMPT_LEN] * len(taps)
    for hook in hooks:
        hook.remove()
    assert fed == [2, PROMPT_LEN] * len(blocks)


def typical_error(rounded: Tensor, exact: Tensor) -> Tensor:
    """Of the median token: rounding sends a few, by chance, to another expert."""
    return (rounded - exact).square().mean(1).sqrt().median()


def test_bfloat16_error_is_that_of_transformers(pair: Pair) -> None:
    exact = pair.theirs(pair.prompt[None]).logits[0]
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        pair.folder,
        dtype=torch.bfloat16,
        attn_implementation="eager",
        experts_implementation="eager",
    )
    rounded = load(pair.folder, pair.config, torch.bfloat16)
    ours, _ = run(rounded, pair.config, pair.prompt, [PROMPT_LEN])
    our_error = typical_error(ours, exact)
    their_error = typical_error(theirs(pair.prompt[None]).logits[0].float(), exact)
    assert our_error < 1.25 * their_error
    assert their_error < 0.1 * exact.square().mean().sqrt()


def test_every_special_feature_matters(pair: Pair) -> None:
    """Without it the logits are off by far more than the tolerance: the parity tests are sharp."""
    changes: dict[str, dict[str, object]] = {}
    layers = pair.config.layers
    attending = [layer for layer in layers if layer.attends]
    windows = [layer.window for layer in layers]
    rotated = [layer for layer in layers if layer.rope is not None]
    rope = min(rotated, key=lambda layer: layer.window is not None).rope if rotated else None

    def each(**fields: object) -> dict[str, object]:
        changed = (replace(at, **fields) if at in attending else at for at in layers)
        return {"layers": tuple(changed)}

    def windowed(windows: Iterable[Lookback | None]) -> dict[str, object]:
        each = zip(layers, windows, strict=True)
        return {"layers": tuple(replace(layer, window=window) for layer, window in each)}

    def turning(other: RopeConfig) -> dict[str, object]:
        swapped = (replace(at, rope=other) if at.rope == rope else at for at in layers)
        return {"layers": tuple(swapped)}

    if rope is not None and rope.kind.value != "default":
        changes["rope"] = turning(RopeConfig(theta=rope.theta))
    if len(pair.config.ropes) > 1:
        changes["local rope"] = each(rope=rope)
    if any(windows):
        changes["window"] = windowed(map(wider, windows))
        shifted = windows[1:] + windows[:1]
        if shifted != windows:
            changes["which layers"] = windowed(shifted)
    if any(isinstance(window, Chunk) for window in windows):
        changes["chunks, not windows"] = windowed(map(most_visible, windows))
    if pair.config.qk_norm is QKNorm.UNIT:
        changes["norms without weights"] = {"qk_norm": QKNorm.NONE}
    if pair.config.query_growth is not None:
        other = replace(pair.config.query_growth, every=pair.config.query_growth.every + 1)
        changes["growth of queries"] = {"query_growth": other}
    if pair.config.logit_soft_cap is not None:
        changes["cap"] = {"logit_soft_cap": None}
    if attending and attending[0].soft_cap is not None:
        changes["attention cap"] = each(soft_cap=None)
    if rope is not None and rope.kind is RopeKind.LONGROPE:
        swapped = {"short_factors": rope.long_factors, "long_factors": rope.short_factors}
        changes["factors"] = turning(replace(rope, **swapped))
        changes["attention factor"] = turning(replace(rope, attention_factor=1.0))
    elif (
        rope is not None
        and pair.config.latent is None
        and attending[0].rotary_dim != attending[0].heads.head_dim
    ):
        changes["share of rope"] = each(rotary_dim=attending[0].heads.head_dim)
    if pair.config.latent is not None:
        other = replace(pair.config.latent, pairs=not pair.config.latent.pairs)
        changes["pairs that turn"] = {"latent": other}
    unrotated = [layer for layer in attending if layer.rope is None]
    if unrotated:
        other = RopeConfig(theta=1000.0) if rope is None else rope
        changes["layers without rope"] = each(rope=other, rotary_dim=unrotated[0].heads.head_dim)
    factors = ["embedding", "residual", "logit_divisor"] if pair.config.multipliers else []
    if pair.config.side_multipliers is not None:
        factors.remove("residual")  # their layers multiply by others
    for name in factors:
        factor = 1.01 * getattr(pair.config.multipliers, name)
        changes[name] = {"multipliers": replace(pair.config.multipliers, **{name: factor})}
    if pair.config.mamba2 is not None:
        changes |= other_states(pair.config)
    if pair.config.moe is None and pair.config.intermediate_size:
        other = "silu" if pair.config.hidden_act == "relu" else "relu"
        changes["activation"] = {"hidden_act": other}
    elif pair.config.moe is not None:
        changes |= {name: {"moe": moe} for name, moe in other_experts(pair.config.moe).items()}
    if attending:
        changes["scale"] = each(scale=attending[0].scale * 1.01)
    exact = pair.theirs(pair.prompt[None]).logits[0]
    for name, change in changes.items():
        config = replace(pair.config, **change)
        wrong, _ = run(load(pair.folder, config, torch.float32), config, pair.prompt, [PROMPT_LEN])
        error = (wrong - exact).abs().max() / exact.abs().max()
        assert error > 100 * TOLERANCE, f"{name} changes the logits by {error:.1e} only"


def other_states(config: ModelConfig) -> dict[str, dict[str, object]]:
    """Layers with states, with one thing changed that their checkpoint has no say in."""
    own, changed = config.mamba2, {}
    assert own is not None
    orders = {GateOrder.GATE_NORM: GateOrder.NORM_GATE, GateOrder.NORM_GATE: GateOrder.GATE_NORM}
    if own.order in orders:
        changed["order of gate and norm"] = {"mamba2": replace(own, order=orders[own.order])}
    steps = replace(own, step_limits=(0.0, 0.5))
    changed["limits of time steps"] = {"mamba2": steps}
    for at in range(5) if own.scales is not None else ():
        scales = (*own.scales[:at], 1.25 * own.scales[at], *own.scales[at + 1 :])
        changed[f"scale {at}"] = {"mamba2": replace(own, scales=scales)}
    sides = config.side_multipliers
    for name in ("attention", "state", "gate", "down") if sides is not None else ():
        other = replace(sides, **{name: 1.05 * getattr(sides, name)})
        changed[f"factor of {name}"] = {"side_multipliers": other}
    return changed


def wider(window: Lookback | None) -> Lookback | None:
    """By one key."""
    return Chunk(window.size + 1) if isinstance(window, Chunk) else window and window + 1


def other_experts(moe: MoEConfig) -> dict[str, MoEConfig]:
    """The experts with one thing changed that their checkpoint has no say in."""
    fewer = moe.experts_per_token - 1
    changed = {"normalised routing": replace(moe, renormalize=not moe.renormalize)}
    if fewer:
        changed["number of experts"] = replace(moe, experts_per_token=fewer)
    if moe.weighs_input:
        changed["weights of inputs"] = replace(moe, weighs_input=False)
    if moe.choice is not None:
        changed["scale of experts"] = replace(moe, choice=replace(moe.choice, scale=1.01))
        if moe.choice.num_groups > 1:
            every = replace(moe.choice, groups_per_token=moe.choice.num_groups)
            changed["groups of experts"] = replace(moe, choice=every)
        if moe.choice.best_of_group > 1 < moe.choice.num_groups:
            best = replace(moe.choice, best_of_group=1)
            changed["best of a group"] = replace(moe, choice=best)
    if moe.swiglu_limit is not None:
        changed["limit"] = replace(moe, swiglu_limit=None)
        changed["alpha"] = replace(moe, swiglu_alpha=1.0)
        changed["offset"] = replace(moe, swiglu_up_offset=0.0)
    return changed


def test_sinks_matter(pair: Pair) -> None:
    if not any(layer.sinks for layer in pair.config.layers):
        attending = sum(layer.attends for layer in pair.config.layers)
        assert pair.ours.attention_sinks() == (None,) * attending
        return
    at = torch.arange(PROMPT_LEN)
    without = pair.ours(pair.prompt, at, FakeContext(pair.config)).hidden
    exact = pair.theirs(pair.prompt[None]).logits[0]
    error = (pair.ours.logits(without) - exact).abs().max() / exact.abs().max()
    assert error > 100 * TOLERANCE


def test_parameters_need_no_gradients(pair: Pair) -> None:
    assert not any(parameter.requires_grad for parameter in pair.ours.parameters())


def test_an_unknown_tap_is_refused_by_name(pair: Pair) -> None:
    last = pair.config.num_layers - 1
    with pytest.raises(ModelError, match=rf"tap must be .*'layer.{last}'.*got 'layer.99'"):
        pair.ours(
            pair.prompt, torch.arange(PROMPT_LEN), FakeContext(pair.config), taps=("layer.99",)
        )
