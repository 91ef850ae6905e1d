"""Environment: what `paceline env` shows: this machine and the attention backends on it."""

import platform
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from paceline.attention.contract import AttentionConfig, GraphSupport
from paceline.attention.registry import BACKENDS, load_backend
from paceline.core.gpus import DeviceFacts, gib
from paceline.core.model.config import Heads
from paceline.core.modes import MaskKind
from paceline.plan.machine import (
    KernelCache,
    allowed_cpus,
    cpu_facts,
    gpus,
    kernel_cache,
    local_device,
    usable_cores,
    versions,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cpu:
    name: str
    logical_cpus: int  # that this process may use
    physical_cores: int  # likewise
    native_bf16: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Of the host."""

    total_bytes: int
    available_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    name: str
    total_bytes: int
    free_bytes: int
    cuda_arch: tuple[int, ...]  # compute capability


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendState:
    """Of a registered attention backend, against a plain decoder on this machine's device."""

    name: str
    live: bool
    reasons: list[str]  # every one why not


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """What was found."""

    versions: Mapping[str, str | None]  # of Python and of libraries; None: absent
    platform: str
    executable: str
    cpu: Cpu
    memory: Memory
    gpus: tuple[Gpu, ...]
    kernel_cache: KernelCache
    backends: tuple[BackendState, ...]

    def to_json(self) -> dict[str, object]:
        """The document of docs/schemas/env.json."""
        return asdict(self)

    def table(self) -> str:
        """For people."""
        cpu, memory, cache = self.cpu, self.memory, self.kernel_cache
        bf16 = "native bfloat16" if cpu.native_bf16 else "no native bfloat16"
        rows = [("platform", self.platform)]
        rows += [(name, found or "absent") for name, found in self.versions.items()]
        cores = f"{cpu.physical_cores} cores, {cpu.logical_cpus} threads"
        rows.append(("cpu", f"{cpu.name}, {cores}, {bf16}"))
        total, free = gib(memory.total_bytes), gib(memory.available_bytes)
        rows.append(("memory", f"{total}, {free} available"))
        for gpu in self.gpus:
            arch = ".".join(map(str, gpu.cuda_arch))
            rows.append(("gpu", f"{gpu.name}, {gib(gpu.total_bytes)}, arch {arch}"))
        if not self.gpus:
            rows.append(("gpu", "none"))
        for backend in self.backends:
            state = "live" if backend.live else "not live: " + "; ".join(backend.reasons)
            rows.append((f"backend {backend.name}", state))
        rows.append(("kernel cache", f"{cache.folder}, {cache.entries} entries"))
        width = max(len(name) for name, _ in rows) + 2
        return "\n".join(f"{name:<{width}}{said}" for name, said in rows)


def environment() -> Environment:
    """Of this process."""
    cpu = cpu_facts()
    return Environment(
        versions=versions(),
        platform=platform.platform(),
        executable=sys.executable,
        cpu=Cpu(
            name=cpu.name,
            logical_cpus=len(allowed_cpus()),
            physical_cores=usable_cores(),
            native_bf16=cpu.native_bf16,
        ),
        memory=Memory(total_bytes=cpu.total_bytes, available_bytes=cpu.free_bytes),
        gpus=tuple(
            Gpu(
                name=gpu.name,
                total_bytes=gpu.total_bytes,
                free_bytes=gpu.free_bytes,
                cuda_arch=gpu.cuda_arch or (),
            )
            for gpu in gpus()
        ),
        kernel_cache=kernel_cache(),
        backends=backends(local_device()),
    )


def backends(device: DeviceFacts) -> tuple[BackendState, ...]:
    """Each registered one on `device`."""
    wanted, found = plain_decoder(device), []
    for name in BACKENDS:
        reasons = load_backend(name).unsupported_reasons(wanted)
        found.append(BackendState(name=name, live=not reasons, reasons=reasons))
    return tuple(found)


def plain_decoder(device: DeviceFacts) -> AttentionConfig:
    """The least a decoder asks of a backend: causal, grouped heads, head dim 128."""
    import torch

    dtype = torch.bfloat16 if device.native_bf16 else torch.float32
    return AttentionConfig(
        device_type=device.device_type,
        cuda_arch=device.cuda_arch,
        dtype=dtype,
        kv_dtype=dtype,
        page_size=16,
        heads=(Heads(32, 8, 128, 128),),
        window=False,
        soft_cap=False,
        sinks=False,
        masks=frozenset({MaskKind.CAUSAL}),
        needs_lse=False,
        graph=GraphSupport.DECODE,
    )
