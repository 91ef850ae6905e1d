"""The teacher computes given tokens in every form, and leaves the engine as it was."""

import pytest
import torch
from llm_cases import GREEDY, Checkpoint, make_llm, random_prompts, tokens_of

from paceline.core.draft_shape import DraftShape
from paceline.core.errors import CapacityError, PacelineError
from paceline.llm.boot import Knobs
from paceline.llm.teacher import TeacherForm, round_rows

TREE = DraftShape(num_steps=3, topk=2, num_draft_tokens=6)
CHAIN = DraftShape(num_steps=3, topk=1, num_draft_tokens=4)
TOKENS = random_prompts((21,), seed=9)[0]


@pytest.fixture(scope="module")
def llm(checkpoint: Checkpoint):
    shape = {"speculative_eagle_topk": 2, "speculative_num_draft_tokens": 6}
    with make_llm(
        checkpoint,
        page_size=4,
        max_num_batched_tokens=256,
        speculative_algorithm="NGRAM",
        speculative_num_steps=3,
        **shape,
    ) as llm:
        yield llm


FORMS = {
    "plain": TeacherForm.plain(21),
    "decode": TeacherForm.decode(9),
    "chain": TeacherForm.verify(17, CHAIN),
    "half a chain": TeacherForm.verify(19, CHAIN),
    "tree": TeacherForm.verify(17, TREE),
    "half a tree": TeacherForm.verify(19, TREE),
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_every_form_reads_what_transformers_computes(llm, checkpoint, form):
    reading = llm.teacher().read(TOKENS, form, layers=True)
    wanted = checkpoint.theirs(torch.tensor([TOKENS]), output_hidden_states=True)
    torch.testing.assert_close(reading.logits, wanted.logits[0, -1], rtol=0, atol=1e-4)
    assert len(reading.layers) == 2
    # hidden_states: the embedding, then the stream behind each layer, the last of them normed.
    torch.testing.assert_close(reading.layers[0], wanted.hidden_states[1][0], rtol=0, atol=1e-4)
    assert reading.layers[1].shape == reading.layers[0].shape


def test_a_prompt_longer_than_a_step_is_read_in_chunks(checkpoint):
    with make_llm(checkpoint, max_num_batched_tokens=8, max_num_seqs=2) as llm:
        reading = llm.teacher().read(TOKENS, TeacherForm.plain(21), layers=True)
    torch.testing.assert_close(reading.logits, checkpoint.logits(TOKENS)[-1], rtol=0, atol=1e-4)
    assert reading.layers[0].shape[0] == 21


def test_the_engine_answers_as_before_and_its_books_balance(llm):
    prompts = random_prompts((20, 30))
    before = tokens_of(llm.generate(prompts, GREEDY))
    teacher = llm.teacher()
    for form in FORMS.values():
        teacher.read(TOKENS, form)
    llm.engine.scheduler.check_integrity()
    after = llm.generate(prompts, GREEDY)
    assert tokens_of(after) == before
    assert [output.metrics.cached_tokens for output in after] == [16, 28]
    (read,) = llm.generate([TOKENS], GREEDY)
    assert read.metrics.cached_tokens == 0  # the teacher's KV is nobody's prefix


def test_a_busy_engine_has_no_teacher(llm):
    (tracker,) = llm.submit(TOKENS, GREEDY)
    with pytest.raises(PacelineError, match="engine must be idle, got busy with requests"):
        llm.teacher()
    llm.abort(tracker.request.request_id)
    llm.teacher()


def test_too_few_pages_are_an_error_that_borrows_none(checkpoint):
    knobs = Knobs(num_pages=(4,))
    with make_llm(checkpoint, knobs=knobs, page_size=4, max_num_seqs=2) as llm:
        for _ in range(2):
            with pytest.raises(CapacityError, match="pages to compare what engines compute must"):
                llm.teacher().read(TOKENS, TeacherForm.plain(21))
        llm.engine.scheduler.check_integrity()
        assert llm.teacher().read(TOKENS[:5], TeacherForm.plain(5)).logits.shape == (160,)


def test_a_tree_holds_the_path_and_wrong_branches():
    rows, parents, kept = round_rows((7, 8, 9), TREE)
    assert rows == (7, 7, 8, 7, 9, 9)
    assert parents == (-1, 0, 0, 2, 2, 4)
    assert kept == (0, 2, 4)
    assert round_rows((7, 8), CHAIN) == ((7, 8, 8, 8), None, (0, 1))
