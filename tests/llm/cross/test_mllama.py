"""Mllama's text model: some layers read rows that a request brings, and none of others' tokens."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from llm_cases import (
    CONTEXT,
    GREEDY,
    VOCAB,
    Checkpoint,
    Tokens,
    assert_idle,
    assert_same_or_tie,
    make_llm,
    random_prompts,
    save_tokenizer,
    tokens_of,
)
from torch import Tensor

from paceline.core.errors import ModelError, RequestError
from paceline.layers.attention import StepContext
from paceline.models.config import parse_config
from paceline.models.mllama_text_model import MOST_ROWS
from paceline.server.border.engine_main import require_served

HIDDEN = 48
SHORT = replace(GREEDY, max_tokens=12)
PROMPTS = random_prompts((20, 5, 9, 26), seed=3)
LENGTHS = (18, None, 1, 40)  # rows; None: no image


@dataclass(frozen=True)
class Seer(Checkpoint):
    """A text model on disk, and transformers' own instance of it (float32)."""

    def logits_of(self, ids: Sequence[int], rows: Tensor | None) -> Tensor:
        """[num_tokens, vocab]  float32"""
        states = None if rows is None else rows[None]
        with torch.inference_mode():
            found: Tensor = self.theirs(
                torch.tensor([list(ids)]), cross_attention_states=states, use_cache=False
            ).logits[0]
        return found

    def said(self, prompt: Sequence[int], rows: Tensor | None, num_tokens: int) -> Tokens:
        """What it generates greedily."""
        ids = list(prompt)
        for _ in range(num_tokens):
            ids.append(int(self.logits_of(ids, rows)[-1].argmax()))
        return tuple(ids[len(prompt) :])


@pytest.fixture(scope="module")
def seer(tmp_path_factory: pytest.TempPathFactory) -> Seer:
    """Gates are open, norms random."""
    folder = tmp_path_factory.mktemp("mllama")
    config = transformers.models.mllama.MllamaTextConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=72,
        num_hidden_layers=4,
        num_attention_heads=3,
        num_key_value_heads=1,
        max_position_embeddings=CONTEXT,
        cross_attention_layers=[1, 2],
        initializer_range=0.15,
        rope_parameters={"rope_type": "default", "rope_theta": 1000.0},
        bos_token_id=1,
        eos_token_id=[2, 3],
        pad_token_id=0,
    )
    config._attn_implementation = "eager"
    torch.manual_seed(5)
    model = transformers.MllamaForCausalLM(config).eval().requires_grad_(False)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            parameter.add_(torch.randn_like(parameter), alpha=0.2)
        if name.endswith("gate"):
            parameter.add_(0.7)
    model.save_pretrained(folder)
    save_tokenizer(folder)
    return Seer(folder, model)


ROWS = [
    None
    if length is None
    else torch.randn(length, HIDDEN, generator=torch.Generator().manual_seed(i))
    for i, length in enumerate(LENGTHS)
]
ASKED: list[dict[str, Any]] = [
    {"prompt_token_ids": prompt, "encoder_input": rows}
    for prompt, rows in zip(PROMPTS, ROWS, strict=True)
]


@pytest.fixture(scope="module")
def said(seer: Seer) -> list[Tokens]:
    return [seer.said(p, rows, SHORT.max_tokens) for p, rows in zip(PROMPTS, ROWS, strict=True)]


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"page_size": 4}, id="graphs"),
        pytest.param(
            {"enforce_eager": True, "sanitize": True, "chunked_prefill_size": 7}, id="eager"
        ),
    ],
)
def test_tokens_are_those_of_transformers(seer: Seer, said: Any, options: Any) -> None:
    """With and without an image in one batch."""
    with make_llm(seer, **options) as llm:
        got = tokens_of(llm.generate(ASKED, SHORT))
        for prompt, rows, ours, theirs in zip(PROMPTS, ROWS, got, said, strict=True):

            def gap(
                output: Tokens, pair: Any, prompt: Any = prompt, rows: Any = rows
            ) -> tuple[float, float]:
                logits = seer.logits_of([*prompt, *output], rows)[-1]
                return (logits.max() - logits[list(pair)].min()).item(), logits.abs().max().item()

            assert_same_or_tie(ours, theirs, gap)
        again = [llm.generate(each, SHORT)[0] for each in (ASKED[0], ASKED[0], ASKED[2])]
        assert tokens_of(again) == [got[0], got[0], got[2]]
        cached = 16 if options.get("page_size") == 4 else 0
        assert again[1].metrics.cached_tokens >= cached
        assert_idle(llm)


