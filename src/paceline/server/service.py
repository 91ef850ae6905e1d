"""Service: the one model a server serves, and what endpoints ask of it."""

import asyncio
import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from fastapi import Request

from paceline.core.sampling_params import SamplingParams
from paceline.engine.request import Share
from paceline.llm.admission import Admission, AdmittedPrompt
from paceline.llm.async_engine import AsyncEngine
from paceline.llm.llm import LLM
from paceline.plan.machine import versions
from paceline.plan.resolution import Resolution
from paceline.server.body import LARGE, read_body
from paceline.server.life import Life
from paceline.server.limits import LIMITS
from paceline.server.meters import Look, Meters
from paceline.server.reader import Reader, Reading
from paceline.server.token_names import TokenNames
from paceline.server.tools.formats import BY_TEMPLATE, Parsers
from paceline.server.worker import BodyWorker, ReaderFacts

_LOOK_S = 2.0  # longer than a turn


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Service:
    """Everything an endpoint needs.  Immutable; the engine has an owner of its own."""

    engine: AsyncEngine
    admission: Admission
    reader: Reader
    worker: BodyWorker
    life: Life
    meters: Meters
    weights: Mapping[str, float]  # by client, where it is not 1
    names: TokenNames
    fingerprint: str  # the same for the same version and options
    created: int  # seconds since 1970

    @classmethod
    def of(
        cls,
        llm: LLM,
        *,
        model: str,
        max_queued: int = LIMITS.max_queued,
        weights: Mapping[str, float] = MappingProxyType({}),
        parsers: Parsers = BY_TEMPLATE,
    ) -> "Service":
        """Serve `llm` under a name.  max_queued: see ServerLimits; weights: by client.

        Raises ConfigError for parsers that do not fit the model's chat template.
        """
        engine, admission = AsyncEngine(llm, max_queued=max_queued), llm.admission
        folder = llm.prepared.source.tokenizer
        facts = ReaderFacts(
            model=model,
            context_len=admission.context_len,
            max_open=engine.max_open,
            vocab_size=admission.config.vocab_size,
            folder=None if folder is None else str(folder.parent),
            formats=parsers.formats(admission.tokenizer),
        )
        return cls(
            engine=engine,
            admission=admission,
            reader=facts.reader(admission.tokenizer),
            worker=BodyWorker(facts),
            life=Life(),
            meters=Meters(),
            weights=weights,
            names=TokenNames(llm.admission.tokenizer),
            fingerprint=_fingerprint(llm.prepared.resolution),
            created=int(time.time()),
        )

    @property
    def model(self) -> str:
        """The name clients ask for."""
        return self.reader.model

    def describe(self) -> dict[str, Any]:
        """The model, as /v1/models shows it."""
        return {
            "id": self.model,
            "object": "model",
            "created": self.created,
            "owned_by": "paceline",
            "max_model_len": self.admission.context_len,
            **self.reader.formats.describe(),
        }

    async def look(self) -> Look | None:
        """What the engine does; None where it does not say so in time."""
        if self.engine.failure is not None:
            return None
        try:
            async with asyncio.timeout(_LOOK_S):
                return await self.engine.ask(Look.at)
        except TimeoutError:
            return None

    def share(self, request: Request, priority: int) -> Share:
        """How a request takes turns: a client is a key where there are several, else an address."""
        client = "" if request.client is None else request.client.host
        return Share(client=client, weight=self.weights.get(client, 1.0), priority=priority)

    async def read(self, endpoint: str, request: Request) -> Reading:
        """What a request's body asks for; a large one is read in a process of its own.

        Raises ApiError, RequestError, ModelError, and BusyError before anything is read.
        """
        self.engine.require_room(1)
        parts = await read_body(request)
        if sum(map(len, parts)) > LARGE:
            return await self.worker.read(endpoint, parts)
        return await asyncio.to_thread(self.reader.read, endpoint, b"".join(parts))

    async def admit(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams
    ) -> list[AdmittedPrompt]:
        """Prompts that share their parameters, checked.  Raises RequestError."""
        return await asyncio.to_thread(self.admission.admit, prompts, params)


def _fingerprint(resolution: Resolution) -> str:
    facts = json.dumps([versions(), resolution.to_json()], sort_keys=True, default=str)
    return f"fp_{hashlib.blake2b(facts.encode(), digest_size=6).hexdigest()}"
