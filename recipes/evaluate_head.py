"""Score a draft head: tokens per round on held-out text, by a loop in plain torch.

    python recipes/evaluate_head.py --head src/paceline/models/bundled/eagle3

Prompts are the first halves of held-out documents, answers the target's greedy text.  A round's
bonus token counts, the token of the prefill does not.  The last line printed is one JSON document.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from continue_rows import continue_rows
from draft_head import DraftHead, default_taps, load_head, target_pass
from draft_tree import Shape, accepted_per_round
from evaluate import HERE
from train_head import BUNDLED

SHAPES = {"chain": Shape(3, 1, 3), "tree": Shape(3, 4, 7)}
MAX_PROMPT = 512  # tokens


def prompts_of(data: Path, number: int) -> list[Tensor]:
    """First halves [n] int64 of held-out documents, at equal distances among all of them."""
    held_out = np.load(data / "heldout.npz")
    starts = held_out["starts"]
    chosen = np.linspace(0, len(starts) - 2, number).astype(int)
    halves = [(starts[doc], (starts[doc + 1] - starts[doc]) // 2) for doc in chosen]
    rows = [
        held_out["tokens"][first : first + min(max(length, 1), MAX_PROMPT)]
        for first, length in halves
    ]
    return [torch.from_numpy(row.astype(np.int64)) for row in rows]


def greedy_text(target: LlamaForCausalLM, prompt: Tensor, num_new: int) -> Tensor:
    """The prompt [n] int64 with up to num_new tokens more, the last an end of text or none."""
    row = torch.nn.functional.pad(prompt, (0, num_new))[None]
    tokens = continue_rows(target, row, len(prompt), 0.0)[0]
    ends = (tokens[len(prompt) :] == target.config.eos_token_id).nonzero()
    return tokens[: len(prompt) + int(ends[0]) + 1] if len(ends) else tokens


@torch.inference_mode()
def score(
    target: LlamaForCausalLM,
    head: DraftHead,
    prompts: Sequence[Tensor],
    num_new: int,
    *,
    shapes: dict[str, Shape],
    taps: tuple[int, ...],
) -> dict[str, dict[str, object]]:
    """What rounds of every shape accept over all prompts; taps: layers whose outputs are read."""
    table = target.model.embed_tokens.weight
    rounds: dict[str, list[int]] = {name: [] for name in shapes}
    for prompt in prompts:
        tokens = greedy_text(target, prompt, num_new)
        features = target_pass(target, tokens[None], taps).features[0]
        for name, shape in shapes.items():
            rounds[name] += accepted_per_round(
                head, table, tokens, features, num_prompt=len(prompt), shape=shape
            )
    return {name: summary(rounds[name], shape) for name, shape in shapes.items()}


def summary(accepted: list[int], shape: Shape) -> dict[str, object]:
    """accepted: drafts taken in each round."""
    count = max(len(accepted), 1)
    shares = [sum(a > depth for a in accepted) / count for depth in range(shape.num_steps)]
    return {
        **shape._asdict(),
        "rounds": len(accepted),
        "tokens_per_round": round(1 + sum(shares), 3),
        "accepted_by_position": [round(share, 3) for share in shares],
    }


def load_target(folder: Path, dtype: torch.dtype) -> LlamaForCausalLM:
    target = LlamaForCausalLM.from_pretrained(folder, dtype=dtype)
    return target.eval().requires_grad_(False)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--head", type=Path, default=BUNDLED / "eagle3", help="head's folder")
    parser.add_argument("--target", type=Path, default=BUNDLED, help="model it drafts for")
    parser.add_argument(
        "--data", type=Path, default=HERE / ".cache" / "data", help="folder made by prepare.py"
    )
    parser.add_argument("--prompts", type=int, default=40, help="held-out documents")
    parser.add_argument("--new-tokens", type=int, default=96, help="greedy tokens of an answer")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--taps", type=int, nargs=3, help="layers read; default: the head's")
    parser.add_argument("--metrics", type=Path, help="JSON file to add the scores to")
    args = parser.parse_args()
    if not (args.data / "heldout.npz").exists():
        parser.error(f"--data: expected heldout.npz in {args.data}; run recipes/prepare.py first")
    return args


def main() -> None:
    args = parse_args()
    dtype = getattr(torch, args.dtype)
    target = load_target(args.target, dtype)
    head = load_head(args.head, device="cpu", dtype=dtype)
    taps = tuple(args.taps or default_taps(target.config.num_hidden_layers))
    prompts = prompts_of(args.data, args.prompts)
    scores = score(target, head, prompts, args.new_tokens, shapes=SHAPES, taps=taps)
    document = {
        "prompts": args.prompts,
        "new_tokens": args.new_tokens,
        "dtype": args.dtype,
        "taps": taps,
        **scores,
    }
    if args.metrics is not None:
        metrics = json.loads(args.metrics.read_text())
        metrics["held_out_acceptance"] = document
        args.metrics.write_text(json.dumps(metrics, indent=1) + "\n")
    print(json.dumps(document))


if __name__ == "__main__":
    main()
