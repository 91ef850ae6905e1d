"""Qwen 3 (model_type qwen3): pre-norm decoder with per-head norms of Q and K."""

from paceline.models.prenorm import build_prenorm

build = build_prenorm
