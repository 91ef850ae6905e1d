"""What encoders, the heads behind them and the inputs that requests bring for them look like.  No
torch.
"""

from dataclasses import dataclass

HEAD_ACTS = ("gelu", "relu", "silu", "tanh")  # of stages of a pooled head


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderConfig:
    """What encoders have beside their layers."""

    position_rows: int = 0  # of a table of learned positions; 0: there is none
    first_position: int = 0  # its row of position 0
    token_types: int = 0  # rows of a table of which one is added to every token: the first, but
    # to those of a pair's second text
    norm_bias: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadStage:
    """One product of what makes numbers of a pooled row, with what stands behind it."""

    name: str  # of its tensors in checkpoints
    width: int  # numbers that it makes
    bias: bool = True
    act: str | None = None  # one of HEAD_ACTS
    norm: str | None = None  # a LayerNorm behind the activation: its name in checkpoints
    norm_bias: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderInputConfig:
    """The tensor of floats that a request brings for layers that read an encoder, and the encoder
    that makes their rows of it."""

    width: int  # numbers of a frame
    frames_per_row: int = 1
    width_first: bool = False  # it lies as [width, frames]; else as [frames, width]
    is_needed: bool = False  # False: a request without it has no rows
    num_layers: int = 0  # of the encoder; 0: there is none, and frames are the rows
    num_heads: int = 0  # of the encoder, as what follows
    intermediate_size: int = 0

    def rows(self, frames: int) -> int:
        """What as many frames become."""
        return -(-frames // self.frames_per_row)

    def shape(self, frames: int) -> tuple[int, int]:
        """Of the tensor."""
        return (self.width, frames) if self.width_first else (frames, self.width)
