"""What a model's requests may end in, from its files and from what was asked.

A checkpoint with a classifier's head scores labels.  One of a body alone (`architectures` of
config.json names no head), or one that comes with the files of sentence-transformers, makes vectors
and nothing else: its head is not read.  Any other generates and scores; with `--pooling` it makes
vectors, too.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from paceline.core.errors import ModelError
from paceline.core.model.config import ModelConfig
from paceline.core.model.encoder import HeadStage
from paceline.core.modes import POOLS, End, Pooling
from paceline.models.classifier import classifying, is_classifier
from paceline.models.fields import Fields
from paceline.models.locate import ModelSource, paths_of

_MODES = {
    "cls": Pooling.CLS,
    "cls_token": Pooling.CLS,
    "mean": Pooling.MEAN,
    "mean_tokens": Pooling.MEAN,
    "lasttoken": Pooling.LAST,
}
_IN_ORDER = re.compile(r"Transformer Pooling( Dense)*( Normalize)?")  # they are computed so
_ACTS = {
    "Identity": None,
    "Tanh": "tanh",
    "ReLU": "relu",
    "GELU": "gelu",
    "SiLU": "silu",
}  # of Dense
_UNSAID_PROMPTS = ("query", "document")  # which every model of sentence-transformers has, if empty
_USUAL = Pooling.LAST  # of a causal body whose files say nothing


def with_ends(config: ModelConfig, source: ModelSource, asked: Pooling | None) -> ModelConfig:
    """`config` with its ends.  asked: --pooling.  Raises ModelError for a way to make vectors that
    is not known here."""
    if source.modules is not None:
        config = _with_texts(config, source)
    if is_classifier(source.config):
        return classifying(config, source, _types(source.modules or ()), asked)
    said = None
    if source.modules is not None:
        said = _said(source.modules, source.pooling_config)
        normalizes = "Normalize" in _types(source.modules)
        config = replace(config, normalizes=normalizes)
    is_body = _is_body(source.config.get("architectures")) or End.GENERATE not in config.ends
    if said is None and not is_body:
        if asked is None:
            return config
        return replace(config, ends=config.ends | {End.POOL}, pooling=asked)
    pooling = asked or said or config.pooling or _USUAL
    _check_prompt_pooled(config, source, pooling)
    head = _dense(config, source)
    bent = [stage.name for stage in head if stage.act is not None]
    if bent and pooling is Pooling.MEAN and not config.reads_whole:
        raise ModelError.about(
            f"{bent[0]} of '{source.name}'",
            expected="without an activation, behind a mean that is made in several steps",
            got=f"{head[0].act}",
            remedy="use a model whose tokens see one another in both directions",
        )
    return replace(config, ends=POOLS, pooling=pooling, pooled_head=head)


def _with_texts(config: ModelConfig, source: ModelSource) -> ModelConfig:
    """With what files of sentence-transformers say of texts: how long they may be, and what is done
    to them first."""
    said = Fields(source.transformer_config, "sentence_bert_config.json")
    limit = said.integer("max_seq_length", None)
    if limit is None:  # newer ones leave it to the tokenizer
        limit = Fields(source.tokenizer_config, "tokenizer_config.json").number(
            "model_max_length", config.max_position
        )
    return replace(
        config,
        usual_context=int(limit) if limit < config.max_position else None,
        vector_prompt=_default_prompt(source.prompts_config),
        lowers=said.flag("do_lower_case", False),
    )


def _default_prompt(said: Mapping[str, Any]) -> str:
    """Of config_sentence_transformers.json; other prompts are for clients to put before texts."""
    fields = Fields(said, "config_sentence_transformers.json")
    if fields.get("default_prompt_name") is None:
        return ""
    prompts = dict.fromkeys(_UNSAID_PROMPTS) | fields.nested("prompts")
    name = fields.choice("default_prompt_name", tuple(prompts))
    prompt = prompts[name] or ""
    if not isinstance(prompt, str):
        fields.fail(f"prompts: {name}", "a text", prompt)
    return prompt


def _check_prompt_pooled(config: ModelConfig, source: ModelSource, pooling: Pooling) -> None:
    """The last token of a text is never one of the prompt's."""
    if config.vector_prompt and pooling is not Pooling.LAST:
        path = paths_of(source.modules or [], "Pooling")[0]
        fields = Fields(source.pooling_config, f"{path}/config.json")
        reason = "use a model that pools the tokens of its prompt, too"
        if not fields.flag("include_prompt", True):
            expected = f"true behind the default prompt {config.vector_prompt!r}"
            fields.fail("include_prompt", expected, False, remedy=reason)


def _dense(config: ModelConfig, source: ModelSource) -> tuple[HeadStage, ...]:
    """The Dense modules of sentence-transformers."""
    stages: list[HeadStage] = []
    for path, said in source.dense.items():
        fields = Fields(said, f"{path}/config.json")
        before = stages[-1].width if stages else config.hidden_size
        if fields.integer("in_features") != before:
            fields.fail("in_features", f"{before}, which it is given", said["in_features"])
        for name in ("module_input_name", "module_output_name"):
            fields.choice(name, ("sentence_embedding",), "sentence_embedding")
        fields.refuse("use_residual", "use a model whose Dense modules add nothing to their output")
        act = str(fields.get("activation_function") or "Tanh").rpartition(".")[2]
        if act not in _ACTS:
            fields.fail("activation_function", f"torch's {', '.join(_ACTS)}", act)
        width, bias = fields.integer("out_features"), fields.flag("bias", True)
        stages.append(HeadStage(name=f"{path}.linear", width=width, bias=bias, act=_ACTS[act]))
    return tuple(stages)


def _is_body(architectures: object) -> bool:
    """Whether the first of them names a model without a head, as AutoModel stores it."""
    if not isinstance(architectures, Sequence) or isinstance(architectures, str):
        return False
    return any(isinstance(name, str) and name.endswith("Model") for name in architectures[:1])


def _said(modules: list[Any], pooling: Mapping[str, Any]) -> Pooling:
    """The pooling that files of sentence-transformers ask for."""
    types = _types(modules)
    if not _IN_ORDER.fullmatch(" ".join(types)):
        raise ModelError.about(
            "modules.json",
            expected="Transformer, Pooling, any number of Dense, and at most one Normalize, last",
            got=", ".join(types) or "none",
            remedy="use a model whose vectors are pooled hidden states",
        )
    modes = [
        name.removeprefix("pooling_mode_")
        for name, is_on in pooling.items()
        if name.startswith("pooling_mode_") and is_on is True
    ]
    mode = pooling.get("pooling_mode")
    modes += [mode] if isinstance(mode, str) else []
    if len(modes) != 1 or modes[0] not in _MODES:
        raise ModelError.about(
            f"{paths_of(modules, 'Pooling')[0]}/config.json",
            expected=f"one mode of {', '.join(sorted(_MODES))}",
            got=" and ".join(modes) or "none",
            remedy="use a model that pools so, or correct that file",
        )
    return _MODES[modes[0]]


def _types(modules: Sequence[Any]) -> list[str]:
    """The last names of the modules' types."""
    kinds = [each.get("type") for each in modules if isinstance(each, Mapping)]
    return [str(kind).rpartition(".")[2] for kind in kinds]
