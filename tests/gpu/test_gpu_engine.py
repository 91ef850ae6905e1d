"""The whole engine on a GPU: benchmarks/gpu_check.py, and what a step may not do."""

import pytest

import gpu_check
from paceline.core.errors import GraphGuardError
from paceline.core.request.sampling_params import SamplingParams
from paceline.llm.llm import LLM
from paceline.runner.recording.graphs import CudaGraph

# Warnings of drivers, and torch's about its own sync debug mode, are shown and fail nothing.
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]

CHECKS = gpu_check.all_checks()
PROMPTS = [[5 + row, 6, 7, 8 + row] for row in range(8)]
LONG = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True)
STEPS = 100


@pytest.mark.parametrize("name", CHECKS)
def test_the_engine_passes_its_gpu_check(name: str) -> None:
    passed, detail = CHECKS[name]()
    assert passed, detail


@pytest.mark.parametrize(
    "drafting",
    [
        {"speculative_algorithm": "off"},
        # One token per round, so that all requests stay as long as decode steps make them.
        {"speculative_algorithm": "EAGLE3", "force_accept_len": 1.0},
    ],
    ids=["decode", "round"],
)
def test_steady_steps_replay_and_never_wait_for_the_device(
    monkeypatch: pytest.MonkeyPatch, drafting: dict[str, object]
) -> None:
    """torch raises at any implicit synchronisation meanwhile."""
    replays = []
    original = CudaGraph.replay

    def replay(graph: CudaGraph) -> None:
        replays.append(graph)
        original(graph)

    with LLM("bundled", device="cuda", max_num_seqs=len(PROMPTS), **drafting) as llm:
        stream = llm.generate(PROMPTS, LONG, stream=True)
        for _ in range(20):  # prompts, the eager use, captures
            llm.engine.step()
        monkeypatch.setattr(CudaGraph, "replay", replay)
        with gpu_check.no_sync(True):
            for _ in range(STEPS):
                llm.engine.step()
        outputs = [output for output in stream if output.finished]
    assert replays[:STEPS] == replays[:1] * STEPS  # one graph, every turn
    assert [len(output.outputs[0].token_ids) for output in outputs] == [200] * len(PROMPTS)


@pytest.mark.parametrize("algorithm", ["off", "EAGLE3"])
def test_nothing_is_compiled_once_it_is_ready(
    monkeypatch: pytest.MonkeyPatch, algorithm: str
) -> None:
    """Prompts of many lengths, batches of many sizes: no request waits for a compiler."""
    triton = pytest.importorskip("triton")
    compiled: list[str] = []
    with LLM("bundled", device="cuda", max_num_seqs=40, speculative_algorithm=algorithm) as llm:
        monkeypatch.setattr(
            triton.knobs.compilation,
            "listener",
            lambda *, src, **_: compiled.append(src.fn.__name__),
        )
        for count in (1, 2, 3, 7, 16, 25, 33, 40):
            prompts = [[5 + row, *range(6, 7 + 9 * count)] for row in range(count)]
            for temperature in (0.0, 0.7):
                params = SamplingParams(temperature=temperature, max_tokens=6, ignore_eos=True)
                llm.generate(prompts, params)
    assert compiled == []


def test_graphs_of_every_sampler_and_size_stay_within_the_plan() -> None:
    """A capture frees other memory of the allocator, so the pool is measured by itself."""
    with LLM("bundled", device="cuda", max_num_seqs=len(PROMPTS)) as llm:
        planned = llm.report()["memory"]["planned"]["graphs_bytes"]
        assert 0 < llm.report()["memory"]["measured"]["graphs"] <= planned
        for temperature, penalty in ((0.0, 0.0), (1.0, 0.0), (1.0, 0.5)):
            params = SamplingParams(
                temperature=temperature, presence_penalty=penalty, max_tokens=6, ignore_eos=True
            )
            for batch in (1, 2, 3, 8):
                llm.generate(PROMPTS[:batch], params)
                llm.generate(PROMPTS[:batch], params)
        store = llm.engine._runner._graphs
        assert len(store.graphs) > 2
        assert store.bytes_used <= planned
        reasons = {event["reason"] for event in llm.report()["events"]}
        assert "graph_reserve_short" not in reasons


def test_the_guard_names_a_rebound_buffer_before_it_is_replayed() -> None:
    with LLM("bundled", device="cuda", max_num_seqs=2) as llm:
        llm.generate(PROMPTS[:2], LONG)
        table = llm.engine._runner._parts.table
        table.token_ids = table.token_ids.clone()
        with pytest.raises(GraphGuardError, match=r"got moved: table\.token_ids; write into"):
            llm.generate(PROMPTS[:2], LONG)


def test_generation_reads_no_memory_it_has_not_written(request: pytest.FixtureRequest) -> None:
    clean, _ = gpu_check.answer(gpu_check.GREEDY, device="cuda", dtype="bfloat16")
    request.getfixturevalue("nan_memory")
    poisoned, _ = gpu_check.answer(gpu_check.GREEDY, device="cuda", dtype="bfloat16")
    assert poisoned == clean
