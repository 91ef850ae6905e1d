"""Whisper's encoder: two convolutions over frames of audio, and layers that look both ways."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.core.model.config import ModelConfig
from paceline.core.model.encoder import EncoderInputConfig
from paceline.core.parallel import ALONE, whole
from paceline.kernels.ragged_attention import ragged_attention
from paceline.layers.layer_norm import LayerNorm
from paceline.layers.linear import Linear, QKVLinear
from paceline.layers.weights.parameter import Placement, empty_parameter
from paceline.layers.weights.weight_format import Named, wholly

_TAPS = 3  # frames that a convolution sees
_MOST_HALF = torch.finfo(torch.float16).max - 1000  # as in transformers


class GeluMLP(nn.Module):
    """down(gelu(up(x))), with biases."""

    def __init__(self, hidden_size: int, inter: int, *, placement: Placement) -> None:
        super().__init__()
        self.up = Linear(whole(hidden_size), whole(inter), bias=True, placement=placement)
        self.down = Linear(whole(inter), whole(hidden_size), bias=True, placement=placement)

    def forward(self, x: Tensor) -> Tensor:
        """x [tokens, hidden] -> [tokens, hidden]."""
        out: Tensor = self.down(self.up.then(x, "gelu"))
        return out

    def fill(self, prefix: str) -> Named:
        """What a checkpoint fills."""
        return self.up.held.fill(f"{prefix}.fc1") | self.down.held.fill(f"{prefix}.fc2")


class AudioLayer(nn.Module):
    """x += attention(norm(x)), to all rows of a request; x += mlp(norm(x))."""

    def __init__(
        self, config: ModelConfig, given: EncoderInputConfig, placement: Placement
    ) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        dim = hidden // given.num_heads
        self.scale = dim**-0.5
        self.attention_norm = LayerNorm(hidden, eps, bias=True, placement=placement)
        self.qkv = QKVLinear(
            hidden,
            num_heads=given.num_heads,
            num_kv_heads=given.num_heads,
            head_dim=dim,
            bias=True,
            parallel=ALONE,
            placement=placement,
        )
        self.out = Linear(whole(hidden), whole(hidden), bias=True, placement=placement)
        self.mlp_norm = LayerNorm(hidden, eps, bias=True, placement=placement)
        self.mlp = GeluMLP(hidden, given.intermediate_size, placement=placement)

    def forward(self, x: Tensor, cu: Tensor) -> Tensor:
        """x [rows, hidden]; cu [2] int32, 0 and rows -> a new tensor of x's shape."""
        q, k, v = self.qkv(self.attention_norm(x))
        attended, _ = ragged_attention(q, k, v, cu, cu, causal=False, scale=self.scale)
        x = self.out(attended.flatten(1)).add_(x)
        out: Tensor = self.mlp(self.mlp_norm(x)).add_(x)
        if out.dtype is torch.float16:  # whose sums pass its end in deep layers
            out.clamp_(-_MOST_HALF, _MOST_HALF)
        return out

    def fill(self, prefix: str) -> Named:
        """What a checkpoint fills."""
        own = f"{prefix}.self_attn"
        return {
            **self.qkv.held.fill(f"{own}.q_proj", f"{own}.k_proj", f"{own}.v_proj"),
            **self.out.held.fill(f"{own}.out_proj"),
            **self.attention_norm.fill(f"{own}_layer_norm"),
            **self.mlp.fill(prefix),
            **self.mlp_norm.fill(f"{prefix}.final_layer_norm"),
        }


class AudioEncoder(nn.Module):
    """From frames of audio to the rows that cross attention reads: half as many."""

    def __init__(self, config: ModelConfig, placement: Placement) -> None:
        super().__init__()
        given, hidden = config.encoder_input, config.hidden_size
        assert given is not None, "what it reads is in the file"

        def kernel(channels: int) -> nn.Parameter:
            return empty_parameter(hidden, channels, _TAPS, placement=placement)

        self.conv1, self.conv2 = kernel(given.width), kernel(hidden)  # [hidden, channels, taps]
        self.bias1 = empty_parameter(hidden, placement=placement)
        self.bias2 = empty_parameter(hidden, placement=placement)
        # [max_encoder_len, hidden]
        self.positions = empty_parameter(config.max_encoder_len, hidden, placement=placement)
        self.layers = nn.ModuleList(
            AudioLayer(config, given, placement) for _ in range(given.num_layers)
        )
        self.norm = LayerNorm(hidden, config.rms_norm_eps, bias=True, placement=placement)

    def forward(self, frames: Tensor) -> Tensor:
        """frames [width, num_frames] of one request -> [ceil(num_frames / 2), hidden]."""
        if not frames.shape[1]:  # which no convolution takes
            return frames.new_empty(0, self.positions.shape[1])
        x = F.gelu(F.conv1d(frames.unsqueeze(0), self.conv1, self.bias1, padding=1))
        x = F.gelu(F.conv1d(x, self.conv2, self.bias2, stride=2, padding=1))
        rows = x.shape[2]
        x = x[0].T + self.positions[:rows]
        cu = torch.arange(2, dtype=torch.int32, device=x.device) * rows  # waits for no copy
        for layer in self.layers:
            x = layer(x, cu)
        out: Tensor = self.norm(x)
        return out

    def destinations(self, prefix: str) -> Named:
        """What a checkpoint fills."""
        named: Named = {
            f"{prefix}.conv1.weight": wholly(self.conv1),
            f"{prefix}.conv1.bias": wholly(self.bias1),
            f"{prefix}.conv2.weight": wholly(self.conv2),
            f"{prefix}.conv2.bias": wholly(self.bias2),
            f"{prefix}.embed_positions.weight": wholly(self.positions),
            **self.norm.fill(f"{prefix}.layer_norm"),
        }
        for index, layer in enumerate(self.layers):
            assert isinstance(layer, AudioLayer)
            named |= layer.fill(f"{prefix}.layers.{index}")
        return named
