"""A turn that fails half-way: it is raised, the engine refuses to go on, and closing returns."""

import signal
from contextlib import suppress
from subprocess import PIPE, TimeoutExpired

import pytest

from children import PACELINE, child
from paceline.core.errors import PacelineError
from paceline.core.request.sampling_params import SamplingParams
from paceline.llm.llm import LLM

GREEDY = SamplingParams(temperature=0.0, max_tokens=8)


@pytest.mark.parametrize("failure", [RuntimeError("out of memory"), KeyboardInterrupt()])
def test_a_failed_launch_is_raised_and_the_engine_refuses_to_go_on(monkeypatch, failure):
    llm = LLM("bundled", threads=1, max_num_seqs=2, enforce_eager=True)

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


@pytest.mark.parametrize("is_impatient", [False, True])
def test_ctrl_c_ends_generate(is_impatient):
    command = [*PACELINE, "generate", "--prompt", "def f(x):", "--max-tokens", "1900"]
    command += ["--temperature", "1", "--threads", "1", "--enforce-eager"]
    with child(command, stdout=PIPE, stderr=PIPE) as process:
        assert process.stdout.read(8)  # it streams
        process.send_signal(signal.SIGINT)
        while is_impatient and process.poll() is None:
            process.send_signal(signal.SIGINT)
            with suppress(TimeoutExpired):
                process.wait(0.02)
        process.communicate()
    assert process.returncode != 0
