"""Python source files, and their normal form: what the bundled model reads.

Every file is parsed, loses its docstrings, comments and layout, and is written back by
`ast.unparse`, so that one logical line is one line.  Nothing here touches the network or draws
random numbers; `prepare.py` is the command.
"""

from __future__ import annotations

import ast
import hashlib
import re
import sys
import sysconfig
import warnings
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

MAX_LINE_CHARS = 400  # a longer logical line is a table or a blob, not code to learn from
MAX_DIGIT_SHARE = 0.2  # likewise: constant tables
MAX_DOC_CHARS = 5000  # about 1500 tokens: a document fits one training row
LEFT_OUT = (  # files broken on purpose, and copies of other projects
    "lib2to3/tests/data/",
    "test/bad",
    "test/tokenizedata/",
    "test/encoded_modules/",
    "_vendor/",
)

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceFile:
    """One file as published: `package` is its origin, `path` is relative to that origin."""

    package: str
    path: str
    text: str

    @property
    def split_key(self) -> str:
        """What the held-out split hashes: the path; a whole folder under transformers/models.

        The files of one model folder are generated from each other, so they stay together.
        """
        parts = self.path.split("/")
        if parts[:2] == ["transformers", "models"] and len(parts) > 3:
            return "/".join(parts[:3])
        return self.path


def stable_hash(text: str) -> int:
    """A 64-bit hash which is the same on every machine and in every run."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


def stdlib_files() -> Iterator[SourceFile]:
    """The running interpreter's standard library, its tests included, without site-packages."""
    root = Path(sysconfig.get_path("stdlib"))
    package = f"cpython=={sys.version_info.major}.{sys.version_info.minor}.{sys.version_info.micro}"
    for file in sorted(root.rglob("*.py")):
        path = file.relative_to(root).as_posix()
        if path.startswith("site-packages/") or any(mark in path for mark in LEFT_OUT):
            continue
        try:
            yield SourceFile(package=package, path=path, text=file.read_text(encoding="utf-8"))
        except UnicodeDecodeError:  # a few test files are Latin-1 or broken on purpose
            continue


def wheel_files(wheel: Path, package: str) -> Iterator[SourceFile]:
    """The .py files of one wheel, read without installing it."""
    with zipfile.ZipFile(wheel) as archive:
        for path in sorted(name for name in archive.namelist() if name.endswith(".py")):
            if any(mark in path for mark in LEFT_OUT):
                continue
            try:
                text = archive.read(path).decode("utf-8")
            except UnicodeDecodeError:
                continue
            yield SourceFile(package=package, path=path, text=text)


def parse(text: str) -> ast.Module | None:
    """The file's tree without docstrings, or None when it is not valid for this interpreter."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        return None
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | FunctionNode):
            _drop_docstring(node)
    return tree


def _drop_docstring(node: ast.Module | ast.ClassDef | FunctionNode) -> None:
    body = node.body
    is_string = body and isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant)
    if is_string and isinstance(body[0].value.value, str):
        body = body[1:]
        node.body = body or ([] if isinstance(node, ast.Module) else [ast.Pass()])


def is_table(text: str) -> bool:
    """Whether a statement is data rather than code: over-long lines, or digits everywhere."""
    if max(map(len, text.split("\n"))) > MAX_LINE_CHARS:
        return True
    return len(text) > 200 and len(re.findall(r"\d", text)) > MAX_DIGIT_SHARE * len(text)


def statements(tree: ast.Module) -> Iterator[str]:
    """The module's top-level statements as text; tables left out, over-long classes in parts."""
    for node in tree.body:
        text = ast.unparse(node)
        if isinstance(node, ast.ClassDef) and (len(text) > MAX_DOC_CHARS or is_table(text)):
            yield from _class_parts(node)
        elif not is_table(text):
            yield text


def _class_parts(node: ast.ClassDef) -> Iterator[str]:
    """A class as several classes of the same name, each holding a run of the members."""
    header = ast.unparse(
        ast.ClassDef(node.name, node.bases, node.keywords, [], node.decorator_list)
    )
    if is_table(header):
        return
    members: list[str] = []
    for member in node.body:
        text = "    " + ast.unparse(member).replace("\n", "\n    ")
        if is_table(text):
            continue
        if members and sum(map(len, members)) + len(text) > MAX_DOC_CHARS:
            yield "\n".join([header, *members])
            members = []
        members.append(text)
    if members:
        yield "\n".join([header, *members])


def documents(parts: list[str]) -> Iterator[str]:
    """Consecutive statements of one file, joined up to MAX_DOC_CHARS; each starts at column 0."""
    pending = ""
    for part in parts:
        if pending and len(pending) + len(part) > MAX_DOC_CHARS:
            yield pending
            pending = ""
        # ast.unparse(Module) sets definitions apart by blank lines; so do we, by exactly one
        gap = "\n" if re.match(r"(async )?def |class |@", part) else ""
        pending += (gap if pending else "") + part + "\n"
    if pending:
        yield pending


@dataclass(frozen=True, slots=True, kw_only=True)
class Function:
    """A top-level function or a method, dedented, without its decorators."""

    header: str  # `def name(args):`, one line, no newline
    body: str  # the indented lines, each ending in a newline

    @property
    def text(self) -> str:
        return f"{self.header}\n{self.body}"


def functions(tree: ast.Module) -> Iterator[Function]:
    """Every top-level function and every method of a top-level class, tables left out."""
    for outer in tree.body:
        for node in outer.body if isinstance(outer, ast.ClassDef) else [outer]:
            if not isinstance(node, FunctionNode):
                continue
            decorators, node.decorator_list = node.decorator_list, []
            header, _, body = ast.unparse(node).partition("\n")
            node.decorator_list = decorators
            if body and not is_table(f"{header}\n{body}"):
                yield Function(header=header, body=body + "\n")
