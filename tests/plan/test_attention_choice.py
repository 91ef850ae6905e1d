"""An engine runs one backend; phases that chose differently run their pair."""

from dataclasses import replace

import pytest

from paceline.attention import registry
from paceline.attention.contract import Capabilities, GraphSupport
from paceline.attention.measurements import Measurement
from paceline.attention.registry import BACKENDS, load_backend
from paceline.core.errors import BackendUnsupported
from paceline.core.gpus import GPUS
from paceline.core.options.asked import engine_options
from paceline.plan.attention_choice import PhaseChoice, one_backend, phase_choices
from paceline.plan.explain import explain_model, show
from paceline.plan.memory.demand import Demands
from paceline.plan.resolve import resolve
from paceline.plan.target import find_target

H200 = GPUS["h200"]


def times(phase: str, **us: float) -> list[Measurement]:
    """One row per backend on the layer of llama-3.1-8b."""
    extend = 1 if phase == "decode" else 1024
    return [
        Measurement(
            gpu="NVIDIA H200",
            phase=phase,  # type: ignore[arg-type]
            batch_size=8,
            kv_len=1024,
            extend_len=extend,
            num_heads=32,
            num_kv_heads=8,
            head_dim=128,
            page_size=16,
            dtype="bfloat16",
            kv_dtype="bfloat16",
            backend=name,
            us=value,
            error=0.1,
            date="2026-01-01",
            versions={},
        )
        for name, value in us.items()
    ]


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[Measurement]:
    """The package's table, as a test fills it, on a machine with every library."""
    table: list[Measurement] = []
    monkeypatch.setattr(registry, "package_table", lambda: tuple(table))
    monkeypatch.setattr(registry, "AUTO_PACKAGES", {})
    return table


def phases(**asked: object) -> tuple[PhaseChoice, ...]:
    """The choices for llama-3.1-8b on an H200."""
    asked = {"model": "llama-3.1-8b", **asked}
    config = find_target(engine_options(asked), weights=False, gpu="h200").config
    options = resolve(asked, Demands(config, H200, None))[0].options
    return phase_choices(config, options, H200)


def test_each_phase_takes_its_fastest_and_the_engine_runs_the_pair(
    measured: list[Measurement],
) -> None:
    measured += times("prefill", triton=200.0, fa4=100.0) + times("decode", triton=30.0, fa4=31.0)
    found = phases()
    assert [choice.backend for choice in found] == ["fa4", "triton"]
    choice = one_backend(found)
    assert choice.name == "fa4+triton"
    assert choice.why == (
        "prefill: fastest of fa4, triton for prefill on NVIDIA H200 (measured: 100 us against "
        "200); flashinfer, fa3 not measured; decode: fastest of triton, fa4 for decode on NVIDIA "
        "H200 (measured: 30.0 us against 31.0); flashinfer, fa3 not measured"
    )
    assert load_backend(choice.name).name == "fa4+triton"
    assert set(choice.rejected) == set(BACKENDS) - {"fa4", "triton"}
    assert choice.rejected["flashinfer"] == [
        "not measured for prefill on NVIDIA H200",
        "not measured for decode on NVIDIA H200",
    ]


def test_one_fastest_for_both_phases_is_no_pair(measured: list[Measurement]) -> None:
    measured += times("prefill", triton=200.0, fa4=100.0) + times("decode", triton=30.0, fa4=20.0)
    choice = one_backend(phases())
    assert choice.name == "fa4"
    assert choice.why.startswith("prefill: fastest of fa4, triton for prefill")
    assert "; decode: fastest of fa4, triton for decode" in choice.why


def test_the_preferred_backend_stays_for_a_phase_it_loses_narrowly(
    measured: list[Measurement],
) -> None:
    measured += times("prefill", triton=100.0, flashinfer=98.0)
    measured += times("decode", triton=30.0, flashinfer=29.5)
    assert one_backend(phases()).name == "triton"


def test_a_faster_backend_that_cannot_run_the_model_is_not_chosen(
    measured: list[Measurement], monkeypatch: pytest.MonkeyPatch
) -> None:
    measured += times("prefill", triton=200.0, fa4=100.0) + times("decode", triton=30.0, fa4=20.0)
    found = phases(kv_cache_dtype="fp8")
    assert one_backend(found).name == "triton"
    assert found[0].rejected["fa4"][0].startswith("KV dtype must be")


