"""What codes stand for, written from the formats' definitions with an index for each number, and by
the formats' own libraries.  Shares nothing with `paceline.models.quantized`."""

from collections.abc import Callable

import numpy as np
import torch
from compressed_tensors.compressors.base import BaseCompressor
from compressed_tensors.quantization import QuantizationScheme
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

Parts = dict[str, Tensor]


def _words(tensor: Tensor) -> np.ndarray:
    return tensor.numpy().view(np.uint32)


def awq(parts: Parts, group: int) -> Tensor:
    """AutoAWQ: nibble i of word c holds column 8 c + P[i]."""
    place = np.argsort([0, 2, 4, 6, 1, 3, 5, 7])
    words, zeros, scales = _words(parts["qweight"]), _words(parts["qzeros"]), parts["scales"]
    k, n = np.indices((words.shape[0], scales.shape[1]))
    code = (words[k, n // 8] >> (4 * place[n % 8])) & 15
    zero = (zeros[k // group, n // 8] >> (4 * place[n % 8])) & 15
    return _times(code.astype(int) - zero.astype(int), scales.float().numpy()[k // group, n]).T


def gptq(parts: Parts, group: int, bits: int, *, plus_one: bool) -> Tensor:
    """AutoGPTQ: code k of a column lies in word k * bits / 32; version 1 adds 1 to zero points."""
    words, zeros, scales = _words(parts["qweight"]), _words(parts["qzeros"]), parts["scales"]
    per, mask = 32 // bits, (1 << bits) - 1
    k, n = np.indices((words.shape[0] * per, scales.shape[1]))
    code = (words[k // per, n] >> (bits * (k % per))) & mask
    zero = ((zeros[k // group, n // per] >> (bits * (n % per))) + plus_one) & mask
    return _times(code.astype(int) - zero.astype(int), scales.float().numpy()[k // group, n]).T


def fp8(parts: Parts, block: tuple[int, int] | None = None) -> Tensor:
    """A number times its scale: the only one, its row's or its block's."""
    codes = parts["weight"].float().numpy()
    scale = parts.get("weight_scale_inv", parts.get("weight_scale"))
    assert scale is not None
    n, k = np.indices(codes.shape)
    table = scale.float().numpy()
    if block is not None:
        return torch.from_numpy(codes * table[n // block[0], k // block[1]])
    return torch.from_numpy(codes * table.reshape(-1, 1)[np.minimum(n, table.size - 1), 0])


def nvfp4(parts: Parts) -> Tensor:
    """Two codes in a byte, the low one first; 16 share a scale, and all one more, which ModelOpt
    multiplies with and compressed-tensors divides by."""
    packed = parts["weight_packed" if "weight_packed" in parts else "weight"].numpy()
    n, k = np.indices((packed.shape[0], 2 * packed.shape[1]))
    code = (packed[n, k // 2] >> (4 * (k % 2))) & 15
    value = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])[code & 7] * (1 - 2.0 * (code >> 3))
    scale = parts["weight_scale"].double().numpy()[n, k // 16]
    if "weight_scale_2" in parts:
        return torch.from_numpy(value * scale * parts["weight_scale_2"].item()).float()
    return torch.from_numpy(value * scale / parts["weight_global_scale"].item()).float()


def experts_mxfp4(parts: Parts) -> Tensor:
    """transformers' own, of gpt-oss."""
    return convert_moe_packed_tensors(parts["blocks"], parts["scales"], dtype=torch.float32)


def compressed(settings: dict) -> Callable[[Parts], Tensor]:
    """compressed-tensors' own, of a config.json's quantization_config."""
    scheme = QuantizationScheme(**settings["config_groups"]["group_0"])
    compressor = BaseCompressor.get_value_from_registry(settings["format"])

    def make(parts: Parts) -> Tensor:
        given = dict(parts)
        if "weight_shape" in given:
            given["weight_shape"] = torch.Size(given["weight_shape"].tolist())
        return compressor.decompress(given, scheme)["weight"].float()

    return make


def _times(code: np.ndarray, scale: np.ndarray) -> Tensor:
    return torch.from_numpy((code * scale).astype(np.float32))
