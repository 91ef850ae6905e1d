"""How much one step holds when nobody says."""

from dataclasses import dataclass, replace

from paceline.core.gpus import GIB, DeviceFacts
from paceline.core.model.config import ModelConfig
from paceline.core.modes import End


@dataclass(frozen=True, slots=True)
class StepSize:
    """Of one step, at most."""

    requests: int
    tokens: int


USUAL_ON_CPU = StepSize(32, 1024)
# By total memory, the largest first: buffers, graphs and samplers grow with both numbers.
USUAL_ON_GPU = ((60 * GIB, StepSize(256, 8192)), (35 * GIB, StepSize(128, 4096)))
USUAL_ON_SMALL_GPU = StepSize(64, 2048)
# Where nobody decodes, no token waits for the end of a step: on a GPU so many times as long a step
# gives the host that much longer to prepare the next, and products that much more rows.  Encoders
# are so fast that they wait for the host to read texts, and begin sooner with a shorter step.
POOLED_STEPS = 2


def usual_step(device: DeviceFacts, config: ModelConfig) -> tuple[StepSize, str]:
    """(what a step of the model holds on the device, why that)."""
    if device.device_type == "cpu":
        return USUAL_ON_CPU, "usual on cpu"
    size, why = USUAL_ON_SMALL_GPU, f"usual on cuda below {USUAL_ON_GPU[-1][0] // GIB} GiB"
    for least, larger in reversed(USUAL_ON_GPU):
        if device.total_bytes >= least:
            size, why = larger, "usual on cuda"
    if End.GENERATE in config.ends or config.looks_ahead:
        return size, why
    return replace(size, tokens=POOLED_STEPS * size.tokens), f"{why} where nothing is generated"