def test_a_library_that_is_not_installed_is_not_chosen_but_may_be_asked_for(
    measured: list[Measurement], monkeypatch: pytest.MonkeyPatch
) -> None:
    measured += times("prefill", triton=200.0, fa4=100.0) + times("decode", triton=30.0, fa4=20.0)
    monkeypatch.setattr(registry, "AUTO_PACKAGES", {"fa4": ("torch", "no-such-package")})
    found = phases()
    assert one_backend(found).name == "triton"
    assert found[0].rejected["fa4"] == ["no-such-package must be installed, got no such package"]
    assert one_backend(phases(attention_backend="fa4")).name == "fa4"


def test_a_hopper_gpu_takes_flash_attention_3_for_prompts_where_it_is_installed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    table = *times("prefill", triton=200.0, fa3=100.0), *times("decode", triton=30.0, fa3=31.0)
    monkeypatch.setattr(registry, "package_table", lambda: table)
    for installed, taken in (({"sglang-kernel"}, "fa3+triton"), (set(), "triton")):
        monkeypatch.setattr(
            registry, "installed_version", lambda name, has=installed: name in has or None
        )
        found = phases()
        assert one_backend(found).name == taken
    assert found[0].rejected["fa3"] == ["sglang-kernel must be installed, got no such package"]


def test_an_explicit_backend_is_honoured_against_the_measurements(
    measured: list[Measurement],
) -> None:
    measured += times("prefill", triton=200.0, fa4=100.0) + times("decode", triton=30.0, fa4=20.0)
    choice = one_backend(phases(attention_backend="triton"))
    assert (choice.name, choice.why, choice.rejected) == ("triton", "asked for", {})
    pair = one_backend(phases(attention_backend="triton+fa4"))
    assert (pair.name, pair.why) == ("triton+fa4", "asked for")


def test_an_explicit_pair_is_refused_with_the_reasons_of_both_halves() -> None:
    with pytest.raises(BackendUnsupported) as caught:
        one_backend(phases(attention_backend="fa4+torch", kv_cache_dtype="fp8"))
    text = str(caught.value)
    assert "fa4: KV dtype must be" in text
    assert "torch: device must be cpu, got cuda" in text


def test_a_phase_without_a_backend_is_refused_and_eager_is_advised_where_it_helps() -> None:
    works = PhaseChoice(phase="prefill", backend="a", why="asked for", rejected={})
    fails = PhaseChoice(phase="decode", backend=None, why="none", rejected={"a": ["no graphs"]})
    with pytest.raises(BackendUnsupported, match=r"no graphs\n.*add --enforce-eager"):
        one_backend([works, fails])
    with pytest.raises(BackendUnsupported) as caught:
        one_backend([replace(fails, phase="prefill"), fails])
    assert caught.value.reasons == ["no graphs"]


def test_explain_shows_the_reasons_of_each_phase(measured: list[Measurement]) -> None:
    measured += times("prefill", triton=200.0, fa4=100.0) + times("decode", triton=30.0, fa4=31.0)
    plan = explain_model({"model": "llama-3.1-8b"}, gpu="h200")
    plan.require()
    text = show(plan)
    assert "  prefill fa4 (fastest of fa4, triton for prefill on NVIDIA H200 (measured" in text
    assert "  decode  triton (fastest of triton, fa4 for decode on NVIDIA H200 (measured" in text
    assert "    not triton: 200 us for prefill against 100 of fa4" in text


def test_a_backend_without_graphs_costs_no_phase_its_graphs(
    measured: list[Measurement], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pair has graphs where both have."""
    fa4 = type(load_backend("fa4"))
    lacking: Capabilities = replace(fa4.capabilities, graph=GraphSupport.NEVER)
    monkeypatch.setattr(fa4, "capabilities", lacking)
    measured += times("prefill", triton=200.0, fa4=100.0) + times("decode", triton=30.0, fa4=31.0)
    assert one_backend(phases()).name == "triton"
    assert one_backend(phases(enforce_eager=True)).name == "fa4+triton"


def test_the_budget_holds_what_the_backend_that_runs_will_allocate() -> None:
    """Without the library: FlashInfer's partial results are float32 of every query head."""

    def workspace(backend: str) -> int:
        asked = {"model": "llama-3.1-8b", "attention_backend": backend}
        return explain_model(asked, gpu="h200").fit.workspace_bytes

    alone = {name: workspace(name) for name in ("triton", "fa4", "flashinfer")}
    partial_results = 4 * 32 * 8192 * 4 * 129  # bytes, heads, tokens, group, head dim and lse
    assert alone["flashinfer"] > alone["triton"] + partial_results
    assert alone["fa4"] < alone["triton"]
    pair = workspace("flashinfer+triton")
    assert alone["flashinfer"] < pair < alone["flashinfer"] + alone["triton"]
