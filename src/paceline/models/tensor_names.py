"""Where a checkpoint's tensors go: name -> the view of a (fused) parameter that the tensor fills.

As most checkpoints name them; an architecture that differs says so in its file.  A layer's format
adds what it calls its own tensors (`layers.weights.weight_format`).  The loader copies into these
views and nothing else.
"""

from paceline.layers.decoders.postnorm_layer import PostNormLayer
from paceline.layers.decoders.prenorm_layer import PreNormLayer
from paceline.layers.decoders.sandwich_layer import SandwichLayer
from paceline.layers.linear import GateUpLinear, Linear, QKVLinear
from paceline.layers.mixers.gated_delta import GatedDeltaNet
from paceline.layers.mixers.latent_attention import LatentAttention
from paceline.layers.mixers.mamba2 import Mamba2
from paceline.layers.mixers.self_attention import SelfAttention
from paceline.layers.mlp import GatedMLP
from paceline.layers.moe import SharedExpert, SparseMLP
from paceline.layers.rank_sum import RankSum, part_of
from paceline.layers.weights.weight_format import ExpertNames, Named, partly, wholly


def name_linear(layer: Linear, prefix: str) -> Named:
    """A projection with a name of its own."""
    return layer.held.fill(prefix)


def name_rows(layer: QKVLinear | GateUpLinear, parts: tuple[str, ...], prefix: str) -> Named:
    """Projections that we multiply with at once, in the order of `parts`."""
    return layer.held.fill(*(f"{prefix}.{part}" for part in parts))


def name_attention(layer: SelfAttention, prefix: str) -> Named:
    """Projections, and norms of Q and K and sinks where a model has them."""
    named = name_rows(layer.qkv, ("q_proj", "k_proj", "v_proj"), prefix)
    named |= name_linear(part_of(layer.out), f"{prefix}.o_proj")
    if layer.q_norm is not None and layer.k_norm is not None:
        q_rows, k_rows = layer.norm_rows()
        named[f"{prefix}.q_norm.weight"] = partly(layer.q_norm.weight, q_rows)
        named[f"{prefix}.k_norm.weight"] = partly(layer.k_norm.weight, k_rows)
    if layer.sinks is not None:
        named[f"{prefix}.sinks"] = partly(layer.sinks, layer.heads)
    return named


def name_latent(layer: LatentAttention, prefix: str) -> Named:
    """Projections to and from latents, and their norms."""
    named = name_linear(layer.q, f"{prefix}.{'q_proj' if layer.q_a is None else 'q_b_proj'}")
    if layer.q_a is not None and layer.q_norm is not None:
        named |= name_linear(layer.q_a, f"{prefix}.q_a_proj")
        named[f"{prefix}.q_a_layernorm.weight"] = wholly(layer.q_norm.weight)
    named |= name_linear(layer.kv_a, f"{prefix}.kv_a_proj_with_mqa")
    named[f"{prefix}.kv_a_layernorm.weight"] = wholly(layer.kv_norm.weight)
    named |= layer.held.fill(f"{prefix}.kv_b_proj")
    return named | name_linear(part_of(layer.out), f"{prefix}.o_proj")


def name_mamba2(layer: Mamba2, prefix: str) -> Named:
    """Projections, the convolution, what each head has, and the norm where there is one."""
    named = name_linear(layer.in_proj, f"{prefix}.in_proj")
    named |= name_linear(layer.out_proj, f"{prefix}.out_proj")
    named[f"{prefix}.conv1d.weight"] = wholly(layer.conv.unsqueeze(1))
    if layer.conv_bias is not None:
        named[f"{prefix}.conv1d.bias"] = wholly(layer.conv_bias)
    if layer.norm is not None:
        named[f"{prefix}.norm.weight"] = wholly(layer.norm.weight)
    of_heads = {"A_log": layer.a_log, "D": layer.skip, "dt_bias": layer.dt_bias}
    return named | {f"{prefix}.{name}": wholly(held) for name, held in of_heads.items()}


def name_fused_mlp(layer: GatedMLP, prefix: str) -> Named:
    """One whose gate and up are one tensor (Granite)."""
    named = layer.gate_up.held.fill(f"{prefix}.input_linear")
    return named | name_linear(layer.down, f"{prefix}.output_linear")


