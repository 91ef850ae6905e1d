"""What a black box keeps, and what it writes where."""

import json
import math
import stat
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from box_cases import boxed, replayed_as_it_was, trip_token, tripping, written
from grammar_turns import Turns
from llm_cases import GREEDY, Checkpoint, make_checkpoint, make_llm, random_prompts

from paceline.core.errors import ConfigError, IntegrityError, RequestError
from paceline.core.request.input_rows import EncoderInput, InputRows
from paceline.core.request.sampling_params import SamplerTier, SamplingParams
from paceline.core.step import (
    FinishCode,
    JoinDelta,
    OverlayDelta,
    PageDelta,
    PromptPositions,
    Step,
    StepLayout,
    StepOutputs,
    TokenMask,
)
from paceline.engine.loop import overlapped_turn
from paceline.llm.box import black_box
from paceline.llm.box.black_box import BlackBox
from paceline.llm.box.record import Made, decode_record, encode_record
from paceline.llm.box.replay import replay
from paceline.llm.box.table_rows import TableRow

PROMPTS = random_prompts((20, 9))


def test_an_engine_without_one_has_the_turn_function_itself(checkpoint: Checkpoint) -> None:
    with make_llm(checkpoint) as llm:
        assert llm.engine._turn is overlapped_turn
        assert llm.keep_stuck("nowhere") is None


def test_as_many_steps_are_kept_as_were_asked_for(checkpoint: Checkpoint, tmp_path: Path) -> None:
    with boxed(checkpoint, tmp_path, kept_steps=5) as llm:
        box = llm._live.black_box
        assert box is not None
        llm.generate(PROMPTS, GREEDY)
        assert len(box._kept) == 5
        llm.keep_stuck("nowhere")
    [record] = written(tmp_path)
    epochs = [step.epoch for step in record.steps]
    assert epochs == list(range(epochs[-1] - 4, epochs[-1] + 1))


def test_a_file_is_plain_json_for_its_owner(checkpoint: Checkpoint, tmp_path: Path) -> None:
    folder = tmp_path / "made" / "for it"
    with boxed(checkpoint, folder) as llm:
        params = {"max_tokens": 5, "seed": 7, "ignore_eos": True, "stop": ["a secret end"]}
        llm.generate("aabbccdd", params)
        llm.keep_stuck("nowhere")
    [path] = folder.iterdir()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    found = json.loads(path.read_text())
    assert found["made"]["options"]["model"] == str(checkpoint.folder)
    assert found["made"]["versions"]["torch"]
    assert len(found["made"]["config_sha256"]) == 64
    [asked] = found["asked"]
    assert (asked["request_id"], asked["row"], asked["arrival"]) == ("request-0", 1, 1)
    [join, _] = found["steps"][0]["deltas"]
    assert join["kind"] == "join"
    assert (join["params"]["seed"], join["params"]["max_tokens"]) == (7, 5)
    assert sum(len(ids) for each in found["landed"] for ids in each["token_ids"]) == 5
    assert "aabbccdd" not in path.read_text()
    assert "secret" not in path.read_text()
    [record] = written(folder)
    [plain, _] = record.steps[0].deltas
    form = replace(plain.params, structured_outputs={"choice": ["a secret form"]})
    assert b"secret" not in encode_record(replace(record, start=((replace(plain, params=form),),)))


def failing(checkpoint: Checkpoint, folder: Path) -> ZeroDivisionError:
    """What an engine raises that fails, with a box in `folder`."""
    with make_llm(checkpoint) as plain:
        token = trip_token(plain, PROMPTS[0], at=4)
    options = {"logits_processors": ["planted:Raises"], "enforce_eager": True}
    with boxed(checkpoint, folder, **options) as llm, pytest.raises(ZeroDivisionError) as caught:
        llm.generate(PROMPTS, tripping(token))
    return caught.value


