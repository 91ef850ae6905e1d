"""The sampler: logits to token ids, on the device, over rows = request x position.

Lives here: the request table's sampling columns, the logits processors, the keyed noise and the
one `sample` every phase calls.  What a caller may ask is checked in `core.request.sampling_params`;
when a request ends is the runner's and the engine's business.
"""

from paceline.layers.sampling.logprobs import SampledLogprobs, token_logprobs
from paceline.layers.sampling.noise import draft_seeds, gumbel
from paceline.layers.sampling.process import process_logits
from paceline.layers.sampling.processor import Column, LogitsProcessor, RowFacts, RowState, Values
from paceline.layers.sampling.rejection import DrawnDrafts
from paceline.layers.sampling.sample import Sampled, sample, unsampled
from paceline.layers.sampling.table import PackedRow, SamplingTable

__all__ = [
    "Column",
    "DrawnDrafts",
    "LogitsProcessor",
    "PackedRow",
    "RowFacts",
    "RowState",
    "Sampled",
    "SampledLogprobs",
    "SamplingTable",
    "Values",
    "draft_seeds",
    "gumbel",
    "process_logits",
    "sample",
    "token_logprobs",
    "unsampled",
]
