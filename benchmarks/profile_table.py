"""The table of profile_decode.py: kernels by role, with bytes, time and share of the limit.

A kernel's role comes from its name (NAMES), and a matrix product's from what surrounds it, because
one library kernel serves several.  Worked example, one layer and the head:

    norm  product  rope  attention  product  norm  product  act  product  norm  product  sample
          qkv                       o              gate_up       down           head

Where gate_up holds the activation the two products between norms are gate_up and down.  A kernel
that no pattern knows is "other".
"""

import re
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from paceline.core.model.config import ModelConfig
from profile_work import Work, least_us, role_bytes, role_flops

# The first pattern found in a kernel's name decides.
NAMES = (
    ("reduce", r"splitK_?reduce|_reduce_splits"),  # belongs to the product before it
    ("exchange", r"_all_reduce_(norm_(polled_)?)?kernel|_all_gather_kernel"),
    ("derive", r"_derive|derive_|_shared_(common|group|place)_kernel"),
    ("commit", r"_commit|commit_|_compact_kv|_keep_states|_chain_rows|_pool_rows"),
    ("draft", r"_draft_topk|_grow_tree|_select_tree|_ngram_lookup"),
    ("sample", r"_greedy|argmax|ArgMax|_sample|softmax|MaxNan|MinNan|radix|[Ss]ort"),
    ("sample", r"_edit(_rows|ed)_kernel|_(best|scores|masses|members|cuts)_kernel"),
    ("sample", r"(?<!few)_tokens_kernel"),
    ("route", r"_moe_route|_moe_align"),
    ("experts", r"_gate_up_kernel|_down_kernel|_sum_kernel|_moe_"),
    (
        "attention",
        r"_decode_kernel|_extend_kernel|_merge_(partials|kernel)|_groups_kernel|[Aa]ttention"
        r"|flash|fmha",
    ),
    ("latents", r"_head_products_kernel|_latent_rows_kernel|_prefix_rows_kernel"),
    (
        "states",
        r"_state_(inputs|rows|step|chunks)_kernel|_(solve_chunks|decay_rates|gated_norm)_kernel",
    ),
    ("norm", r"norm"),
    ("rope", r"rope|write_kv|rotary"),
    ("act", r"act_and_mul|silu|gelu|sigmoid_gate"),
    ("product", r"nvjet|gemm|gemv|cutlass|cublas|_one_token_kernel|_few_tokens_kernel|linear"),
    ("product", r"packed_(one|few|more|many)_kernel|_skinny_scaled_kernel"),
    ("operand", r"_unpack_weight|_round_rows"),
    ("copy", r"Memcpy|Memset|memcpy"),
)
ROLES = (
    *("qkv", "o", "gate_up", "down", "head", "router", "product", "experts", "route"),
    *(
        "attention",
        "latents",
        "states",
        "norm",
        "rope",
        "act",
        "derive",
        "draft",
        "sample",
        "commit",
    ),
    *("exchange", "copy", "other"),
)
BETWEEN = frozenset(
    {"other", "copy", "reduce", "operand", "exchange"}
)  # say nothing of products beside them
# A product right after or right before a known kernel; any other follows the one before it.
FIRST_AFTER: dict[str | None, str] = {
    "attention": "o",
    "latents": "o",
    "states": "o",
    "act": "down",
    "route": "down",  # of a shared expert, whose first product stands behind the router
}
LAST_BEFORE = {
    "rope": "qkv",
    "attention": "qkv",
    "latents": "qkv",
    "states": "qkv",
    "act": "gate_up",
} | dict.fromkeys(("draft", "sample", "commit", None), "head")
NEXT_PRODUCT = {
    "qkv": "o",
    "o": "gate_up",
    "router": "gate_up",
    "gate_up": "down",
    "down": "qkv",
    None: "qkv",
}