def name_gated_delta(layer: GatedDeltaNet, prefix: str) -> Named:
    """Projections, convolution, decays and norm of a gated delta net."""
    return {
        **layer.held.fill(f"{prefix}.in_proj_qkvz", f"{prefix}.in_proj_ba"),
        f"{prefix}.conv1d.weight": layer.conv_target(),
        f"{prefix}.A_log": partly(layer.decay_log, layer.values),
        f"{prefix}.dt_bias": partly(layer.decay_bias, layer.values),
        f"{prefix}.norm.weight": wholly(layer.norm.weight),
        **name_linear(part_of(layer.out), f"{prefix}.out_proj"),
    }


def name_mlp(layer: GatedMLP, prefix: str) -> Named:
    """One gated feed-forward block."""
    named = name_rows(layer.gate_up, ("gate_proj", "up_proj"), prefix)
    return named | name_linear(layer.down, f"{prefix}.down_proj")


def name_experts(layer: SparseMLP, prefix: str) -> Named:
    """A router and experts with tensors of their own, and what every token takes."""
    named = name_routed(layer, prefix)
    return named if layer.shared is None else named | name_shared_expert(layer.shared, prefix)


def name_routed(layer: SparseMLP, prefix: str) -> Named:
    """The router, and the experts that it chooses from."""
    named = name_linear(layer.router, f"{prefix}.gate")
    own = [f"{prefix}.experts.{expert}" for expert in range(layer.num_experts)]
    names = [ExpertNames(f"{e}.gate_proj", f"{e}.up_proj", f"{e}.down_proj") for e in own]
    named |= layer.held.format.fill_each(layer.held.weight, names)
    if layer.choice_bias is not None:
        named[f"{prefix}.gate.e_score_correction_bias"] = wholly(layer.choice_bias)
    return named


def name_shared_expert(layer: SharedExpert, prefix: str) -> Named:
    """Qwen's has a gate; DeepSeek's has none, and is named as if it were several."""
    if layer.gate is None:
        return name_mlp(layer.mlp, f"{prefix}.shared_experts")
    named = name_mlp(layer.mlp, f"{prefix}.shared_expert")
    return named | name_linear(layer.gate, f"{prefix}.shared_expert_gate")


def name_feed_forward(layer: GatedMLP | SparseMLP | RankSum, prefix: str) -> Named:
    """Of a layer: experts where the model has them there."""
    block = part_of(layer)
    return name_experts(block, prefix) if isinstance(block, SparseMLP) else name_mlp(block, prefix)


def name_prenorm(layer: PreNormLayer, prefix: str) -> Named:
    """A decoder layer of Llama and its kin."""
    return _name_blocks(layer, prefix) | name_prenorms(layer, prefix)


def name_prenorms(layer: PreNormLayer, prefix: str) -> Named:
    """Its norms alone."""
    return {
        f"{prefix}.input_layernorm.weight": wholly(layer.input_norm.weight),
        f"{prefix}.post_attention_layernorm.weight": wholly(layer.mlp_norm.weight),
    }


def name_postnorm(layer: PostNormLayer, prefix: str) -> Named:
    """A decoder layer with norms behind its blocks."""
    return {
        **_name_blocks(layer, prefix),
        f"{prefix}.post_attention_layernorm.weight": wholly(layer.attention_norm.weight),
        f"{prefix}.post_feedforward_layernorm.weight": wholly(layer.output_norm.weight),
    }


def name_sandwich(layer: SandwichLayer, prefix: str) -> Named:
    """A decoder layer of the later Gemmas."""
    return {
        **_name_blocks(layer, prefix),
        f"{prefix}.input_layernorm.weight": wholly(layer.input_norm.weight),
        f"{prefix}.post_attention_layernorm.weight": wholly(layer.attention_norm.weight),
        f"{prefix}.pre_feedforward_layernorm.weight": wholly(layer.mlp_norm.weight),
        f"{prefix}.post_feedforward_layernorm.weight": wholly(layer.output_norm.weight),
    }


def _name_blocks(layer: PreNormLayer | PostNormLayer | SandwichLayer, prefix: str) -> Named:
    """Attention, or what stands in its place, and feed-forward of a decoder layer."""
    block = layer.attention
    if isinstance(block, GatedDeltaNet):
        named = name_gated_delta(block, f"{prefix}.linear_attn")
    else:
        assert isinstance(block, SelfAttention)
        named = name_attention(block, f"{prefix}.self_attn")
    return named | name_feed_forward(layer.mlp, f"{prefix}.mlp")
