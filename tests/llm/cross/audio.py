"""A tiny Whisper, and what transformers' own says of the same prompts and audio."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from llm_cases import VOCAB, Checkpoint, GapOf, Tokens, save_tokenizer
from torch import Tensor, nn

MELS, MOST_FRAMES, CONTEXT = 8, 40, 96
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "num_mel_bins": MELS,
    "d_model": 48,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 3,
    "encoder_ffn_dim": 72,
    "decoder_ffn_dim": 56,
    "max_source_positions": MOST_FRAMES // 2,
    "max_target_positions": CONTEXT,
    "init_std": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
}


@dataclass(frozen=True)
class Audio(Checkpoint):
    """A Whisper on disk, and transformers' own instance of it (float32)."""

    def rows(self, frames: Tensor) -> Tensor:
        """[1, rows, hidden] of frames [mels, num_frames], by their encoder.  It takes as many as it
        is made for, so of fewer it is made for so many, with the first of its positions."""
        encoder, config = self.theirs.model.encoder, self.theirs.config
        table, most = encoder.embed_positions, config.max_source_positions
        encoder.embed_positions = nn.Embedding.from_pretrained(
            table.weight[: -(-frames.shape[1] // 2)]
        )
        object.__setattr__(config, "max_source_positions", frames.shape[1] / 2)
        try:
            rows: Tensor = encoder(frames[None]).last_hidden_state
        finally:
            encoder.embed_positions = table
            config.max_source_positions = most
        return rows

    def logits_of(self, ids: Sequence[int], frames: Tensor) -> Tensor:
        """[num_tokens, vocab]  float32"""
        with torch.inference_mode():
            rows = self.rows(frames) if frames.shape[1] else None
            tokens = torch.tensor([list(ids)])
            found = self.theirs.model.decoder(tokens, encoder_hidden_states=rows, use_cache=False)
            logits: Tensor = self.theirs.proj_out(found.last_hidden_state)[0]
        return logits

    def said(self, prompt: Sequence[int], frames: Tensor, num_tokens: int) -> Tokens:
        """What it generates greedily; end tokens are tokens like any other."""
        ids = list(prompt)
        for _ in range(num_tokens):
            ids.append(int(self.logits_of(ids, frames)[-1].argmax()))
        return tuple(ids[len(prompt) :])

    def gap_over(self, prompt: Sequence[int], frames: Tensor) -> GapOf:
        """As `gap`, of a prompt with audio."""

        def gap_of(output: Tokens, pair: tuple[int, int]) -> tuple[float, float]:
            logits = self.logits_of([*prompt, *output], frames)[-1]
            return (logits.max() - logits[list(pair)].min()).item(), logits.abs().max().item()

        return gap_of


def make_audio(folder: Path, **more: Any) -> Audio:
    """Norms and biases are random too, so that one left out or swapped shows, and cross attention
    is sharp enough to matter."""
    config = transformers.WhisperConfig(**SIZES | more)
    config._attn_implementation = "eager"
    torch.manual_seed(7)
    model = transformers.WhisperForConditionalGeneration(config).eval().requires_grad_(False)
    for parameter in model.parameters():
        if parameter.ndim == 1:
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    for layer in model.model.decoder.layers:
        layer.encoder_attn.q_proj.weight.mul_(4.0)
        layer.encoder_attn.out_proj.weight.mul_(0.5)
    model.model.decoder.embed_tokens.weight.mul_(2.0)
    model.model.decoder.embed_positions.weight.mul_(2.0)
    model.generation_config.eos_token_id = [2, 3]
    model.save_pretrained(folder)
    save_tokenizer(folder)
    return Audio(folder, model)


def frames_of(seed: int, num_frames: int) -> Tensor:
    """[mels, num_frames]"""
    return torch.randn(MELS, num_frames, generator=torch.Generator().manual_seed(seed)) * 2


def asked(prompt: Sequence[int], frames: Tensor) -> dict[str, Any]:
    return {"prompt_token_ids": list(prompt), "encoder_input": frames}
