"""Plug-in logits processors: loaded by name, refused by name, and equal to transformers' own."""

import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from click.testing import CliRunner
from llm_cases import (
    EOS,
    GREEDY,
    Checkpoint,
    assert_idle,
    llm_of,
    make_llm,
    random_prompts,
    recorded_steps,
    tokens_of,
)
from torch import Tensor
from transformers.generation.logits_process import ExponentialDecayLengthPenalty

from covers import Cell
from paceline.cli.app import app
from paceline.core.errors import ConfigError, HostReadError, KernelArgumentError, RequestError
from paceline.core.request.sampling_params import SamplerTier, SamplingParams
from paceline.layers.sampling import Column, LogitsProcessor, SamplingTable, process_logits
from paceline.llm.llm import LLM
from paceline.plan.processors import load_processors

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs" / "logits-processors.md"
NAME = "example_processor:LengthDecay"
DECAY = {"length_decay": [6, 1.3]}
ENDING = replace(GREEDY, ignore_eos=False)


class Shift(LogitsProcessor):
    """Adds a bias to one token: two processors must not mix up their columns."""

    arguments = frozenset({"shift"})
    columns: ClassVar[Mapping[str, Column]] = {
        "token": Column(torch.int64),
        "by": Column(torch.float32, 2),
    }

    def pack(self, row):
        token, by = row.args.get("shift", (0, 0.0))
        return {"token": token, "by": [by]}

    def apply(self, logits: Tensor, rows: Tensor, positions: Tensor, state) -> Tensor:
        by = state.columns["by"][rows].sum(1, keepdim=True)
        return logits.scatter_add(1, state.columns["token"][rows][:, None], by)


class Transposed(Shift):
    arguments = frozenset({"transposed"})

    def apply(self, logits, rows, positions, state):
        return logits.T if logits.shape[0] != logits.shape[1] else logits.double()


class Reader(Shift):
    arguments = frozenset({"reader"})

    def apply(self, logits, rows, positions, state):
        return logits + float(logits.max().item())


class SameArgument(Shift):
    pass


class Unfinished(LogitsProcessor):
    def pack(self, row):
        return {}


class Half(Shift):
    columns: ClassVar[Mapping[str, Column]] = {
        "token": Column(torch.float16),
        "by": Column(torch.float32),
    }


class Forgetful(Shift):
    def pack(self, row):
        return {"token": 0}


class Wide(Shift):
    columns: ClassVar[Mapping[str, Column]] = {
        "token": Column(torch.int64, 2048),
        "by": Column(torch.float32, 2),
    }

    def pack(self, row):
        return {"token": [0], "by": []}


@pytest.fixture(scope="module")
def llm(checkpoint: Checkpoint) -> LLM:
    return make_llm(checkpoint, logits_processors=[NAME, f"{__name__}:Shift"])


def test_the_page_shows_the_tested_file() -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert (HERE / "example_processor.py").read_text() in blocks


