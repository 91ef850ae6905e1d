"""What a backend says it will hold is a bound of what it allocates, without its library."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from example_backend import DenseBackend

from paceline.attention.backends import flashinfer_wrappers
from paceline.attention.backends.fa4_backend import FlashAttention4Backend
from paceline.attention.backends.flashinfer_backend import Calls, FlashInferBackend
from paceline.attention.backends.torch_backend import TorchBackend
from paceline.attention.backends.triton_backend import TritonBackend
from paceline.attention.contract import AttentionBackend, AttentionSpec, Limits, Part
from paceline.attention.held import tensor_bytes
from paceline.core.errors import ConfigError
from paceline.core.gpus import MOST_SMS
from paceline.core.model.lookback import Chunk
from paceline.core.modes import MaskKind
from paceline.kernels.paged_attention import splits
from paceline.kernels.stand_in import StandIn

SPEC = AttentionSpec(
    layer_id=0,
    group=0,
    num_heads=8,
    num_kv_heads=2,
    head_dim=64,
    v_head_dim=64,
    scale=1.0,
    window=None,
    soft_cap=None,
)
LIMITS = Limits(
    device=torch.device("cpu"),
    dtype=torch.float32,
    kv_dtype=torch.float32,
    layers=(
        SPEC,
        replace(SPEC, layer_id=1, group=1, window=32),
        replace(SPEC, layer_id=2, group=2, window=Chunk(16)),
    ),
    max_reqs=6,
    max_tokens=40,
    max_pages=(9, 9, 9),
    windows=(None, 32, Chunk(16)),
    page_size=16,
)
META = replace(LIMITS, device=torch.device("meta"))


@pytest.mark.parametrize("backend", [TorchBackend, DenseBackend])
def test_a_backend_without_a_formula_is_asked_on_the_meta_device(
    backend: type[AttentionBackend],
) -> None:
    assert backend().buffer_bytes(META) == tensor_bytes(backend().make_buffers(LIMITS)) > 0


class ReadsBack(TorchBackend):
    """Needs the values of what it allocated."""

    def make_buffers(self, limits: Limits) -> Any:
        return torch.zeros(4, device=limits.device).tolist()


def test_a_backend_that_cannot_be_asked_there_is_told_to_bring_a_formula() -> None:
    with pytest.raises(ConfigError, match="backend torch must be allocated on the meta device"):
        ReadsBack().buffer_bytes(META)


@pytest.mark.parametrize("sms", [1, 40, 132, MOST_SMS])
@pytest.mark.parametrize("max_reqs", [1, 6, 257])
@pytest.mark.parametrize("kv_heads", [1, 2, 8])
def test_the_split_workspace_of_a_gpu_is_counted_without_it(
    sms: int, max_reqs: int, kv_heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = replace(
        LIMITS,
        max_reqs=max_reqs,
        layers=tuple(replace(layer, num_kv_heads=kv_heads) for layer in LIMITS.layers),
    )
    with StandIn("cuda", sms):
        counted = TritonBackend().buffer_bytes(replace(limits, device=META.device))
    monkeypatch.setattr(splits, "multiprocessors", lambda device: sms)
    assert counted == tensor_bytes(TritonBackend().make_buffers(limits))


def test_a_larger_gpu_holds_a_larger_split_workspace() -> None:
    sizes = []
    for sms in (58, 132, MOST_SMS):
        with StandIn("cuda", sms):
            sizes.append(TritonBackend().buffer_bytes(META))
    assert sizes == sorted(set(sizes))


@pytest.mark.parametrize("sms", [1, 132, MOST_SMS])
def test_the_bound_of_flashinfer_holds_its_workspace_and_every_schedule(
    sms: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    bound = FlashInferBackend().buffer_bytes(META)
    monkeypatch.setattr(flashinfer_wrappers, "multiprocessors", lambda device: sms)
    held = tensor_bytes(FlashInferBackend(library=object()).make_buffers(LIMITS))
    shapes = [(reqs, tokens) for reqs in (1, 2, 6) for tokens in (6, 12, 40)]
    for reqs, tokens in shapes:
        for spec in LIMITS.layers:
            shape = Calls(Part.ALL, spec.chunk).shape(MaskKind.CAUSAL, reqs, tokens)
            held += flashinfer_wrappers.schedule_bytes(spec, shape, LIMITS.device)
    assert held <= bound


@pytest.mark.parametrize("sms", [1, 132, MOST_SMS])
def test_the_partial_results_of_flashinfer_are_bounded_for_any_gpu(
    sms: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a small step they follow from the multiprocessors, not from its tokens."""
    small = replace(LIMITS, max_reqs=1, max_tokens=1)
    bound = flashinfer_wrappers.workspace_bytes(replace(small, device=META.device))
    monkeypatch.setattr(flashinfer_wrappers, "multiprocessors", lambda device: sms)
    held = flashinfer_wrappers.workspace_bytes(small)
    assert held <= bound
    assert (held == bound) == (sms == MOST_SMS)


def test_the_bound_of_flash_attention_needs_no_library() -> None:
    held = FlashAttention4Backend(library=object()).make_buffers(LIMITS)  # type: ignore[arg-type]
    assert FlashAttention4Backend().buffer_bytes(META) == tensor_bytes(held)
