"""Which requests of a decode share the pages of a prefix, so that one program reads it for several.

Requests with one page in place `min_pages` - 1 are a group; the first of them leads.  A request is
in its group with the pages that it and the leader have in common, unless these are less than half
of what the closest follower has; the group shares what all in it have in common.  Groups of few
requests or pages share nothing.  Only pages that lie wholly before a request's own token count:
their keys are in the cache, and no step writes there.

Worked example: page size 16, min_pages 2, min_reqs 2, tile_reqs 4.

    page_table    [5 6 7 9] [5 6 3 0] [8 2 1 0] [5 6 7 4]      kv_lens  [60, 40, 33, 50]
    whole pages   3, 2, 2, 3
    groups        0, 1, 3 by page 6, led by 0; 2 alone
    in common     3 (all of the leader's), 2, -, 3; shared by all in it: 2
    shared_lens   [32, 32, 0, 32]
    places        [0, 1, -1, 2]             a group begins at a multiple of tile_reqs
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from paceline.core.sharing import MIN_SHARED_KEYS, MIN_SHARERS
from paceline.kernels._check import require_triton
from paceline.kernels.custom_op import define_op
from paceline.kernels.paged_attention.checks import check_index

CHUNK_KEYS = 256  # of a shared prefix that one program is worth
_ROWS = 64  # query rows of a tile: the group's heads of some requests


class SharingRule(NamedTuple):
    """From where on sharing pays, and how many requests read together."""

    min_pages: int
    min_reqs: int
    tile_reqs: int

    def tiles(self, num_reqs: int) -> int:
        """The most tiles that `num_reqs` requests fill: the last of a group need not be full."""
        return num_reqs // self.min_reqs + num_reqs // self.tile_reqs


def sharing_rule(group: int, page_size: int) -> SharingRule:
    """For `group` query heads to a KV head."""
    heads = 1 << max(group - 1, 0).bit_length()
    return SharingRule(-(-MIN_SHARED_KEYS // page_size), MIN_SHARERS, max(1, _ROWS // heads))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SharedPrefixes:
    """What a plan finds for one cache group, and its scratch; the first rows are a step's."""

    shared_lens: Tensor  # [reqs]  int32  leading keys that a request shares; 0: none
    places: Tensor  # [reqs]  int32  of the request in the tiles of its group; -1: it shares none
    leaders: Tensor  # [reqs]  int32  scratch: who leads its group; -1: too short for one
    common: Tensor  # [reqs]  int32  scratch: pages in common with the leader
    held: Tensor  # [reqs]  int32  scratch: requests that its group holds

    def of(self, num_reqs: int) -> "SharedPrefixes":
        """Of a step of so many padded requests."""
        return SharedPrefixes(
            shared_lens=self.shared_lens[:num_reqs],
            places=self.places[:num_reqs],
            leaders=self.leaders[:num_reqs],
            common=self.common[:num_reqs],
            held=self.held[:num_reqs],
        )


def shared_prefixes(max_reqs: int, device: torch.device) -> SharedPrefixes:
    """Buffers for steps of up to `max_reqs` requests."""

    def column() -> Tensor:
        return torch.empty(max_reqs, dtype=torch.int32, device=device)

    return SharedPrefixes(
        shared_lens=column(), places=column(), leaders=column(), common=column(), held=column()
    )


def find_shared_reference(
    page_table: Tensor, kv_lens: Tensor, rule: SharingRule, *, page_size: int
) -> tuple[Tensor, Tensor]:
    """The definition: shared_lens and places, [reqs] int32 each; on the host, one by one."""
    table, lens = page_table.tolist(), kv_lens.tolist()
    whole = [min(max(length - 1, 0) // page_size, page_table.shape[1]) for length in lens]
    groups: dict[int, list[int]] = {}
    for req, pages in enumerate(whole):
        if pages >= rule.min_pages:
            groups.setdefault(table[req][rule.min_pages - 1], []).append(req)
    shared, places, tile = [0] * len(lens), [-1] * len(lens), 0
    for leader, *followers in groups.values():
        common = {leader: whole[leader]}
        for req in followers:
            most = min(whole[req], whole[leader])
            differs = [a != b for a, b in zip(table[req][:most], table[leader], strict=False)]
            common[req] = differs.index(True) if True in differs else most
        closest = max((common[req] for req in followers), default=0)
        held = [req for req in common if 2 * common[req] >= closest]
        least = min(common[req] for req in held)
        if not closest or len(held) < rule.min_reqs or least < rule.min_pages:
            continue
        for rank, req in enumerate(held):
            shared[req], places[req] = least * page_size, tile * rule.tile_reqs + rank
        tile += -(-len(held) // rule.tile_reqs)
    return torch.tensor(shared, dtype=torch.int32), torch.tensor(places, dtype=torch.int32)


def find_shared(
    page_table: Tensor,
    kv_lens: Tensor,
    into: SharedPrefixes,
    rule: SharingRule,
    *,
    page_size: int,
) -> None:
    """Write what requests share into `into`, which has as many rows.

    page_table: [reqs, max_pages] int32; kv_lens: [reqs] int32, the step's token counted.
    Graph-safe: the grid depends on padded sizes only; no host sync.  Raises KernelArgumentError.
    """
    reqs = page_table.shape[0]
    check_index("kv_lens", kv_lens, (reqs,))
    for name in ("shared_lens", "places", "leaders", "common", "held"):
        check_index(name, getattr(into, name), (reqs,))
    if reqs:
        columns = (into.shared_lens, into.places, into.leaders, into.common, into.held)
        _FIND_SHARED(page_table, kv_lens, *columns, *rule, page_size)


def _launch(
    page_table: Tensor,
    kv_lens: Tensor,
    shared_lens: Tensor,
    places: Tensor,
    leaders: Tensor,
    common: Tensor,
    held: Tensor,
    min_pages: int,
    min_reqs: int,
    tile_reqs: int,
    page_size: int,
) -> None:
    require_triton("find_shared", otherwise="turn the sharing of prefixes off")
    from paceline.kernels._triton.shared_prefix import launch_find_shared

    into = SharedPrefixes(
        shared_lens=shared_lens, places=places, leaders=leaders, common=common, held=held
    )
    launch_find_shared(
        page_table,
        kv_lens,
        into,
        SharingRule(min_pages, min_reqs, tile_reqs),
        page_size=page_size,
    )


_FIND_SHARED = define_op(
    "find_shared(Tensor page_table, Tensor kv_lens, Tensor(a!) shared_lens, Tensor(b!) places, "
    "Tensor(c!) leaders, Tensor(d!) common, Tensor(e!) held, int min_pages, int min_reqs, "
    "int tile_reqs, int page_size) -> ()",
    cpu=_launch,
    cuda=_launch,
)
