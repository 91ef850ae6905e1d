"""A turn that fails half-way: it is raised, the engine refuses to go on, and closing returns."""

import signal
import subprocess
import sys
import time

import pytest

from paceline.core.errors import PacelineError
from paceline.core.sampling_params import SamplingParams
from paceline.engine.llm import LLM

GREEDY = SamplingParams(temperature=0.0, max_tokens=8)


@pytest.mark.parametrize("failure", [RuntimeError("out of memory"), KeyboardInterrupt()])
def test_a_failed_launch_is_raised_and_the_engine_refuses_to_go_on(monkeypatch, failure):
    llm = LLM("bundled", threads=1, max_num_seqs=2)

    def launch(step):
        raise failure

    stream = llm.generate("import os", GREEDY, stream=True)
    next(stream)
    monkeypatch.setattr(llm.engine._runner, "launch", launch)
    with pytest.raises(type(failure)):
        list(stream)
    with pytest.raises(PacelineError, match=r"engine must be whole, got broken by .*build a new"):
        llm.generate("import os", GREEDY)
    llm.close()


@pytest.mark.parametrize("presses", [1, 2])
def test_ctrl_c_ends_generate(presses):
    command = [sys.executable, "-u", "-m", "paceline", "generate", "--prompt", "def f(x):"]
    command += ["--max-tokens", "1900", "--temperature", "1", "--threads", "1"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout.read(8)  # it streams
    for _ in range(presses):
        process.send_signal(signal.SIGINT)
        time.sleep(0.05)
    assert process.wait(timeout=60) != 0
    process.communicate()
