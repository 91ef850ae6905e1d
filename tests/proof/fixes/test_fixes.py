"""Every fix switch applies, brings its bug back in the case it names, and nowhere without it."""

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from named_cell import CASES, run_named

from paceline.core.reverts.hook import reverted_sources
from paceline.proof.check.cell import Status
from paceline.proof.fixes.registry import all_fixes, show, to_json

ROOT = Path(__file__).parents[3]
PACKAGE = ROOT / "src" / "paceline"
FIXES = {fix.id: fix for fix in all_fixes()}
CELLS = [fix for fix in FIXES.values() if "::" not in fix.case]
TESTS = [fix for fix in FIXES.values() if "::" in fix.case]
# One of each module that a fix edits, and of each backend; the others apply and compile, and run
# with the long products.
QUICK = {fix.modules[0]: fix.id for fix in FIXES.values()}
QUICK |= {fix.case.split("/")[1]: fix.id for fix in CELLS}


def walked(fixes):
    """Parameters of a test that walks a fix's case: a process for each."""
    return [
        pytest.param(fix.id, marks=() if fix.id in QUICK.values() else pytest.mark.slow)
        for fix in fixes
    ]


PASSING = {Status.PROVEN, Status.EMULATED}
without_the_bug = cache(run_named)  # of a case of several fixes once


@pytest.fixture(scope="module")
def outcomes(request):
    """(fix, case) -> status and reason of every case that runs with its bug."""
    mine = [item for item in request.session.items if "outcomes" in item.fixturenames]
    jobs = sorted({item.callspec.params["fix_id"] for item in mine})
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    environment.pop("PACELINE_REVERT_FIX", None)
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("fix_walker.py"))],
        input=json.dumps([[fix_id, FIXES[fix_id].case] for fix_id in jobs]),
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    return {(line["fix"], line["case"]): line for line in lines}


@pytest.mark.parametrize("fix_id", walked(FIXES.values()))
def test_a_reverted_fix_fails_its_case_with_its_symptom(fix_id, outcomes):
    fix = FIXES[fix_id]
    line = outcomes[fix_id, fix.case]
    assert line["status"] == "failing", line["reason"]
    assert fix.expect in line["reason"]


@pytest.mark.parametrize("fix_id", walked(CELLS))
def test_the_case_of_a_fix_passes_without_the_bug(fix_id):
    """Of cells: a case that is a test is run as one, and fails there."""
    result = without_the_bug(FIXES[fix_id].case)
    assert result.status in PASSING, result.reason


@pytest.mark.parametrize("fix_id", FIXES)
def test_the_edits_of_a_fix_apply_and_compile(fix_id):
    for module, source in reverted_sources([FIXES[fix_id]], package=PACKAGE).items():
        compile(source, module, "exec")


def test_there_are_enough_fixes():
    assert len(CELLS) >= 24
    assert len(TESTS) >= 12


def test_every_case_is_of_the_suite_or_a_test():
    for fix in CELLS:
        method, _, mode, _, variant = fix.case.split("/")
        assert (method, mode, variant) in CASES, fix.id
    for fix in TESTS:
        path, _, name = fix.case.partition("::")
        function = name.partition("[")[0]
        assert f"def {function}(" in (ROOT / path).read_text(encoding="utf-8"), fix.id


def test_fixes_touch_every_part_of_a_round():
    modules = {module for fix in TESTS for module in fix.modules}
    assert modules >= {
        "paceline.kernels.commit",
        "paceline.kernels.compact_kv",
        "paceline.kernels.draft_topk",
        "paceline.kernels.grow_tree",
        "paceline.cache.prefix_tree",
        "paceline.speculate.eagle.config",
        "paceline.speculate.eagle.head",
        "paceline.runner.runner_config",
        "paceline.runner.program",
        "paceline.speculate.draft_cache",
        "paceline.speculate.draft_passes",
        "paceline.speculate.drafting",
        "paceline.speculate.feature_proposer",
    }


def test_fixes_touch_every_layout_mode_and_runner():
    modules = {module for fix in FIXES.values() for module in fix.modules}
    parts = [fix.case.split("/") for fix in CELLS]
    assert {part[2] for part in parts} >= {
        *("extend", "decode", "mixed", "draft_decode"),
        *("target_verify", "draft_extend", "draft_extend_v2"),
    }
    assert {part[3] for part in parts} >= {"eager", "recorded"}
    assert {part[1] for part in parts} >= {"torch", "triton", "flashinfer", "fa4", "flex"}
    assert {part[0] for part in parts} == {
        *("dense", "swa", "chunk", "mla", "embed", "cross"),
        *("gdn", "mamba2"),
    }
    assert modules >= {
        "paceline.attention.layouts.csr",
        "paceline.kernels.derive",
        "paceline.kernels.derive_tree",
        "paceline.kernels.paged_decode_cpu",
        "paceline.layers.attention",
        "paceline.runner.buffers",
        "paceline.runner.model_runner",
        "paceline.runner.table.request_table",
    }


def test_the_list_says_everything_of_a_fix():
    fix = FIXES["page-ids-as-slots"]
    document = to_json(fix)
    assert list(document) == ["id", "source", "symptom", "targets", "case"]
    assert document["targets"][0] == "paceline.kernels.derive"
    for value in (fix.id, fix.source, fix.symptom, fix.case, "paceline.kernels.derive"):
        assert value in show([fix])


def test_texts_are_sentences_that_name_a_source():
    for fix in FIXES.values():
        assert fix.symptom.endswith("."), fix.id
        assert fix.source.startswith(
            ("sgl-project/", "flashinfer-ai/", "vllm-project/", "field: ")
        ), fix.id
