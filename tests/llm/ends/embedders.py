"""Tiny checkpoints that make vectors, with the files of sentence-transformers, and what
transformers makes of the same tokens."""

import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tiny_checkpoints
import torch
import transformers
from llm_cases import save_tokenizer, token_text
from torch import Tensor

from paceline.core.modes import Pooling
from paceline.llm.ends.vectors import EmbeddingOutput

TOLERANCE = 1e-5  # of numbers of vectors of length 1, float32
_MODES = {Pooling.LAST: "lasttoken", Pooling.CLS: "cls_token", Pooling.MEAN: "mean_tokens"}


@dataclass(frozen=True)
class Embedder:
    """A body on disk, and transformers' own instance of it (float32)."""

    folder: Path
    theirs: transformers.PreTrainedModel

    def hidden(self, token_ids: Sequence[int]) -> Tensor:
        """[num_tokens, hidden]"""
        with torch.inference_mode():
            found: Tensor = self.theirs(torch.tensor([list(token_ids)])).last_hidden_state[0]
        return found

    def vector(
        self,
        token_ids: Sequence[int],
        pooling: Pooling,
        *,
        dimensions: int | None = None,
        normalize: bool = True,
    ) -> Tensor:
        """[dimensions]"""
        hidden = self.hidden(token_ids).double()
        rows = {Pooling.LAST: hidden[-1], Pooling.CLS: hidden[0], Pooling.MEAN: hidden.mean(0)}
        found = rows[pooling][:dimensions]
        return torch.nn.functional.normalize(found, dim=0) if normalize else found


def write_modules(
    folder: Path, pooling: Pooling, *, normalize: bool = True, width: int = 40, **more: Any
) -> None:
    """modules.json and what it names.  more: of 1_Pooling/config.json."""
    kinds = [("", "Transformer"), ("1_Pooling", "Pooling")]
    kinds += [("2_Normalize", "Normalize")] if normalize else []
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (path, kind) in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    modes = {f"pooling_mode_{mode}": each is pooling for each, mode in _MODES.items()}
    said = {"word_embedding_dimension": width, **modes, "include_prompt": True, **more}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(said))


def make_embedder(
    folder: Path, pooling: Pooling | None = Pooling.LAST, *, normalize: bool = True, **more: Any
) -> Embedder:
    """A Qwen3 without a head.  pooling: of its files; None: there are none."""
    config = transformers.Qwen3Config(**tiny_checkpoints.CASES["qwen3-odd-heads"][1], **more)
    config._attn_implementation = "eager"
    torch.manual_seed(zlib.crc32(b"embedder"))
    theirs = transformers.Qwen3Model(config).eval().requires_grad_(False)
    theirs.save_pretrained(folder)
    save_tokenizer(folder)
    as_it_is = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": token_text(0)}
    (folder / "tokenizer_config.json").write_text(json.dumps(as_it_is))  # for transformers
    if pooling is not None:
        write_modules(folder, pooling, normalize=normalize)
    return Embedder(folder, theirs)


def assert_vectors(found: Sequence[EmbeddingOutput], wanted: Sequence[Tensor]) -> None:
    for embedding, vector in zip(found, wanted, strict=True):
        error = (torch.from_numpy(embedding.vector.copy()).double() - vector).abs().max().item()
        scale = max(vector.abs().max().item(), 1.0)
        assert error < TOLERANCE * scale, f"vectors differ by {error:.2e}"
