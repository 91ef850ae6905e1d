"""The import graph of the package: directions, sibling implementations, the engine path."""

import ast
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src"
PACKAGE = SOURCE / "paceline"

# A room imports itself and rooms of a lower level.  Rooms of one level do not know each other.
LEVELS = {
    "cli": 10,
    "bench": 9,
    "server": 9,
    "llm": 8,
    "plan": 7,
    "speculate": 6,
    "runner": 5,
    "models": 4,
    "layers": 3,
    "attention": 2,
    "engine": 2,
    "cache": 1,
    "kernels": 1,
    "text": 1,
    "core": 0,
}
HOST = {"engine": {"cache", "text", "core"}, "text": {"core"}}  # rooms that know these alone
USERS = {"engine": {"llm", "bench", "server", "cli", "proof"}}  # who alone knows these rooms
ONLOOKERS = {"proof": {"cli", "bench"}}  # look at everything; who but tests imports them
OPTIONAL = (
    "click",
    "fastapi",
    "huggingface_hub",
    "jinja2",
    "llguidance",
    "msgspec",
    "prometheus_client",
    "psutil",
    "rich",
    "transformers",
    "uvicorn",
)


def imported_modules(source: str, module: str) -> list[str]:
    """Absolute names of every import statement, wherever it stands in the file."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parent = module.split(".")[: -node.level]
                base = ".".join([*parent, base] if base else parent)
            found += [f"{base}.{alias.name}" for alias in node.names]
    return [name for name in found if name.split(".")[0] == "paceline"]


def direction_faults(source: str, module: str) -> list[str]:
    """Imports of `module` that go against the direction of the rooms."""
    room = module.split(".")[1]
    faults = []
    for name in imported_modules(source, module):
        target = name.split(".")[1] if "." in name else ""
        if target == room:
            continue
        if target in ONLOOKERS:
            allowed = room in ONLOOKERS[target]
        elif room in ONLOOKERS:
            allowed = target in LEVELS
        else:
            allowed = target in LEVELS and LEVELS[target] < LEVELS[room]
            allowed &= target in HOST.get(room, LEVELS) and room in USERS.get(target, LEVELS)
        if not allowed:
            faults.append(f"{module} imports {name}")
    return faults


def sibling_faults(source: str, module: str, siblings: set[str]) -> list[str]:
    """Imports of `module` that reach another implementation of the same interface."""
    return [
        f"{module} imports {name}"
        for name in imported_modules(source, module)
        for other in siblings - {module}
        if name == other or name.startswith(other + ".")
    ]


def module_name(path: Path) -> str:
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def room_files() -> list[Path]:
    return sorted(path for path in PACKAGE.rglob("*.py") if path.parent != PACKAGE)


def implementations() -> dict[str, set[str]]:
    from paceline.attention.mixers import REGISTRIES
    from paceline.attention.registry import BACKENDS
    from paceline.cli.app import VERBS
    from paceline.models.registry import ARCHITECTURES

    return {
        "attention backends": {target.partition(":")[0] for target in BACKENDS.values()},
        "state backends": {
            target.partition(":")[0]
            for targets in REGISTRIES.values()
            if targets is not BACKENDS
            for target in targets.values()
        },
        "architectures": {f"paceline.models.{name.replace('-', '_')}" for name in ARCHITECTURES},
        "verbs": {target.partition(":")[0] for target, _ in VERBS.values()},
    }


def test_every_room_has_a_level():
    rooms = {path.name for path in PACKAGE.iterdir() if path.is_dir() and path.name[0] != "_"}
    assert rooms <= LEVELS.keys() | ONLOOKERS.keys()


def test_imports_point_one_way():
    faults = [
        fault
        for path in room_files()
        for fault in direction_faults(path.read_text(), module_name(path))
    ]
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("paceline.core.step", "from paceline.plan.memory.fit import Fit"),
        ("paceline.kernels.rope", "import paceline.cache.pages"),
        ("paceline.layers.mlp", "def f():\n    from paceline.models import llama"),
        ("paceline.runner.derive", "from ..engine import scheduler"),
        ("paceline.llm.llm", "from paceline.proof import fixes"),
        ("paceline.models.llama", "from paceline import LLM"),
        ("paceline.server.app", "from paceline.cli import flags"),
        ("paceline.engine.loop", "from paceline.kernels.rope import rope"),
        ("paceline.layers.mlp", "from paceline.engine import request"),
    ],
)
def test_a_wrong_direction_is_found(module, source):
    assert direction_faults(source, module)


def test_right_directions_pass():
    source = "from paceline.core import step\nfrom . import fit\nimport torch\n"
    assert not direction_faults(source, "paceline.llm.llm")
    assert not direction_faults("from paceline.proof import check", "paceline.cli.check")


@pytest.mark.parametrize("kind", ["attention backends", "architectures", "verbs"])
def test_implementations_of_one_interface_do_not_import_each_other(kind):
    siblings = implementations()[kind]
    assert len(siblings) > 1
    faults = []
    for module in siblings:
        path = SOURCE.joinpath(*module.split(".")).with_suffix(".py")
        faults += sibling_faults(path.read_text(), module, siblings)
    assert not faults, "\n".join(faults)


DRAFTERS = ("eagle", "mtp", "standalone", "ngram", "n-gram", "prompt lookup")
OPTION_OF_TREES = re.compile(r"speculative[-_]eagle[-_]topk")  # its name is the public one


@pytest.mark.parametrize("room", ["engine", "runner", "plan", "llm"])
def test_rooms_that_plan_and_run_drafts_name_no_drafter(room):
    """A drafter is a folder of `speculate`: these know its two contracts alone."""
    sources = {
        path.name: OPTION_OF_TREES.sub("", path.read_text().lower())
        for path in (PACKAGE / room).rglob("*.py")
    }
    assert sources
    named = {name for name, text in sources.items() if any(word in text for word in DRAFTERS)}
    assert not named


def test_an_import_between_siblings_is_found():
    siblings = {"paceline.models.llama", "paceline.models.qwen2"}
    source = "from paceline.models.llama import LlamaForCausalLM"
    assert sibling_faults(source, "paceline.models.qwen2", siblings)
    assert not sibling_faults(source, "paceline.models.llama", siblings)


def room_docstring_faults(source: str) -> list[str]:
    text = ast.get_docstring(ast.parse(source)) or ""
    faults = [] if text else ["has no docstring"]
    if text.count("\n\n") > 1:
        faults.append("says more than a title and one paragraph")
    return faults


def test_every_room_says_what_lives_there():
    for path in sorted(PACKAGE.glob("*/")):
        if path.name.startswith("_"):
            continue
        faults = room_docstring_faults((path / "__init__.py").read_text())
        assert not faults, f"{path.name} {faults}"
    assert room_docstring_faults("import os\n")
    assert room_docstring_faults('"""Title.\n\nOne.\n\nTwo."""\n')


def python(code: str, **options) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        env={"PYTHONPATH": str(SOURCE), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"},
        **options,
    )


BLOCKED = f"""
    import sys

    class Refuse:
        names = set({OPTIONAL!r})

        def find_spec(self, name, path=None, target=None):
            if name.split(".")[0] in self.names:
                raise ImportError(f"blocked: {{name}}")

    sys.meta_path.insert(0, Refuse())
