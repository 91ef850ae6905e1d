"""Every case of the matrix, in the order of the report."""

from paceline.proof.suite.blocks import block_cases
from paceline.proof.suite.case import Case
from paceline.proof.suite.cross import cross_cases
from paceline.proof.suite.decode import decode_cases
from paceline.proof.suite.dims import dim_cases
from paceline.proof.suite.encoders import encoder_cases
from paceline.proof.suite.extend import extend_cases, mixed_cases
from paceline.proof.suite.latent import latent_cases
from paceline.proof.suite.long import long_cases
from paceline.proof.suite.rope import rope_cases
from paceline.proof.suite.speculate import (
    draft_decode_cases,
    draft_extend_cases,
    verify_cases,
)
from paceline.proof.suite.step_alone import both_ways_cases, step_cases
from paceline.proof.suite.tiny import tiny_cases
from paceline.proof.suite.windows import window_cases


def cases() -> tuple[Case, ...]:
    """All cases; names are unique among those of a method and mode."""
    return (
        *extend_cases(),
        *mixed_cases(),
        *decode_cases(),
        *verify_cases(),
        *draft_decode_cases(),
        *draft_extend_cases(),
        *window_cases(),
        *tiny_cases(),
        *cross_cases(),
        *dim_cases(),
        *latent_cases(),
        *block_cases(),
        *encoder_cases(),
        *rope_cases(),
        *step_cases(),
        *both_ways_cases(),
        *long_cases(),
    )
