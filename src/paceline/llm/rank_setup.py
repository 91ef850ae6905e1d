"""What a rank is started with, and what it tells of itself, so that all ranks are alike."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import msgspec
import torch
from msgspec import Struct

from paceline.core.errors import ConfigError
from paceline.core.options.engine_options import EngineOptions
from paceline.kernels.peer_memory import PeerMemory
from paceline.llm.prepare import Prepared
from paceline.llm.rank_words import Planned, Started
from paceline.models.locate import ModelSource
from paceline.plan.machine import versions
from paceline.runner.shared_memory import BoxShape, SharedMemory
from paceline.runner.step_frames import LAYOUT


class RankSetup(Struct, frozen=True, kw_only=True):
    """What a rank's process is started with."""

    rank: int
    path: list[str]  # where the leader finds modules, plug-ins among them
    options: dict[str, Any]  # resolved by the leader, as far as they are not the usual
    memory: int  # file descriptor
    capacity: int  # of the exchange in that memory
    dtype: str  # of the exchange
    gpu: int | None  # index of its own; None: it runs on the CPU

    def map(self) -> SharedMemory:
        """This process's map of the memory."""
        return SharedMemory(self.memory, self.shape)

    def take_gpu(self) -> None:
        """Make it this process's, before anything is on one."""
        if self.gpu is not None:
            torch.cuda.set_device(self.gpu)

    def peer_memory(self) -> PeerMemory | None:
        """Of this process, new; None: all ranks are on the CPU."""
        shape = self.shape
        if self.gpu is None:
            return None
        return PeerMemory(self.rank, shape.ranks, dtype=shape.dtype)

    @property
    def shape(self) -> BoxShape:
        ranks: int = self.options["tensor_parallel_size"]
        dtype: torch.dtype = getattr(torch, self.dtype)
        return BoxShape(ranks=ranks, capacity=self.capacity, dtype=dtype)


def started() -> Started:
    """Of this process."""
    return Started(versions=versions(), layout=LAYOUT)


def planned(prepared: Prepared, num_pages: tuple[int, ...], peers: PeerMemory | None) -> Planned:
    """Of this process."""
    drafter = None if prepared.speculation is None else prepared.speculation.drafter.source
    stored = prepared.options.load_format != "dummy"
    sources = [prepared.source]
    if drafter is not None and drafter != prepared.source:  # a layer of the target's own is with it
        sources.append(drafter)
    return Planned(
        options=unusual(prepared.options),
        weights=_fingerprint(sources, stored=stored),
        num_pages=num_pages,
        box=b"" if peers is None else peers.handle,
    )


def unusual(options: EngineOptions) -> dict[str, Any]:
    """Options that are not what they are when nobody asks, as they are behind JSON."""
    usual = asdict(EngineOptions())
    found = {name: value for name, value in asdict(options).items() if value != usual[name]}
    behind: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(found))
    return behind


def _fingerprint(sources: Sequence[ModelSource], *, stored: bool) -> str:
    """Of configurations, and of the names, sizes and times of the files beside weights, those of
    Dense modules too."""
    seen: list[Any] = [each.said for each in sources]
    found = [(each.folder, each.dense) for each in sources if each.folder is not None and stored]
    folders = [folder / name for folder, dense in found for name in ("", *dense)]
    for path in [path for folder in folders for path in sorted(folder.iterdir())]:
        facts = path.stat()
        seen.append((path.name, facts.st_size, facts.st_mtime_ns))
    return hashlib.sha256(msgspec.json.encode(seen, order="sorted")).hexdigest()


def facts(of: Started) -> dict[str, Any]:
    """In which ranks must be alike before they plan."""
    return {"layout of steps": of.layout, **of.versions}


def require_alike(told: Sequence[Mapping[str, Any]]) -> None:
    """Raise ConfigError unless every rank's facts are those of the first, the leader's."""
    ours, *others = told
    reasons = [
        f"of rank {rank} {name} {theirs.get(name)}, not {ours.get(name)}"
        for rank, theirs in enumerate(others, start=1)
        for name in sorted(ours.keys() | theirs.keys())
        if ours.get(name) != theirs.get(name)
    ]
    if reasons:
        raise ConfigError.about(
            "ranks of the model",
            expected="alike",
            got="; ".join(reasons),
            remedy="start all of them from one installation and one copy of the weights",
        )
