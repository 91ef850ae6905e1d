"""Makes two tokens take turns: extra_args={"alternate": what the other one's logit gains}."""

from typing import ClassVar

import torch

from paceline.layers.sampling import Column, LogitsProcessor


class Alternate(LogitsProcessor):
    arguments = frozenset({"alternate"})
    columns: ClassVar = {"gain": Column(torch.float32)}

    def pack(self, row):
        return {"gain": row.args.get("alternate", 0.0)}

    def apply(self, logits, rows, positions, state):
        other = state.token_ids[rows, positions - 1].long() ^ 1
        return logits.scatter_add(1, other[:, None], state.columns["gain"][rows, None])
