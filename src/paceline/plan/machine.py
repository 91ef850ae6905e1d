"""This machine: its devices, the versions of what the engine leans on, and the kernel cache.

Reads /proc and package metadata; only `local_device` and `gpus` import torch.
"""

import gc
import os
import platform
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from paceline.core.errors import ConfigError
from paceline.core.gpus import DeviceFacts, published_row
from paceline.core.plugins import installed_version

LIBRARIES = (
    "paceline",
    "torch",
    "triton",
    "numpy",
    "safetensors",
    "tokenizers",
    "huggingface_hub",
    "transformers",
)
BF16_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "bf16"})  # x86 and aarch64 names


def versions() -> dict[str, str | None]:
    """Version of Python and of each library the engine may use; None where it is absent."""
    return {"python": platform.python_version(), **installed(LIBRARIES)}


def installed(packages: Sequence[str]) -> dict[str, str | None]:
    """Version of each package; None where it is absent."""
    return {name: installed_version(name) for name in packages}


def local_device(device_type: str | None = None) -> DeviceFacts:
    """The current GPU when there is one, otherwise the CPU; or the one asked for.

    Raises ConfigError when a GPU is asked for and none is usable.
    """
    if device_type == "cpu":
        return cpu_facts()
    import torch

    if torch.cuda.is_available():
        return _gpu_facts(torch.cuda.current_device())
    if device_type == "cuda":
        raise ConfigError.about(
            "device",
            expected="a CUDA device that torch can use",
            got=f"none (torch {torch.__version__}, built for CUDA {torch.version.cuda})",
            remedy="use --device cpu, or install a torch build for this GPU's driver",
        )
    return cpu_facts()


def gpus() -> list[DeviceFacts]:
    """Every GPU torch can use."""
    import torch

    if not torch.cuda.is_available():
        return []
    return [_gpu_facts(index) for index in range(torch.cuda.device_count())]


def num_gpus_from_current() -> int:
    """The current GPU and those behind it, which ranks take one by one."""
    import torch

    return torch.cuda.device_count() - torch.cuda.current_device()


def cpu_facts() -> DeviceFacts:
    """The CPU of this machine, and of it what this process may use."""
    info = _cpuinfo()
    total, free = _memory()
    flags = set((info.get("flags") or info.get("Features") or "").split())
    return DeviceFacts(
        name=info.get("model name") or platform.processor() or platform.machine(),
        device_type="cpu",
        total_bytes=total,
        free_bytes=free,
        cuda_arch=None,
        bandwidth_bytes_s=None,
        matmul_flops=None,
        multiprocessors=None,
        cores=free_cores(),
        cpus=len(allowed_cpus()),
        native_bf16=bool(flags & BF16_FLAGS),
        source="/proc/cpuinfo and /proc/meminfo",
    )


def usable_cores() -> int:
    """Physical cores among the logical ones this process may run on."""
    allowed = allowed_cpus()
    siblings = set()
    for cpu in allowed:
        path = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        siblings.add(path.read_text().strip() if path.is_file() else str(cpu))
    return len(siblings)


def free_cores() -> int:
    """Those of `usable_cores` that others leave idle and the control group pays for; at least 1.

    A thread that waits for one without a core spins: it takes time, and takes it from others.
    """
    cores = usable_cores() - busy_cpus()
    quota = cpu_quota()
    return max(1, cores if quota is None else min(cores, int(quota)))


def busy_cpus(path: Path = Path("/proc/loadavg")) -> int:
    """CPUs that others keep busy: now, and over the last minute; 0 where `path` is absent.

    Both, so that neither a run that has just ended nor a moment's peak counts.
    """
    if not path.is_file():
        return 0
    average, _, _, runnable, _ = path.read_text().split()
    now = int(runnable.partition("/")[0]) - 1  # without this process
    return max(0, min(round(float(average)), now))