def test_the_command_on_the_page_runs() -> None:
    [text] = re.findall(
        r"^    paceline (generate .*?)\n\n", PAGE.read_text(), re.MULTILINE | re.DOTALL
    )
    words = shlex.split(text.replace("\\\n", ""))
    small = ["--max-num-seqs", "1", "--max-model-len", "64", "--threads", "1", "--json", "-v"]
    done = CliRunner().invoke(app, [*words, *small, "--max-tokens", "30"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout.splitlines()[-1])["finish_reason"] in ("stop", "length")
    assert "logits-processor" in done.stderr


def test_the_worked_example_equals_transformers(checkpoint: Checkpoint) -> None:
    """On logits of a row in the middle of a table, beside a row that does not ask for it."""
    [processor] = load_processors([NAME])
    table = SamplingTable(4, torch.device("cpu"), [processor])
    params = {2: SamplingParams(extra_args=DECAY), 3: SamplingParams()}
    for row, each in params.items():
        packed = table.pack(each, prompt_len=9, max_len=50, eos_token_ids=EOS, default_seed=0)
        table.floats[row] = torch.from_numpy(packed.floats)
        table.ints[row] = torch.from_numpy(packed.ints)
    theirs = ExponentialDecayLengthPenalty((6, 1.3), list(EOS), 9)
    for known in (9, 14, 15, 16, 25):
        logits = torch.randn(2, 160, generator=torch.Generator().manual_seed(known))
        ours = process_logits(
            logits,
            rows=torch.tensor([3, 2]),
            positions=torch.tensor([known, known]),
            table=table,
            token_ids=torch.zeros(4, 50, dtype=torch.int32),
        )
        wanted = theirs(torch.zeros(1, known, dtype=torch.int64), logits[1:])
        torch.testing.assert_close(ours[1:], wanted)
        assert torch.equal(ours[0], logits[0])


CELLS: dict[str, Cell] = {
    "graphs": {},
    "eager-twin": {"enforce_eager": True, "overlap": False},
    "preempted": {"pool": "tight", "chunked_prefill_size": 7},
    "deferred": {"stream": "deferred"},
}


@pytest.mark.parametrize("name", CELLS)
def test_answers_with_the_worked_example_are_transformers(
    checkpoint: Checkpoint, name: str
) -> None:
    prompts = random_prompts([20, 26, 23, 31], seed=4)
    with llm_of(
        checkpoint, CELLS[name], tight_pages={16: (9,)}, margin=0, logits_processors=[NAME]
    ) as llm:
        ours = tokens_of(llm.generate(prompts, replace(ENDING, extra_args=DECAY)))
        assert_idle(llm)
    for prompt, answer in zip(prompts, ours, strict=True):
        decay = {"exponential_decay_length_penalty": (6, 1.3), "eos_token_id": list(EOS)}
        assert answer == checkpoint.generate(prompt, GREEDY.max_tokens, **decay)
        assert answer[-1] in EOS


def test_rows_that_do_not_ask_are_untouched(llm: LLM, checkpoint: Checkpoint) -> None:
    prompts = random_prompts([20, 20, 20], seed=4)
    params = [
        replace(ENDING, extra_args=DECAY),
        GREEDY,
        replace(GREEDY, extra_args={"shift": (77, 1000)}),
    ]
    outputs = tokens_of(llm.generate(prompts, params))
    assert len(outputs[0]) < 46
    assert outputs[1] == checkpoint.generate(prompts[1], 46)
    assert outputs[2] == (77,) * 46


def test_only_steps_with_such_a_request_run_the_full_sampler(llm: LLM) -> None:
    with recorded_steps(llm) as steps:
        llm.generate([5, 6, 7], replace(GREEDY, max_tokens=3))
        assert {step.sampler for step in steps} == {SamplerTier.GREEDY}
        llm.generate([5, 6, 7], replace(GREEDY, max_tokens=3, extra_args={"shift": [7, 1]}))
        assert {step.sampler for step in steps} == {SamplerTier.GREEDY, SamplerTier.PLUG_INS}


@pytest.mark.parametrize(
    ("args", "text"),
    [
        ({"lenght_decay": [1, 2]}, r"a key of extra_args must be one of length_decay, shift, got "),
        ({"lenght_decay": [1, 2]}, r"did you mean length_decay\?"),
        ({"x": 1}, r"got 'x'; load its processor with --logits-processor"),
        ({"length_decay": 5}, r"length_decay must be \[tokens, factor\], got 5; pass two numbers"),
        ({"length_decay": [1, "2"]}, r"length_decay must be \[tokens, factor\], got \(1, '2'\)"),
        ({"shift": [1.5, 1]}, "column 'token' of Shift must be one 64-bit integer, got 1.5; ref"),
        ({"shift": [2**63, 1]}, "column 'token' of Shift must be one 64-bit integer, got 922337"),
        ({"shift": [1, 10**400]}, r"column 'by' of Shift must be at most 2 numbers, got \[1000"),
        ({"length_decay": [2**63 - 2, 1.0]}, "column 'start' of LengthDecay must be one 64-bit"),
        ({"shift": 7}, r"extra_args of Shift must be values it can pack, got {'shift': 7} \(Ty"),
        ({"shift": [1, "much"]}, r"column 'by' of Shift must be at most 2 numbers, got \['much'\]"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_runs(
    llm: LLM, args: dict[str, Any], text: str
) -> None:
    with pytest.raises(RequestError, match=text):
        llm.generate([5, 6], replace(GREEDY, extra_args=args))
    assert not llm.engine.has_work


def test_arguments_without_any_processor_are_refused(checkpoint: Checkpoint) -> None:
    with (
        make_llm(checkpoint) as llm,
        pytest.raises(RequestError, match="extra_args must be absent"),
    ):
        llm.generate([5, 6], replace(GREEDY, extra_args=DECAY))


@pytest.mark.parametrize(
    ("names", "text"),
    [
        (
            ["nowhere:Class"],
            "logits processor must be an importable package.module:Class, got 'now",
        ),
        (["example_processor"], "must be an importable package.module:Class, got 'example_proc"),
        (
            ["example_processor:torch"],
            "a subclass of LogitsProcessor, got 'example_processor:torch'",
        ),
        ([NAME, NAME], "the argument 'length_decay' must be declared by one logits processor, got"),
        (["{}:Shift", "{}:SameArgument"], "Shift and .*SameArgument; load one of the two"),
        (["{}:Unfinished"], "must be a class with pack and apply, made without arguments"),
        (["{}:Half"], "column 'token' of .*:Half must be float32 or int64, at least 1 wide"),
        (
            ["{}:Forgetful"],
            r"columns packed by Forgetful must be \['by', 'token'\], got \['token'\]",
        ),
        (["{}:Wide"], "must be at most 16384 bytes per request, got 16392; declare narrower"),
    ],
)
def test_a_processor_that_cannot_be_loaded_is_refused(names: list[str], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        load_processors([name.format(__name__) for name in names])


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (NAME, "logits_processors must be a list, got 'example_processor:LengthDecay'"),
        ([3], r"logits_processors must be a list of non-empty str, got \(3,\)"),
        ([""], "logits_processors must be a list of non-empty str"),
    ],
)
def test_names_that_are_no_list_of_words_are_refused(value: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        LLM(logits_processors=value)


def test_a_processor_that_returns_another_shape_is_named(checkpoint: Checkpoint) -> None:
    with make_llm(checkpoint, logits_processors=[f"{__name__}:Transposed"]) as llm:
        text = r"logits returned by Transposed must be float32 \[1, 160\], got torch.float32 \[160"
        with pytest.raises(KernelArgumentError, match=text):
            llm.generate([5, 6], replace(GREEDY, extra_args={"transposed": [1, 1]}))


def test_a_host_read_is_refused_while_capturing(checkpoint: Checkpoint) -> None:
    llm = make_llm(checkpoint, logits_processors=[f"{__name__}:Reader"])
    with llm, pytest.raises(HostReadError, match="item"):
        llm.generate([5, 6], replace(GREEDY, extra_args={"reader": [1, 1]}))


def test_the_budget_has_room_for_its_columns(checkpoint: Checkpoint) -> None:
    with make_llm(checkpoint, logits_processors=[f"{__name__}:Shift"]) as llm:
        memory = llm.report()["memory"]
        assert memory["measured"]["workspace"] <= memory["planned"]["workspace_bytes"]
        assert llm.report()["options"]["logits_processors"]["value"] == (f"{__name__}:Shift",)
        assert re.search(rf"logits-processor +{__name__}:Shift +\(asked\)", llm.resolution_table)
