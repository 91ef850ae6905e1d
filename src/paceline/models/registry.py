"""The architectures: one file each, named as Hugging Face's model_type.  Imports no torch."""

from paceline.core.errors import ModelError
from paceline.models import (
    bert,
    deepseek_v2,
    deepseek_v3,
    exaone4,
    falcon_h1,
    gemma,
    gemma2,
    gemma3_text,
    glm4_moe_lite,
    gpt_oss,
    granite,
    granitemoehybrid,
    llama,
    llama4_text,
    mamba2,
    minicpm3,
    mistral,
    mixtral,
    mllama_text_model,
    modernbert,
    olmo2,
    phi3,
    qwen2,
    qwen2_moe,
    qwen3,
    qwen3_moe,
    qwen3_next,
    roberta,
    seed_oss,
    smollm3,
    whisper,
    xlm_roberta,
)
from paceline.models.architecture import Architecture

_FILES = (
    *(bert, deepseek_v2, deepseek_v3, exaone4, falcon_h1, gemma, gemma2, gemma3_text),
    *(glm4_moe_lite, gpt_oss, granite, granitemoehybrid, llama, llama4_text, mamba2, minicpm3),
    *(
        mistral,
        mixtral,
        mllama_text_model,
        modernbert,
        olmo2,
        phi3,
        qwen2,
        qwen2_moe,
        qwen3,
        qwen3_moe,
        qwen3_next,
    ),
    *(roberta, seed_oss, smollm3, whisper, xlm_roberta),
)
ARCHITECTURES: dict[str, Architecture] = {
    file.ARCHITECTURE.model_type or file.__name__.rpartition(".")[2]: file.ARCHITECTURE
    for file in _FILES
}


def architecture(model_type: str) -> Architecture:
    """Raises ModelError naming the known ones."""
    if model_type not in ARCHITECTURES:
        raise ModelError.about(
            "model_type",
            expected=f"one of {', '.join(sorted(ARCHITECTURES))}",
            got=repr(model_type),
            remedy="use a model of a supported architecture",
        )
    return ARCHITECTURES[model_type]
