"""The pages under docs/: what they name exists, and decisions have one form."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "paceline"
DECISIONS = sorted((ROOT / "docs" / "decisions").glob("*.md"))
PAGES = [*sorted((ROOT / "docs").glob("*.md")), *DECISIONS, ROOT / "CONTRIBUTING.md"]
ELSEWHERE = {"python/sglang/srt/model_executor/forward_batch_info.py"}  # another project's


def prose(page: Path) -> str:
    """A page without its fenced code."""
    return re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_named_by_a_page_exist(page):
    named = set(re.findall(r"`([\w/]+\.py)`", prose(page))) - ELSEWHERE
    places = (PACKAGE, ROOT)
    assert not [n for n in named if not any((place / n).exists() for place in places)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_of_a_page_lead_somewhere(page):
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", prose(page))
    assert not [link for link in links if not (page.parent / link).exists()]


def test_every_room_has_its_line_in_the_architecture():
    rooms = re.findall(r"^\| `(\w+)` \|", prose(ROOT / "docs" / "architecture.md"), re.MULTILINE)
    present = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert sorted(rooms) == sorted(present)


def test_decisions_are_numbered_without_gaps():
    assert [path.name[:3] for path in DECISIONS] == [
        f"{n:03}" for n in range(1, len(DECISIONS) + 1)
    ]


@pytest.mark.parametrize("page", DECISIONS, ids=lambda page: page.name)
def test_a_decision_has_one_form(page):
    text = page.read_text()
    assert text.startswith(f"# {page.name[:3]}. ")
    parts = re.findall(r"^## (.+)$", text, re.MULTILINE)
    assert parts == ["Context", "Choice", "Rejected", "Consequences"]
