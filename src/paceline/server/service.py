"""Service: the one model a server serves, and what endpoints ask of it."""

import asyncio
import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from paceline.core.errors import ModelError
from paceline.core.sampling_params import SamplingParams
from paceline.llm.admission import Admission, AdmittedPrompt
from paceline.llm.async_engine import AsyncEngine
from paceline.llm.llm import LLM
from paceline.plan.machine import versions
from paceline.plan.resolution import Resolution
from paceline.server.errors import ApiError
from paceline.server.limits import LIMITS
from paceline.server.places import shortened
from paceline.server.token_names import TokenNames
from paceline.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Service:
    """Everything an endpoint needs.  Immutable; the engine has an owner of its own."""

    engine: AsyncEngine
    admission: Admission
    model: str  # the name clients ask for
    names: TokenNames
    fingerprint: str  # the same for the same version and options
    created: int  # seconds since 1970

    @classmethod
    def of(cls, llm: LLM, *, model: str, max_queued: int = LIMITS.max_queued) -> "Service":
        """Serve `llm` under a name.  max_queued: see Limits."""
        return cls(
            engine=AsyncEngine(llm, max_queued=max_queued),
            admission=llm.admission,
            model=model,
            names=TokenNames(llm.admission.tokenizer),
            fingerprint=_fingerprint(llm.prepared.resolution),
            created=int(time.time()),
        )

    def check_model(self, name: str) -> None:
        """Raise 404 for a model that is not served."""
        if name != self.model:
            got, remedy = shortened(repr(name)), "ask GET /v1/models"
            raise ApiError.about(
                "model",
                expected=repr(self.model),
                got=got,
                remedy=remedy,
                param="model",
                code="model_not_found",
                status=404,
            )

    def describe(self) -> dict[str, Any]:
        """The model, as /v1/models shows it."""
        return {
            "id": self.model,
            "object": "model",
            "created": self.created,
            "owned_by": "paceline",
            "max_model_len": self.admission.context_len,
        }

    async def admit(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams
    ) -> list[AdmittedPrompt]:
        """Prompts that share their parameters, checked.  Raises RequestError."""
        return await asyncio.to_thread(self.admission.admit, prompts, params)

    async def encode(
        self, prompts: Sequence[str | Sequence[int]], max_tokens: int | None
    ) -> list[list[int]]:
        """Token ids of prompts that leave room for their answers; ids stay what they are.

        Raises RequestError, ModelError, and ApiError for one that does not fit.
        """
        room = partial(self._require_room, max_tokens=max_tokens, param="prompt")
        for prompt in prompts:
            if not isinstance(prompt, str):
                room(len(prompt))
        if not any(isinstance(prompt, str) for prompt in prompts):
            return [list(prompt) for prompt in prompts]  # type: ignore[arg-type]
        encode = partial(self._encode, room=room)
        return await asyncio.to_thread(
            lambda: [encode(each) if isinstance(each, str) else list(each) for each in prompts]
        )

    async def decode(self, token_ids: Sequence[int]) -> str:
        """The text of a prompt, special tokens included.  Raises ModelError.

        Ids that are none have no text; the engine refuses them when it takes the prompt.
        """
        known = [token for token in token_ids if 0 <= token < self.admission.config.vocab_size]
        decode = self._tokenizer.decode
        return await asyncio.to_thread(decode, known, skip_special_tokens=False)

    async def render(
        self, messages: Sequence[Mapping[str, Any]], max_tokens: int | None
    ) -> list[int]:
        """Token ids of a conversation that leaves room for its answer.  Raises as `encode` does."""
        room = partial(self._require_room, max_tokens=max_tokens, param="messages")
        return await asyncio.to_thread(self._render, messages, room)

    def _render(
        self, messages: Sequence[Mapping[str, Any]], room: Callable[..., None]
    ) -> list[int]:
        text = self._tokenizer.render_chat(messages)
        # The template alone decides on special tokens.
        return self._encode(text, room, add_special_tokens=False)

    def _encode(
        self, text: str, room: Callable[..., None], *, add_special_tokens: bool = True
    ) -> list[int]:
        """room: raises unless so many tokens leave some; asked before what may take seconds."""
        fewest = self._tokenizer.fewest_tokens(text, self.admission.context_len)
        if fewest:
            room(fewest, got=f"at least {fewest}")
        ids = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        room(len(ids))
        return ids

    def _require_room(
        self, num_tokens: int, *, max_tokens: int | None, param: str, got: str | None = None
    ) -> None:
        """Raise 400 unless a prompt has a token and leaves room for its answer."""
        if not num_tokens:
            remedy = "send at least one token, for example the begin-of-text token"
            raise ApiError.about(
                param, expected="at least one token", got="none", remedy=remedy, param=param
            )
        if num_tokens + (max_tokens or 1) > self.admission.context_len:
            asked = f"and {max_tokens} to generate" if max_tokens else "and at least 1 more"
            raise ApiError.about(
                param,
                expected=f"within the context of {self.admission.context_len} tokens",
                got=f"{got or num_tokens} {asked}",
                remedy="shorten it or ask for fewer tokens",
                param=param,
                code="context_length_exceeded",
            )

    @property
    def _tokenizer(self) -> Tokenizer:
        if self.admission.tokenizer is None:
            remedy = "send prompts as token ids to /v1/completions"
            expected = "sent to a model with tokenizer.json"
            raise ModelError.about("text", expected=expected, got="one without", remedy=remedy)
        return self.admission.tokenizer


def _fingerprint(resolution: Resolution) -> str:
    facts = json.dumps([versions(), resolution.to_json()], sort_keys=True, default=str)
    return f"fp_{hashlib.blake2b(facts.encode(), digest_size=6).hexdigest()}"
