"""Near: the known words closest to one that is not known.  No torch."""

from collections.abc import Iterable
from difflib import get_close_matches

MOST = 3
LEAST_ALIKE = 0.65  # as difflib counts; 1 is equal
SHORTEST = 3  # letters of a known word that is looked for inside a longer one


def near(word: str, known: Iterable[str]) -> list[str]:
    """Those equal but for case and dashes; or else those the word is a part of; or else the longest
    that is a part of the word; or else the one spelled most alike.
    """
    by_form: dict[str, list[str]] = {}
    for each in sorted(known):
        by_form.setdefault(plain(each), []).append(each)
    form = plain(word)
    inside = [each for each in by_form if len(each) >= SHORTEST and each in form]
    forms = (
        [each for each in by_form if each == form]
        or [each for each in by_form if form and form in each]
        or sorted(inside, key=len)[-1:]
        or get_close_matches(form, by_form, n=1, cutoff=LEAST_ALIKE)
    )
    return [each for found in forms for each in by_form[found]][:MOST]


def did_you_mean(word: str, known: Iterable[str], *, otherwise: str) -> str:
    """The remedy of an error that names an unknown word."""
    found = near(word, known)
    return f"did you mean {' or '.join(found)}?" if found else otherwise


def plain(word: str) -> str:
    """A word without case, dashes and blanks."""
    return "".join(letter for letter in word.lower() if letter not in "-_ ")