@dataclass(frozen=True, slots=True)
class Kernel:
    """One execution on the device; microseconds."""

    name: str
    start: float
    end: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Idle:
    """Medians over steps: microseconds busy and idle, shares of a step's period.  None: of a single
    step there is no pause."""

    busy_us: float
    idle_within_us: float
    idle_between_us: float | None
    idle_within_share: float
    idle_between_share: float | None

    def line(self, limit_us: float | None) -> str:
        """One line about the whole step."""
        line = f"busy {self.busy_us:.0f} us/step"
        if limit_us is not None:
            line += f", {limit_us / self.busy_us:.1%} of the limit ({limit_us:.0f} us)"
        line += f"; idle within a step {self.idle_within_us:.1f} us ({self.idle_within_share:.1%})"
        if self.idle_between_us is not None:
            line += f", between steps {self.idle_between_us:.1f} us ({self.idle_between_share:.1%})"
        return line


def kind_of(name: str) -> str:
    """The kind of a kernel by its name alone; products have no role yet."""
    for kind, pattern in NAMES:
        if re.search(pattern, name):
            return kind
    return "other"


def roles_of(names: Sequence[str]) -> list[str]:
    """The role of each kernel of one step, in the order they ran."""
    kinds = [kind_of(name) for name in names]
    marks = [kind if kind not in BETWEEN else None for kind in kinds]
    roles = list(kinds)
    last: str | None = None
    for group in _product_groups(marks):
        before = next((mark for mark in reversed(marks[: group[0]]) if mark), None)
        after = next((mark for mark in marks[group[-1] + 1 :] if mark), None)
        found = _product_roles(before, after, len(group), last)
        for index, role in zip(group, found, strict=True):
            roles[index] = last = role
    held = "other"
    for index, kind in enumerate(kinds):
        if kind == "product":
            held = roles[index]
        elif kind == "reduce":
            roles[index] = held
    held = "other"
    for index in reversed(range(len(kinds))):
        if kinds[index] == "product":
            held = roles[index]
        elif kinds[index] == "operand":  # what it makes is what the next product multiplies
            roles[index] = held
    return roles


def split_steps(kernels: Iterable[Kernel], steps: int) -> list[list[Kernel]]:
    """The kernels of each step.  A step begins with derive; where no kernel is known as that, steps
    of equal length begin after the longest typical pause."""
    ordered = sorted(kernels, key=lambda kernel: kernel.start)
    derives = [kind_of(kernel.name) == "derive" for kernel in ordered]
    starts = [
        _with_staging(ordered, i) for i, d in enumerate(derives) if d and not (i and derives[i - 1])
    ]
    if len(starts) != steps:
        starts = _periodic_starts(ordered, steps)
    bounds = [*starts, len(ordered)]
    return [ordered[a:b] for a, b in pairwise(bounds)]


def idle(steps: Sequence[Sequence[Kernel]]) -> Idle:
    """What the device did not use of the steps."""
    busy = [sum(own_times(step)) for step in steps]
    spans = [max(k.end for k in step) - step[0].start for step in steps]
    between = [after[0].start - max(k.end for k in before) for before, after in pairwise(steps)]
    within = statistics.median(span - work for span, work in zip(spans, busy, strict=True))
    gap = max(0.0, statistics.median(between)) if between else None
    period = statistics.median(spans) + (gap or 0.0)
    return Idle(
        busy_us=statistics.median(busy),
        idle_within_us=within,
        idle_between_us=gap,
        idle_within_share=within / period,
        idle_between_share=None if gap is None else gap / period,
    )


def own_times(step: Sequence[Kernel]) -> list[float]:
    """Microseconds each kernel adds to the device's busy time; overlap counts for the earlier."""
    times, reached = [], float("-inf")
    for kernel in step:
        times.append(max(0.0, kernel.end - max(kernel.start, reached)))
        reached = max(reached, kernel.end)
    return times


