"""Prompts, conversations, labels and log-probabilities in the forms callers know."""

import asyncio
import json
import logging
import math
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tokenizers
import torch
from llm_cases import (
    CONTEXT,
    GREEDY,
    VOCAB,
    Checkpoint,
    Tokens,
    assert_idle,
    make_llm,
    random_prompts,
    text_of,
    token_text,
)

from paceline.core.errors import ModelError, RequestError
from paceline.core.request.sampling_params import SamplingParams
from paceline.engine.answers.outputs import RequestOutput
from paceline.llm.admission import MAX_TOKENS_CUT
from paceline.llm.async_llm import AsyncLLM
from paceline.llm.llm import LLM

SHORT = replace(GREEDY, max_tokens=6)
TEMPLATE = (
    "{% for m in messages %}{{ m.role[:1] }}{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}{{ tail | default('zz') }}{% endif %}"
)
TALK = [{"role": "user", "content": "abc"}, {"role": "assistant", "content": "dea"}]
TOLERANCE = 2e-5  # float32 logits of a tiny model


@pytest.fixture(scope="module")
def talker(checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """With a chat template, and a tokenizer that knows a token the model has no row for."""
    folder = tmp_path_factory.mktemp("talker") / "model"
    shutil.copytree(checkpoint.folder, folder)
    core = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    core.add_special_tokens(["<image>"])
    assert core.token_to_id("<image>") == VOCAB
    core.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    return Checkpoint(folder, checkpoint.theirs)


@pytest.fixture(scope="module")
def llm(talker: Checkpoint) -> LLM:
    return make_llm(talker)


def tokens(output: RequestOutput) -> Tokens:
    return output.outputs[0].token_ids


IDS = [random_prompts([9])[0], random_prompts([14])[0]]
FORMS = {
    "texts": [text_of(ids) for ids in IDS],
    "ids": IDS,
    "tuples": tuple(map(tuple, IDS)),
    "numpy": [np.array(ids, dtype=np.int32) for ids in IDS],
    "numpy scalars": [list(np.array(ids)) for ids in IDS],
    "torch": [torch.tensor(ids) for ids in IDS],
    "mappings": [{"prompt": text_of(IDS[0])}, {"prompt_token_ids": np.array(IDS[1])}],
    "mapping with nulls": [{"prompt": text_of(ids), "prompt_token_ids": None} for ids in IDS],
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_a_prompt_is_the_same_prompt(llm: LLM, form: str) -> None:
    wanted = [tokens(output) for output in llm.generate(IDS, SHORT)]
    for prompts in (FORMS[form], iter(FORMS[form])):
        assert [tokens(output) for output in llm.generate(prompts, SHORT)] == wanted
    [alone] = llm.generate(FORMS[form][0], sampling_params=SHORT, use_tqdm=False)
    assert tokens(alone) == wanted[0]


def test_rows_of_an_array_are_prompts(llm: LLM) -> None:
    rows = torch.tensor([IDS[1], IDS[1][::-1]])
    outputs = llm.generate(rows, SHORT)
    assert [output.prompt_token_ids for output in outputs] == [tuple(r) for r in rows.tolist()]
    assert [tokens(o) for o in llm.generate(rows.numpy(), SHORT)] == [tokens(o) for o in outputs]


def test_no_prompts_have_no_outputs(llm: LLM) -> None:
    assert llm.generate([], SHORT) == []
    assert list(llm.generate(iter(()), SHORT, stream=True)) == []
    assert llm.generate([], []) == []


def test_progress_is_drawn_when_asked_for(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    llm.generate(IDS, SHORT)
    assert capsys.readouterr().err == ""
    llm.generate(IDS, SHORT, use_tqdm=True)
    with pytest.raises(RequestError, match="use_tqdm must be left out of a stream, got True; cou"):
        llm.generate(IDS, SHORT, stream=True, use_tqdm=True)
    assert "prompts: 100%" in (shown := capsys.readouterr().err)
    assert "2/2" in shown


def test_a_text_with_a_token_the_model_lacks_is_refused_and_others_run(llm: LLM) -> None:
    text = (
        rf"prompt\[1\]: prompt token id 2 must be an integer from 0 to {VOCAB - 1}, got {VOCAB}, "
        "the tokenizer's '<image>'; leave that piece out"
    )
    running = llm.generate(IDS[0], SHORT, stream=True)
    next(running)
    with pytest.raises(RequestError, match=text):
        llm.generate(["abab", "abab<image>"], SHORT)
    *_, last = running
    assert tokens(last) == tokens(llm.generate(IDS[0], SHORT)[0])
    assert_idle(llm)


WRONG = {
    "a token it lacks": ("<image>", None, "prompt token id 0 must be"),
    "an id it lacks": ([VOCAB], None, "prompt token id 0 must be"),
    "one below all": ([4, -1], None, "prompt token id 1 must be"),
    "one beyond all integers of a device": ([2**40], None, "prompt token id 0 must be"),
    "nothing": ([], None, "prompt must be 1 to"),
    "too long": ([4] * CONTEXT, None, "prompt must be 1 to"),
    "a number": (4.5, None, "prompt must be text"),
    "no such field": (IDS[0], {"temprature": 1.0}, "sampling field must be"),
    "no parameters": (IDS[0], 5, "sampling_params must be"),
    "a stop id it lacks": (IDS[0], {"stop_token_ids": [VOCAB]}, "stop_token_ids must be"),
}


@pytest.mark.parametrize("stream", [False, True])
def test_wrong_prompts_may_be_told_instead_of_refusing_the_others(llm: LLM, stream: bool) -> None:
    cases = list(WRONG.values())
    prompts = [IDS[0], *(prompt for prompt, _, _ in cases), IDS[1]]
    params = [SHORT, *(SHORT if p is None else p for _, p, _ in cases), SHORT]
    outputs = llm.generate(prompts, params, stream=stream, return_errors=True)
    found = {output.request_id: output for output in outputs}
    by_index = sorted(found.values(), key=lambda output: int(output.request_id.split("-")[1]))
    good = [tokens(output) for output in (by_index[0], by_index[-1])]
    assert good == [tokens(output) for output in llm.generate(IDS, SHORT)]
    for index, (output, (_, _, text)) in enumerate(zip(by_index[1:-1], cases, strict=True), 1):
        [failed] = output.outputs
        assert output.finished
        assert failed.finish_reason == "error"
        assert failed.error is not None
        assert failed.error.startswith(f"prompt[{index}]: {text}")
        assert output.as_document()["error"] == failed.error
    assert_idle(llm)


def test_a_request_that_can_never_fit_is_told_too(talker: Checkpoint) -> None:
    from paceline.llm.boot import Knobs

    with make_llm(talker, knobs=Knobs(num_pages=(3,))) as small:
        prompts = [[4] * 20, [4] * 60]
        good, bad = small.generate(prompts, SHORT, return_errors=True)
        assert len(tokens(good)) == 6
        assert "KV pages of request" in bad.outputs[0].error
        with pytest.raises(RequestError, match=r"^prompt\[1\]: KV pages of request"):
            small.generate(prompts, SHORT)
        assert_idle(small)


def test_chat_renders_as_transformers_does(llm: LLM, talker: Checkpoint) -> None:
    import transformers

    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(talker.folder / "tokenizer.json"), chat_template=TEMPLATE
    )
    cases = [
        (TALK, {}),
        (TALK, {"add_generation_prompt": False}),
        (TALK, {"chat_template_kwargs": {"tail": "bc"}}),
    ]
    for messages, how in cases:
        wanted = theirs.apply_chat_template(
            messages,
            add_generation_prompt=how.get("add_generation_prompt", True),
            tokenize=False,
            **how.get("chat_template_kwargs", {}),
        )
        ids = theirs.encode(wanted, add_special_tokens=False)
        [output] = llm.chat(messages, SHORT, **how)
        assert (output.prompt, list(output.prompt_token_ids)) == (wanted, ids)
        assert tokens(output) == tokens(llm.generate(ids, SHORT)[0])


def test_chat_takes_many_conversations_and_streams(llm: LLM) -> None:
    both = [TALK, TALK[:1]]
    outputs = llm.chat(both, SHORT)
    assert [tokens(o) for o in outputs] == [tokens(llm.chat(talk, SHORT)[0]) for talk in both]
    *_, last = llm.chat(TALK, SHORT, stream=True)
    assert tokens(last) == tokens(outputs[0])
    assert llm.chat([], SHORT) == []


def test_a_task_gets_the_answer_of_chat(llm: LLM, talker: Checkpoint) -> None:
    async def ask() -> RequestOutput:
        async with AsyncLLM(str(talker.folder), threads=1, max_num_seqs=8) as other:
            return [snapshot async for snapshot in other.chat(TALK, SHORT)][-1]

    [expected] = llm.chat(TALK, SHORT)
    found = asyncio.run(ask())
    assert (found.prompt, tokens(found)) == (expected.prompt, tokens(expected))


def test_an_answer_goes_on_to_the_end_of_the_context_unless_told_otherwise(llm: LLM) -> None:
    outputs = llm.chat([TALK] * 6)
    for output in outputs:
        completion = output.outputs[0]
        total = len(output.prompt_token_ids) + len(completion.token_ids)
        assert completion.finish_reason == "stop" or total == CONTEXT
    assert max(len(o.outputs[0].token_ids) for o in outputs) > SamplingParams().max_tokens


@pytest.mark.parametrize(
    ("messages", "got"),
    [("ab", "str"), ({"role": "user"}, "dict"), ([[]], "none"), ([[5]], "5"), (["ab"], "str")],
)
def test_what_is_no_conversation_is_refused(llm: LLM, messages: object, got: str) -> None:
    with pytest.raises(RequestError, match=f"messages must be a list of mappings .* got {got}; "):
        llm.chat(messages, SHORT)


def test_text_parts_are_read_as_the_text_they_make(llm: LLM) -> None:
    parts = [{"type": "text", "text": "ab"}, {"type": "text", "text": "cd"}]
    [output] = llm.chat([{"role": "user", "content": parts}], SHORT)
    assert output.prompt == "uab\ncdzz"
    call = {"role": "assistant", "content": None, "tool_calls": [{}]}  # the template's to write
    [output] = llm.chat([{"role": "user"}, call], SHORT)
    assert output.prompt.startswith("ua")


@pytest.mark.parametrize(
    "content",
    [None, 5, {"type": "text", "text": "ab"}, [5], [{"type": "image"}], [{"type": "text"}]],
    ids=repr,
)
def test_content_that_is_no_text_is_refused(llm: LLM, content: object) -> None:
    with pytest.raises(RequestError) as caught:
        llm.chat([{"role": "user", "content": content}], SHORT)
    assert str(caught.value) == (
        f"content of user must be a text or a list of text parts, got {content!r}; "
        "send it as text: other content is not read"
    )


@pytest.mark.parametrize(
    ("variables", "got"),
    [
        ({"add_generation_prompt": False}, "'add_generation_prompt'"),
        ({"messages": []}, "'messages'"),
        ({1: 2}, "1"),
        (["tail"], "list"),
    ],
)
def test_what_no_template_can_be_given_is_refused(llm: LLM, variables: object, got: str) -> None:
    with pytest.raises(RequestError) as caught:
        llm.chat(TALK, SHORT, chat_template_kwargs=variables)
    assert str(caught.value) == (
        "chat_template_kwargs must be {name: value}, of names other than messages and "
        f"add_generation_prompt, got {got}; pass these two as arguments of chat"
    )


def test_a_wrong_conversation_names_its_index(llm: LLM) -> None:
    with pytest.raises(RequestError, match=r"^prompt\[1\]: messages must be"):
        llm.chat([TALK, [{"content": "ab"}]], SHORT)
    good, bad = llm.chat([TALK, [{"content": "ab"}]], SHORT, return_errors=True)
    assert (len(tokens(good)), bad.outputs[0].finish_reason) == (6, "error")


def test_labels_are_scored_as_transformers_scores_them(llm: LLM, talker: Checkpoint) -> None:
    query, items, labels = "abac", ["adae", "afagah"], [5, 77, 130]
    wanted = []
    for item in items:
        ids = llm.tokenizer.encode(query + item)
        wanted.append(talker.logits(ids)[-1].softmax(-1)[labels])
    found = torch.tensor(llm.score_labels(query, items, labels))
    assert torch.allclose(found, torch.stack(wanted), rtol=1e-3, atol=1e-7)
    shares = torch.tensor(llm.score_labels(query, items, labels, apply_softmax=True))
    assert torch.allclose(shares, found / found.sum(1, keepdim=True), rtol=1e-3)
    ids = [llm.tokenizer.encode(item) for item in items]
    as_ids = torch.tensor(llm.score_labels(llm.tokenizer.encode(query), ids, labels))
    assert torch.allclose(as_ids, found)


def test_the_item_may_come_first(llm: LLM) -> None:
    assert llm.score_labels("ab", ["cd"], [5], item_first=True) == llm.score_labels(
        "cd", ["ab"], [5]
    )
    assert llm.score_labels("ab", ["cd"], [5], item_first=True) != llm.score_labels(
        "ab", ["cd"], [5]
    )


def test_what_is_scored_comes_in_any_form_that_prompts_have(llm: LLM) -> None:
    wanted = llm.score_labels([4, 5], [[6], [7]], [8, 9])
    assert (
        llm.score_labels(np.array([4, 5]), iter([np.array([6]), [7]]), torch.tensor([8, 9]))
        == wanted
    )
    assert llm.score_labels("ab", iter(["cd"]), [5]) == llm.score_labels("ab", ["cd"], [5])
    assert llm.score_labels("ab", [], [5]) == []


@pytest.mark.parametrize(
    ("query", "items", "labels", "text"),
    [
        ("ab", [[4]], [5], "query and items must be all texts or all token ids, got some of each"),
        ([4], ["ab"], [5], "query and items must be all texts or all token ids, got some of each"),
        ("ab", "cd", [5], "items must be several texts, or several lists of token ids, got str"),
        ("ab", 4, [5], "items must be several texts, or several lists of token ids, got int"),
        ([], [[4], []], [5], "query and item must be at least one token together, got none"),
        ("ab", ["cd"], [], "label_token_ids must be at least one token id, got none"),
        ("ab", ["cd"], "a", "label_token_ids must be at least one token id, got str"),
        ("ab", ["cd"], [4, VOCAB], f"a label token id must be an integer from 0 to {VOCAB - 1}, "),
        ("ab", ["cd"], [True], f"a label token id must be an integer from 0 to {VOCAB - 1}, got T"),
        ("ab", ["cd"], 5, "prompt must be text, token ids or a mapping with one of them, got int"),
    ],
)
def test_what_cannot_be_scored_is_refused(
    llm: LLM, query: object, items: object, labels: object, text: str
) -> None:
    with pytest.raises(RequestError) as caught:
        llm.score_labels(query, items, labels)
    assert str(caught.value).startswith(text)


def test_log_probabilities_carry_texts_and_add_up(llm: LLM, talker: Checkpoint) -> None:
    """Sampled tokens, beside transformers' own distribution."""
    params = SamplingParams(temperature=1.5, seed=3, max_tokens=5, logprobs=2, prompt_logprobs=1)
    [output] = llm.generate(IDS[0], replace(params, ignore_eos=True))
    [completion] = output.outputs
    wanted = talker.logits([*IDS[0], *completion.token_ids]).log_softmax(-1)
    rows = [*output.prompt_logprobs[1:], *completion.logprobs]
    ids = [*IDS[0][1:], *completion.token_ids]
    assert output.prompt_logprobs[0] is None
    for row, token, theirs in zip(rows, ids, wanted[:-1], strict=True):
        best = theirs.topk(len(row.top_ids))
        assert row.token_id == token
        assert math.isclose(row[token].logprob, theirs[token], abs_tol=TOLERANCE)
        assert row.top_ids == tuple(best.indices.tolist())
        assert {each: entry.rank for each, entry in row.items() if entry.rank} == {
            each: rank for rank, each in enumerate(row.top_ids, 1)
        }
        assert {each: entry.decoded_token for each, entry in row.items()} == {
            each: token_text(each) for each in {token, *row.top_ids}
        }
        assert next(iter(row)) == token
        assert len(row) == len({token, *row.top_ids})
        with pytest.raises(KeyError):
            row[next(each for each in range(VOCAB) if each not in row)]
    total = sum(row.chosen for row in completion.logprobs)
    assert math.isclose(completion.cumulative_logprob, total, rel_tol=1e-9)
    assert llm.generate(IDS[0], SHORT)[0].outputs[0].cumulative_logprob is None
    document = output.as_document()
    assert document["logprobs"][0]["token"] == token_text(completion.token_ids[0])
    assert document["cumulative_logprob"] == completion.cumulative_logprob
    json.dumps(document)


def test_a_limit_beyond_the_context_is_said_once(
    talker: Checkpoint, caplog: pytest.LogCaptureFixture
) -> None:
    with make_llm(talker) as llm, caplog.at_level(logging.INFO, "paceline"):
        for _ in range(2):
            [output] = llm.generate([4] * 100, replace(GREEDY, max_tokens=10**9))
        assert len(tokens(output)) == CONTEXT - 100
        llm.generate([4] * 100, replace(GREEDY, max_tokens=CONTEXT - 100))
        cut = [event for event in llm.report()["events"] if event["reason"] == MAX_TOKENS_CUT]
    assert [event["count"] for event in cut] == [2]
    assert cut[0]["detail"] == (
        f"max_tokens 1000000000 reaches beyond the context of {CONTEXT} tokens: outputs end there"
    )
    assert caplog.text.count(MAX_TOKENS_CUT) == 1


def test_text_without_a_tokenizer_needs_none_of_this(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    folder = tmp_path / "mute"
    shutil.copytree(checkpoint.folder, folder)
    (folder / "tokenizer.json").unlink()
    with make_llm(Checkpoint(folder, checkpoint.theirs)) as mute:
        [output] = mute.generate(IDS[0], replace(SHORT, logprobs=1))
        assert {entry.decoded_token for entry in output.outputs[0].logprobs[0].values()} == {""}
        with pytest.raises(ModelError, match=r"tokenizer must be a model with tokenizer\.json"):
            mute.chat(TALK)
        with pytest.raises(ModelError, match=r"tokenizer must be a model with tokenizer\.json"):
            mute.generate([IDS[0], "ab"], SHORT, return_errors=True)
        assert_idle(mute)
