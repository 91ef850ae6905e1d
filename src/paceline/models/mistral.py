"""Mistral 7B, Nemo and their kin (model_type mistral): Llama, with one window for all layers where
the checkpoint has one."""

from paceline.models.prenorm import build_prenorm

build = build_prenorm
