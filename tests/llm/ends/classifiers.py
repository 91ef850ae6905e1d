"""Tiny cross-encoders with a tokenizer that joins pairs, and what transformers makes of a pair."""

import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import tiny_checkpoints
import tokenizers
import torch
import transformers
from llm_cases import save_tokenizer, text_of, token_text
from tokenizers.processors import TemplateProcessing
from torch import Tensor

CONTEXT = 96
_SIZES: dict[str, Any] = {
    "vocab_size": 160,
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 72,
    "initializer_range": 0.15,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "cls_token_id": 1,
    "sep_token_id": 2,
}
_BERT = {"max_position_embeddings": CONTEXT, "pad_token_id": 0}
_ROBERTA = {"max_position_embeddings": CONTEXT + 1, "pad_token_id": 0, "type_vocab_size": 1}
_MODERN = {"max_position_embeddings": CONTEXT, "pad_token_id": 0, "local_attention": 8}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("Bert", _BERT),
    "bert-labels": ("Bert", _BERT | {"num_labels": 3}),
    "roberta": ("Roberta", _ROBERTA),
    "xlm-roberta": ("XLMRoberta", _ROBERTA),
    "modernbert-cls": ("ModernBert", _MODERN),
    "modernbert-mean": (
        "ModernBert",
        _MODERN
        | {"classifier_pooling": "mean", "classifier_bias": True, "norm_bias": True}
        | {"classifier_activation": "silu", "num_labels": 3},
    ),
    "qwen3": ("Qwen3", {}),
}


@dataclass(frozen=True)
class CrossEncoder:
    """A classifier on disk, and transformers' own instance of it (float32)."""

    folder: Path
    theirs: transformers.PreTrainedModel

    @property
    def tells_types(self) -> bool:
        return self.theirs.config.model_type == "bert"

    def logits(self, query: str, document: str) -> Tensor:
        """[num_labels]"""
        [pair] = self.core.encode_batch([(query, document)])
        given = {"input_ids": torch.tensor([pair.ids])}
        if self.tells_types:
            given["token_type_ids"] = torch.tensor([pair.type_ids])
        with torch.inference_mode():
            found: Tensor = self.theirs(**given).logits[0]
        return found

    @property
    def core(self) -> tokenizers.Tokenizer:
        return _core(self.folder)


@cache
def _core(folder: Path) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))


def make_cross_encoder(case: str, folder: Path, **more: Any) -> CrossEncoder:
    family, settings = CASES[case]
    sizes = _SIZES if family != "Qwen3" else tiny_checkpoints.CASES["qwen3-odd-heads"][1]
    wanted = {"num_labels": 1, **sizes, **settings, **more}
    config = getattr(transformers, f"{family}Config")(**wanted)
    config._attn_implementation = "eager"
    torch.manual_seed(zlib.crc32(case.encode()))
    theirs = getattr(transformers, f"{family}ForSequenceClassification")(config)
    theirs = theirs.eval().requires_grad_(False)
    for parameter in theirs.parameters():
        if parameter.ndim == 1:
            parameter.add_(torch.randn_like(parameter), alpha=0.2)
    theirs.save_pretrained(folder)
    save_tokenizer(folder)
    if family != "Qwen3":
        _join_pairs(folder, second_type=int(family == "Bert"))
    return CrossEncoder(folder, theirs)


def _join_pairs(folder: Path, *, second_type: int) -> None:
    """[CLS] first [SEP] second [SEP], and what transformers reads to load it."""
    cls, sep = token_text(1), token_text(2)
    path = folder / "tokenizer.json"
    core = tokenizers.Tokenizer.from_file(str(path))
    core.post_processor = TemplateProcessing(
        single=f"{cls} $A {sep}",
        pair=f"{cls} $A {sep} $B:{second_type} {sep}:{second_type}",
        special_tokens=[(cls, 1), (sep, 2)],
    )
    core.save(str(path))
    names = ["input_ids", "attention_mask", *(["token_type_ids"] if second_type else [])]
    said = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_input_names": names,
        "pad_token": token_text(0),
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(said))


def some_pairs(ids: Sequence[Sequence[int]]) -> tuple[str, list[str]]:
    """(a query, documents): texts of `ids`, the first the query."""
    query, *documents = map(text_of, ids)
    return query, documents
