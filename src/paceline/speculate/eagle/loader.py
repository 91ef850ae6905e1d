"""From a located EAGLE head to a module with weights in it.

Released heads are one pytorch_model.bin or safetensors files; their first layer is `midlayer` or
`layers.0`, and copies of the target's embedding and language-model head may lie beside it.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch

from paceline.core.options.engine_options import LOAD_FORMATS
from paceline.core.parallel import Parallel
from paceline.layers.weights.dense import DENSE
from paceline.layers.weights.parameter import Placement
from paceline.models.causal_lm import CausalLM
from paceline.models.checkpoint import StoredTensors, open_checkpoint
from paceline.models.loader import copy_weights, fill_dummy, weights_folder
from paceline.models.locate import ModelSource
from paceline.models.pickled_checkpoint import PICKLED_NAME, open_pickled
from paceline.speculate.eagle.config import EagleConfig
from paceline.speculate.eagle.head import EagleHead, build_eagle_head
from paceline.speculate.eagle.vocabulary import read_d2t, spread_d2t

_LATER_NORM = re.compile(r"layers\.([1-9]\d*)\.hidden_norm\.weight$")
_AUX_NORMS = {f"aux_norm_{at}.weight": i for i, at in enumerate(("low", "mid", "high"))}


def load_eagle_head(
    source: ModelSource,
    config: EagleConfig,
    target: CausalLM,
    *,
    parallel: Parallel,
    device: torch.device,
    dtype: torch.dtype,
    max_positions: int,
    load_format: str = "auto",
    progress: bool | None = None,
    seed: int = 0,
) -> EagleHead:
    """The head, ready to run on `target`, whose weights are in place; arguments as of `load_model`
    and `build_eagle_head`.

    Raises WeightsError naming the tensors or the file at fault.
    """
    assert load_format in LOAD_FORMATS, f"{load_format} is none of {LOAD_FORMATS}"

    def build(config: EagleConfig) -> EagleHead:
        return build_eagle_head(
            config,
            target,
            parallel=parallel,
            placement=Placement(device, dtype, DENSE),
            max_positions=max_positions,
        )

    vocab_size = config.layer.vocab_size
    if load_format == "dummy":
        head = build(config)
        fill_dummy(head, seed=seed)
        if head.d2t is not None:
            head.d2t.copy_(spread_d2t(head.d2t.shape[0], vocab_size))
        return head
    with _open(weights_folder(source)) as checkpoint:
        names = canonical_names(checkpoint.names, config)
        head = build(replace(config, fc_bias="fc.bias" in names))
        copy_weights(
            checkpoint,
            names,
            head.destinations(),
            module=head,
            model=source.name,
            progress=progress,
        )
        if head.d2t is not None:
            head.d2t.copy_(read_d2t(checkpoint, head.d2t.shape[0], vocab_size, head=source.name))
    return head


@contextmanager
def _open(folder: Path) -> Iterator[StoredTensors]:
    """The safetensors files of `folder`, or where there are none its pytorch_model.bin."""
    pickled = folder / PICKLED_NAME
    if pickled.is_file() and not any(folder.glob("*.safetensors")):
        yield open_pickled(pickled)
    else:
        with open_checkpoint(folder) as checkpoint:
            yield checkpoint


def canonical_names(stored: list[str], config: EagleConfig) -> dict[str, str]:
    """Names as `EagleHead.destinations` has them -> as they are stored, of the tensors needed.

    A later layer's one input norm is its hidden_norm, or its input_layernorm where it has none.
    """
    found: dict[str, str] = {}
    later: dict[str, str] = {}
    for name in stored:
        canonical = _canonical(name, config)
        if canonical is None:
            continue
        if (norm := _LATER_NORM.match(canonical)) is not None:
            later[f"layers.{norm[1]}.input_layernorm.weight"] = name
        else:
            found[canonical] = name
    return found | later


def _canonical(name: str, config: EagleConfig) -> str | None:
    """None for a tensor that is not needed here: rope frequencies, the maps between vocabularies
    (`eagle.vocabulary` reads them), and copies of what the target has."""
    name = name.removeprefix("model.")
    if name.startswith("midlayer."):
        name = "layers.0." + name.removeprefix("midlayer.")
    if name in _AUX_NORMS:
        return f"fc_norm.{_AUX_NORMS[name]}.weight"
    unused = name.endswith(".rotary_emb.inv_freq")
    unused |= name == "embed_tokens.weight" and not config.has_own_embedding
    unused |= name == "lm_head.weight" and config.version == 1
    unused |= name in ("d2t", "t2d") and config.draft_vocab_size is not None
    return None if unused else name
