"""Llama 2, 3 and their kin (model_type llama): the plain pre-norm decoder."""

from paceline.models.architecture import Architecture
from paceline.models.config_prenorm import read_plain

ARCHITECTURE = Architecture(read=read_plain, defaults={"max_position_embeddings": 2048})
