"""Train the bundled model within a wall-clock budget, export it and score it.

    python recipes/train.py --minutes 2.2 --out recipes/.cache/out

reads what prepare.py wrote and leaves in --out: model/ (config, bf16 safetensors, tokenizer),
metrics.json and, after evaluate.py's scores, one JSON document as the last line printed.
Weights are kept in float32 and computed with in bfloat16; matrices inside the layers learn by
Muon, everything else by AdamW; the learning rate follows the clock.
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from evaluate import HERE, evaluate, held_out_bits_per_byte

MUON_LR = 6e-3  # scaled to AdamW's update size, see match_rms_adamw
ADAMW_LR = 3e-3
WEIGHT_DECAY = 0.1
WARM_UP_STEPS = 100
DECAY_FROM = 0.4  # of the budget; from there the learning rate falls linearly to zero
ROPE_THETA = 10000.0
FIRST_REPORT = 60  # steps; later reports, each with an export, at equal distances
REPORTS = 12
SAMPLE_WINDOWS = 32  # held-out windows read for an estimate


def model_config(num_layers: int) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=4096,
        hidden_size=192,
        intermediate_size=640,
        num_hidden_layers=num_layers,
        num_attention_heads=3,
        num_key_value_heads=1,
        head_dim=64,
        max_position_embeddings=2048,
        rope_theta=ROPE_THETA,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        attention_bias=False,
        mlp_bias=False,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=0,
    )


def pack(tokens: np.ndarray, starts: np.ndarray, order: np.ndarray, row_len: int) -> np.ndarray:
    """Rows of documents, [num_rows, row_len] uint16, in the given order of documents.

    Every row begins at the beginning of a document, since a prompt does; what the last document
    of a row has too much is dropped, and in the next epoch another document is the last one.
    """
    rows, row, filled = [], np.empty(row_len, dtype=np.uint16), 0
    for doc in order:
        first, last = starts[doc], starts[doc + 1]
        taken = min(last - first, row_len - filled)
        row[filled : filled + taken] = tokens[first : first + taken]
        filled += taken
        if filled == row_len:
            rows.append(row)
            row, filled = np.empty(row_len, dtype=np.uint16), 0
    if not rows:
        raise SystemExit(f"expected at least one row of {row_len} tokens, got {len(tokens)} tokens")
    return np.stack(rows)


def batches(data: Path, batch_rows: int, row_len: int, seed: int) -> Iterator[tuple[int, Tensor]]:
    """Endless (epoch, rows [batch_rows, row_len] int32); every epoch packs a new order."""
    train = np.load(data / "train.npz")
    tokens, starts = train["tokens"], train["starts"]
    rng = np.random.default_rng(seed)
    epoch = 0
    while True:
        rows = pack(tokens, starts, rng.permutation(len(starts) - 1), row_len)
        rows = torch.from_numpy(rows.astype(np.int32))
        for first in range(0, max(len(rows) - batch_rows, 0) + 1, batch_rows):
            yield epoch, rows[first : first + batch_rows]
        epoch += 1


def head_loss(model: LlamaForCausalLM, hidden: Tensor, targets: Tensor) -> Tensor:
    """Mean next-token loss from the last layer's output [num_rows, row_tokens, hidden]."""
    logits = model.lm_head(model.model.norm(hidden))
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten().long())


def token_loss(model: LlamaForCausalLM, rows: Tensor, head: Callable[..., Tensor]) -> Tensor:
    """Mean next-token loss of rows [num_rows, row_tokens + 1].

    The layers are called one by one, without a mask: LlamaModel.forward looks at the positions on
    the host in every step, which costs a synchronisation.
    """
    inputs, targets = rows[:, :-1], rows[:, 1:]
    inner = model.model
    hidden = inner.embed_tokens(inputs).to(torch.bfloat16)  # the residual stream, as at inference
    positions = torch.arange(inputs.shape[1], device=inputs.device)[None]
    rotary = inner.rotary_emb(hidden, positions)
    for layer in inner.layers:
        hidden = layer(hidden, attention_mask=None, position_embeddings=rotary)
    return head(model, hidden, targets)


def make_optimizers(model: LlamaForCausalLM) -> list[torch.optim.Optimizer]:
    fused = next(model.parameters()).is_cuda
    matrices = [p for p in model.model.layers.parameters() if p.ndim == 2]
    norms = [p for p in model.parameters() if p.ndim == 1]
    groups = [
        {"params": [model.model.embed_tokens.weight], "weight_decay": WEIGHT_DECAY},
        {"params": norms, "weight_decay": 0.0},
    ]
    return [
        torch.optim.Muon(
            matrices, lr=MUON_LR, weight_decay=WEIGHT_DECAY, adjust_lr_fn="match_rms_adamw"
        ),
        torch.optim.AdamW(groups, lr=ADAMW_LR, betas=(0.9, 0.95), fused=fused),
    ]


