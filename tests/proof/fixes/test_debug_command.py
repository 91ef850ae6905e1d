"""`paceline debug fixes`: the list for people and for programs."""

import json
import subprocess
import sys
from pathlib import Path

import jsonschema
from click.testing import CliRunner

from paceline.cli.app import app
from paceline.proof.fixes.registry import all_fixes

SCHEMA = Path(__file__).parents[3] / "docs" / "schemas" / "debug_fixes.json"


def run(*words):
    done = CliRunner().invoke(app, ["debug", *words])
    assert done.exit_code == 0, done.output
    return done.stdout


def test_json_has_every_fix_and_fits_its_schema():
    document = json.loads(run("fixes", "--json"))
    jsonschema.validate(document, json.loads(SCHEMA.read_text()))
    assert [entry["id"] for entry in document["fixes"]] == [fix.id for fix in all_fixes()]


def test_the_list_for_people_names_every_id_and_case():
    text = run("fixes")
    for fix in all_fixes():
        assert fix.id in text
        assert fix.case in text


def test_help_says_how_a_bug_is_switched_on():
    text = run("fixes", "--help")
    assert "PACELINE_REVERT_FIX=ID paceline check --filter CASE" in text
    assert "List past bugs" in run("--help")


def test_the_list_imports_no_torch():
    code = "import sys; from paceline.cli.app import app; app(['debug', 'fixes'], "
    code += "standalone_mode=False); assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
