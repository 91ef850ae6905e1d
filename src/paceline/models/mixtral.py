"""Mixtral (model_type mixtral): Mistral with experts in place of every feed-forward block."""

from paceline.models.prenorm import build_prenorm

build = build_prenorm
