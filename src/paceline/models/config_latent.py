"""What config.json files of models with latent attention have in common."""

from functools import partial
from typing import TYPE_CHECKING, Any

from paceline.core.model.config import HIDDEN_ACTS, ExpertChoice, LatentConfig, MoEConfig
from paceline.core.model.rope import RopeConfig, yarn_mscale
from paceline.models.architecture import prenorm
from paceline.models.config_moe import SILU
from paceline.models.config_prenorm import attention_biases
from paceline.models.config_rope import context_limit, read_rope
from paceline.models.config_windows import uniform_windows
from paceline.models.fields import Fields

if TYPE_CHECKING:
    from paceline.layers.decoders.prenorm_layer import PreNormLayer
    from paceline.layers.weights.weight_format import Named


def _name_layer(layer: "PreNormLayer", prefix: str) -> "Named":
    from paceline.layers.mixers.latent_attention import LatentAttention
    from paceline.models.tensor_names import name_feed_forward, name_latent, name_prenorms

    assert isinstance(layer.attention, LatentAttention)
    return {
        **name_latent(layer.attention, f"{prefix}.self_attn"),
        **name_feed_forward(layer.mlp, f"{prefix}.mlp"),
        **name_prenorms(layer, prefix),
    }


# Of the configuration classes of both.
LATENT_DEFAULTS: dict[str, Any] = {
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
}
latent_prenorm = partial(prenorm, named=_name_layer)


def read_latent(fields: Fields, *, v_dim: int | None = None) -> dict[str, Any]:
    """Llama's fields with latent attention in place of heads of K and V.

    v_dim: what v_head_dim is where it is not given; None: it is given, or has a default.
    """
    heads = fields.integer("num_attention_heads")
    latent = LatentConfig(
        rank=fields.integer("kv_lora_rank"),
        rope_dim=fields.integer("qk_rope_head_dim"),
        nope_dim=fields.integer("qk_nope_head_dim"),
        v_dim=fields.integer("v_head_dim", *([] if v_dim is None else [v_dim])),
        q_rank=fields.integer("q_lora_rank", None),
        pairs=fields.flag("rope_interleave", True),
    )
    if fields.integer("num_key_value_heads", heads) != heads:
        given = fields.integer("num_key_value_heads")
        fields.fail("num_key_value_heads", f"num_attention_heads {heads} with latents", given)
    rope = read_rope(fields)
    shared: dict[str, Any] = {
        "vocab_size": fields.integer("vocab_size"),
        "hidden_size": fields.integer("hidden_size"),
        "intermediate_size": fields.integer("intermediate_size"),
        "num_layers": fields.integer("num_hidden_layers"),
        "num_heads": heads,
        "num_kv_heads": 1,
        "head_dim": latent.rank + latent.rope_dim,
        "v_head_dim": latent.rank,
        "v_in_k": True,
        "latent": latent,
        "rotary_dim": latent.rope_dim,
        "max_position": context_limit(rope, fields.integer("max_position_embeddings")),
        "rms_norm_eps": fields.number("rms_norm_eps", 1e-6),
        "rope": rope,
        "attention_scale": _scale(latent, rope),
        "hidden_act": fields.choice("hidden_act", tuple(HIDDEN_ACTS), "silu"),
        "tie_word_embeddings": fields.flag("tie_word_embeddings", False),
        "mlp_bias": fields.flag("mlp_bias", False),
        **attention_biases(fields),
    }
    return shared | {"layer_windows": uniform_windows(shared, None)}


def _scale(latent: LatentConfig, rope: RopeConfig) -> float:
    """Of the heads that are expanded, times yarn's mscale twice where all dimensions have one."""
    plain: float = (latent.nope_dim + latent.rope_dim) ** -0.5
    if not rope.mscale_all_dim:
        return plain
    return plain * yarn_mscale(rope.factor, rope.mscale_all_dim) ** 2


def read_groups(fields: Fields) -> tuple[int, int]:
    """(groups of experts, how many of them a token chooses from)."""
    groups, chosen = fields.integer("n_group", 1), fields.integer("topk_group", 1)
    count = fields.integer("n_routed_experts")
    if count % groups:
        fields.fail("n_group", f"a divisor of n_routed_experts {count}", groups)
    if chosen > groups:
        fields.fail("topk_group", f"at most n_group {groups}", chosen)
    within, taken = chosen * (count // groups), fields.integer("num_experts_per_tok")
    if taken > within:
        fields.fail("num_experts_per_tok", f"at most the {within} of its groups", taken)
    return groups, chosen


def all_but_the_first(fields: Fields) -> tuple[bool, ...]:
    """[num_layers] which have experts: those behind the first first_k_dense_replace."""
    num_layers, dense = fields.integer("num_hidden_layers"), fields.get("first_k_dense_replace")
    if not isinstance(dense, int) or dense < 0:
        fields.fail("first_k_dense_replace", "a number of layers", dense)
    if fields.integer("moe_layer_freq", 1) != 1:
        fields.fail("moe_layer_freq", "1", fields.get("moe_layer_freq"))
    return tuple(layer >= dense for layer in range(num_layers))


def read_sigmoid_experts(fields: Fields, layers: tuple[bool, ...]) -> MoEConfig | None:
    """Of DeepSeek-V3 and kin: sigmoids and a bias choose, within the best groups."""
    groups, chosen = read_groups(fields)
    fields.choice("topk_method", ("noaux_tc",), "noaux_tc")
    fields.choice("scoring_func", ("sigmoid",), "sigmoid")
    choice = ExpertChoice(
        num_groups=groups,
        groups_per_token=chosen,
        best_of_group=2,
        sigmoid=True,
        biased=True,
        scale=fields.number("routed_scaling_factor", 1.0),
    )
    renormalize = fields.flag("norm_topk_prob", True)
    return read_experts(fields, layers, renormalize=renormalize, choice=choice)


def read_experts(
    fields: Fields,
    layers: tuple[bool, ...],
    *,
    renormalize: bool,
    choice: ExpertChoice | None,
) -> MoEConfig | None:
    """layers: [num_layers] which have them; None where none has."""
    fields.choice("hidden_act", SILU, "silu")
    size, count = fields.integer("moe_intermediate_size"), fields.integer("n_routed_experts")
    taken = fields.integer("num_experts_per_tok")
    if taken > count:
        fields.fail("num_experts_per_tok", f"at most n_routed_experts {count}", taken)
    if not any(layers):
        return None
    return MoEConfig(
        layers=layers,
        num_experts=count,
        experts_per_token=taken,
        intermediate_size=size,
        bias=False,
        shared_size=size * fields.integer("n_shared_experts"),
        shared_gate=False,
        renormalize=renormalize,
        choice=choice,
    )
