"""The repository's own promises: README, schemas, constraints."""

import json
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import jsonschema
import pytest

from longest_first import LONGEST, longest_first

ROOT = Path(__file__).parent.parent
SCHEMAS = sorted((ROOT / "docs" / "schemas").glob("*.json"))


def test_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="no repository: nobody knows what is kept")
def test_nothing_that_is_ignored_is_kept():
    words = ["git", "ls-files", "--cached", "--ignored", "--exclude-standard"]
    assert not subprocess.check_output(words, cwd=ROOT, text=True)


def test_tests_follow_the_rooms():
    folders = {path.parent for path in (ROOT / "tests").rglob("test_*.py")} - {ROOT / "tests"}
    rooms = {path.parent.name for path in (ROOT / "src" / "paceline").glob("*/__init__.py")}
    rooms |= {"benchmarks", "recipes", "gpu", "mutants"}
    assert {folder.relative_to(ROOT / "tests").parts[0] for folder in folders} <= rooms
    crowded = [path.name for path in folders if len(list(path.glob("test_*.py"))) > 20]
    assert crowded == ["kernels"]


def test_the_longest_files_are_there():
    assert all((ROOT / "tests" / name).exists() for name in LONGEST)
    assert len(set(LONGEST)) == len(LONGEST)


def test_long_files_begin_first_and_others_follow_by_their_paths():
    """Whoever collects from the end has the same order; tests of a file stay as they were."""
    paths = ("b.py", "b.py", LONGEST[1], "a/c.py", "a.py", LONGEST[0])
    items = [
        SimpleNamespace(path=ROOT / "tests" / path, number=number)
        for number, path in enumerate(paths)
    ]
    longest_first(items)
    assert [item.number for item in items] == [5, 2, 3, 4, 0, 1]


def test_readme_links_lead_somewhere():
    links = re.findall(r"\]\(([^)#:]+)\)", (ROOT / "README.md").read_text())
    missing = [link for link in links if not (ROOT / link).exists()]
    assert links
    assert not missing


def test_readme_names_only_flags_that_exist():
    from paceline.cli.app import VERBS
    from paceline.cli.bench import bench
    from paceline.cli.chat import chat
    from paceline.cli.check import check
    from paceline.cli.env import env
    from paceline.cli.explain import explain
    from paceline.cli.generate import generate
    from paceline.cli.prove import prove
    from paceline.cli.serve import serve

    commands = [bench.commands["latency"], chat, check, env, explain, generate, prove, serve]
    flags = {flag for command in commands for p in command.params for flag in p.opts}
    flags |= {flag for command in commands for p in command.params for flag in p.secondary_opts}
    text = (ROOT / "README.md").read_text()
    lines = re.findall(r"^paceline (\w+)([^#\n]*)", text, re.MULTILINE)
    assert {verb for verb, _ in lines} <= set(VERBS)
    used = {flag for _, rest in lines for flag in re.findall(r"--[a-z-]+", rest)}
    assert used
    assert used <= flags


def fenced(language, page="README.md"):
    text = (ROOT / page).read_text()
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", ["README.md", "docs/python.md"])
def test_python_of_a_page_runs_as_it_stands(page, capsys):
    code = "\n".join(fenced("python", page))
    exec(compile(code, page, "exec"), {"__name__": "__main__"})
    assert len(capsys.readouterr().out.splitlines()) > 2


def readme_commands():
    """The commands that need neither a GPU, nor a checkpoint, nor minutes."""
    lines = [line.partition("  #")[0] for block in fenced("") for line in block.splitlines()]
    return [
        line.strip()
        for line in lines
        if line.startswith("paceline") and "path/to" not in line and "dummy" not in line
    ]