def role_rows(
    steps: Sequence[Sequence[Kernel]],
    config: ModelConfig,
    work: Work,
    *,
    bandwidth: float | None,
    flops: float | None,
) -> list[dict[str, object]]:
    """One row per role, in the order of ROLES; time is the mean per step."""
    calls = dict.fromkeys(ROLES, 0)
    micros = dict.fromkeys(ROLES, 0.0)
    for step in steps:
        times = own_times(step)
        for role, own in zip(roles_of([kernel.name for kernel in step]), times, strict=True):
            calls[role] += 1
            micros[role] += own
    moved, products = role_bytes(config, work), role_flops(config, work)
    total = sum(micros.values())
    rows = []
    for role in ROLES:
        if not calls[role]:
            continue
        us = micros[role] / len(steps)
        size, count = moved.get(role), products.get(role)
        limit_us = least_us(size, count, bandwidth, flops)
        rows.append(
            {
                "role": role,
                "calls_per_step": calls[role] / len(steps),
                "us_per_step": us,
                "share_of_busy": micros[role] / total,
                "bytes": size,
                "gb_s": None if size is None else size / us / 1e3,
                "tflop_s": None if count is None else count / us / 1e6,
                "share_of_limit": None if limit_us is None else limit_us / us,
            }
        )
    return rows


def show(rows: Sequence[dict[str, object]]) -> str:
    """The table for people."""
    lines = [
        f"{'role':<10}{'calls':>7}{'us/step':>10}{'busy':>8}{'MB':>10}{'GB/s':>8}{'TFLOP/s':>9}"
        f"{'of limit':>10}"
    ]
    for row in rows:
        size, share = row["bytes"], row["share_of_limit"]
        lines.append(
            f"{row['role']:<10}{row['calls_per_step']:>7.1f}{row['us_per_step']:>10.1f}"
            f"{row['share_of_busy']:>8.1%}{_shown(size, 1e-6, '.1f'):>10}"
            f"{_shown(row['gb_s'], 1, '.0f'):>8}{_shown(row['tflop_s'], 1, '.1f'):>9}"
            f"{_shown(share, 1, '.1%'):>10}"
        )
    return "\n".join(lines)


def _product_groups(marks: Sequence[str | None]) -> list[list[int]]:
    """Runs of products with no other known kernel between them, by their indices."""
    groups: list[list[int]] = []
    is_open = False
    for index, mark in enumerate(marks):
        if mark == "product":
            groups = groups if is_open else [*groups, []]
            groups[-1].append(index)
            is_open = True
        elif mark is not None:
            is_open = False
    return groups


def _product_roles(
    before: str | None, after: str | None, count: int, last: str | None
) -> list[str]:
    """The roles of `count` products between two known kernels; `last` is the role before them."""
    roles: list[str] = []
    for index in range(count):
        if index == 0 and before in FIRST_AFTER:
            last = FIRST_AFTER[before]
        elif index == 0 and (after == "route" or (after == "act" and count > 1)):
            last = "router"
        elif index == count - 1 and after in LAST_BEFORE:
            last = LAST_BEFORE[after]
        else:
            last = NEXT_PRODUCT.get(last, "product")
        roles.append(last)
    return roles


def _with_staging(ordered: Sequence[Kernel], derive: int) -> int:
    """Where a step's copies from the host, and what applies them, begin before its derive."""
    start = derive
    while start and kind_of(ordered[start - 1].name) in {"copy", "other"}:
        if "DtoH" in ordered[start - 1].name:
            break
        start -= 1
    return start


def _periodic_starts(ordered: Sequence[Kernel], steps: int) -> list[int]:
    """Starts of equally long steps, such that the pauses before them are the longest."""
    length = len(ordered) // steps
    pauses = [b.start - a.end for a, b in pairwise(ordered)]

    def typical(offset: int) -> float:
        found = pauses[offset - 1 :: length] if offset else pauses[length - 1 :: length]
        return statistics.median(found or [0.0])

    offset = max(range(max(1, length)), key=typical)
    return [offset + index * length for index in range(steps)]


def _shown(value: object, scale: float, spec: str) -> str:
    return "-" if not isinstance(value, (int, float)) else format(value * scale, spec)
