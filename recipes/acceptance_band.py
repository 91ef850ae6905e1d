"""Write acceptance.json: how many tokens per round a head reaches, and how few mean a fault.

    python recipes/acceptance_band.py --head src/paceline/models/bundled/eagle3

An engine runs the same prompts when it starts.  The last line printed is what was written.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from transformers import AutoTokenizer

from draft_head import default_taps, load_head
from draft_tree import Shape
from evaluate_head import load_target, score
from parse_score import read_headers
from train_head import BUNDLED

NUM_PROMPTS = 8  # of the held-out headers, at equal distances
MAX_TOKENS = 24
NUM_STEPS = 3
LEAST = 0.8  # of what was measured; bfloat16 and other kernels stay above, a wrong order below


def band(head_folder: Path, target_folder: Path) -> dict[str, object]:
    """The file's fields, measured in float32."""
    target = load_target(target_folder, torch.float32)
    head = load_head(head_folder, device="cpu", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(target_folder)
    headers = read_headers()
    texts = [item["header"] for item in headers[:: len(headers) // NUM_PROMPTS][:NUM_PROMPTS]]
    prompts = [torch.tensor(tokenizer(text)["input_ids"]) for text in texts]
    taps = default_taps(target.config.num_hidden_layers)
    shapes = {"chain": Shape(NUM_STEPS, 1, NUM_STEPS)}
    found = score(target, head, prompts, MAX_TOKENS, shapes=shapes, taps=taps)
    reached = round(float(str(found["chain"]["tokens_per_round"])), 2)
    return {
        "prompts": texts,
        "max_tokens": MAX_TOKENS,
        "num_steps": NUM_STEPS,
        "tokens_per_round": reached,
        "least_tokens_per_round": round(LEAST * reached, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--head", type=Path, default=BUNDLED / "eagle3", help="head's folder")
    parser.add_argument("--target", type=Path, default=BUNDLED, help="model it drafts for")
    args = parser.parse_args()
    document = band(args.head, args.target)
    (args.head / "acceptance.json").write_text(json.dumps(document, indent=1) + "\n")
    print(json.dumps(document))


if __name__ == "__main__":
    main()
