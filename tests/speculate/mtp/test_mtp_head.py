"""A model's layer behind its last computes what transformers' MtpModel does, draft after draft."""

from dataclasses import dataclass

import mtp_checkpoints
import pytest
import torch
from fake_context import FakeContext
from torch import Tensor
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

from paceline.core.model.config import ModelConfig
from paceline.core.parallel import Parallel
from paceline.models.causal_lm import CausalLM
from paceline.models.config import parse_config
from paceline.models.coverage import require_filled_once
from paceline.models.loader import load_model
from paceline.models.locate import locate
from paceline.models.registry import architecture
from paceline.speculate.drafter import Loading
from paceline.speculate.mtp.head import MtpHead
from paceline.speculate.mtp.layout import layout_of, read_next_token
from paceline.speculate.mtp.loader import load_mtp_head

CPU = torch.device("cpu")
TOLERANCE = 1e-5  # of the largest number; the two differ in the order of float32 sums
PROMPT = torch.tensor([5, 17, 3, 88, 41, 41, 9, 60, 2, 77, 30, 12])
KNOWN = len(PROMPT) - 1  # positions whose next token is known


@dataclass(frozen=True)
class Case:
    """One model in both implementations."""

    features: Tensor  # [KNOWN, hidden]  transformers' last hidden states
    theirs: MtpModel
    config: ModelConfig  # of the model
    ours: CausalLM
    layer: ModelConfig  # of the layer behind its last
    head: MtpHead


@pytest.fixture(scope="module", params=mtp_checkpoints.CASES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    folder = tmp_path_factory.mktemp("model")
    target = mtp_checkpoints.save_mtp(request.param, folder)
    source = locate(str(folder))
    config = parse_config(source.config)
    how = Loading(parallel=Parallel(), device=CPU, dtype=torch.float32, load_format="auto", seed=0)
    ours = load_model(source, config, max_positions=64, **how)
    layout = layout_of(config)
    layer = read_next_token(source.config, layout)
    place = str(architecture(config.model_type).predicts).format(config.num_layers)
    head = load_mtp_head(source, layer, layout, ours, place=place, max_positions=64, how=how)
    features = target(PROMPT[None, :-1], output_hidden_states=True).hidden_states[-1][0]
    return Case(features, mtp_checkpoints.load_mtp(target), config, ours, layer, head)


def assert_close(ours: Tensor, theirs: Tensor) -> None:
    assert ours.shape == theirs.shape
    error = (ours - theirs).abs().max() / theirs.abs().max()
    assert error < TOLERANCE, f"relative error {error:.2e}"


def reference_chain(case: Case, drafts: int) -> tuple[list[Tensor], list[Tensor]]:
    """(features of the last position, logits) of each draft, the layer reading its own output."""
    cache = MtpCache(config=case.theirs.config)
    tokens, fed, at = PROMPT[None, 1:], case.features[None], torch.arange(KNOWN)[None]
    features, logits = [], []
    for _ in range(drafts):
        out = case.theirs.forward_layer(0, fed, at, cache, input_ids=tokens)
        fed, at = out[:, -1:], at[:, -1:] + 1
        features.append(fed[0])
        logits.append(case.theirs._project_to_logits(fed)[0])
        tokens = logits[-1].argmax(-1)[None]
    return features, logits


def our_chain(case: Case, drafts: int, chunks: list[int]) -> tuple[list[Tensor], list[Tensor]]:
    """The same from our hidden states, the known tokens in chunks."""
    ctx, at = FakeContext(case.layer), torch.arange(KNOWN)
    taps = case.ours(PROMPT[:-1], at, FakeContext(case.config), taps=("final",)).taps
    parts = [each.split(chunks) for each in (PROMPT[1:], at, case.head.fuse([taps["final"]]))]
    for ids, positions, fed in zip(*parts, strict=True):
        last = case.head(ids, positions, fed, ctx)[-1:]
    features, logits = [last], [case.head.logits(last)]
    for step in range(1, drafts):
        last = case.head(logits[-1].argmax(-1), torch.tensor([KNOWN + step - 1]), last, ctx)
        features.append(last)
        logits.append(case.head.logits(last))
    return features, logits


@pytest.mark.parametrize("chunks", [[KNOWN], [1, 4, 6]], ids=["whole", "chunked"])
def test_a_chain_of_drafts_is_that_of_transformers(case: Case, chunks: list[int]) -> None:
    features, logits = our_chain(case, 4, chunks)
    expected_features, expected_logits = reference_chain(case, 4)
    assert_close(torch.cat(features), torch.cat(expected_features))
    assert_close(torch.cat(logits), torch.cat(expected_logits))


def test_what_the_target_shares_is_no_parameter_of_the_layer(case: Case) -> None:
    shared = {parameter.data_ptr() for parameter in case.ours.parameters()}
    assert not shared & {parameter.data_ptr() for parameter in case.head.parameters()}


def test_every_parameter_is_filled_from_the_checkpoint(case: Case) -> None:
    require_filled_once(case.head, case.head.destinations(), model="head")
