"""Train an EAGLE-3 draft head for the bundled model within a wall-clock budget and export it.

    python recipes/train_head.py --minutes 3 --out recipes/.cache/head

reads what prepare.py wrote and leaves in --out: eagle3/ (config, bf16 safetensors) and
metrics_head.json, which is also the last line printed.  The target is frozen, in bfloat16.  The
head learns by training-time test: in simulated step s it is fed its own output of step s - 1, and
its distribution is drawn towards the target's.  Half of the rows are documents, the others begin as
documents and go on in the target's own words, greedy or sampled.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from continue_rows import continue_rows
from draft_head import DraftHead, default_taps, save_head, target_pass
from evaluate import HERE
from train import batches, lr_factor, pack, set_lrs

MUON_LR = 6e-3  # scaled to AdamW's update size, as in train.py
ADAMW_LR = 2e-3
STEP_WEIGHT = 0.8  # of a simulated step's loss, relative to the step before
WRITTEN = ((64, 1.0), (256, 1.0), (256, 0.0), (512, 0.0))  # tokens kept, temperature
REPORTS = 10
BUNDLED = HERE.parent / "src" / "paceline" / "models" / "bundled"


def frequent_ids(data: Path, vocab_size: int, number: int) -> tuple[Tensor, float]:
    """The most frequent token ids, ascending [number] int64, and their share of all tokens."""
    counts = np.bincount(np.load(data / "train.npz")["tokens"], minlength=vocab_size)
    ids = np.sort(np.argsort(-counts, kind="stable")[:number])
    return torch.from_numpy(ids), float(counts[ids].sum() / counts.sum())


def new_head(target: LlamaForCausalLM, draft_ids: Tensor, width: int) -> DraftHead:
    """A head that begins with the upper tap, the target's final norm and language-model head."""
    config = LlamaConfig(**target.config.to_dict() | {"intermediate_size": width})
    head = DraftHead(config, len(draft_ids))
    with torch.no_grad():
        head.lm_head.weight.copy_(target.lm_head.weight[draft_ids])
        head.norm.weight.copy_(target.model.norm.weight)
        head.fc.weight.zero_()
        head.fc.weight[:, -config.hidden_size :].fill_diagonal_(1)
    head.d2t.copy_(draft_ids - torch.arange(len(draft_ids)))
    head.t2d[draft_ids] = True
    return head


