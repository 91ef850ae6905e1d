"""EncoderRunner: rows that requests bring beside their tokens, and the layers that attend to them.

Worked example: page size 4; row 3 joined with 6 rows of an encoder, row 5 with none, and a padded
row.  Both extend by 1.

    encoder_lens      row 0: 1   row 3: 6   row 5: 0     of the request table
    page_table        [[3, 4], [0, 0], [0, 0]]      of the ENCODER group
    prefix_lens       [6, 0, 1]                     gathered in every step
    kv_lens           [7, 1, 2]                     prefix + extend

All rows of an encoder are visible to every token: to its layers they are a prefix, and
Part.PREFIX of any attention backend is cross attention.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from paceline.attention.contract import AttentionBackend, LayerCache, Limits
from paceline.cache.pool import KVPool
from paceline.core.errors import IntegrityError
from paceline.core.model.config import ModelConfig
from paceline.core.modes import MaskKind
from paceline.core.request.input_rows import EncoderInput
from paceline.kernels.step_view import StepView
from paceline.kernels.write_kv import bind_write_kv
from paceline.layers.attention import EncoderPlan, layer_caches
from paceline.models.causal_lm import CausalLM
from paceline.runner.table.request_table import RequestTable


def derive_encoder(encoder_lens: Tensor, view: StepView, group: int) -> None:
    """Fill the lengths of ENCODER groups, of which `group` is one.  Device-only, static shapes.

    encoder_lens: [rows] int32 of the request table.
    """
    lens = view.groups[group]
    torch.index_select(encoder_lens, 0, view.row_ids, out=lens.prefix_lens)
    torch.add(lens.prefix_lens, view.extend_lens, out=lens.kv_lens)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EncoderRunner:
    """The ENCODER groups of a model, with what plans and runs the layers that read them."""

    groups: tuple[int, ...]  # [num_encoder_groups] of the step's view, one behind the other
    pools: tuple[KVPool, ...]  # [num_encoder_groups]
    most_rows: int  # of a request
    layers: Mapping[int, LayerCache]  # by layer id of the model; spec.group counts ENCODER groups
    backend: AttentionBackend
    backend_buffers: Any

    @classmethod
    def make(
        cls,
        config: ModelConfig,
        groups: tuple[int, ...],
        pools: Sequence[KVPool],
        backend: AttentionBackend,
        bounds: Limits,
    ) -> "EncoderRunner":
        """groups: of the step's view; bounds: of the layers that read them."""
        specs = [pool.spec for pool in pools]
        caches = layer_caches(config, specs, pools, sinks=[None] * len(bounds.layers))
        return cls(
            groups=groups,
            pools=tuple(pools),
            most_rows=config.max_encoder_len,
            layers={cache.spec.layer_id: cache for cache in caches if cache is not None},
            backend=backend,
            backend_buffers=backend.make_buffers(replace(bounds, prefix_alone=True)),
        )

    def plan(self, view: StepView) -> EncoderPlan:
        """What its layers share in a step; what the step's rows are to one another is nothing to
        them."""
        own = view.of(view.groups[self.groups[0] : self.groups[-1] + 1])
        own = replace(
            own,
            mask=MaskKind.CAUSAL,
            tree_mask=None,
            visible_end=None,
            shares_prefix=False,
            kv_len_bound=self.most_rows + view.max_extend_len,
        )
        lens = own.prefix_lens.index_select(0, own.req_ids)
        return EncoderPlan(
            backend=self.backend,
            layers=self.layers,
            plan=self.backend.plan(own, self.backend_buffers),
            is_read=(lens > 0).unsqueeze(1),
        )

    def write(self, model: CausalLM, given: EncoderInput, table: RequestTable, row: int) -> None:
        """Write the K and V that the model's layers make of what a request brings, once, before
        its first step.

        row: the request's, of `table`, which has its pages.  Mutates the pools.  Raises
        IntegrityError where the model makes other rows, or of other layers, than were declared.
        """
        device, data = table.token_ids.device, given.data
        if device.type == "cuda":
            data = data.pin_memory()  # torch keeps it until the copy is done
        made = {
            layer_id: (k, v)
            for layer_id, k, v in model.encoder_kv(data.to(device, non_blocking=True))
        }
        lengths = {layer_id: (len(k), len(v)) for layer_id, (k, v) in made.items()}
        if lengths != dict.fromkeys(self.layers, (given.num_rows, given.num_rows)):
            raise IntegrityError.about(
                f"rows of K and V that the model makes of encoder input {given.media_hash}",
                expected=f"{given.num_rows} of each of the layers {sorted(self.layers)}",
                got=lengths,
                remedy="declare in num_rows what encoder_kv makes, for all layers that read it",
            )
        rows = torch.arange(given.num_rows, device=device)
        for layer_id, (k, v) in made.items():
            layer = self.layers[layer_id]
            page_size = layer.k_cache.shape[1]
            page_table = table.page_tables[self.groups[layer.spec.group]][row]
            pages = page_table.index_select(0, rows // page_size)
            slots = pages.long() * page_size + rows % page_size
            bind_write_kv(k, layer.k_cache, slots, layer.k_scale)()
            bind_write_kv(v, layer.v_cache, slots, layer.v_scale)()
