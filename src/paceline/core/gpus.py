"""Devices as facts: what a budget and a backend choice need to know of one.  No torch.

The table holds published board data, so that a model can be planned for a GPU that is not here.
Memory is a little below the marketed size, as drivers report it; a live device replaces it.
"""

from dataclasses import dataclass

from paceline.core.errors import ConfigError
from paceline.core.near import did_you_mean, plain

GIB = 1 << 30
MOST_SMS = 192  # multiprocessors of a GPU that is not known, for bounds
INTERPRETER_SMS = 4  # what kernels pretend to have on a CPU


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceFacts:
    """One device, here or by name."""

    name: str  # for people
    device_type: str  # "cpu" or "cuda"
    total_bytes: int  # memory of the device
    free_bytes: int  # of it, not used by others now; equals total for a device known by name
    cuda_arch: tuple[int, int] | None  # compute capability
    bandwidth_bytes_s: float | None  # published peak of the main memory
    matmul_flops: float | None  # published peak of dense bfloat16 products, float32 accumulation
    multiprocessors: int | None  # of a GPU
    cores: int | None  # physical cores this process may use and others leave idle (CPU)
    cpus: int | None  # logical ones it may use; None for a device known by name
    native_bf16: bool  # has bfloat16 multiply instructions
    source: str  # where the facts come from


# Words by which drivers name forms of one board that have its bandwidth and its clocks.
SAME_BOARD = frozenset({"SXM4", "SXM5", "HBM2e", "HBM3", "HBM3e"})


def _gpu(
    name: str,
    memory_gib: float,
    arch: tuple[int, int],
    *,
    tb_s: float,
    tflop_s: float | None,
    sms: int,
    source: str,
) -> DeviceFacts:
    total = int(memory_gib * GIB)
    return DeviceFacts(
        name=name,
        device_type="cuda",
        total_bytes=total,
        free_bytes=total,
        cuda_arch=arch,
        bandwidth_bytes_s=tb_s * 1e12,
        matmul_flops=None if tflop_s is None else tflop_s * 1e12,
        multiprocessors=sms,
        cores=None,
        cpus=None,
        native_bf16=arch >= (8, 0),
        source=source,
    )


# Compute capabilities: NVIDIA, "CUDA GPU Compute Capability" table.
_ROWS = (
    ("a10g", "NVIDIA A10G", 22.3, (8, 6), 0.600, None, "AWS G5 instance page: 24 GB, 600 GB/s"),
    ("a100-40gb", "NVIDIA A100 40GB", 39.4, (8, 0), 1.555, 312.0, "NVIDIA A100 datasheet, SXM4"),
    ("a100-80gb", "NVIDIA A100 80GB", 79.2, (8, 0), 2.039, 312.0, "NVIDIA A100 datasheet, SXM4"),
    ("b200", "NVIDIA B200", 178.3, (10, 0), 8.0, 2250.0, "NVIDIA DGX B200 datasheet, an eighth"),
    ("h100", "NVIDIA H100 80GB", 79.1, (9, 0), 3.35, 989.4, "NVIDIA H100 datasheet, SXM5"),
    ("h200", "NVIDIA H200", 139.8, (9, 0), 4.8, 989.4, "NVIDIA H200 datasheet, SXM"),
    ("l4", "NVIDIA L4", 22.0, (8, 9), 0.300, 121.0, "NVIDIA L4 datasheet"),
    ("l40s", "NVIDIA L40S", 44.4, (8, 9), 0.864, 362.05, "NVIDIA L40S datasheet"),
    ("rtx-3090", "NVIDIA GeForce RTX 3090", 23.6, (8, 6), 0.936, 71.0, "NVIDIA GA102 whitepaper"),
    ("rtx-4090", "NVIDIA GeForce RTX 4090", 23.5, (8, 9), 1.008, 165.2, "NVIDIA Ada whitepaper"),
    (
        "rtx-5090",
        "NVIDIA GeForce RTX 5090",
        31.4,
        (12, 0),
        1.792,
        209.5,
        "NVIDIA RTX Blackwell whitepaper",
    ),
)
# Multiprocessors that are enabled, from NVIDIA's architecture whitepapers and datasheets.
_SMS = {
    "a10g": 80,
    "a100-40gb": 108,
    "a100-80gb": 108,
    "b200": 148,
    "h100": 132,
    "h200": 132,
    "l4": 58,
    "l40s": 142,
    "rtx-3090": 82,
    "rtx-4090": 128,
    "rtx-5090": 170,
}
GPUS: dict[str, DeviceFacts] = {
    key: _gpu(name, memory, arch, tb_s=tb_s, tflop_s=tflop_s, sms=_SMS[key], source=source)
    for key, name, memory, arch, tb_s, tflop_s, source in _ROWS
}


def published_row(driver_name: str) -> DeviceFacts | None:
    """The table's row of a board, by the name its driver gives; None where there is none.

    Words the driver adds must be known to change nothing: "NVIDIA H100 PCIe" is another board.
    """
    words = set(driver_name.replace("-", " ").split())
    for row in GPUS.values():
        named = set(row.name.split())
        if named <= words and words - named <= SAME_BOARD:
            return row
    return None


def gpu_by_name(name: str) -> DeviceFacts:
    """The table's row, whatever the case and the dashes.  Raises ConfigError listing the names."""
    rows = [row for key, row in GPUS.items() if plain(key) == plain(name)]
    if not rows:
        leave = "leave --gpu out to plan for this machine"
        raise ConfigError.about(
            "gpu",
            expected="one of " + ", ".join(sorted(GPUS)),
            got=name,
            remedy=did_you_mean(name, GPUS, otherwise=leave),
        )
    return rows[0]


def gib(size: int) -> str:
    """Bytes for people: GiB, or MiB below a tenth of one."""
    return f"{size / GIB:.2f} GiB" if abs(size) >= GIB // 10 else f"{size / (1 << 20):.1f} MiB"
