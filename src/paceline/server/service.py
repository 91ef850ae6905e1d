"""Service: the one model a server serves, and what endpoints ask of it."""

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from fastapi import Request

from paceline.core.modes import End
from paceline.engine.request import Share
from paceline.server.bodies.body import LARGE, SMALL, read_body
from paceline.server.bodies.reader import COMPLETIONS, TOLD, Reader, Reading
from paceline.server.bodies.worker import BodyWorker, ReaderFacts
from paceline.server.border.messages import NO_VECTORS, Ready, Vectors
from paceline.server.border.remote import RemoteEngine
from paceline.server.life import Life
from paceline.server.telemetry.meters import Meters
from paceline.server.token_names import TokenNames
from paceline.server.tools.formats import BY_TEMPLATE, Parsers
from paceline.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Service:
    """Everything an endpoint needs.  Immutable; the engine has an owner of its own."""

    engine: RemoteEngine
    reader: Reader
    worker: BodyWorker
    life: Life
    meters: Meters
    weights: Mapping[str, float]  # by client, where it is not 1
    names: TokenNames
    fingerprint: str  # the same for the same version and options
    created: int  # seconds since 1970
    ends: tuple[End, ...] = ()  # what requests may ask of it
    vectors: Vectors = NO_VECTORS

    @classmethod
    def of(
        cls,
        engine: RemoteEngine,
        served: Ready,
        *,
        model: str,
        life: Life,
        weights: Mapping[str, float] = MappingProxyType({}),
        parsers: Parsers = BY_TEMPLATE,
    ) -> "Service":
        """Serve `engine`, which is ready, under a name.  Reads its tokenizer.  weights: by client.

        Raises ModelError, and ConfigError for parsers that do not fit the model's chat template.
        """
        tokenizer, lowers = None, served.vectors.lowers
        if served.folder is not None:
            tokenizer = Tokenizer.from_folder(Path(served.folder), lowers=lowers)
        if tokenizer is not None:  # looks at its whole vocabulary once, here and not in the loop
            tokenizer.fewest_tokens("", 1)
        facts = ReaderFacts(
            model=model,
            context_len=served.context_len,
            max_open=engine.callers.max_open,
            vocab_size=served.vocab_size,
            folder=served.folder,
            lowers=lowers,
            vector_prompt=served.vectors.prompt,
            formats=parsers.formats(tokenizer),
        )
        return cls(
            engine=engine,
            reader=facts.reader(tokenizer),
            worker=BodyWorker(facts),
            life=life,
            meters=Meters(),
            weights=weights,
            names=TokenNames(tokenizer),
            fingerprint=served.fingerprint,
            created=int(time.time()),
            ends=served.ends,
            vectors=served.vectors,
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
            "max_model_len": self.reader.room.context_len,
            **self.reader.formats.describe(),
        }

    def share(self, request: Request, priority: int) -> Share:
        """How a request takes turns: a client is a key where there are several, else an address."""
        client = "" if request.client is None else request.client.host
        return Share(client=client, weight=self.weights.get(client, 1.0), priority=priority)

    async def read(self, endpoint: str, request: Request) -> Reading:
        """What a request's body asks for; a large one is read in a process of its own.

        Raises ApiError, RequestError, ModelError, and BusyError before anything is read that the
        engine would be asked for.
        """
        if endpoint not in TOLD:
            self.engine.callers.require_room(1)
        parts = await read_body(request)
        num_bytes = sum(map(len, parts))
        if num_bytes > LARGE:
            return await self.worker.read(endpoint, parts)
        if num_bytes <= SMALL and endpoint == COMPLETIONS:  # whose text goes through no template
            return self.reader.read(endpoint, b"".join(parts))
        return await asyncio.to_thread(self.reader.read, endpoint, b"".join(parts))
