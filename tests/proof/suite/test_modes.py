"""The forward modes: their facts agree with each other and with the page that documents them."""

import re
from pathlib import Path

from paceline.core.modes import MaskKind
from paceline.proof.suite.modes import MODE_FACTS, ExtendShape, ForwardMode, ModeFacts

PAGE = Path(__file__).parents[3] / "docs" / "layouts.md"
HEADER = ["mode", "mask", "extend"]


def forward_modes_section() -> str:
    return PAGE.read_text().partition("\n## Forward modes\n")[2]


def documented_facts() -> dict[ForwardMode, ModeFacts]:
    """The table of docs/layouts.md, in its order."""
    lines = [line for line in forward_modes_section().splitlines() if line.startswith("|")]
    header, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert header == HEADER
    return {
        ForwardMode[name]: ModeFacts(MaskKind(mask), ExtendShape(extend))
        for name, mask, extend in rows
    }


def test_the_documented_table_is_the_table():
    assert list(documented_facts().items()) == list(MODE_FACTS.items())


def test_every_mode_has_a_documented_source():
    assert re.findall(r"^- \*\*(\w+)\*\*:", forward_modes_section(), re.MULTILINE) == [
        mode.name for mode in ForwardMode
    ]


def test_every_mode_has_facts():
    assert list(MODE_FACTS) == list(ForwardMode)
    assert all(mode.facts is MODE_FACTS[mode] for mode in ForwardMode)


def test_causal_modes_of_one_token_need_no_tree():
    for mode in ForwardMode:
        if mode.facts.extend is ExtendShape.ONE:
            assert mode.facts.mask is MaskKind.CAUSAL
