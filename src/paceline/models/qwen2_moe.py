"""Qwen 2 MoE (model_type qwen2_moe): Qwen 2 with experts, one of which every token takes."""

from paceline.models.prenorm import build_prenorm

build = build_prenorm
