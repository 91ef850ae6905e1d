"""Devices as facts: what a budget and a backend choice need to know of one.  No torch.

The table holds published board data, so that a model can be planned for a GPU that is not here.
Memory is a little below the marketed size, as drivers report it; a live device replaces it.
"""

from dataclasses import dataclass

from paceline.core.errors import ConfigError, message

GIB = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceFacts:
    """One device, here or by name."""

    name: str  # for people
    device_type: str  # "cpu" or "cuda"
    total_bytes: int  # memory of the device
    free_bytes: int  # of it, not used by others now; equals total for a device known by name
    cuda_arch: tuple[int, int] | None  # compute capability
    bandwidth_bytes_s: float | None  # published peak of the main memory
    cores: int | None  # physical cores this process may use (CPU)
    native_bf16: bool  # has bfloat16 multiply instructions
    source: str  # where the facts come from


def _gpu(
    name: str, memory_gib: float, arch: tuple[int, int], tb_s: float, source: str
) -> DeviceFacts:
    total = int(memory_gib * GIB)
    return DeviceFacts(
        name=name,
        device_type="cuda",
        total_bytes=total,
        free_bytes=total,
        cuda_arch=arch,
        bandwidth_bytes_s=tb_s * 1e12,
        cores=None,
        native_bf16=arch >= (8, 0),
        source=source,
    )


# Compute capabilities: NVIDIA, "CUDA GPU Compute Capability" table.
GPUS: dict[str, DeviceFacts] = {
    "a10g": _gpu("NVIDIA A10G", 22.3, (8, 6), 0.600, "AWS G5 instance page: 24 GB, 600 GB/s"),
    "a100-40gb": _gpu("NVIDIA A100 40GB", 39.4, (8, 0), 1.555, "NVIDIA A100 datasheet, SXM4 40GB"),
    "a100-80gb": _gpu("NVIDIA A100 80GB", 79.2, (8, 0), 2.039, "NVIDIA A100 datasheet, SXM4 80GB"),
    "b200": _gpu(
        "NVIDIA B200", 178.3, (10, 0), 8.0, "NVIDIA DGX B200 datasheet: 1440 GB and 64 TB/s by 8"
    ),
    "h100": _gpu("NVIDIA H100 80GB", 79.1, (9, 0), 3.35, "NVIDIA H100 datasheet, SXM5"),
    "h200": _gpu("NVIDIA H200", 139.8, (9, 0), 4.8, "NVIDIA H200 datasheet, SXM"),
    "l4": _gpu("NVIDIA L4", 22.0, (8, 9), 0.300, "NVIDIA L4 datasheet"),
    "l40s": _gpu("NVIDIA L40S", 44.4, (8, 9), 0.864, "NVIDIA L40S datasheet"),
    "rtx-3090": _gpu("NVIDIA GeForce RTX 3090", 23.6, (8, 6), 0.936, "NVIDIA GA102 whitepaper"),
    "rtx-4090": _gpu("NVIDIA GeForce RTX 4090", 23.5, (8, 9), 1.008, "NVIDIA Ada whitepaper"),
    "rtx-5090": _gpu(
        "NVIDIA GeForce RTX 5090", 31.4, (12, 0), 1.792, "NVIDIA RTX Blackwell whitepaper"
    ),
}


def gpu_by_name(name: str) -> DeviceFacts:
    """The table's row; '_' and upper case are accepted.  Raises ConfigError listing the names."""
    key = name.lower().replace("_", "-").replace(" ", "-")
    if key not in GPUS:
        raise ConfigError(
            message(
                "gpu",
                expected="one of " + ", ".join(sorted(GPUS)),
                got=name,
                remedy="leave --gpu out to plan for this machine",
            )
        )
    return GPUS[key]
