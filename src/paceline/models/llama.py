"""Llama 2, 3 and their kin (model_type llama): the plain pre-norm decoder."""

from paceline.models.prenorm import build_prenorm

build = build_prenorm
