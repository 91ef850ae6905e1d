"""Qwen 3 MoE (model_type qwen3_moe): Qwen 3 with experts in place of most feed-forward blocks."""

from paceline.models.prenorm import build_prenorm

build = build_prenorm
