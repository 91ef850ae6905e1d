"""The first layer at fault: two engines compute the same tokens, and their layers are compared.

The reference computes them plainly, once as a prompt and once token by token: how far these two lie
apart is what rounding may do.  The contender computes them in the form in which it went wrong: the
rows of a round, single steps, or a prompt.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.core.draft_shape import DraftShape
from paceline.llm.llm import LLM
from paceline.llm.teacher import TeacherForm, TeacherOutput

NOISE_FACTOR = 4.0  # another backend or another width may round more than the two plain forms do
LEAST_ULPS = 4.0  # of the dtype, where the two forms agree by chance


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCase:
    """Tokens behind which two engines disagree."""

    tokens: tuple[int, ...]  # prompt, and what both generated
    num_prompt: int
    dtype: torch.dtype

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - self.num_prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """What the reference makes of a case."""

    plain: TeacherOutput
    allowance: tuple[float, ...]  # [num_layers] difference that rounding explains


@dataclass(frozen=True, slots=True, kw_only=True)
class Blame:
    """What a contender makes of it."""

    layer: int | None  # the first that differs by more than its allowance
    detail: str


def expect(reference: LLM, case: LayerCase) -> Expected:
    """Read with the reference, which must be idle."""
    teacher, num = reference.teacher(), len(case.tokens)
    plain = teacher.read(case.tokens, TeacherForm.plain(num), layers=True)
    least = LEAST_ULPS * torch.finfo(case.dtype).eps
    # A prompt of one token has no second form of the same rows.
    start = max(1, min(case.num_prompt, num - 1))
    stepped = teacher.read(case.tokens, TeacherForm.decode(start), layers=True)
    return Expected(
        plain=plain,
        allowance=tuple(
            max(NOISE_FACTOR * difference, least)
            for difference in differences(plain.layers, stepped.layers)
        ),
    )


def blame(contender: LLM, case: LayerCase, expected: Expected, shape: DraftShape | None) -> Blame:
    """Read with the contender, which must be idle.  shape: of its rounds; None: it has none."""
    teacher = contender.teacher()
    form, words = form_of(case, shape)
    found = teacher.read(case.tokens, form, layers=True)
    layer, detail = _first(expected, found)
    if layer is None:
        return Blame(
            layer=None,
            detail=f"every layer agrees about the same tokens, {words}: look at what is sampled, "
            "accepted and committed, and at the cache that earlier steps left",
        )
    where = f"{detail}, {words}"
    if form.start < len(case.tokens):
        plain = teacher.read(case.tokens, TeacherForm.plain(len(case.tokens)), layers=True)
        is_plain, _ = _first(expected, plain)
        where += "; so it does as a prompt" if is_plain == layer else "; as a prompt it agrees"
    return Blame(layer=layer, detail=where)


def form_of(case: LayerCase, shape: DraftShape | None) -> tuple[TeacherForm, str]:
    """How a contender computed the last tokens of a case, and in words."""
    num = len(case.tokens)
    if case.num_generated == 0:
        return TeacherForm.plain(num), "computed as a prompt"
    if shape is None:
        return TeacherForm.decode(case.num_prompt), "computed one by one"
    start = max(case.num_prompt, num - shape.max_path)
    kind = "chain" if shape.is_chain else "tree"
    return TeacherForm.verify(
        start, shape
    ), f"computed as a {kind} of {shape.num_draft_tokens} rows"


def differences(wanted: Sequence[Tensor], got: Sequence[Tensor]) -> tuple[float, ...]:
    """[num_layers] the largest distance of a token's hidden states, by the length of the first."""
    pairs = zip(wanted, got, strict=True)
    return tuple(float(((a - b).norm(dim=1) / a.norm(dim=1)).max()) for a, b in pairs)


def _first(expected: Expected, found: TeacherOutput) -> tuple[int | None, str]:
    apart = differences(expected.plain.layers, found.layers)
    for layer, (difference, allowed) in enumerate(zip(apart, expected.allowance, strict=True)):
        if not difference <= allowed:  # NaN is a fault too
            return layer, f"layer {layer} differs by {difference:.1e}, {allowed:.1e} is allowed"
    return None, ""