def test_logits_are_those_of_transformers(seer: Seer) -> None:
    with make_llm(seer, chunked_prefill_size=7) as llm:
        outputs = llm.generate(ASKED, replace(SHORT, max_tokens=1, prompt_logprobs=0))
    for prompt, rows, output in zip(PROMPTS, ROWS, outputs, strict=True):
        theirs = seer.logits_of(prompt, rows).log_softmax(-1)
        assert output.prompt_logprobs is not None
        found = zip(prompt[1:], output.prompt_logprobs[1:], strict=True)
        ours = [entry[token].logprob for token, entry in found]
        own = theirs[torch.arange(len(prompt) - 1), torch.tensor(prompt[1:])]
        torch.testing.assert_close(torch.tensor(ours), own, rtol=0, atol=2e-5)


def test_what_is_seen_matters(seer: Seer) -> None:
    seen = [seer.logits_of(PROMPTS[0], rows)[-1] for rows in (*ROWS[:2], ROWS[0][:5])]
    assert min((a - b).abs().max() for a, b in (seen[:2], seen[1:], seen[::2])) > 0.1


def test_a_request_without_an_image_skips_those_layers(seer: Seer, monkeypatch: Any) -> None:
    """What the other tests would find: feed-forward blocks that run all the same."""
    monkeypatch.setattr(StepContext, "of_readers", lambda ctx, x, rows=None: x)
    with make_llm(seer, enforce_eager=True) as llm:
        [output] = llm.generate(ASKED[1], replace(SHORT, max_tokens=1, logprobs=1))
    [found] = output.outputs[0].logprobs
    theirs = seer.logits_of(PROMPTS[1], None)[-1].log_softmax(-1)
    [token] = output.outputs[0].token_ids
    assert abs(found[token].logprob - theirs[token].item()) > 1e-3


def test_what_overflows_in_a_block_that_is_passed_over_stays_there() -> None:
    encoder = SimpleNamespace(is_read=torch.tensor([[True], [False]]))
    ctx: Any = SimpleNamespace(_encoder=lambda: encoder)
    x = torch.tensor([[1.0, 2.0], [torch.inf, torch.nan]], dtype=torch.float16)
    passed = StepContext.of_readers(ctx, x)
    assert torch.equal(passed, torch.tensor([[1.0, 2.0], [0.0, 0.0]], dtype=torch.float16))
    rows = torch.tensor([1])  # one of the step's tokens alone
    assert torch.equal(StepContext.of_readers(ctx, x[rows], rows), passed[rows])


def test_rows_of_another_width_are_refused(seer: Seer) -> None:
    wanted = rf"encoder_input must be floats \[0 to {MOST_ROWS}, {HIDDEN}\], got float32 \[3, 5\]"
    with make_llm(seer) as llm, pytest.raises(RequestError, match=wanted):
        llm.generate(ASKED[0] | {"encoder_input": torch.zeros(3, 5)}, SHORT)


def test_text_alone_is_served(seer: Seer) -> None:
    require_served(parse_config(seer.theirs.config.to_dict()))


@pytest.mark.parametrize("layers", [[], [4], 1])
def test_other_layers_are_refused(seer: Seer, layers: Any) -> None:
    with pytest.raises(
        ModelError, match="cross_attention_layers must be a list of layers from 0 to 3"
    ):
        parse_config(seer.theirs.config.to_dict() | {"cross_attention_layers": layers})


def test_the_file_of_the_whole_model_is_read(seer: Seer, tmp_path: Path) -> None:
    text = seer.theirs.config.to_dict()
    outer = {"model_type": "mllama", "text_config": text, "vision_config": {}}
    assert parse_config(outer) == parse_config(text)
