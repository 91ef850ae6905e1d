"""Makes an end token likelier the longer an answer gets, as transformers'
ExponentialDecayLengthPenalty does: extra_args={"length_decay": [tokens, factor]}.
"""

from typing import ClassVar

import torch

from paceline.core.errors import RequestError
from paceline.layers.sampling import Column, LogitsProcessor


class LengthDecay(LogitsProcessor):
    arguments = frozenset({"length_decay"})
    columns: ClassVar = {
        "start": Column(torch.int64),  # tokens known where it sets in
        "factor": Column(torch.float32),  # 1 = none
    }

    def check(self, args, vocab_size):
        got = args["length_decay"]
        is_pair = isinstance(got, tuple) and len(got) == 2
        if not is_pair or any(not isinstance(number, int | float) for number in got):
            expected, remedy = "[tokens, factor]", "pass two numbers"
            raise RequestError.about("length_decay", expected=expected, got=got, remedy=remedy)

    def pack(self, row):
        start, factor = row.args.get("length_decay", (0, 1.0))
        return {"start": row.prompt_len + start, "factor": factor}

    def apply(self, logits, rows, positions, state):
        beyond = (positions - state.columns["start"][rows]).clamp(min=0)
        growth = state.columns["factor"][rows] ** beyond - 1  # [num_rows]
        ids = state.stop_ids[rows]  # [num_rows, MAX_STOP_IDS]
        used = torch.arange(ids.shape[1], device=ids.device) < state.num_stop_ids[rows, None]
        used = used & (ids < logits.shape[-1])
        ids = ids.masked_fill(~used, 0)
        change = logits.gather(1, ids).abs() * growth[:, None]
        return logits.scatter_add(1, ids, change.masked_fill(~used, 0.0))