def attend(q: Tensor, past: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Attention of one simulated step, [num_rows, heads, starts, head_dim].

    A start's keys are those of step 0 up to itself, and of every later step its own.  past: (k, v)
    of each step so far, this one's last, each [num_rows, kv_heads, starts, head_dim].
    """
    starts, group = q.shape[2], q.shape[1] // past[0][0].shape[1]
    causal = torch.ones(starts, starts, dtype=torch.bool, device=q.device).tril()
    pairs = [tuple(x.repeat_interleave(group, dim=1) for x in pair) for pair in past]
    (k, v), own = pairs[0], pairs[1:]
    scores = [(q @ k.mT).masked_fill(~causal, -torch.inf)]
    scores += [(q * k_own).sum(-1, keepdim=True).to(q.dtype) for k_own, _ in own]
    weights = (torch.cat(scores, dim=-1) * q.shape[-1] ** -0.5).softmax(-1).to(q.dtype)
    out = weights[..., :starts] @ v
    for at, (_, v_own) in enumerate(own, start=starts):
        out = out + weights[..., at : at + 1] * v_own
    return out


def simulate(
    head: DraftHead, embedded: Tensor, taps: Tensor, num_steps: int
) -> Iterator[tuple[int, Tensor]]:
    """(step, logits [num_rows, starts, draft_vocab]) of num_steps simulated steps.

    embedded [num_rows, tokens, hidden] and taps [num_rows, tokens, 3 * hidden] of whole rows.  From
    start p, step s is draft position p + s, takes the token at p + s + 1 and predicts the one
    behind it; there are tokens - num_steps starts.
    """
    starts = embedded.shape[1] - num_steps
    feature = head.fc(taps[:, :starts])
    past: list[tuple[Tensor, Tensor]] = []
    for step in range(num_steps):
        positions = torch.arange(step, step + starts, device=embedded.device)
        q, k, v = head.qkv(embedded[:, step + 1 : step + 1 + starts], feature, positions)
        past.append((k, v))
        feature = head.finish(feature, attend(q, past))
        yield step, head.logits(feature)


@torch.no_grad()
def lesson(
    target: LlamaForCausalLM, head: DraftHead, rows: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Of rows [num_rows, tokens]: embeddings, taps, and the target's probabilities of draft ids."""
    found = target_pass(target, rows, default_taps(target.config.num_hidden_layers))
    wanted = found.logits.float().softmax(-1)[..., head.target_ids].to(torch.bfloat16)
    return target.model.embed_tokens(rows), found.features, wanted


def head_loss(head: DraftHead, taught: tuple[Tensor, Tensor, Tensor], num_steps: int) -> Tensor:
    """Cross-entropy against the target's distribution, summed over the simulated steps.

    What the target gives to tokens outside of the draft vocabulary counts for nothing.
    """
    embedded, taps, wanted = taught
    starts = embedded.shape[1] - num_steps
    total = embedded.new_zeros((), dtype=torch.float32)
    for step, logits in simulate(head, embedded, taps, num_steps):
        probs = wanted[:, step + 1 : step + 1 + starts]
        log_probs = F.log_softmax(logits.float(), dim=-1)
        total = total - STEP_WEIGHT**step * (probs * log_probs).sum(-1).mean()
    return total


@torch.inference_mode()
def agreement(
    target: LlamaForCausalLM, head: DraftHead, rows: Tensor, num_steps: int
) -> list[float]:
    """By simulated step: how often head and target put the same draft id first."""
    embedded, taps, wanted = lesson(target, head, rows)
    starts = rows.shape[1] - num_steps
    return [
        (logits.argmax(-1) == wanted[:, step + 1 : step + 1 + starts].argmax(-1))
        .float()
        .mean()
        .item()
        for step, logits in simulate(head, embedded, taps, num_steps)
    ]


def written_rows(target: LlamaForCausalLM, args: argparse.Namespace) -> Tensor:
    """Rows the target finished, [len(WRITTEN) * written_rows, row_tokens] int32, shuffled."""
    source = batches(args.data, args.written_rows, args.row_tokens, args.seed + 1)
    parts = []
    for kept, temperature in WRITTEN:
        _, rows = next(source)
        rows = rows.to(args.device).long()
        num_kept = kept * args.row_tokens // 1024
        parts.append(continue_rows(target, rows, num_kept, temperature).int())
    rows = torch.cat(parts)
    return rows[torch.randperm(len(rows), device=rows.device)]


def mixed(args: argparse.Namespace, written: Tensor) -> Iterator[Tensor]:
    """Endless batches [batch_rows, row_tokens] int64: half documents, half the target's words."""
    half = args.batch_rows // 2
    at = 0
    for _, rows in batches(args.data, args.batch_rows - half, args.row_tokens, args.seed):
        own = written[torch.arange(at, at + half, device=written.device) % len(written)]
        at += half
        yield torch.cat([rows.to(args.device).long(), own.long()])


def held_out_rows(args: argparse.Namespace) -> Tensor:
    """[num_rows, row_tokens] int64: at most as many rows as a batch has."""
    held_out = np.load(args.data / "heldout.npz")
    order = np.arange(len(held_out["starts"]) - 1)
    rows = pack(held_out["tokens"], held_out["starts"], order, args.row_tokens)
    return torch.from_numpy(rows[: args.batch_rows].astype(np.int64)).to(args.device)


def make_optimizers(head: DraftHead) -> list[torch.optim.Optimizer]:
    """Muon for the matrices between features and features, AdamW for the rest."""
    matrices = [head.fc.weight, *(p for p in head.midlayer.parameters() if p.ndim == 2)]
    inside = {id(p) for p in matrices}
    rest = [p for p in head.parameters() if id(p) not in inside]
    return [
        torch.optim.Muon(matrices, lr=MUON_LR, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(rest, lr=ADAMW_LR, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def train(args: argparse.Namespace) -> dict[str, object]:
    """Train until the budget is spent, exporting on the way; returns the metrics."""
    began = time.monotonic()
    torch.manual_seed(args.seed)
    target = LlamaForCausalLM.from_pretrained(args.target, dtype=torch.bfloat16)
    target = target.to(args.device).eval().requires_grad_(False)
    flat = json.loads((args.target / "config.json").read_text())
    draft_ids, coverage = frequent_ids(args.data, target.config.vocab_size, args.draft_vocab)
    head = new_head(target, draft_ids, args.width).to(args.device)
    optimizers, base_lrs = make_optimizers(head), [MUON_LR, ADAMW_LR]
    held_out, written = held_out_rows(args), written_rows(target, args)
    written_s = time.monotonic() - began
    budget_s = 60 * args.minutes - written_s
    print(f"{written.numel():,} tokens by the target after {written_s:.1f} s", flush=True)
    history: list[dict[str, object]] = []
    step = 0
    for rows in mixed(args, written):
        progress = (time.monotonic() - began - written_s) / budget_s
        if progress >= 1.0:
            break
        set_lrs(optimizers, base_lrs, lr_factor(step, progress))
        with torch.autocast(args.device, torch.bfloat16):
            loss = head_loss(head, lesson(target, head, rows), args.steps)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        step += 1
        if step % 10 == 0:
            loss.item()  # keeps the host's clock, and so the schedule, near the device
        if step == 20 or progress * REPORTS >= len(history) + 1:
            save_head(head, args.out / "eagle3", flat)
            history.append(report(target, head, held_out, args.steps, step, loss.item()))
            print(json.dumps(history[-1]), f"{time.monotonic() - began:.1f} s", flush=True)
    save_head(head, args.out / "eagle3", flat)
    history.append(report(target, head, held_out, args.steps, step, loss.item()))
    return {
        "training_seconds": round(time.monotonic() - began, 1),
        "seconds_of_writing": round(written_s, 1),
        "written_tokens": written.numel(),
        "steps": step,
        "training_tokens_seen": step * args.batch_rows * args.row_tokens,
        **facts(head, coverage, args),
        "history": history,
    }


def facts(head: DraftHead, coverage: float, args: argparse.Namespace) -> dict[str, object]:
    """What of the metrics is known without the clock."""
    return {
        "batch_tokens": args.batch_rows * args.row_tokens,
        "row_tokens": args.row_tokens,
        "simulated_steps": args.steps,
        "draft_vocab_coverage": round(coverage, 4),
        "num_parameters": sum(p.numel() for p in head.parameters()),
        "folder_bytes": sum(f.stat().st_size for f in (args.out / "eagle3").iterdir()),
        "device": torch.cuda.get_device_name() if args.device == "cuda" else args.device,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def report(
    target: LlamaForCausalLM,
    head: DraftHead,
    held_out: Tensor,
    num_steps: int,
    step: int,
    loss: float,
) -> dict[str, object]:
    with torch.autocast(held_out.device.type, torch.bfloat16):
        shares = agreement(target, head, held_out, num_steps)
    return {"step": step, "loss": round(loss, 4), "agreement": [round(x, 4) for x in shares]}


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--minutes", type=float, default=3.0, help="training budget, wall clock")
    parser.add_argument(
        "--data", type=Path, default=HERE / ".cache" / "data", help="folder made by prepare.py"
    )
    parser.add_argument("--target", type=Path, default=BUNDLED, help="model to draft for")
    parser.add_argument("--out", type=Path, default=HERE / ".cache" / "head", help="results")
    parser.add_argument("--draft-vocab", type=int, default=3072, help="most frequent ids to draft")
    parser.add_argument("--width", type=int, default=640, help="inner width of the head's MLP")
    parser.add_argument("--steps", type=int, default=5, help="simulated steps")
    parser.add_argument("--row-tokens", type=int, default=1024, help="tokens per training row")
    parser.add_argument("--batch-rows", type=int, default=48, help="rows per step")
    parser.add_argument(
        "--written-rows", type=int, default=4096, help="rows the target writes, of each sort"
    )
    parser.add_argument("--seed", type=int, default=0)
    default_device = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=default_device, choices=["cuda", "cpu"])
    args = parser.parse_args()
    if not (args.data / "train.npz").exists():
        parser.error(f"--data: expected train.npz in {args.data}; run recipes/prepare.py first")
    return args


def main() -> None:
    args = parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    transformers.utils.logging.disable_progress_bar()
    metrics = train(args)
    (args.out / "metrics_head.json").write_text(json.dumps(metrics, indent=1) + "\n")
    print(json.dumps(metrics))


if __name__ == "__main__":
    main()
