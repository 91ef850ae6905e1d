"""Whether an engine that makes vectors keeps anything of a text for later steps.

Where each text is computed in one step and no text takes its beginning from another, nobody reads
what a cache would hold.  Then no layer is in a cache group: one fact (`LayerSpec.reads_whole`)
leaves out the pool, the writes and the reads.
"""

from collections.abc import Mapping
from dataclasses import replace

from paceline.core.gpus import DeviceFacts
from paceline.core.model.config import SOFTMAX, LayerSpec, ModelConfig
from paceline.core.model.lookback import Chunk
from paceline.core.modes import End
from paceline.core.options.engine_options import EngineOptions
from paceline.plan.step_size import usual_step

# What is asked of a cache, or of who reads it; ranks and blocks are of layers that have one.
_OF_A_CACHE = (
    "kv_cache_bytes",
    "kv_cache_dtype",
    "page_size",
    "attention_backend",
    "prompt_blocks",
    "tensor_parallel_size",
)
# Where the prefix cache was asked off, the step of a GPU may grow so far, for the longest text.
# A CPU's may not: its attention to a whole text holds all scores of it.  Nor may that of an engine
# that was given a share of the GPU: a longer step may not fit, where texts in parts do.
GROWTH = 2


def without_cache(
    config: ModelConfig, asked: Mapping[str, object], given: EngineOptions, device: DeviceFacts
) -> ModelConfig:
    """`config`, whose layers keep nothing where a step holds the longest text and nothing was asked
    of a cache.

    asked: by field name, of which `given` was made.  Unasked, classifiers keep theirs: the pairs of
    one query begin alike.
    """
    prefixes = asked.get("enable_prefix_cache")
    is_unasked = prefixes is None and config.label_act
    if not _can(config) or asked_of_a_cache(given) or prefixes or is_unasked:
        return config
    length = given.max_model_len or config.usual_context or config.max_position
    tokens = given.max_num_batched_tokens
    if tokens is None:
        tokens = usual_step(device, config)[0].tokens
        has_all = given.gpu_memory_utilization is None
        if prefixes is False and has_all and device.device_type == "cuda":
            tokens *= GROWTH
    if length > min(tokens, given.chunked_prefill_size or tokens):
        return config
    return replace(config, layers=tuple(replace(layer, cache_free=True) for layer in config.layers))


def asked_of_a_cache(given: EngineOptions) -> list[str]:
    """Fields by which an engine has a cache that could do without; prefixes left aside."""
    unasked = EngineOptions()
    return [name for name in _OF_A_CACHE if getattr(given, name) != getattr(unasked, name)]


def _can(config: ModelConfig) -> bool:
    """Whether nothing is generated, and every layer can attend to the step's own rows."""
    return End.GENERATE not in config.ends and all(map(_attends_alone, config.layers))


def _attends_alone(layer: LayerSpec) -> bool:
    """Never latents: absorbed, they read the rows of a pool."""
    is_plain = layer.mixer == SOFTMAX and not layer.state and not layer.reads_encoder
    has_keys = layer.causal and not layer.heads.v_in_k
    return is_plain and has_keys and not layer.sinks and not isinstance(layer.window, Chunk)
