"""The text model of Llama 3.2 Vision (model_type mllama_text_model): Llama in which some layers
attend to an image's rows in place of the text.  What sees is not run: a request brings the rows,
as the projector behind it makes them (transformers' `cross_attention_states`).
"""

from dataclasses import replace
from typing import Any

from paceline.core.model.config import ModelConfig
from paceline.core.model.encoder import EncoderInputConfig
from paceline.models.architecture import COMPUTED, Architecture
from paceline.models.config_layers import with_layers
from paceline.models.config_prenorm import read_prenorm
from paceline.models.fields import Fields

MOST_ROWS = 4 * 1601  # an image of four tiles, each of 40 x 40 patches and one for the class
_FURTHER_IDS = 8  # rows of the token table behind the vocabulary, which the head has not


def read(fields: Fields) -> dict[str, Any]:
    """Of the text model alone."""
    shared = read_prenorm(fields)
    num_layers, given = shared["num_layers"], fields.get("cross_attention_layers")
    places = range(num_layers)
    if not isinstance(given, list) or not given or not {*given} <= {*places}:
        expected = f"a list of layers from 0 to {num_layers - 1}"
        fields.fail("cross_attention_layers", expected, given)
    parsed = with_layers(shared | {"layer_windows": (None,) * num_layers})
    layers = [
        replace(layer, rope=None, rotary_dim=0, reads_encoder=True) if index in given else layer
        for index, layer in enumerate(parsed["layers"])
    ]
    return parsed | {
        "layers": tuple(layers),
        "stored_vocab_size": shared["vocab_size"] + _FURTHER_IDS,
        "max_encoder_len": MOST_ROWS,
        "encoder_input": EncoderInputConfig(width=shared["hidden_size"]),
    }


def build(config: ModelConfig, **where: Any) -> Any:
    """where: as of `build_mllama`."""
    from paceline.models.mllama_stack import build_mllama

    return build_mllama(config, **where)


ARCHITECTURE = Architecture(
    read=read,
    build=build,
    text_of="mllama",
    defaults={
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 40,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "cross_attention_layers": [3, 8, 13, 18, 23, 28, 33, 38],
    },
    ignored=(*COMPUTED, r"^(model\.)?(vision_model|multi_modal_projector)\."),
)
