"""Gemma 3, text only (model_type gemma3_text, and the text_config of gemma3): per-head norms of Q
and K, and windowed layers with a rope table of their own."""

from paceline.models.sandwich import build_sandwich

build = build_sandwich