@pytest.mark.parametrize("line", readme_commands())
def test_readme_commands_run(line, monkeypatch, capfd):
    """In this process, which has imported what each would import anew."""
    from paceline.cli.app import main

    words = shlex.split(line)[1:]
    monkeypatch.setattr(sys, "argv", ["paceline", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    shown = capfd.readouterr()
    assert not ended.value.code, shown.err
    assert shown.out
    if "--json" in words:
        document = json.loads(shown.out.splitlines()[-1])
        schema = json.loads((ROOT / "docs" / "schemas" / f"{words[0]}.json").read_text())
        jsonschema.validate(document, schema)


def test_every_document_has_a_schema():
    assert [path.stem for path in SCHEMAS] == [
        "bench_attention",
        "bench_attention_backends",
        "bench_latency",
        "bench_latency_vectors",
        "bench_serve",
        "bench_speculative",
        "bench_throughput",
        "check",
        "debug_fixes",
        "env",
        "explain",
        "generate",
        "prove",
    ]


@pytest.mark.parametrize("path", SCHEMAS, ids=lambda path: path.stem)
def test_schemas_are_valid_and_closed(path):
    schema = json.loads(path.read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    for part in objects_of(schema):
        assert part.get("additionalProperties") is not None, part


def objects_of(schema):
    """Every part of a schema that describes an object."""
    if isinstance(schema, dict):
        if schema.get("type") == "object":
            yield schema
        for value in schema.values():
            yield from objects_of(value)


def test_every_dependency_is_pinned_by_the_constraints():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = project["dependencies"] + project["optional-dependencies"]["dev"]
    names = {re.split(r"[<>=;\[ ]", entry)[0].lower() for entry in wanted} - {"triton"}
    pins = (ROOT / "constraints.txt").read_text()
    pinned = {name.lower() for name in re.findall(r"^([\w-]+)==", pins, re.MULTILINE)}
    assert names <= pinned, names - pinned


def test_make_has_the_usual_verbs():
    targets = re.findall(r"^([a-z-]+):.*##", (ROOT / "Makefile").read_text(), re.MULTILINE)
    wanted = {
        "help",
        "setup",
        "demo",
        "test",
        "test-full",
        "compile",
        "lint",
        "bench",
        "mutants",
        "faults",
        "clean",
    }
    assert set(targets) == wanted


def commands_of(verb, folder, uv):
    """What a verb would run on a fresh checkout, without running it."""
    words = ["make", "-n", verb, f"UV={uv}", f"VENV={folder / 'venv'}", "PYTHON=python3"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True)
    return " ".join(done.stdout.replace("\\\n", " ").split()).replace(f"{folder}/", "")


MAKE = {
    "setup": ["[dev]"],
    "demo": ["venv/bin/paceline generate --echo --prompt"],
    "test": ["venv/bin/python -m pytest -n auto", '-m "not gpu and not slow"'],
    "test-full": ["venv/bin/python -m pytest -n auto", '-m "not gpu"'],
    "lint": ["venv/bin/ruff check .", "venv/bin/ruff format --check .", "venv/bin/mypy"],
    "bench": ["venv/bin/paceline bench latency --batch-size"],
}
INSTALL = {
    "": ["python3 -m venv venv", "venv/bin/python -m pip install", "-c constraints.txt"],
    "uv": [
        "uv venv --quiet --allow-existing --python python3 venv",
        "uv pip install --quiet --python venv/bin/python --torch-backend=auto -c constraints.txt",
    ],
}


@pytest.mark.parametrize("uv", INSTALL, ids=["pip", "uv"])
@pytest.mark.parametrize("verb", MAKE)
def test_a_verb_of_make_installs_what_it_needs_and_runs(verb, uv, tmp_path):
    text = commands_of(verb, tmp_path, uv)
    at = [text.index(part) for part in [*INSTALL[uv], *MAKE[verb]]]
    assert at == sorted(at)
    assert (" uv " in f" {text}") == bool(uv)
    assert ("[dev]" in text) == (verb not in {"demo", "bench"})


def test_a_warning_fails_a_test_in_a_worker_too(tmp_path):
    """One that is given, and one of a file that nobody closes."""
    case = tmp_path / "test_leaks.py"
    leaks = {"warns": "warnings.warn('x')", "leaves": "open(__file__)"}
    tests = [f"def test_{name}():\n    {leak}\n" for name, leak in leaks.items()]
    case.write_text("\n\n".join(["import warnings", *tests]))
    words = [sys.executable, "-m", "pytest", "-n", "1", "-c", str(ROOT / "pyproject.toml")]
    words += ["-p", "no:cacheprovider", f"--rootdir={tmp_path}", f"--basetemp={tmp_path / 'own'}"]
    words += [str(case), "-rfE"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stdout
    for name in leaks:
        assert re.search(rf"^(FAILED|ERROR) \S*::test_{name}\b", done.stdout, re.MULTILINE), (
            done.stdout
        )


@pytest.mark.parametrize("uv", INSTALL, ids=["pip", "uv"])
@pytest.mark.parametrize("verb", ["help", "clean"])
def test_a_verb_that_needs_nothing_installs_nothing(verb, uv, tmp_path):
    text = commands_of(verb, tmp_path, uv)
    assert text
    assert "install" not in text


def test_every_extra_is_imported_somewhere():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = {
        re.split(r"[<>=;\[ ]", e)[0] for name in extras if name != "dev" for e in extras[name]
    }
    files = [p for room in ("src", "tests", "benchmarks") for p in (ROOT / room).rglob("*.py")]
    text = "\n".join(path.read_text() for path in files)
    # Distributions that are named otherwise than their module; backends load these by name.
    modules = {
        "flash-attn-4": "flash_attn",
        "langchain-openai": "langchain_openai",
        "lm-eval": "lm_eval",
        "flashinfer-python": "flashinfer",
        "sglang-kernel": "sgl_kernel.flash_mla",
        "opentelemetry-sdk": "opentelemetry.sdk",
        "opentelemetry-exporter-otlp-proto-http": "opentelemetry.exporter.otlp.proto.http",
    }
    assert wanted
    assert not [
        name
        for name in (modules.get(name, name) for name in wanted)
        if not re.search(rf"^ *(import|from) {name}\b|^MODULE = \"{name}\b", text, re.MULTILINE)
    ]
