"""Make the training data and the tokenizer of the bundled model.

    python recipes/prepare.py

fetches the wheels named in recipes/packages.txt, reads their .py files and the running
interpreter's standard library, normalises them (sources.py), splits them by file, trains the
byte-level BPE and writes into recipes/.cache/data:

    train.npz        tokens of the training documents, and where each document starts
    heldout.npz      the same for the held-out files, with the byte count of their text
    headers.json     the 100 held-out function headers of the parse score
    stats.json       files, bytes and tokens, per package
    tokenizer/       tokenizer.json, tokenizer_config.json
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from sources import (
    Function,
    SourceFile,
    documents,
    functions,
    parse,
    stable_hash,
    statements,
    stdlib_files,
    wheel_files,
)

HERE = Path(__file__).parent
END_OF_TEXT = "<|endoftext|>"
VOCAB_SIZE = 4096
HELD_OUT_PERCENT = 2  # of the files
MODEL_FOLDER_PERCENT = 50  # of transformers/models: its folders resemble each other
FUNCTION_PERCENT = 40  # of the training functions also stand alone, as documents of their own
NUM_HEADERS = 100
MAX_HEADERS_PER_FILE = 2
MAX_HEADER_CHARS = 160
MIN_BODY_LINES = 3

# Newline and indentation are one piece; a word may take one leading character (a space, a dot, a
# bracket); a digit is alone but for a leading space; then punctuation, then other white space.
PIECES = r"\n+ *|[^\s\p{L}\p{N}_]?[\p{L}_]+| [\p{L}_]+| ?\p{N}| ?[^\s\p{L}\p{N}_]+| +|\s"

# No chat tuning: the messages are code, one after another.
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }}"
    "{% if not loop.last %}{{ '\\n' }}{% endif %}{% endfor %}"
)


@dataclass(slots=True)
class Collection:
    """The documents of both splits, and the books kept while they are made."""

    train: list[str] = field(default_factory=list)
    held_out: list[str] = field(default_factory=list)
    candidates: list[tuple[str, Function]] = field(default_factory=list)
    train_bodies: set[str] = field(default_factory=set)
    seen: set[str] = field(default_factory=set)
    stats: dict[str, dict[str, int]] = field(default_factory=lambda: defaultdict(_zero_stats))


def _zero_stats() -> dict[str, int]:
    return {"train_files": 0, "train_bytes": 0, "held_out_files": 0, "held_out_bytes": 0}


def read_pins(path: Path) -> list[str]:
    """The `name==version` lines of packages.txt."""
    pins = [line.strip() for line in path.read_text().splitlines() if line.strip()]
    for pin in pins:
        if pin.count("==") != 1:
            raise SystemExit(f"{path}: expected name==version on every line, got {pin!r}")
    return pins


def fetch_wheels(pins: list[str], folder: Path) -> dict[str, Path]:
    """Pin -> wheel file; downloads what the folder lacks."""
    folder.mkdir(parents=True, exist_ok=True)
    wheels = {}
    for pin in pins:
        name, version = pin.split("==")
        pattern = f"{name}-{version}[-+]*.whl"
        if not list(folder.glob(pattern)):
            command = ["download", "--no-deps", "--only-binary=:all:", "-d", str(folder), pin]
            subprocess.run([sys.executable, "-m", "pip", *command], check=True)
        found = sorted(folder.glob(pattern))
        if len(found) != 1:
            raise SystemExit(f"expected one wheel {pattern} in {folder}, got {len(found)}")
        wheels[pin] = found[0]
    return wheels


def source_files(wheels: dict[str, Path]) -> Iterator[SourceFile]:
    yield from stdlib_files()
    for pin, wheel in wheels.items():
        yield from wheel_files(wheel, pin)


def is_held_out(file: SourceFile) -> bool:
    return stable_hash(f"split:{file.split_key}") % 100 < HELD_OUT_PERCENT


def is_used(file: SourceFile) -> bool:
    if not file.split_key.startswith("transformers/models/"):
        return True
    return stable_hash(f"use:{file.split_key}") % 100 < MODEL_FOLDER_PERCENT


def is_wanted(text: str, out: Collection) -> bool:
    """New, and without the end-of-text mark, which the tokenizer would take for the token."""
    return text not in out.seen and END_OF_TEXT not in text


def collect(files: list[SourceFile]) -> Collection:
    """Training files first: a held-out statement that also stands in them is then left out."""
    out = Collection()
    for file in sorted(filter(is_used, files), key=is_held_out):
        held_out = is_held_out(file)
        tree = parse(file.text)
        if tree is None:
            continue
        fresh = [part for part in statements(tree) if is_wanted(part, out)]
        out.seen.update(part for part in fresh if "\n" in part)  # imports may recur
        split = "held_out" if held_out else "train"
        docs = list(documents(fresh))
        (out.held_out if held_out else out.train).extend(docs)
        stats = out.stats[file.package]
        stats[f"{split}_files"] += bool(docs)
        stats[f"{split}_bytes"] += sum(len(doc.encode()) for doc in docs)
        for function in functions(tree):
            if held_out:
                out.candidates.append((file.path, function))
                continue
            out.train_bodies.add(function.body)
            text = function.text
            if is_wanted(text, out) and stable_hash(f"alone:{text}") % 100 < FUNCTION_PERCENT:
                out.seen.add(text)
                out.train.append(text)
    return out


def choose_headers(collection: Collection) -> list[dict[str, str]]:
    """NUM_HEADERS headers in hash order; none whose body occurs verbatim in a training file."""
    per_file: dict[str, int] = defaultdict(int)
    chosen: dict[str, str] = {}
    for path, function in sorted(
        collection.candidates, key=lambda item: stable_hash(f"{item[0]}:{item[1].header}")
    ):
        header, body = function.header, function.body
        fits = len(header) <= MAX_HEADER_CHARS and body.count("\n") >= MIN_BODY_LINES
        if not fits or body in collection.train_bodies or header in chosen:
            continue
        if per_file[path] < MAX_HEADERS_PER_FILE:
            per_file[path] += 1
            chosen[header] = path
    if len(chosen) < NUM_HEADERS:
        raise SystemExit(f"expected {NUM_HEADERS} held-out headers, got {len(chosen)}")
    picked = list(chosen.items())[:NUM_HEADERS]
    return [{"header": header, "path": path} for header, path in picked]


def train_tokenizer(texts: list[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": END_OF_TEXT,
        "pad_token": END_OF_TEXT,
        "add_bos_token": False,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 2048,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def check_round_trip(tokenizer: Tokenizer, texts: list[str]) -> None:
    for text in texts:
        back = tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False)
        if back != text:
            raise SystemExit(f"decode(encode(x)) != x, x = {text[:80]!r}, got {back[:80]!r}")


def encode(tokenizer: Tokenizer, texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
    """tokens uint16, each document ending in END_OF_TEXT; starts int64 [num_docs + 1]."""
    end = tokenizer.token_to_id(END_OF_TEXT)
    tokens, lens = [], [0]
    for first in range(0, len(texts), 4096):
        for encoding in tokenizer.encode_batch(texts[first : first + 4096]):
            tokens.append(np.array([*encoding.ids, end], dtype=np.uint16))
            lens.append(len(tokens[-1]))
    return np.concatenate(tokens), np.cumsum(lens)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--cache", type=Path, default=HERE / ".cache", help="working folder")
    parser.add_argument("--packages", type=Path, default=HERE / "packages.txt", help="the pins")
    args = parser.parse_args()

    sys.setrecursionlimit(20_000)  # ast.unparse recurses through sums of hundreds of terms
    wheels = fetch_wheels(read_pins(args.packages), args.cache / "wheels")
    collection = collect(list(source_files(wheels)))
    print(f"{len(collection.train)} training documents, {len(collection.held_out)} held out")
    headers = choose_headers(collection)

    data = args.cache / "data"
    tokenizer = train_tokenizer(collection.train[::3])  # a third is plenty for 4096 entries
    odd = ["", " \t\r\n\x00", "naïve 🙂 \u200b日本", "x  =\t1\n\n\n   y", "a1b22_c3 ... \n \n"]
    check_round_trip(tokenizer, odd + collection.held_out)
    save_tokenizer(tokenizer, data / "tokenizer")

    tokens, starts = encode(tokenizer, collection.train)
    np.savez_compressed(data / "train.npz", tokens=tokens, starts=starts)
    held_tokens, held_starts = encode(tokenizer, collection.held_out)
    num_bytes = sum(len(doc.encode()) for doc in collection.held_out)
    np.savez_compressed(
        data / "heldout.npz", tokens=held_tokens, starts=held_starts, num_bytes=num_bytes
    )
    (data / "headers.json").write_text(json.dumps(headers, indent=1) + "\n")
    stats = {
        "packages": collection.stats,
        "train": {"documents": len(starts) - 1, "tokens": len(tokens)},
        "held_out": {
            "documents": len(held_starts) - 1,
            "tokens": len(held_tokens),
            "bytes": num_bytes,
        },
    }
    (data / "stats.json").write_text(json.dumps(stats, indent=1) + "\n")
    print(json.dumps(stats))


if __name__ == "__main__":
    main()
