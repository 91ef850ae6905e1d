"""A step is the same behind a frame: those that a scheduler makes in a busy hour, and one that has
something of everything."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from grammar_turns import Turns
from hypothesis import given
from hypothesis import strategies as st
from llm_cases import VOCAB, random_prompts, recorded_steps
from speculative_cases import Truth, drafting_llm, llama_truth, serve

from paceline.core.modes import MaskKind
from paceline.core.request.input_rows import EncoderInput, InputRows
from paceline.core.request.sampling_params import SamplerTier, SamplingParams
from paceline.core.step import (
    GivenDrafts,
    JoinDelta,
    OverlayDelta,
    PageDelta,
    PromptPositions,
    PromptSpan,
    Step,
    StepLayout,
    TokenMask,
)
from paceline.runner.step_frames import decode_step, encode_step

KIND = "logprobs"
JOIN = JoinDelta(
    row=3, token_ids=(5, 6, 7), prompt_len=2, prefix_len=0, max_len=9, params=SamplingParams(seed=1)
)
EVERYTHING = Step(
    epoch=2**40,
    layout=StepLayout(rows=(3,), extend_lens=(3,), emits=(True,), parents=((-1, 0, 0),)),
    is_ragged=True,
    mask=MaskKind.TREE,
    is_round=True,
    prefix_lens_bound=(4,),
    sampler=SamplerTier.PLUG_INS,
    logprobs=True,
    deltas=(
        PageDelta(row=3, group=1, start=2, page_ids=(8, 9)),
        replace(JOIN, positions=PromptPositions(((0, 1, 1), (0, 0, 5)), 3)),
        PageDelta(row=3, group=0, start=0, page_ids=()),
    ),
    prompt_spans=(PromptSpan(0, 1, 2, 3),),
    observed=False,
    shares_prefix=True,
    masks=(TokenMask(0, bytes(range(256))),),
    has_overlay=True,
    tells_drafts=(0,),
    given=(GivenDrafts(0, (5, 7), (-1, 0)),),
)


@pytest.fixture(scope="module")
def truth(tmp_path_factory: pytest.TempPathFactory) -> Truth:
    return llama_truth(tmp_path_factory.mktemp("truth"), (KIND,))


def test_steps_of_a_busy_hour_come_back(truth: Truth) -> None:
    cell = {"drafter": "STANDALONE", "topk": 2, "page_size": 16, "pool": "tight"}
    with (
        drafting_llm(truth, cell | {"chunked_prefill_size": 7}) as llm,
        recorded_steps(llm) as seen,
    ):
        serve(llm, truth.jobs[KIND])
        llm.generate(random_prompts((9, 30)), {"prompt_logprobs": 2, "max_tokens": 4})
        llm.generate(random_prompts((5,)), grammar=Turns([(1, 2)], length=3))
    kinds = Counter(type(delta) for step in seen for delta in step.deltas)
    assert kinds[JoinDelta] > 20
    assert kinds[PageDelta] > 20
    assert {step.kind for step in seen} >= {"ragged step", "round", "decode step"}
    assert any(step.prompt_spans for step in seen)
    assert any(step.masks for step in seen)
    for step in seen:
        found = decode_step(encode_step(step))
        assert found == step
        assert not any(isinstance(delta, JoinDelta) and delta.packed_ids for delta in found.deltas)
    joins = [delta for step in seen for delta in step.deltas if isinstance(delta, JoinDelta)]
    # As they came, and with what they said before they waited again.
    assert {delta.packed_ids is None for delta in joins} == {False, True}
    for delta in joins:
        ids = np.array(delta.token_ids, np.int32).tobytes()
        assert delta.packed_ids in (None, ids)


def test_a_step_with_something_of_everything_comes_back() -> None:
    usual = replace(EVERYTHING, masks=None, mask=MaskKind.CAUSAL, deltas=())
    for field in fields(Step):  # nothing is left as it is where nobody says
        value = getattr(EVERYTHING, field.name)
        assert value or field.name == "observed", field.name
    for step in (EVERYTHING, usual, replace(EVERYTHING, masks=())):
        found = decode_step(encode_step(step))
        assert found == step
        assert [type(delta) for delta in found.deltas] == [type(delta) for delta in step.deltas]


NAMES = st.text(min_size=1, max_size=4)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=2),
    max_leaves=6,
)


@given(
    temperature=st.floats(0.0, 100.0),
    bias=st.dictionaries(st.integers(0, VOCAB), st.floats(-100.0, 100.0), max_size=4),
    stop=st.lists(NAMES, max_size=3),
    seed=st.integers(-(2**63), 2**63 - 1),
    extra=st.dictionaries(NAMES, JSON, max_size=3),
)
def test_parameters_of_a_request_come_back(
    temperature: float, bias: dict[int, float], stop: Sequence[str], seed: int, extra: Any
) -> None:
    params = SamplingParams(
        temperature=temperature, logit_bias=bias, stop=stop, seed=seed, extra_args=extra
    )
    step = replace(EVERYTHING, deltas=(replace(JOIN, params=params),))
    found = decode_step(encode_step(step))
    assert found == step
    assert hash(found.deltas[0]) == hash(step.deltas[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool], ids=str)
def test_what_an_encoder_reads_comes_back(dtype: torch.dtype) -> None:
    data = torch.randn(3, 2, 5).to(dtype)
    given = EncoderInput(num_rows=6, media_hash="picture", data=data.transpose(0, 1))
    step = replace(EVERYTHING, deltas=(replace(JOIN, encoder=given),))
    [found] = decode_step(encode_step(step)).deltas
    assert isinstance(found, JoinDelta)
    assert found.encoder is not None
    assert (found.encoder.num_rows, found.encoder.media_hash) == (6, "picture")
    assert found.encoder.data.dtype == dtype
    assert torch.equal(found.encoder.data, given.data)
    assert replace(found, encoder=None) == JOIN


def test_rows_behind_a_hit_are_all_that_travels() -> None:
    rows = torch.randn(5, 4).bfloat16()
    source = InputRows(start=2, num_tokens=5, media_hash="picture", rows=rows)
    delta = OverlayDelta(row=3, start=4, slots=(7, 8, 1), source=source)
    short, long = (
        encode_step(replace(EVERYTHING, deltas=(replace(delta, start=start),))) for start in (4, 2)
    )
    assert len(long) - len(short) == 2 * 4 * rows.itemsize
    [found] = decode_step(short).deltas
    assert isinstance(found, OverlayDelta)
    assert (found.row, found.start, found.slots) == (3, 4, (7, 8, 1))
    assert (found.source.start, found.source.stop) == (4, 7)
    assert torch.equal(found.source.rows, rows[2:])


@pytest.mark.parametrize("frame", [b"", b"\x90", encode_step(EVERYTHING)[:-1], b"\x01"])
def test_what_is_no_frame_is_refused(frame: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        decode_step(frame)
