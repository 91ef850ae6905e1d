"""An explicit choice runs or raises with every reason; auto says what it chose and why."""

import re
from dataclasses import replace

import pytest
import torch

from paceline.attention import registry
from paceline.attention.backends.torch_backend import TorchBackend
from paceline.attention.contract import AttentionConfig, GraphSupport
from paceline.attention.measurements import Measurement
from paceline.attention.registry import AUTO_ORDER, BACKENDS, choose, load_backend
from paceline.core.errors import BackendUnsupported, ConfigError
from paceline.core.model.config import Heads
from paceline.core.modes import MaskKind

ON_CPU = AttentionConfig(
    device_type="cpu",
    cuda_arch=None,
    dtype=torch.float32,
    kv_dtype=torch.float32,
    page_size=16,
    heads=(Heads(4, 2, 64, 64),),
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
    assert set(choice.rejected) == set(BACKENDS) - {"torch"}
    assert all(choice.rejected.values())


def test_auto_on_a_gpu_chooses_triton() -> None:
    choice = choose(ON_H200)
    order = "triton, flashinfer, fa4, fa3, flashinfer_mla, flashmla"
    why = f"first of {order} that can run on cuda"
    assert (choice.name, choice.why) == ("triton", why)
    assert set(choice.rejected) == set(BACKENDS) - {"triton"}
    assert choice.rejected["torch"] == ["device must be cpu, got cuda"]


def test_auto_takes_a_library_for_chunks_where_it_was_measured_with_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(registry, "AUTO_PACKAGES", {})
    chunked, asked = (
        replace(ON_H200, chunks=frozenset({8192})),
        {"phase": "decode", "gpu": "NVIDIA H200"},
    )
    assert choose(chunked).name == "triton"
    unmeasured = choose(chunked, **asked, table=FA4_IS_FASTER)
    assert unmeasured.name == "triton"
    assert "not measured for decode of chunks on NVIDIA H200" in unmeasured.rejected["fa4"]
    table = [*FA4_IS_FASTER, *(replace(each, chunk=8192) for each in FA4_IS_FASTER)]
    measured = choose(chunked, **asked, table=table)
    assert measured.name == "fa4"
    assert "for decode of chunks on NVIDIA H200 (measured with" in measured.why
    assert "30.0 us for decode of chunks against 20.0 of fa4" in measured.rejected["triton"]


def test_a_backend_whose_chunks_are_no_chunk_support_is_refused() -> None:
    with pytest.raises(ConfigError, match="no ChunkSupport as its chunks, which are False"):
        load_backend("third_party_backend:SaysYesOrNo")


def test_auto_without_a_candidate_raises_with_every_reason() -> None:
    with pytest.raises(BackendUnsupported) as caught:
        choose(replace(ON_H200, heads=(Heads(4, 2, 20, 20),), cuda_arch=(7, 5)))
    text = str(caught.value)
    assert "triton: CUDA arch must be at least (8, 0), got (7, 5)" in text
    assert "triton: head dim must be [64, 80, 96, 128, 256], got 20" in text
    assert text.endswith(
        "name one that can with --attention-backend, or change what is asked of it"
    )


def test_auto_on_an_unknown_device_says_so() -> None:
    with pytest.raises(BackendUnsupported, match="no backend for device tpu"):
        choose(replace(ON_CPU, device_type="tpu"))


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("xyzzy", "name one of these, or auto where an engine is to choose"),
        ("", "name one of these, or auto where an engine is to choose"),
        ("TORCH", "did you mean torch?"),
        ("flashinfr", "did you mean flashinfer?"),
    ],
)
def test_an_unknown_name_is_refused_with_the_known_ones(name: str, remedy: str) -> None:
    with pytest.raises(ConfigError) as caught:
        choose(ON_CPU, name)
    assert str(caught.value) == (
        f"attention backend must be {', '.join(BACKENDS)}, package.module:Class, prefill+decode of "
        f"two, or cascade(one), got {name!r}; {remedy}"
    )


def test_a_third_party_backend_is_named_by_module_and_class() -> None:
    assert isinstance(load_backend(OUTSIDE), TorchBackend)
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


# --- compositions ---------------------------------------------------------------------------------

WITH_TREES = replace(ON_CPU, masks=frozenset({MaskKind.CAUSAL, MaskKind.TREE}))


class NoTree(TorchBackend):
    """Named from this file."""

    name = "no-tree"
    capabilities = replace(TorchBackend.capabilities, masks=frozenset({MaskKind.CAUSAL}))


NO_TREE = f"{__name__}:NoTree"


@pytest.mark.parametrize(
    ("asked", "made"),
    [
        ("torch+triton", "torch+triton"),
        ("cascade(triton)", "cascade(triton)"),
        ("torch+cascade(triton)", "torch+cascade(triton)"),
        ("cascade(torch+triton)", "cascade(torch+triton)"),
        ("cascade(torch)+cascade(triton)", "cascade(torch)+cascade(triton)"),
        (f"{OUTSIDE}+torch", "outside+torch"),
    ],
)
def test_a_composition_is_named_by_its_parts(asked: str, made: str) -> None:
    assert load_backend(asked).name == made


