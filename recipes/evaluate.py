"""Score an exported model: the parse score, and held-out bits per byte.

    python recipes/evaluate.py --model src/paceline/models/bundled --parse-only

The parse score (parse_score.py) needs the headers beside this file; held-out bits per byte, left
out by --parse-only, need what prepare.py wrote.  The last line printed is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast
from transformers.modeling_utils import PreTrainedModel

from parse_score import HEADERS, NUM_NEW_TOKENS, parse_report, read_headers

HERE = Path(__file__).parent
WINDOW = 2048  # tokens; windows do not overlap, so text after a cut is read without its past
DEMO_PROMPT = "def fibonacci(n):"


def held_out_bits_per_byte(
    model: PreTrainedModel, data: Path, *, rows: int = 4, max_windows: int | None = None
) -> float:
    """Bits the model needs for the held-out documents and their ends, per byte of their text."""
    held_out = np.load(data / "heldout.npz")
    tokens = held_out["tokens"].astype(np.int64)
    bytes_per_token = float(held_out["num_bytes"]) / len(tokens)
    end = tokens[-1]  # every document ends in the end-of-text token; the first one follows it too
    stream = torch.from_numpy(np.concatenate([[end], tokens]))
    nats, num_tokens = 0.0, 0
    firsts = list(range(0, len(stream) - 1, WINDOW))[:max_windows]
    whole = [first for first in firsts if first + WINDOW < len(stream)]
    batches = [whole[i : i + rows] for i in range(0, len(whole), rows)]
    batches += [[first] for first in firsts[len(whole) :]]
    for batch in batches:
        window = torch.stack([stream[first : first + WINDOW + 1] for first in batch])
        window = window.to(model.device)
        with torch.inference_mode():
            logits = model(input_ids=window[:, :-1], use_cache=False).logits.float()
        targets = window[:, 1:].flatten()
        nats += F.cross_entropy(logits.flatten(0, 1), targets, reduction="sum").item()
        num_tokens += targets.numel()
    return nats / math.log(2) / (num_tokens * bytes_per_token)


def complete(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, prompts: list[str], rows: int
) -> list[tuple[str, bool]]:
    """Greedy continuations of NUM_NEW_TOKENS tokens, each with whether the model ended it."""
    completions: list[tuple[str, bool]] = []
    for first in range(0, len(prompts), rows):
        batch = tokenizer(
            prompts[first : first + rows],
            return_tensors="pt",
            padding=True,
            padding_side="left",
            return_token_type_ids=False,
        ).to(model.device)
        with torch.inference_mode():
            out = model.generate(**batch, max_new_tokens=NUM_NEW_TOKENS, do_sample=False)
        for text in tokenizer.batch_decode(out[:, batch["input_ids"].shape[1] :]):
            text, mark, _ = text.partition(tokenizer.eos_token)
            completions.append((text, bool(mark)))
    return completions


def evaluate(
    folder: Path, data: Path | None, *, headers: Path, device: str, rows: int
) -> dict[str, object]:
    """All scores of an exported folder, run in bfloat16 as it is stored; no bits without data."""
    if not (folder / "model.safetensors").exists():
        raise SystemExit(f"--model: expected a folder with model.safetensors, got {folder}")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).to(device).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    items = read_headers(headers)
    completions = complete(model, tokenizer, [item["header"] for item in items], rows)
    report = parse_report(items, completions)
    for item in report:
        print(f"--- {'parses' if item['parses'] else 'FAILS'}  {item['path']}")
        print(item["header"] + item["body"])
    demo, _ = complete(model, tokenizer, [DEMO_PROMPT], rows=1)[0]
    print(f"--- demo\n{DEMO_PROMPT}{demo}")
    bits = {}
    if data is not None:
        bits["held_out_bits_per_byte"] = held_out_bits_per_byte(model, data, rows=min(rows, 16))
    return {
        "parse_score": sum(bool(item["parses"]) for item in report),
        "num_headers": len(report),
        **bits,
        "demo": DEMO_PROMPT + demo,
        "num_parameters": sum(p.numel() for p in model.parameters()),
        "model_bytes": sum(f.stat().st_size for f in folder.iterdir() if f.is_file()),
        "device": torch.cuda.get_device_name() if device == "cuda" else device,
        "torch": torch.__version__,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", type=Path, required=True, help="exported model folder")
    parser.add_argument(
        "--data", type=Path, default=HERE / ".cache" / "data", help="folder made by prepare.py"
    )
    parser.add_argument("--headers", type=Path, default=HEADERS, help="headers to complete")
    parser.add_argument("--parse-only", action="store_true", help="no bits per byte, no --data")
    default_device = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=default_device, choices=["cuda", "cpu"])
    parser.add_argument("--rows", type=int, default=4, help="prompts or windows per batch")
    args = parser.parse_args()
    data = None if args.parse_only else args.data
    if data is not None and not (data / "heldout.npz").exists():
        parser.error(
            f"--data: expected heldout.npz in {data}; run recipes/prepare.py first, "
            "or score with --parse-only"
        )
    scores = evaluate(args.model, data, headers=args.headers, device=args.device, rows=args.rows)
    print(json.dumps(scores))


if __name__ == "__main__":
    main()
