"""Cases that cross page sizes and layouts with the modes, and trees with page sizes."""

import itertools
from collections.abc import Callable
from dataclasses import replace

from paceline.proof.suite.build import base_case, full, ragged_case, tree_case, uniform_case
from paceline.proof.suite.case import Case, PageLayout
from paceline.proof.suite.modes import ForwardMode
from paceline.proof.suite.trees import VERIFY_TREES, beam, draft_step

_PAGES = (32, 64, 128, 256)
Build = Callable[[Case, str], Case]  # of a base, and a name's end


def cross_cases() -> tuple[Case, ...]:
    """Page sizes x modes, layouts x modes, trees x page sizes."""
    return full(*_pages(), *_layouts(), *_trees())


def _prefixes(base: Case) -> tuple[int, ...]:
    """Three requests of two pages and more, about the ends of pages; of a page of 1, shorter."""
    size = base.page_size
    return (2 * size - 1, 2 * size, size + size // 2 + 1)


def _mixed(base: Case, end: str) -> Case:
    first, second, third = _prefixes(base)
    return ragged_case(base, f"cross-{end}", ((first, 1), (second, 7), (third, 1)))


def _accepted(base: Case, end: str) -> Case:
    first, second, third = _prefixes(base)
    return ragged_case(base, f"cross-{end}", ((first, 4), (second, 1), (third, 3)))


def _chain(base: Case, end: str) -> Case:
    return uniform_case(base, f"chain4-{end}", _prefixes(base), extend=4)


def _topk4(base: Case, end: str) -> Case:
    return tree_case(base, f"topk4-{end}", _prefixes(base), VERIFY_TREES["topk4"])


def _topk2_step3(base: Case, end: str) -> Case:
    return tree_case(base, f"topk2-step3-{end}", _prefixes(base), draft_step(beam(2, 4), 3))


def _frozen(base: Case, end: str) -> Case:
    return uniform_case(replace(base, prefix_only=True), f"frozen-kv-{end}", _prefixes(base))


def _fixed(base: Case, end: str) -> Case:
    return uniform_case(base, f"fixed3-{end}", _prefixes(base), extend=3)


_BUILDS: tuple[tuple[ForwardMode, Build], ...] = (
    (ForwardMode.MIXED, _mixed),
    (ForwardMode.TARGET_VERIFY, _chain),
    (ForwardMode.TARGET_VERIFY, _topk4),
    (ForwardMode.DRAFT_DECODE, _topk2_step3),
    (ForwardMode.DRAFT_DECODE, _frozen),
    (ForwardMode.DRAFT_EXTEND, _accepted),
    (ForwardMode.DRAFT_EXTEND_V2, _fixed),
)


def _pages() -> tuple[Case, ...]:
    return tuple(
        build(replace(base_case(mode), page_size=size), f"page{size}")
        for mode, build in _BUILDS
        for size in _PAGES
    )


def _layouts() -> tuple[Case, ...]:
    return tuple(
        build(replace(base_case(mode), layout=layout), layout.value)
        for mode, build in _BUILDS
        if build is not _frozen
        for layout in PageLayout
        if layout not in (PageLayout.SHUFFLED, PageLayout.CONTIGUOUS)  # the default; the least
    )


def _trees() -> tuple[Case, ...]:
    """Each tree with another page size; topk4 has them all."""
    base = base_case(ForwardMode.TARGET_VERIFY)
    sizes = itertools.cycle((1, *_PAGES))
    sized = [
        (replace(base, page_size=size), name)
        for size, name in zip(sizes, VERIFY_TREES, strict=False)
    ]
    return tuple(
        tree_case(each, f"{name}-at-page{each.page_size}", _prefixes(each), VERIFY_TREES[name])
        for each, name in sized
    )
