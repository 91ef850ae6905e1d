"""EAGLE heads on ranks that share them, and their target, draft what one process drafts."""

from concurrent.futures import ThreadPoolExecutor

import eagle_checkpoints as heads
import pytest
import torch
from fake_context import FakeContext
from torch import Tensor

from paceline.core.model.config import ModelConfig
from paceline.core.parallel import Parallel, of_rank
from paceline.kernels.all_reduce import Exchange, open_exchange
from paceline.layers.weights.dense import DENSE
from paceline.layers.weights.parameter import Placement
from paceline.layers.weights.weight_format import Named
from paceline.models.config import parse_config
from paceline.models.coverage import require_filled_once
from paceline.models.registry import architecture
from paceline.speculate.eagle.config import EagleConfig, parse_eagle_config, tap_names
from paceline.speculate.eagle.head import build_eagle_head

CPU = torch.device("cpu")
IDS = torch.tensor([5, 17, 3, 88, 41, 41, 9, 60, 2, 77, 30, 12])
EVEN = {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 12}  # of the target
CASES = {
    "eagle1": ("EAGLE", heads.HEAD),
    "eagle3": ("EAGLE3", heads.EAGLE3),
    "eagle3-norms-three-layers": (
        "EAGLE3",
        heads.EAGLE3 | {"fc_norm": True, "norm_output": True, "num_hidden_layers": 3},
    ),
    "eagle3-own-embedding": (
        "EAGLE3",
        heads.EAGLE3 | {"hidden_size": 32, "target_hidden_size": heads.HIDDEN},
    ),
}


def fill(named: Named) -> None:
    """Noise that only a tensor's name decides; a rank takes its part of it."""
    for name, target in sorted(named.items()):
        noise = torch.Generator().manual_seed(sum(map(ord, name)))
        stored = torch.randn(target.shape, generator=noise) * 0.2
        target.copy_(stored + (1.0 if "norm" in name else 0.0))


def draft(
    target_config: ModelConfig, config: EagleConfig, parallel: Parallel, way: Exchange | None
) -> Tensor:
    """Logits of a head at every position but the last, on its target's features."""
    placement = Placement(CPU, torch.float32, DENSE, way)
    where = {"parallel": parallel, "placement": placement, "max_positions": 64}
    target = architecture(target_config.model_type).build(target_config, **where)
    fill(target.destinations())
    head = build_eagle_head(config, target, **where)
    fill(head.destinations())
    require_filled_once(head, head.destinations(), model="head")
    names, at = tap_names(config, target_config), torch.arange(len(IDS) - 1)
    with torch.inference_mode():
        seen = FakeContext(of_rank(target_config, parallel))
        taps = target(IDS[:-1], at, seen, taps=names).taps
        features = head.fuse([taps[name] for name in names])
        ctx = FakeContext(of_rank(config.layer, parallel))
        return head.logits(head(IDS[1:], at, features, ctx))


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", CASES)
def test_heads_on_ranks_draft_what_one_process_drafts(name: str, size: int) -> None:
    algorithm, raw = CASES[name]
    config = parse_eagle_config(raw, algorithm)
    raw_target = heads.target_model().config.to_dict()
    target = parse_config(raw_target | {"dtype": "float32", **EVEN})
    alone = draft(target, config, Parallel(), None)
    ways = open_exchange(size, 64 * 256, dtype=torch.float32, device=CPU)
    with ThreadPoolExecutor(size) as threads:
        runs = [
            threads.submit(draft, target, config, Parallel(rank, size), way)
            for rank, way in enumerate(ways)
        ]
        ranks = [run.result() for run in runs]
    assert all(torch.equal(rank, ranks[0]) for rank in ranks)
    error = (ranks[0] - alone).abs().max() / alone.abs().max()
    assert error < 1e-5, f"relative error {error:.2e}"
