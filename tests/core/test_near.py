"""The nearest known word."""

import pytest

from paceline.core.gpus import GPUS, gpu_by_name
from paceline.core.near import did_you_mean, near

WORDS = ["serve", "generate", "bench", "env", "rtx-4090", "a100-40gb", "a100-80gb", "h100", "n"]


@pytest.mark.parametrize(
    ("word", "found"),
    [
        ("generat", ["generate"]),
        ("genrate", ["generate"]),
        ("Serve", ["serve"]),
        ("server", ["serve"]),
        ("rtx4090", ["rtx-4090"]),
        ("RTX_4090", ["rtx-4090"]),
        ("4090", ["rtx-4090"]),
        ("a100", ["a100-40gb", "a100-80gb"]),
        ("h100-80gb", ["h100"]),
        ("NVIDIA H100", ["h100"]),
        ("-", []),
        ("", []),
        ("xyzzy", []),
    ],
)
def test_case_dashes_parts_and_spelling_count(word, found):
    assert near(word, WORDS) == found


def test_a_remedy_names_all_candidates_or_what_else_to_do():
    assert did_you_mean("a100", WORDS, otherwise="look") == "did you mean a100-40gb or a100-80gb?"
    assert did_you_mean("xyzzy", WORDS, otherwise="look it up") == "look it up"


@pytest.mark.parametrize("name", ["rtx4090", "RTX 4090", "rtx_4090", "rtx-4090"])
def test_a_gpu_is_known_whatever_its_dashes(name):
    assert gpu_by_name(name) is GPUS["rtx-4090"]
