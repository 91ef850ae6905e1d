"""An explicit choice runs or raises with every reason; auto says what it chose and why."""

from dataclasses import replace

import pytest
import torch

from paceline.attention.backends.torch_backend import TorchBackend
from paceline.attention.contract import AttentionConfig, GraphSupport
from paceline.attention.registry import AUTO_ORDER, BACKENDS, choose, load_backend
from paceline.core.errors import BackendUnsupported, ConfigError
from paceline.core.modes import MaskKind

ON_CPU = AttentionConfig(
    device_type="cpu",
    cuda_arch=None,
    dtype=torch.float32,
    kv_dtype=torch.float32,
    page_size=16,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    v_head_dim=64,
    window=False,
    soft_cap=False,
    sinks=False,
    masks=frozenset({MaskKind.CAUSAL}),
    needs_lse=False,
    graph=GraphSupport.DECODE,
)
ON_H200 = replace(
    ON_CPU, device_type="cuda", cuda_arch=(9, 0), dtype=torch.bfloat16, kv_dtype=torch.bfloat16
)
OUTSIDE = "third_party_backend:OutsideBackend"


@pytest.mark.parametrize("name", BACKENDS)
def test_every_short_name_loads_its_backend(name: str) -> None:
    assert load_backend(name).name == name


@pytest.mark.parametrize("order", AUTO_ORDER.values())
def test_auto_prefers_known_backends_only(order: tuple[str, ...]) -> None:
    assert set(order) <= set(BACKENDS)


def test_an_explicit_choice_that_fits_is_taken() -> None:
    choice = choose(ON_CPU, "torch")
    assert (choice.name, choice.why, choice.rejected) == ("torch", "asked for", {})


def test_an_explicit_choice_that_does_not_fit_raises_with_every_reason() -> None:
    with pytest.raises(BackendUnsupported) as caught:
        choose(replace(ON_CPU, page_size=16, window=True), OUTSIDE)
    assert caught.value.reasons == [
        "page size must be [4], got 16",
        "sliding window must be absent, got present",
    ]
    assert str(caught.value) == (
        f"attention backend '{OUTSIDE}' cannot run here:\n"
        "  - page size must be [4], got 16\n"
        "  - sliding window must be absent, got present\n"
        "choose another with --attention-backend, or 'auto' to let the engine choose"
    )


def test_an_explicit_choice_never_falls_back() -> None:
    with pytest.raises(BackendUnsupported, match="device must be cpu, got cuda"):
        choose(ON_H200, "torch")


def test_auto_says_why_and_what_it_passed_over() -> None:
    choice = choose(ON_CPU)
    assert choice.name == "torch"
    assert choice.why == "first of torch that can run on cpu"
    assert set(choice.rejected) == {"triton"}
    assert all(choice.rejected["triton"])


def test_auto_on_a_gpu_chooses_triton() -> None:
    choice = choose(ON_H200)
    assert (choice.name, choice.why) == ("triton", "first of triton that can run on cuda")
    assert choice.rejected == {"torch": ["device must be cpu, got cuda"]}


def test_auto_without_a_candidate_raises_with_every_reason() -> None:
    with pytest.raises(BackendUnsupported) as caught:
        choose(replace(ON_H200, head_dim=20, v_head_dim=20, cuda_arch=(7, 5)))
    text = str(caught.value)
    assert "triton: CUDA arch must be at least (8, 0), got (7, 5)" in text
    assert "triton: head dim must be [64, 80, 96, 128, 256], got 20" in text


def test_auto_on_an_unknown_device_says_so() -> None:
    with pytest.raises(BackendUnsupported, match="no backend for device tpu"):
        choose(replace(ON_CPU, device_type="tpu"))


@pytest.mark.parametrize("name", ["flashfoo", "", "TORCH"])
def test_an_unknown_name_is_refused_with_the_known_ones(name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        choose(ON_CPU, name)
    assert str(caught.value) == (
        "attention backend must be auto, triton, torch or package.module:Class, "
        f"got {name!r}; name one of these"
    )


def test_a_third_party_backend_is_named_by_module_and_class() -> None:
    assert issubclass(load_backend(OUTSIDE), TorchBackend)
    choice = choose(replace(ON_CPU, page_size=4), OUTSIDE)
    assert (choice.name, choice.why) == (OUTSIDE, "asked for")


@pytest.mark.parametrize(
    ("name", "detail"),
    [
        ("no_such_package.backend:Backend", "No module named 'no_such_package'"),
        ("third_party_backend:Missing", "has no attribute 'Missing'"),
    ],
)
def test_what_cannot_be_imported_is_refused_with_the_cause(name: str, detail: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_backend(name)
    text = str(caught.value)
    assert text.startswith(
        f"attention backend must be an importable package.module:Class, got {name!r} ("
    )
    assert detail in text
    assert text.endswith("check the spelling and PYTHONPATH")


@pytest.mark.parametrize(("name", "kind"), [("NotABackend", "type"), ("NOT_A_CLASS", "int")])
def test_what_is_no_backend_is_refused(name: str, kind: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_backend(f"third_party_backend:{name}")
    assert str(caught.value) == (
        "attention backend must be a subclass of AttentionBackend, "
        f"got 'third_party_backend:{name}', a {kind}; "
        "derive it from paceline.attention.contract.AttentionBackend"
    )