def test_a_full_folder_gets_no_more_and_loses_none(
    checkpoint: Checkpoint, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(black_box.MOST_FILES):
        (tmp_path / f"{number}.box.json").touch()
    error = failing(checkpoint, tmp_path)
    assert not hasattr(error, "__notes__")
    assert len(list(tmp_path.iterdir())) == black_box.MOST_FILES
    assert f"no black box was written: {tmp_path} has 16 already" in caplog.text


def test_the_log_has_the_file_and_how_to_run_it(
    checkpoint: Checkpoint, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    failing(checkpoint, tmp_path)
    [path] = tmp_path.iterdir()
    assert f"the last steps are in {path.name}; paceline debug replay {path}" in caplog.text


def test_boxes_of_one_millisecond_are_two(
    checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with boxed(checkpoint, tmp_path) as llm:
        llm.generate(PROMPTS, GREEDY)
        moments = iter((10**18 + 5, 10**18 + 1_005))
        monkeypatch.setattr(black_box.time, "time_ns", lambda: next(moments))
        names = [llm.keep_stuck("nowhere"), llm.keep_stuck("nowhere")]
    assert len(set(names)) == 2
    assert len(written(tmp_path)) == 2


def test_what_is_too_large_has_fewer_steps(
    checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with boxed(checkpoint, tmp_path) as llm:
        llm.generate(PROMPTS, GREEDY)
        llm.keep_stuck("nowhere")
        [path] = tmp_path.iterdir()
        monkeypatch.setattr(black_box, "MOST_BYTES", path.stat().st_size // 2)
        llm.keep_stuck("nowhere")
    whole, short = written(tmp_path)
    assert 0 < len(short.steps) <= len(whole.steps) // 2 + 1
    assert short.steps == whole.steps[-len(short.steps) :]
    assert replay(short, {}).difference is None


MANY = 20_000  # numbers: more than half of the bytes below
JOIN = JoinDelta(
    row=1, token_ids=(5,), prompt_len=1, prefix_len=0, max_len=9, params=SamplingParams()
)
ROWS = InputRows(start=0, num_tokens=1, media_hash="", rows=torch.zeros(MANY * 10))
PICTURE = EncoderInput(num_rows=1, media_hash="", data=torch.zeros(MANY * 10))
PLACES = PromptPositions(axes=((0,) * (MANY // 2),) * 2, delta=0)


def test_a_row_enters_again_with_what_it_said_and_nothing_packed_without_it() -> None:
    row = TableRow(replace(JOIN, packed_ids=bytes([5, 0, 0, 0])), said=[7])
    again = row.rejoined()
    assert (again.token_ids, again.packed_ids) == ((5, 7), None)


@pytest.mark.parametrize(
    "brought",
    [
        pytest.param({"deltas": (replace(JOIN, token_ids=(5,) * MANY),)}, id="token ids"),
        pytest.param({"deltas": (replace(JOIN, positions=PLACES),)}, id="positions"),
        pytest.param({"deltas": (replace(JOIN, encoder=PICTURE),)}, id="a picture"),
        pytest.param(
            {"deltas": (JOIN, PageDelta(row=1, group=0, start=0, page_ids=(1,) * MANY))}, id="pages"
        ),
        pytest.param(
            {"deltas": (JOIN, OverlayDelta(row=1, start=0, slots=(1,), source=ROWS))}, id="rows"
        ),
        pytest.param({"masks": (TokenMask(0, bytes(MANY * 40)),)}, id="masks"),
    ],
)
def test_steps_that_bring_much_are_fewer(
    tmp_path: Path, brought: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """Two of them are more than there is room for; those in flight stay."""
    running = SimpleNamespace(request_id="a", row=1, arrival=0)
    scheduler: Any = SimpleNamespace(running=[running])
    made = Made(config_sha256="", options={}, chosen=(), num_pages=(9,), device="cpu", versions={})
    box = BlackBox(tmp_path, scheduler, made, kept_bytes=MANY * 40 * 3 // 2)
    for epoch in range(1, 6):
        step = Step(
            epoch=epoch,
            layout=StepLayout(rows=(1,), extend_lens=(1,), emits=(True,)),
            is_ragged=False,
            prefix_lens_bound=(1,),
            sampler=SamplerTier.GREEDY,
            logprobs=False,
            deltas=(JOIN,) if epoch == 1 else (),
        )
        box.note(step if epoch == 1 else replace(step, **brought))
        if epoch < 5:
            outputs = StepOutputs(
                epoch=epoch, token_ids=((7,),), finish=(FinishCode.RUNNING,), logprobs=None
            )
            box.note_outputs(outputs)
    box.write_stuck("nowhere")
    [record] = written(tmp_path)
    assert [step.epoch for step in record.steps] == [5]
    assert "4 steps left it early: --black-box-bytes is 1200000" in caplog.text


@pytest.mark.parametrize("end", ["by the device", "by the host", "not yet"])
def test_what_has_ended_keeps_no_tensors(tmp_path: Path, end: str) -> None:
    """Nor embeddings whose tokens have been computed; a picture stays while its request runs."""
    running = [SimpleNamespace(request_id="ab"[row - 1], row=row, arrival=row) for row in (1, 2)]
    scheduler: Any = SimpleNamespace(running=running)
    made = Made(config_sha256="", options={}, chosen=(), num_pages=(9,), device="cpu", versions={})
    box = BlackBox(tmp_path, scheduler, made, kept_steps=2)
    overlay = OverlayDelta(row=1, start=0, slots=(1,), source=ROWS)
    first = (replace(JOIN, encoder=PICTURE), overlay, replace(JOIN, row=2))
    for epoch in range(1, 6):
        code = FinishCode.RUNNING
        if epoch == 2 and end == "by the device":
            code = FinishCode.LENGTH
        if epoch == 3 and end == "by the host":
            del running[0]
        step = Step(
            epoch=epoch,
            layout=StepLayout(rows=(1,) if epoch < 3 else (2,), extend_lens=(1,), emits=(True,)),
            is_ragged=False,
            prefix_lens_bound=(1,),
            sampler=SamplerTier.GREEDY,
            logprobs=False,
            deltas=first if epoch == 1 else (),
        )
        box.note(step)
        box.note_outputs(StepOutputs(epoch=epoch, token_ids=((7,),), finish=(code,), logprobs=None))
        if epoch == 3:
            assert box._rows.holding() == {1}, "a step that is kept goes on with it"
    assert not box._rows[1].overlays
    assert box._rows.holding() == ({1} if end == "not yet" else set())


def test_a_file_of_format_1_is_read(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """There `tells_drafts` was a bool."""
    with boxed(checkpoint, tmp_path) as llm:
        llm.generate(PROMPTS, GREEDY)
        llm.keep_stuck("nowhere")
    [record], [path] = written(tmp_path), tmp_path.iterdir()
    found = json.loads(path.read_text())
    assert found["format"] == 2
    found["format"] = 1
    for step in found["steps"]:
        step["tells_drafts"] = True
    assert decode_record("x", json.dumps(found).encode()) == record


def test_bytes_without_a_folder_are_refused(checkpoint: Checkpoint) -> None:
    with pytest.raises(ConfigError, match="black_box_bytes must be given with --black-box-dir"):
        make_llm(checkpoint, black_box_bytes="1MiB")


def test_an_engine_with_few_bytes_keeps_few_steps_that_replay(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    with boxed(checkpoint, tmp_path, black_box_bytes=2500) as llm:
        llm.generate(PROMPTS, GREEDY)
        llm.keep_stuck("nowhere")
    [record] = written(tmp_path)
    assert 0 < len(record.steps) <= 5
    replayed_as_it_was(record)


def test_what_cannot_be_written_hides_nothing(
    checkpoint: Checkpoint,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(black_box, "MOST_BYTES", 10)
    error = failing(checkpoint, tmp_path)
    assert str(error) == "a planted fault"
    assert not list(tmp_path.iterdir())
    assert "the black box could not be written" in caplog.text
    assert "a black box of the steps in flight must be at most 10 bytes, got" in caplog.text


def test_ctrl_c_is_no_failure(
    checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def launch(step: object) -> None:
        raise KeyboardInterrupt

    with boxed(checkpoint, tmp_path) as llm:
        monkeypatch.setattr(llm.engine._runner, "launch", launch)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(PROMPTS, GREEDY)
    assert not list(tmp_path.iterdir())


def test_what_the_scheduler_raises_is_said_to_be_its_own(
    checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with boxed(checkpoint, tmp_path) as llm:
        scheduler = llm.engine.scheduler
        stream = llm.generate(PROMPTS[0], GREEDY, stream=True)
        next(stream)

        def lost(*_: object) -> bool:
            raise IntegrityError("a page is lost")

        monkeypatch.setattr(scheduler._cache, "holds", lost)
        with pytest.raises(IntegrityError, match="a page is lost"):
            list(stream)
    [record] = written(tmp_path)
    assert record.failure.is_hosts
    found = replay(record, {})
    assert not found.is_reproduced
    assert found.end.endswith("ended; it was raised by the scheduler, which a replay does without")


class Refuses(Turns):
    """A grammar that hears what it has not allowed."""

    def accept(self, token: int) -> None:
        raise RequestError("a grammar's word")


def test_who_ends_by_a_grammar_is_not_told_of_anothers_nan(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    def poison(model: Any) -> None:
        model.get_input_embeddings().weight[77] = math.nan

    sick = make_checkpoint("llama-gqa2-untied", tmp_path / "sick", change=poison)
    with boxed(sick, tmp_path / "box") as llm:
        trackers = llm.submit([[5, 6]], GREEDY, grammar=Refuses([range(10, 20)], length=3))
        trackers += llm.submit([[5, 77]], GREEDY)
        while llm.engine.has_work:
            llm.engine.step()
    refused, failed = [tracker.snapshot().outputs[0].error for tracker in trackers]
    [path] = (tmp_path / "box").iterdir()
    assert refused == "a grammar's word"
    assert str(failed).endswith(f"its last steps are in {path.name}")
    [record] = written(tmp_path / "box")
    assert record.failure.rows == (1,)
    assert "grammar" not in record.failure.text


@pytest.mark.parametrize("what", ["a file", "a folder that is locked"])
def test_a_folder_that_cannot_be_written_is_refused(
    checkpoint: Checkpoint, tmp_path: Path, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "box"
    if what == "a file":
        folder.touch()
    monkeypatch.setattr(black_box.os, "access", lambda *_: False)
    with pytest.raises(ConfigError, match="black_box_dir must be a folder that can be written"):
        make_llm(checkpoint, black_box_dir=str(folder))


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"{", "black box file 'x' must be what a black box wrote, got Input data was truncated"),
        (
            b'{"format": 0}',
            "must be of format 1 or 2, got format 0; give a file of --black-box-dir",
        ),
        (b'{"format": 1}', "Object missing required field"),
        (b'{"format": 1, "steps": [3]}', "Expected `object`, got `int`"),
        (b'{"format": 2}', "Object missing required field"),
    ],
    ids=str,
)
def test_what_is_no_record_is_refused(data: bytes, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        decode_record("x", data)
    assert text in str(caught.value)