def cpu_quota(root: Path = Path("/sys/fs/cgroup")) -> float | None:
    """CPUs that the control group (version 2, or 1) may use on average; None: all."""
    new, old = root / "cpu.max", root / "cpu"
    if new.is_file():
        quota, period = new.read_text().split()
    elif (old / "cpu.cfs_quota_us").is_file():
        quota = (old / "cpu.cfs_quota_us").read_text().strip()
        period = (old / "cpu.cfs_period_us").read_text().strip()
    else:
        return None
    return None if quota in ("max", "-1") else int(quota) / int(period)


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelCache:
    """The folder where Triton keeps compiled kernels."""

    folder: str
    exists: bool
    entries: int


def kernel_cache() -> KernelCache:
    """As it is now."""
    folder = Path(os.environ.get("TRITON_CACHE_DIR") or Path.home() / ".triton" / "cache")
    entries = sum(1 for _ in folder.iterdir()) if folder.is_dir() else 0
    return KernelCache(folder=str(folder), exists=folder.is_dir(), entries=entries)


def cache_state(device_type: str, entries_before: int) -> str:
    """ "cold": this run compiled kernels; "warm": all came from the folder; "none": no compiler.

    Told by whether the kernel cache folder gained entries since `entries_before` were counted.
    """
    if device_type == "cpu":
        return "none"
    return "warm" if kernel_cache().entries == entries_before else "cold"


def seconds_since_process_start() -> float | None:
    """Wall seconds since the kernel started this process; None where /proc does not say."""
    stat, uptime = Path("/proc/self/stat"), Path("/proc/uptime")
    if not (stat.is_file() and uptime.is_file()):
        return None
    # Field 22 counts from 1; the command name before it may hold spaces and ends with ')'.
    ticks = int(stat.read_text().rpartition(")")[2].split()[19])
    return float(uptime.read_text().split()[0]) - ticks / os.sysconf("SC_CLK_TCK")


def allowed_cpus() -> list[int]:
    """Logical CPUs that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


@contextmanager
def settled() -> Iterator[None]:
    """Within the block collections walk what comes later alone: modules and the model stay.

    For a process that serves: a whole collection took 105 to 213 ms, in which nothing is streamed.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def release_memory() -> None:
    """Give back what dead engines of this process hold: their graphs, programs and buffers refer to
    each other, and torch keeps the blocks it freed.
    """
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _gpu_facts(index: int) -> DeviceFacts:
    import torch

    release_memory()  # of an engine whose boot failed, for example
    free, total = torch.cuda.mem_get_info(index)
    arch = torch.cuda.get_device_capability(index)
    name = torch.cuda.get_device_name(index)
    row = published_row(name)
    return DeviceFacts(
        name=name,
        device_type="cuda",
        total_bytes=total,
        free_bytes=free,
        cuda_arch=arch,
        bandwidth_bytes_s=None if row is None else row.bandwidth_bytes_s,
        matmul_flops=None if row is None else row.matmul_flops,
        multiprocessors=torch.cuda.get_device_properties(index).multi_processor_count,
        cores=None,
        cpus=len(allowed_cpus()),
        native_bf16=arch >= (8, 0),
        source="the CUDA driver",
    )


def _cpuinfo() -> dict[str, str]:
    """The first processor's lines of /proc/cpuinfo; empty where there is none."""
    path = Path("/proc/cpuinfo")
    if not path.is_file():
        return {}
    first = path.read_text().split("\n\n", 1)[0]
    pairs = (line.split(":", 1) for line in first.splitlines() if ":" in line)
    return {key.strip(): value.strip() for key, value in pairs}


def _memory() -> tuple[int, int]:
    """(total, available) bytes, within the control group's limit."""
    path = Path("/proc/meminfo")
    if not path.is_file():
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return total, total
    rows = dict(line.split(":", 1) for line in path.read_text().splitlines())
    total, free = (int(rows[key].split()[0]) * 1024 for key in ("MemTotal", "MemAvailable"))
    limit = Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text().strip() if limit.is_file() else "max"
    if text != "max":
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
        total, free = min(total, int(text)), min(free, max(0, int(text) - used))
    return total, free
