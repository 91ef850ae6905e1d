"""What a service refuses before a request reaches the engine."""

import asyncio
from dataclasses import fields
from types import SimpleNamespace

import pytest

from paceline.server.errors import ApiError
from paceline.server.service import Service


def make_service() -> Service:
    """Of a context of 8 tokens; nothing here reaches its other parts."""
    parts = dict.fromkeys(field.name for field in fields(Service))
    return Service(**parts | {"model": "tiny", "admission": SimpleNamespace(context_len=8)})


def encode(prompts: list[list[int]], max_tokens: int | None) -> list[list[int]]:
    return asyncio.run(make_service().encode(prompts, max_tokens))


@pytest.mark.parametrize(("num_prompt", "max_tokens"), [(7, None), (7, 1), (4, 4), (1, 7)])
def test_a_context_may_be_filled_to_its_last_token(num_prompt: int, max_tokens: int | None) -> None:
    prompts = [[5], [5] * num_prompt]
    assert encode(prompts, max_tokens) == prompts


@pytest.mark.parametrize(("num_prompt", "max_tokens"), [(8, None), (8, 1), (4, 5), (1, 8)])
def test_one_token_more_is_refused_in_whatever_prompt(num_prompt: int, max_tokens) -> None:
    for prompts in ([[5] * num_prompt], [[5], [5] * num_prompt]):
        with pytest.raises(ApiError, match="prompt must be within the context of 8 tokens") as got:
            encode(prompts, max_tokens)
        assert (got.value.status, got.value.code) == (400, "context_length_exceeded")


def test_an_empty_prompt_among_others_is_refused() -> None:
    with pytest.raises(ApiError, match="prompt must be at least one token, got none"):
        encode([[5], []], None)


def test_another_model_is_not_found() -> None:
    service = make_service()
    service.check_model("tiny")
    with pytest.raises(ApiError, match="model must be 'tiny', got 'Tiny'") as refused:
        service.check_model("Tiny")
    assert (refused.value.status, refused.value.code) == (404, "model_not_found")
    with pytest.raises(ApiError) as refused:
        service.check_model("k" * 10**5)
    assert len(str(refused.value)) < 200