def lr_factor(step: int, progress: float) -> float:
    """Of the full learning rate, in `step` and at `progress` in 0..1 of the time."""
    warm = min(1.0, (step + 1) / WARM_UP_STEPS)
    return warm * min(1.0, max(0.0, (1.0 - progress) / (1.0 - DECAY_FROM)))


def set_lrs(optimizers: list[torch.optim.Optimizer], base_lrs: list[float], factor: float) -> None:
    for optimizer, lr in zip(optimizers, base_lrs, strict=True):
        for group in optimizer.param_groups:
            group["lr"] = lr * factor


def export(model: LlamaForCausalLM, tokenizer: Path, folder: Path) -> LlamaForCausalLM:
    """Write a bf16 copy with the usual names, config.json also in the flat form; returns it."""
    folder.mkdir(parents=True, exist_ok=True)
    half = LlamaForCausalLM(model.config).to(model.device, torch.bfloat16)
    half.load_state_dict(model.state_dict())
    half.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"rope_theta": ROPE_THETA, "torch_dtype": "bfloat16", "dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(tokenizer / name, folder / name)
    (folder / "model.safetensors").chmod(0o644)
    return half


def train(args: argparse.Namespace) -> dict[str, object]:
    """Train until the budget is spent, exporting on the way; returns the metrics."""
    began = time.monotonic()
    torch.manual_seed(args.seed)
    model = LlamaForCausalLM(model_config(args.layers)).to(args.device)
    optimizers, base_lrs = make_optimizers(model), [MUON_LR, ADAMW_LR]
    head = head_loss
    if args.compile:
        head = torch.compile(head_loss, dynamic=False)
        for layer in model.model.layers:  # one compilation serves all layers
            layer.compile(dynamic=False)
    history: list[dict[str, float]] = []
    step, first_step_s = 0, 0.0
    for epoch, rows in batches(args.data, args.batch_rows, args.row_tokens + 1, args.seed):
        progress = (time.monotonic() - began) / (60 * args.minutes)
        if progress >= 1.0:
            break
        set_lrs(optimizers, base_lrs, lr_factor(step, progress))
        with torch.autocast(args.device, torch.bfloat16):
            loss = token_loss(model, rows.to(args.device), head)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        step += 1
        if step == 1 or step % 20 == 0:
            loss.item()  # keeps the host's clock, and so the schedule, near the device
        if step == 1:
            first_step_s = time.monotonic() - began
            print(f"first step, compilation included: {first_step_s:.1f} s", flush=True)
        if step == FIRST_REPORT or progress * REPORTS >= len(history) + 1:
            half = export(model, args.data / "tokenizer", args.out / "model")
            rate = (step - 1) * args.batch_tokens / (time.monotonic() - began - first_step_s)
            history.append(report(half, args.data, step, epoch, loss.item(), rate))
            print(json.dumps(history[-1]), flush=True)
    export(model, args.data / "tokenizer", args.out / "model")
    return {
        "training_seconds": round(time.monotonic() - began, 1),
        "seconds_to_first_step": round(first_step_s, 1),
        "steps": step,
        "epochs": epoch + 1,
        "training_tokens_seen": step * args.batch_tokens,
        "batch_tokens": args.batch_tokens,
        "history": history,
        "transformers": transformers.__version__,
    }


def report(
    model: LlamaForCausalLM, data: Path, step: int, epoch: int, loss: float, rate: float
) -> dict[str, float]:
    bits = held_out_bits_per_byte(model, data, rows=8, max_windows=SAMPLE_WINDOWS)
    return {
        "step": step,
        "epoch": epoch,
        "loss": round(loss, 4),
        "held_out_bits_per_byte_sample": round(bits, 4),
        "tokens_per_second": round(rate),
    }


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--minutes", type=float, default=2.2, help="training budget, wall clock")
    parser.add_argument(
        "--data", type=Path, default=HERE / ".cache" / "data", help="folder made by prepare.py"
    )
    parser.add_argument("--out", type=Path, default=HERE / ".cache" / "out", help="results")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--row-tokens", type=int, default=2048, help="tokens per training row")
    parser.add_argument("--batch-rows", type=int, default=96, help="rows per step")
    parser.add_argument("--seed", type=int, default=0)
    default_device = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=default_device, choices=["cuda", "cpu"])
    parser.add_argument("--no-compile", dest="compile", action="store_false")
    args = parser.parse_args()
    if not (args.data / "train.npz").exists():
        parser.error(f"--data: expected train.npz in {args.data}; run recipes/prepare.py first")
    args.batch_tokens = args.batch_rows * args.row_tokens
    return args


def main() -> None:
    args = parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    transformers.utils.logging.disable_progress_bar()
    metrics = train(args)
    metrics_file = args.out / "metrics.json"
    metrics_file.write_text(json.dumps(metrics, indent=1) + "\n")
    rows = 100 if args.device == "cuda" else 4
    metrics |= evaluate(
        args.out / "model",
        args.data,
        headers=args.data / "headers.json",
        device=args.device,
        rows=rows,
    )
    metrics_file.write_text(json.dumps(metrics, indent=1) + "\n")
    print(json.dumps(metrics))


if __name__ == "__main__":
    main()
