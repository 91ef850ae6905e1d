"""The whole engine on vendors' attention kernels: their tokens are those of ours, up to ties."""

import importlib.util

import pytest

import gpu_check
from paceline.llm.llm import LLM

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]

# Of log-probabilities, through twelve layers in float16, the finest format that all of them take.
TIE_GAP = 0.05
MODULES = {"flashinfer": "flashinfer", "fa4": "flash_attn"}


def engine(backend: str, **options: object) -> LLM:
    """The bundled model on `backend`."""
    chosen = {
        "attention_backend": backend,
        "dtype": "float16",
        "max_num_seqs": 16,
        "speculative_algorithm": "off",
    } | options
    return LLM("bundled", device="cuda", **chosen)


def answer(backend: str, **options: object) -> gpu_check.Tokens:
    """Greedy tokens; the second run replays what the first captured."""
    with engine(backend, **options) as llm:
        work = gpu_check.prompts(llm.report()["vocab_size"])
        llm.generate(work, gpu_check.GREEDY)
        return [output.outputs[0].token_ids for output in llm.generate(work, gpu_check.GREEDY)]


@pytest.mark.parametrize("backend", ["flashinfer", "fa4", "fa4+flashinfer", "fa4+triton"])
def test_a_vendor_backend_generates_what_ours_does(backend: str) -> None:
    for name in backend.split("+"):
        if name in MODULES and importlib.util.find_spec(MODULES[name]) is None:
            pytest.skip(f"{name} needs {MODULES[name]}")
    ours, theirs = answer("triton"), answer(backend)
    with engine("triton") as llm:
        work = gpu_check.prompts(llm.report()["vocab_size"])
        for where in gpu_check.first_differences(ours, theirs):
            gap = gpu_check.gap_at(llm, work, ours, where)
            assert gap < TIE_GAP, f"{where}: the likeliest two tokens are {gap} apart"


@pytest.mark.parametrize("backend", ["flashinfer", "fa4"])
def test_graphs_of_a_vendor_backend_give_what_its_eager_steps_do(backend: str) -> None:
    if importlib.util.find_spec(MODULES[backend]) is None:
        pytest.skip(f"{backend} needs {MODULES[backend]}")
    assert answer(backend) == answer(backend, enforce_eager=True)
