"""The sampler: logits to token ids, on the device, over rows = request x position.

Lives here: the request table's sampling columns, the logits processors, the keyed noise and the
one `sample` every phase calls.  What a caller may ask is checked in `core.sampling_params`; when a
request ends is the runner's and the engine's business.
"""

from paceline.layers.sampling.noise import gumbel
from paceline.layers.sampling.process import keep_mask, process_logits
from paceline.layers.sampling.sample import Sampled, sample
from paceline.layers.sampling.table import NO_TOKEN, PackedRow, SamplingTable, pack_row

__all__ = [
    "NO_TOKEN",
    "PackedRow",
    "Sampled",
    "SamplingTable",
    "gumbel",
    "keep_mask",
    "pack_row",
    "process_logits",
    "sample",
]
