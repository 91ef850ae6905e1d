"""Service: the one model a server serves, and what endpoints ask of it."""

import asyncio
import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.core.errors import ModelError, message
from paceline.core.sampling_params import SamplingParams
from paceline.engine.admission import Admission, Admitted
from paceline.engine.async_engine import AsyncEngine
from paceline.engine.llm import LLM
from paceline.engine.tokenizer import Tokenizer
from paceline.server.errors import ApiError
from paceline.server.limits import LIMITS
from paceline.server.token_names import TokenNames


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Service:
    """Everything an endpoint needs.  Immutable; the engine has an owner of its own."""

    engine: AsyncEngine
    admission: Admission
    model: str  # the name clients ask for
    tokenizer: Tokenizer | None
    names: TokenNames
    vocab_size: int  # of the model
    context_len: int  # tokens of prompt and answer together
    fingerprint: str  # the same for the same version and options
    created: int  # seconds since 1970

    @classmethod
    def of(cls, llm: LLM, *, model: str, max_queued: int = LIMITS.max_queued) -> "Service":
        """Serve `llm` under a name.  max_queued: see Limits."""
        report = llm.report()
        tokenizer = llm.admission.tokenizer
        return cls(
            engine=AsyncEngine(llm, max_queued=max_queued),
            admission=llm.admission,
            model=model,
            tokenizer=tokenizer,
            names=TokenNames(tokenizer),
            vocab_size=report["vocab_size"],
            context_len=report["options"]["max_model_len"]["value"],
            fingerprint=_fingerprint(report),
            created=int(time.time()),
        )

    def check_model(self, name: str) -> None:
        """Raise 404 for a model that is not served."""
        if name != self.model:
            text = message(
                "model", expected=repr(self.model), got=repr(name), remedy="ask GET /v1/models"
            )
            raise ApiError(404, text, param="model", code="model_not_found")

    def describe(self) -> dict[str, Any]:
        """The model, as /v1/models shows it."""
        return {
            "id": self.model,
            "object": "model",
            "created": self.created,
            "owned_by": "paceline",
            "max_model_len": self.context_len,
        }

    async def admit(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams
    ) -> list[Admitted]:
        """Prompts that share their parameters, checked.  Raises RequestError."""
        return await asyncio.to_thread(self.admission.admit, prompts, params)

    async def encode(self, prompts: Sequence[str | Sequence[int]]) -> list[list[int]]:
        """Token ids of texts; ids stay what they are.  Raises RequestError, ModelError."""
        if not any(isinstance(prompt, str) for prompt in prompts):
            return [list(prompt) for prompt in prompts]  # type: ignore[arg-type]
        return await asyncio.to_thread(self._encode, prompts)

    async def decode(self, token_ids: Sequence[int]) -> str:
        """The text of a prompt, special tokens included.  Raises ModelError.

        Ids that are none have no text; the engine refuses them when it takes the prompt.
        """
        known = [token for token in token_ids if 0 <= token < self.vocab_size]
        decode = self._tokenizer.decode
        return await asyncio.to_thread(decode, known, skip_special_tokens=False)

    async def render(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Token ids of a conversation.  Raises RequestError, ModelError."""
        return await asyncio.to_thread(self._tokenizer.apply_chat_template, messages)

    def check_lengths(
        self, prompts: Sequence[Sequence[int]], max_tokens: int | None, *, param: str
    ) -> None:
        """Raise 400 unless every prompt leaves room for its answer, and has a token."""
        for prompt in prompts:
            if not prompt:
                remedy = "send at least one token, for example the begin-of-text token"
                text = message(param, expected="at least one token", got="none", remedy=remedy)
                raise ApiError(400, text, param=param)
            if len(prompt) + (max_tokens or 1) > self.context_len:
                asked = f"and {max_tokens} to generate" if max_tokens else "and at least 1 more"
                text = message(
                    param,
                    expected=f"within the context of {self.context_len} tokens",
                    got=f"{len(prompt)} {asked}",
                    remedy="shorten it or ask for fewer tokens",
                )
                raise ApiError(400, text, param=param, code="context_length_exceeded")

    @property
    def _tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            remedy = "send prompts as token ids to /v1/completions"
            expected = "sent to a model with tokenizer.json"
            raise ModelError(message("text", expected=expected, got="one without", remedy=remedy))
        return self.tokenizer

    def _encode(self, prompts: Sequence[str | Sequence[int]]) -> list[list[int]]:
        encode: Callable[[str], list[int]] = self._tokenizer.encode
        return [encode(each) if isinstance(each, str) else list(each) for each in prompts]


def _fingerprint(report: Mapping[str, Any]) -> str:
    facts = json.dumps([report["versions"], report["options"]], sort_keys=True, default=str)
    return f"fp_{hashlib.blake2b(facts.encode(), digest_size=6).hexdigest()}"