@pytest.mark.parametrize(
    ("asked", "unknown"),
    [("fa9+torch", "fa9"), ("torch+", ""), ("+torch", ""), ("cascade(torch", "cascade(torch")],
)
def test_an_unknown_part_is_refused_as_an_unknown_name_is(asked: str, unknown: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"cascade(one), got {unknown!r}; ")):
        choose(ON_CPU, asked)


def test_an_explicit_composition_runs_or_raises_with_the_reasons_of_each_part() -> None:
    choice = choose(ON_CPU, "torch+torch")
    assert (choice.name, choice.why) == ("torch+torch", "asked for")
    with pytest.raises(BackendUnsupported) as caught:
        choose(ON_H200, "torch+triton")
    assert caught.value.reasons == ["torch: device must be cpu, got cuda"]


def test_trees_of_a_backend_without_a_tree_mask_run_by_cascade_and_why_says_so() -> None:
    choice = choose(WITH_TREES, NO_TREE)
    assert choice.name == f"cascade({NO_TREE})"
    assert choice.why == f"asked for; {NO_TREE} has no tree mask, so trees run by cascade"
    assert load_backend(choice.name).name == "cascade(no-tree)"
    assert choose(ON_CPU, NO_TREE).name == NO_TREE


def test_auto_puts_a_cascade_where_its_first_backend_has_no_trees(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(BACKENDS, "no-tree", NO_TREE)
    monkeypatch.setitem(AUTO_ORDER, "cpu", ("no-tree", "torch"))
    choice = choose(WITH_TREES)
    assert choice.name == "cascade(no-tree)"
    assert choice.why == (
        "first of no-tree, torch that can run on cpu; no-tree has no tree mask, so trees run by "
        "cascade"
    )
    assert choice.rejected["torch"] == ["auto prefers no-tree on cpu"]


def test_a_backend_with_trees_is_taken_as_it_is() -> None:
    assert choose(WITH_TREES).name == "torch"
    assert choose(WITH_TREES, "torch").name == "torch"


def test_a_backend_without_trees_and_without_an_lse_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(NoTree, "capabilities", replace(NoTree.capabilities, returns_lse=False))
    with pytest.raises(BackendUnsupported, match="mask kind must be"):
        choose(WITH_TREES, NO_TREE)


# --- auto by measurements -------------------------------------------------------------------------


def _row(backend: str, us: float) -> Measurement:
    return Measurement(
        gpu="NVIDIA H200",
        phase="decode",
        batch_size=8,
        kv_len=1024,
        extend_len=1,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        page_size=16,
        dtype="bfloat16",
        kv_dtype="bfloat16",
        backend=backend,
        us=us,
        error=0.1,
        date="2026-01-01",
        versions={},
    )


FA4_IS_FASTER = [_row("triton", 30.0), _row("fa4", 20.0)]


def test_auto_takes_the_measured_fastest_of_what_is_installed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for missing in ("flash-attn-4", "nvidia-cutlass-dsl"):  # the package, and one that it imports
        monkeypatch.setattr(
            registry, "installed_version", lambda each, gone=missing: None if each == gone else "1"
        )
        absent = choose(ON_H200, phase="decode", gpu="NVIDIA H200", table=FA4_IS_FASTER)
        assert absent.name == "triton"
        assert absent.rejected["fa4"] == [f"{missing} must be installed, got no such package"]
        assert choose(ON_H200, "fa4").name == "fa4"  # asked for, it says so where it is imported
    monkeypatch.setattr(registry, "AUTO_PACKAGES", {})
    choice = choose(ON_H200, phase="decode", gpu="NVIDIA H200", table=FA4_IS_FASTER)
    assert choice.name == "fa4"
    assert choice.why.startswith("fastest of fa4, triton for decode on NVIDIA H200 (measured with ")
    assert choice.rejected["triton"] == ["30.0 us for decode against 20.0 of fa4"]
    assert set(choice.rejected) == set(BACKENDS) - {"fa4"}


def test_auto_asks_no_table_without_a_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "AUTO_PACKAGES", {})
    choice = choose(ON_H200, gpu="NVIDIA H200", table=FA4_IS_FASTER)
    assert choice.name == "triton"
    assert choice.rejected["fa4"] == ["auto prefers triton on cuda"]


def test_a_table_says_nothing_about_an_explicit_choice() -> None:
    choice = choose(ON_H200, "triton", phase="decode", gpu="NVIDIA H200", table=FA4_IS_FASTER)
    assert (choice.name, choice.why) == ("triton", "asked for")


def test_the_fastest_without_a_tree_mask_runs_trees_by_cascade(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(registry, "AUTO_PACKAGES", {})
    trees = replace(ON_H200, masks=WITH_TREES.masks)
    choice = choose(trees, phase="decode", gpu="NVIDIA H200", table=FA4_IS_FASTER)
    assert choice.name == "cascade(fa4)"
    assert choice.why.endswith("; fa4 has no tree mask, so trees run by cascade")
