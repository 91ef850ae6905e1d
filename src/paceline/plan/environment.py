"""Environment: the document of `paceline env`: this machine and the attention backends on it."""

from collections.abc import Mapping
from typing import Any

from paceline.attention.contract import AttentionConfig, GraphSupport
from paceline.attention.registry import BACKENDS, load_backend
from paceline.core.gpus import DeviceFacts, gib
from paceline.core.model.config import Heads
from paceline.core.modes import MaskKind
from paceline.plan.machine import describe, local_device


def environment() -> dict[str, object]:
    """`machine.describe()` and, per backend, whether it is live or every reason why not."""
    device = local_device()
    return {**describe(), "backends": backends(device)}


def backends(device: DeviceFacts) -> list[dict[str, object]]:
    """Each registered backend against a plain decoder on `device`."""
    wanted = plain_decoder(device)
    rows: list[dict[str, object]] = []
    for name in BACKENDS:
        reasons = load_backend(name).unsupported_reasons(wanted)
        rows.append({"name": name, "live": not reasons, "reasons": reasons})
    return rows


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


def show(document: Mapping[str, Any]) -> str:
    """The document for people."""
    cpu, memory, cache = document["cpu"], document["memory"], document["kernel_cache"]
    bf16 = "native bfloat16" if cpu["native_bf16"] else "no native bfloat16"
    rows = [("platform", document["platform"])]
    rows += [(name, found or "absent") for name, found in document["versions"].items()]
    cores = f"{cpu['physical_cores']} cores, {cpu['logical_cpus']} threads"
    rows.append(("cpu", f"{cpu['name']}, {cores}, {bf16}"))
    total, free = gib(memory["total_bytes"]), gib(memory["available_bytes"])
    rows.append(("memory", f"{total}, {free} available"))
    for gpu in document["gpus"]:
        arch = ".".join(map(str, gpu["cuda_arch"]))
        rows.append(("gpu", f"{gpu['name']}, {gib(gpu['total_bytes'])}, arch {arch}"))
    if not document["gpus"]:
        rows.append(("gpu", "none"))
    for backend in document["backends"]:
        state = "live" if backend["live"] else "not live: " + "; ".join(backend["reasons"])
        rows.append((f"backend {backend['name']}", state))
    rows.append(("kernel cache", f"{cache['folder']}, {cache['entries']} entries"))
    width = max(len(name) for name, _ in rows) + 2
    return "\n".join(f"{name:<{width}}{said}" for name, said in rows)
