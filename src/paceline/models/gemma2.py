"""Gemma 2 (model_type gemma2): soft caps on attention scores and logits, every other layer
windowed."""

from paceline.models.sandwich import build_sandwich

build = build_sandwich
