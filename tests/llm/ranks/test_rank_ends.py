"""However a process of a model ends, all end: within a second, with the reason, and nothing of them
stays."""

import gc
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from llm_cases import GREEDY, Checkpoint, make_checkpoint, make_llm, random_prompts

from children import child
from paceline.core.errors import PacelineError
from paceline.kernels import all_reduce
from paceline.llm import rank_phases
from paceline.llm.llm import LLM
from paceline.llm.ranks import LeadingStep

PROMPTS = random_prompts((9, 20))
SOON_S = 1.0
MEMORY = "paceline-ranks"  # as the kernel calls a map of it


@pytest.fixture(scope="module")
def three_heads(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return make_checkpoint("llama-odd-heads-biases", tmp_path_factory.mktemp("llama"))


@pytest.fixture
def llm(three_heads: Checkpoint) -> Iterator[LLM]:
    with make_llm(three_heads, tensor_parallel_size=3, enforce_eager=True) as made:
        yield made


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
    return state != "Z"


def wait_for(condition: Callable[[], bool]) -> float:
    """Seconds until it holds."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < 20, "it never does"
        time.sleep(0.005)
    return time.monotonic() - began


def pids_of(llm: LLM) -> tuple[int, ...]:
    ranks = llm._live.ranks
    assert ranks is not None
    return ranks.pids


def assert_gone(pids: tuple[int, ...]) -> None:
    assert wait_for(lambda: not any(map(is_alive, pids))) < SOON_S


def maps_of(pid: int) -> str:
    return Path(f"/proc/{pid}/maps").read_text()


@pytest.mark.parametrize("when", ["idle", "running"])
def test_a_rank_that_is_killed_ends_all_with_its_name(llm: LLM, when: str) -> None:
    pids = pids_of(llm)
    assert all(MEMORY in maps_of(pid) for pid in pids)
    stream = llm.generate(PROMPTS, GREEDY, stream=True)
    next(stream)
    os.kill(pids[1], signal.SIGKILL)
    if when == "idle":
        assert_gone(pids)
    began = time.monotonic()
    with pytest.raises(
        PacelineError,
        match=r"^rank 2 of the model must be running, got ended: by SIGKILL; load the model again$",
    ):
        list(stream)
    assert time.monotonic() - began < SOON_S
    assert_gone(pids)
    with pytest.raises(PacelineError, match="engine must be whole"):
        llm.generate(PROMPTS, GREEDY)


SLOW = pytest.mark.slow  # a neighbour ends by the same line


@pytest.mark.parametrize(
    "when", [pytest.param("prefill", marks=SLOW), pytest.param("round", marks=SLOW), "drain"]
)
def test_a_rank_that_is_killed_in_the_midst_ends_all(three_heads: Checkpoint, when: str) -> None:
    drafts = {"speculative_algorithm": "NGRAM"} if when == "round" else {}
    made = make_llm(three_heads, tensor_parallel_size=3, enforce_eager=True, **drafts)
    pids = pids_of(made)
    stream = made.generate([[5, 6, 7] * 5], GREEDY, stream=True)
    if when != "prefill":
        next(stream)
    os.kill(pids[0], signal.SIGKILL)
    if when != "drain":
        with pytest.raises(PacelineError, match=r"^rank 1 of the model .* ended: by SIGKILL"):
            list(stream)
    made.close()
    assert_gone(pids)


def test_a_rank_that_hangs_is_waited_for_no_longer_than_stated(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    pids = pids_of(llm)
    monkeypatch.setattr(all_reduce, "WAIT_S", 0.2)
    os.kill(pids[0], signal.SIGSTOP)
    with pytest.raises(TimeoutError, match=r"messages of each rank after 0\.2 s must be"):
        llm.generate(PROMPTS, GREEDY)
    assert_gone(pids)


@pytest.mark.slow  # the short form is the test above
@pytest.mark.parametrize("when", ["prefill", "decode", "round", "drain"])
def test_a_rank_that_hangs_in_the_midst_ends_all(
    three_heads: Checkpoint, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafts = {"speculative_algorithm": "NGRAM"} if when == "round" else {}
    made = make_llm(three_heads, tensor_parallel_size=3, enforce_eager=True, **drafts)
    pids = pids_of(made)
    monkeypatch.setattr(all_reduce, "WAIT_S", 0.5)
    stream = made.generate([[5, 6, 7] * 5], GREEDY, stream=True)
    if when != "prefill":
        next(stream)
    os.kill(pids[0], signal.SIGSTOP)
    if when != "drain":
        with pytest.raises(TimeoutError, match=r"messages of each rank after 0\.5 s must be"):
            list(stream)
    made.close()
    assert_gone(pids)


def test_what_the_leader_raises_ends_the_ranks(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    pids = pids_of(llm)

    def launch(step: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(llm.engine._runner._runner, "launch", launch)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPTS, GREEDY)
    assert_gone(pids)


@pytest.mark.parametrize("how", ["closed", "forgotten"])
def test_nothing_stays_of_an_engine_that_is(checkpoint: Checkpoint, how: str) -> None:
    made = make_llm(checkpoint, tensor_parallel_size=2)
    pids = pids_of(made)
    assert MEMORY in maps_of(os.getpid())
    if how == "closed":
        made.close()
        made.close()
    del made
    gc.collect()
    assert_gone(pids)
    gc.collect()
    assert MEMORY not in maps_of(os.getpid())


PLANTED = """
import os, signal, time
phase = os.environ.get("PLANTED")
if phase is not None:
    after = int(os.environ.get("PLANTED_AFTER", "0"))
    def fail(*args, **kwargs):
        global after
        after -= 1
        if after >= 0:
            return whole(*args, **kwargs)
        how = os.environ.get("PLANTED_HOW")
        if how == "sleep":
            time.sleep(600)
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        if how == "negate":
            return whole(*args, **kwargs).neg_()
        raise ValueError(f"planted while it {phase}")

    import paceline.llm.prepare, paceline.llm.stored_weights, paceline.runner.model_runner
    import paceline.layers.embedding
    owner, name = {
        "plans": (paceline.llm.prepare, "prepare"),
        "loads": (paceline.llm.stored_weights, "load_model"),
        "captures": (paceline.runner.model_runner.ModelRunner, "boot"),
        "runs": (paceline.runner.model_runner.ModelRunner, "launch"),
        "samples": (paceline.layers.embedding, "all_gather"),
    }[phase]
    whole = getattr(owner, name)
    setattr(owner, name, fail)
"""


def plant(phase: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Have ranks that are started run PLANTED."""
    (tmp_path / "sitecustomize.py").write_text(PLANTED)
    paths = [str(tmp_path), str(Path(__file__).parents[3] / "src")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    monkeypatch.setenv("PLANTED", phase)


@pytest.mark.parametrize(
    ("phase", "how"), [pytest.param("plans", "sleep", marks=SLOW), ("loads", "stop")]
)
def test_a_rank_that_hangs_while_it_boots_is_named_with_its_phase(
    checkpoint: Checkpoint,
    phase: str,
    how: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    plant(phase, monkeypatch, tmp_path)
    monkeypatch.setenv("PLANTED_HOW", how)
    monkeypatch.setattr(rank_phases, "BOOT_WAIT_S", 8.0)
    told = f"^rank 1 of the model must be ready, got nothing done for 8 s while it {phase}; look"
    with pytest.raises(PacelineError, match=told):
        make_llm(checkpoint, tensor_parallel_size=2)
    assert not children()


@pytest.mark.parametrize(
    "phase", [pytest.param("plans", marks=SLOW), pytest.param("loads", marks=SLOW), "captures"]
)
def test_a_rank_that_is_killed_while_it_boots_ends_all(
    checkpoint: Checkpoint, phase: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    plant(phase, monkeypatch, tmp_path)
    monkeypatch.setenv("PLANTED_HOW", "kill")
    with pytest.raises(PacelineError, match=r"^rank 1 of the model .* ended: by SIGKILL; load"):
        make_llm(checkpoint, tensor_parallel_size=2)
    assert not children()


@pytest.mark.parametrize(
    "phase",
    [*(pytest.param(name, marks=SLOW) for name in ("plans", "loads", "captures")), "runs"],
)
def test_an_error_of_a_rank_is_everybodys(
    checkpoint: Checkpoint, phase: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    plant(phase, monkeypatch, tmp_path)
    why = re.escape(f"ValueError('planted while it {phase}')")
    told = f"^rank 1 of the model must be running, got ended: {why}; load"

    def run() -> None:
        with make_llm(checkpoint, tensor_parallel_size=2) as made:
            assert phase == "runs"
            made.generate(PROMPTS, GREEDY)

    with pytest.raises(PacelineError, match=told):
        run()
    assert not children()


@pytest.mark.slow  # the short form is the test above
@pytest.mark.parametrize(
    "drafts", [{}, {"speculative_algorithm": "NGRAM"}], ids=["decode", "round"]
)
def test_an_error_of_a_rank_behind_its_first_step_is_everybodys(
    checkpoint: Checkpoint,
    drafts: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    plant("runs", monkeypatch, tmp_path)
    monkeypatch.setenv("PLANTED_AFTER", "3")
    why = re.escape("ValueError('planted while it runs')")
    with make_llm(checkpoint, tensor_parallel_size=2, enforce_eager=True, **drafts) as made:
        stream = made.generate([[5, 6, 7] * 5], GREEDY, stream=True)
        next(stream)
        with pytest.raises(PacelineError, match=f"^rank 1 .* got ended: {why}; load"):
            list(stream)
    assert not children()


def test_a_rank_that_says_other_tokens_is_named_with_the_first_step_that_is_compared(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    plant("samples", monkeypatch, tmp_path)
    monkeypatch.setenv("PLANTED_HOW", "negate")
    monkeypatch.setenv("PLANTED_AFTER", "3")
    asked = {"tensor_parallel_size": 2, "enforce_eager": True, "compare_ranks_every": 2}
    differ = r"tokens \[\d+\] with RUNNING, not tokens \[\d+\] with RUNNING, of row 0 in step \d+"
    with make_llm(checkpoint, **asked) as made:
        pids = pids_of(made)
        with pytest.raises(
            PacelineError, match=f"^what rank 1 of the model says must be .* got {differ}; its"
        ):
            made.generate(PROMPTS, GREEDY)
        assert_gone(pids)


def children() -> list[str]:
    """Ranks that live below this process."""
    found = []
    for path in Path(f"/proc/{os.getpid()}/task").glob("*/children"):
        for pid in path.read_text().split():
            command = Path(f"/proc/{pid}/cmdline").read_text()
            if "rank_process" in command and is_alive(int(pid)):
                found.append(pid)
    return found


LEADER = """
import sys
from paceline import LLM

def tell_and_wait(step=None):
    print(*llm._live.ranks.pids, flush=True)
    sys.stdin.read()

if __name__ == "__main__":
    llm = LLM(sys.argv[1], tensor_parallel_size=2, threads=1, device="cpu")
    if sys.argv[2] == "idle":
        tell_and_wait()
    llm.engine._runner._runner.launch = tell_and_wait  # the others are in a sum, and wait for it
    llm.generate([[5, 6, 7]], {"max_tokens": 100})
"""


@pytest.mark.parametrize(
    ("killed", "when"),
    [
        pytest.param(signal.SIGKILL, "idle", marks=SLOW),
        (signal.SIGKILL, "running"),
        (signal.SIGTERM, "idle"),
        pytest.param(signal.SIGTERM, "running", marks=SLOW),
    ],
    ids=["kill-idle", "kill-running", "term-idle", "term-running"],
)
def test_ranks_do_not_outlive_their_leader(
    checkpoint: Checkpoint, when: str, killed: signal.Signals
) -> None:
    command = [sys.executable, "-c", LEADER, str(checkpoint.folder), when]
    pipes = {"stdout": subprocess.PIPE, "stdin": subprocess.PIPE}
    with child(command, text=True, **pipes) as leader:
        pids = tuple(map(int, leader.stdout.readline().split()))
        assert pids
        assert all(map(is_alive, pids))
        time.sleep(0.3)  # it sleeps or is in the sum
        leader.send_signal(killed)
        leader.wait(10)
        assert_gone(pids)


def test_a_step_whose_gpu_waited_in_vain_ends_the_ranks_and_says_what_may_hang() -> None:
    class Launched:
        def wait(self) -> None:
            raise RuntimeError("CUDA error: unspecified launch failure\nand what to compile with")

    class Running:
        ended: BaseException | None = None

        def require_running(self) -> None:
            pass

        def end(self, error: BaseException) -> None:
            self.ended = error

    ranks = Running()
    step: Any = LeadingStep
    with pytest.raises(PacelineError) as caught:
        step(Launched(), ranks).wait()
    assert str(caught.value) == (
        "a step of all ranks must be run, with every rank's part within 60 s, got CUDA error: "
        "unspecified launch failure; look at the ranks' logs for one that hangs; load the model "
        "again"
    )
    assert ranks.ended is caught.value.__cause__
