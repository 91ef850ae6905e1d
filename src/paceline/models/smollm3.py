"""SmolLM 3 (model_type smollm3): Llama in which every fourth layer has no rope."""

from paceline.models.prenorm import build_prenorm

build = build_prenorm
