"""The import hook behind fix switches: modules whose source is edited before it is compiled.

`PACELINE_REVERT_FIX=<id>[,<id>...]` brings past bugs back, so that a test can be seen to fail.  The
edited text is what `inspect` and tracebacks show, and what Triton compiles.
"""

import linecache
import sys
from collections.abc import Mapping, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType

from paceline.core.errors import ConfigError
from paceline.core.reverts.anchors import AnchorError, replaced
from paceline.core.reverts.fixes import Edit, Fix, read_fix

VARIABLE = "PACELINE_REVERT_FIX"


def revert(ids: Sequence[str], *, fixes: Path, package: Path) -> None:
    """Bring bugs back in every module of `package` imported from now on.

    fixes: the folder of their files; package: the folder of the package's own `__init__`.  Raises
    ConfigError, before anything is changed: an unknown id, an edit whose place is not there
    exactly once, a module that is imported already.
    """
    listed = [read_fix(fixes, fix_id) for fix_id in dict.fromkeys(ids)]
    sources = reverted_sources(listed, package=package)
    imported = sorted(sources.keys() & sys.modules.keys())
    if imported:
        raise ConfigError.about(
            "modules to revert",
            expected="not imported yet",
            got=", ".join(imported),
            remedy=f"set {VARIABLE} before the first import",
        )
    sys.meta_path.insert(0, RevertingFinder(sources))


def reverted_sources(fixes: Sequence[Fix], *, package: Path) -> dict[str, str]:
    """The edited source of every module the fixes name, edits applied in order."""
    sources: dict[str, str] = {}
    for fix in fixes:
        for edit in fix.edits:
            before = sources.get(edit.module) or _read_source(fix, edit.module, package)
            sources[edit.module] = _edited(fix, edit, before)
    return sources


class RevertingFinder(MetaPathFinder):
    """Finds the modules it has another source for; leaves all others to the finders behind it."""

    def __init__(self, sources: Mapping[str, str]) -> None:
        self._sources = dict(sources)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The module's own spec with a loader of the edited source."""
        if fullname not in self._sources:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.origin is None:
            return spec
        spec.loader = RevertedLoader(fullname, spec.origin, self._sources[fullname])
        return spec


class RevertedLoader(SourceFileLoader):
    """Compiles an edited text under the real file's name, and shows it to `inspect`."""

    def __init__(self, fullname: str, path: str, source: str) -> None:
        super().__init__(fullname, path)
        self._source = source

    def get_source(self, fullname: str) -> str:
        """The edited text."""
        return self._source

    def get_code(self, fullname: str) -> CodeType:
        """Compiled anew: what is cached on disk is of the real text."""
        lines = self._source.splitlines(keepends=True)
        linecache.cache[self.path] = (len(self._source), None, lines, self.path)
        return self.source_to_code(self._source, self.path)


def _read_source(fix: Fix, module: str, package: Path) -> str:
    root, *inner = module.split(".")
    home = package.joinpath(*inner)
    for path in (home.with_suffix(".py"), home / "__init__.py"):
        if root == package.name and path.is_file():
            return path.read_text(encoding="utf-8")
    raise ConfigError.about(
        f"module of fix '{fix.id}'",
        expected=f"a source file of {package.name}",
        got=module,
        remedy="name the module that the edited text lives in now",
    )


def _edited(fix: Fix, edit: Edit, source: str) -> str:
    try:
        return replaced(source, edit.symbol, edit.find, edit.replace)
    except (AnchorError, SyntaxError) as error:
        raise ConfigError.about(
            f"what fix '{fix.id}' edits in {edit.module}",
            expected=f"once in {edit.symbol}",
            got=str(error),
            remedy="write the edit for the source as it is now",
        ) from error
