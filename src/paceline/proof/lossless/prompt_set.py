"""PromptSet: the prompts by which engines are compared, and how any model is given them.

A file of prompts is TOML: tables [[prompt]] with `kind`, a word to group by, and `text`.
"""

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.core.errors import ConfigError, ModelError
from paceline.core.options.spec import Flag

if TYPE_CHECKING:  # they import torch, and the flag is read for --help
    from paceline.llm.inputs import Prompt
    from paceline.llm.llm import LLM

BUILT_IN = Path(__file__).with_suffix(".toml")
PROMPTS = Flag(
    name="prompts",
    metavar="FILE",
    help="TOML file of tables [[prompt]] with `kind` and `text`.  [default: twelve of our own]",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedPrompt:
    """One text to continue."""

    name: str  # its kind and its number among those of the file, such as "code 1"
    kind: str
    text: str


def read_prompts(file: str | None = None) -> tuple[NamedPrompt, ...]:
    """The prompts of a file, at least one; None: our own.  Raises ConfigError for what is no such
    file."""
    path = BUILT_IN if file is None else Path(file)
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:  # no such file; no UTF-8, no TOML
        raise _refused(path, f"none ({error})") from error
    rows = document.get("prompt")
    if document.keys() != {"prompt"} or not isinstance(rows, list) or not rows:
        raise _refused(path, f"the keys {sorted(document)}")
    return tuple(_prompt(path, number, row) for number, row in enumerate(rows, 1))


def inputs_of(llm: "LLM", prompts: Sequence[NamedPrompt]) -> "list[Prompt]":
    """The texts; for a model without a tokenizer their bytes, cut to its vocabulary."""
    try:
        _ = llm.tokenizer
    except ModelError:
        vocab_size = llm.prepared.config.vocab_size
        return [[byte % vocab_size for byte in each.text.encode()] for each in prompts]
    return [each.text for each in prompts]


def _prompt(path: Path, number: int, row: object) -> NamedPrompt:
    if not isinstance(row, dict) or row.keys() != {"kind", "text"}:
        raise _refused(path, f"prompt {number} with other keys")
    kind, text = row["kind"], row["text"]
    if not all(isinstance(value, str) and value for value in (kind, text)):
        raise _refused(path, f"prompt {number} with a value that is empty or no string")
    return NamedPrompt(name=f"{kind} {number}", kind=kind, text=text)


def _refused(path: Path, got: str) -> ConfigError:
    return ConfigError.about(
        f"prompts in {str(path)!r}",
        expected="a TOML file of tables [[prompt]] with the strings `kind` and `text`",
        got=got,
        remedy="see src/paceline/proof/lossless/prompt_set.toml, or leave --prompts out",
    )