"""


def test_the_engine_path_needs_no_optional_library_and_a_bench_click_alone():
    code = """
    import paceline.llm.llm

    sys.meta_path[0].names -= {"click"}
    from importlib import import_module
    from paceline.cli.app import app
    for bench in ("attention", "latency", "serve", "speculative", "throughput"):
        import_module(f"paceline.bench.{bench}")
        app(["bench", bench, "--help"], standalone_mode=False)
    """
    done = python(BLOCKED + code)
    assert done.returncode == 0, done.stderr
    for bench in ("attention", "latency", "serve", "speculative", "throughput"):
        assert f" bench {bench} [OPTIONS]" in done.stdout


def test_rooms_of_the_host_import_no_torch():
    rooms = ("core", "engine", "text")
    names = [module_name(path) for room in rooms for path in sorted((PACKAGE / room).rglob("*.py"))]
    code = f"""
        import sys
        from importlib import import_module
        for name in {names!r}:
            import_module(name)
            assert "torch" not in sys.modules, name
    """
    done = python(code)
    assert done.returncode == 0, done.stderr


def test_the_block_is_seen():
    done = python(BLOCKED + "\n    import click\n")
    assert "blocked: click" in done.stderr


def test_weighing_recording_and_planning_import_no_compiler():
    """sympy and torch._dynamo take longer than an engine takes to start: torch's own kernels for
    the meta device bring them along, and its wrapper around a dispatch mode."""
    code = """
        import sys
        from paceline.models import config, locate, size

        def require_none(of, *more):
            compilers = {"sympy", "torch._dynamo", "torch._inductor", *more} & sys.modules.keys()
            assert not compilers, f"{of}: {compilers}"

        parsed = config.parse_config(locate.locate("gpt-oss-20b").config)
        assert size.weights_bytes(parsed, "bfloat16") > 1e9
        require_none("weighing", "triton")

        import torch
        from paceline.runner.recording.recorded import RecordedGraph
        RecordedGraph(poison=False).capture(lambda: torch.ones(2).add_(1))
        require_none("recording")

        from paceline.plan.explain import explain_model
        asked = {"model": "llama-3.1-8b", "load_format": "dummy"}
        explain_model(asked, gpu="h200")
        explain_model({**asked, "max_model_len": 30000}, gpu="l4")
        explain_model({"model": "bundled", "device": "cpu"}, gpu=None)  # whose own head drafts
        for model in ("deepseek-v3-7-layers", "mamba2-2.7b", "qwen3-next-16-layers", "bert-base"):
            explain_model({"model": model, "load_format": "dummy"}, gpu="h200")
        explain_model({"model": model, "load_format": "dummy", "device": "cpu"}, gpu=None)
        require_none("planning")
    """
    done = python(code)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("given", "spins"),
    [
        ({}, "1000"),
        ({"GOMP_SPINCOUNT": "7"}, "7"),
        ({"OMP_WAIT_POLICY": "ACTIVE"}, None),
    ],
    ids=str,
)
def test_threads_spin_shortly_unless_the_environment_says_how_long(given, spins):
    code = f"""
        import os
        os.environ.update({given!r})
        import paceline
        assert os.environ.get("GOMP_SPINCOUNT") == {spins!r}
    """
    done = python(code)
    assert done.returncode == 0, done.stderr


def test_help_imports_no_torch():
    code = """
        import sys
        from paceline.cli.app import app
        app(["--help"], standalone_mode=False)
        heavy = {"torch", "numpy", "tokenizers", "jinja2", "rich"} & set(sys.modules)
        assert not heavy, heavy
    """
    done = python(code)
    assert done.returncode == 0, done.stderr
    assert "generate" in done.stdout


def test_help_of_a_verb_imports_no_torch():
    verbs = ("generate", "chat", "check", "bench", "explain", "env", "serve", "debug", "prove")
    code = f"""
        import sys
        from paceline.cli.app import app
        for verb in {verbs!r}:
            app([verb, "--help"], standalone_mode=False)
            assert "torch" not in sys.modules, verb
    """
    done = python(code)
    assert done.returncode == 0, done.stderr


def test_the_package_exports_its_names_lazily():
    done = python(
        """
        import sys
        import paceline
        assert "torch" not in sys.modules
        assert paceline.__all__ == ["LLM", "AsyncLLM", "RequestOutput", "SamplingParams"]
        assert set(paceline.__all__) <= set(dir(paceline))
        assert paceline.SamplingParams.__name__ == "SamplingParams"
        try:
            paceline.Engine
        except AttributeError as error:
            assert "no attribute 'Engine'" in str(error)
        else:
            raise AssertionError
        """
    )
    assert done.returncode == 0, done.stderr
