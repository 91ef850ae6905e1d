"""Devices as facts: what a budget and a backend choice need to know of one.  No torch.

The table holds published board data, so that a model can be planned for a GPU that is not here.
Memory is a little below the marketed size, as drivers report it; a live device replaces it.
"""

from dataclasses import dataclass, replace

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

    def of_each(self, processes: int) -> "DeviceFacts":
        """What each of so many processes may take: of a CPU its share, of GPUs each has its own."""
        if processes == 1 or self.device_type != "cpu":
            return self
        return replace(
            self,
            total_bytes=self.total_bytes // processes,
            free_bytes=self.free_bytes // processes,
            cores=None if self.cores is None else max(1, self.cores // processes),
        )


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
        name=f"NVIDIA {name}",
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


# Compute capabilities: NVIDIA, "CUDA GPU Compute Capability" table; multiprocessors that are
# enabled: NVIDIA's architecture whitepapers and datasheets.
_ROWS = (
    ("a10g", "A10G", 22.3, (8, 6), 0.600, None, 80, "AWS G5 instance page: 24 GB, 600 GB/s"),
    ("a100-40gb", "A100 40GB", 39.4, (8, 0), 1.555, 312.0, 108, "NVIDIA A100 datasheet, SXM4"),
    ("a100-80gb", "A100 80GB", 79.2, (8, 0), 2.039, 312.0, 108, "NVIDIA A100 datasheet, SXM4"),
    ("b200", "B200", 178.3, (10, 0), 8.0, 2250.0, 148, "NVIDIA DGX B200 datasheet, an eighth"),
    ("h100", "H100 80GB", 79.1, (9, 0), 3.35, 989.4, 132, "NVIDIA H100 datasheet, SXM5"),
    ("h200", "H200", 139.8, (9, 0), 4.8, 989.4, 132, "NVIDIA H200 datasheet, SXM"),
    ("l4", "L4", 22.0, (8, 9), 0.300, 121.0, 58, "NVIDIA L4 datasheet"),
    ("l40s", "L40S", 44.4, (8, 9), 0.864, 362.05, 142, "NVIDIA L40S datasheet"),
    ("rtx-3090", "GeForce RTX 3090", 23.6, (8, 6), 0.936, 71.0, 82, "NVIDIA GA102 whitepaper"),
    ("rtx-4090", "GeForce RTX 4090", 23.5, (8, 9), 1.008, 165.2, 128, "NVIDIA Ada whitepaper"),
    (
        "rtx-5090",
        "GeForce RTX 5090",
        31.4,
        (12, 0),
        1.792,
        209.5,
        170,
        "NVIDIA RTX Blackwell whitepaper",
    ),
)
GPUS: dict[str, DeviceFacts] = {
    key: _gpu(name, memory, arch, tb_s=tb_s, tflop_s=tflop_s, sms=sms, source=source)
    for key, name, memory, arch, tb_s, tflop_s, sms, source in _ROWS
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
