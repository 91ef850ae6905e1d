"""Qwen 2 and 2.5 (model_type qwen2): pre-norm decoder with biases on Q, K and V."""

from paceline.models.prenorm import build_prenorm

build = build_prenorm
