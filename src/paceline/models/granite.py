"""Granite (model_type granite): Llama with multipliers on embeddings, on what each block adds, on
attention scores and on logits."""

from paceline.models.prenorm import build_prenorm

build = build_prenorm
