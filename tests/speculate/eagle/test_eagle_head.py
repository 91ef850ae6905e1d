"""EAGLE heads compute what the papers and their released weights say, on the target's features."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import eagle_checkpoints as heads
import pytest
import torch
import torch.nn.functional as F
import transformers
from fake_context import FakeContext
from safetensors.torch import save_file
from torch import Tensor

from paceline.core.model.config import ModelConfig
from paceline.core.parallel import Parallel
from paceline.layers.weights.dense import DENSE
from paceline.layers.weights.parameter import Placement
from paceline.models.causal_lm import CausalLM
from paceline.models.config import parse_config
from paceline.models.coverage import require_filled_once
from paceline.models.loader import load_model
from paceline.models.locate import ModelSource, SourceKind, locate
from paceline.speculate.eagle.config import EagleConfig, parse_eagle_config, tap_names
from paceline.speculate.eagle.head import EagleHead, build_eagle_head
from paceline.speculate.eagle.loader import load_eagle_head

CPU = torch.device("cpu")
TOLERANCE = 1e-5  # of the largest number; the two differ in the order of float32 sums
PROMPT = torch.tensor([5, 17, 3, 88, 41, 41, 9, 60, 2, 77, 30, 12])
FEATURES = len(PROMPT) - 1  # the last token's feature is not known when it is drafted from

EXPLICIT = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 3, 8]}}
CASES: dict[str, dict[str, Any]] = {
    "eagle1": heads.HEAD,
    "eagle1-no-bias": heads.HEAD | {"bias": False},
    "eagle1-two-layers": heads.HEAD | {"num_hidden_layers": 2},
    "eagle3": heads.EAGLE3,
    "eagle3-explicit-taps": heads.EAGLE3 | EXPLICIT,
    "eagle3-norms": heads.EAGLE3 | {"fc_norm": True, "norm_output": True},
    "eagle3-norm-before-residual": heads.EAGLE3 | {"norm_before_residual": True},
    "eagle3-three-layers": heads.EAGLE3 | {"num_hidden_layers": 3},
    "eagle3-last-hidden": heads.EAGLE3 | {"eagle_config": {"use_aux_hidden_state": False}},
    "eagle3-target-vocabulary": heads.EAGLE3 | {"draft_vocab_size": None},
    "eagle3-narrow": heads.EAGLE3 | {"hidden_size": 32, "target_hidden_size": heads.HIDDEN},
    "eagle3-llama3-rope": heads.EAGLE3
    | {
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        }
    },
}


@dataclass(frozen=True)
class Target:
    """One model in both implementations."""

    theirs: transformers.LlamaForCausalLM
    ours: CausalLM
    config: ModelConfig


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    folder = tmp_path_factory.mktemp("target")
    theirs = heads.target_model()
    theirs.save_pretrained(folder)
    source = locate(str(folder))
    config = parse_config(source.config)
    ours = load_model(
        source, config, parallel=Parallel(), device=CPU, dtype=torch.float32, max_positions=64
    )
    return Target(theirs, ours, config)


@dataclass(frozen=True)
class Case:
    """One head in both implementations."""

    name: str
    raw: dict[str, Any]
    config: EagleConfig
    named: dict[str, Tensor]
    head: EagleHead
    target: Target

    def context(self) -> FakeContext:
        return FakeContext(self.config.layer)

    def ids(self, drafts: Tensor) -> Tensor:
        """Draft tokens as target tokens, by the stored offsets."""
        return drafts if "d2t" not in self.named else drafts + self.named["d2t"][drafts]


@pytest.fixture(scope="module", params=CASES)
def case(
    request: pytest.FixtureRequest, target: Target, tmp_path_factory: pytest.TempPathFactory
) -> Case:
    raw = CASES[request.param]
    is_eagle1 = request.param.startswith("eagle1")
    config = parse_eagle_config(raw, "EAGLE" if is_eagle1 else "EAGLE3")
    if is_eagle1:
        named = heads.eagle1_tensors(raw)
    else:
        named = heads.eagle3_tensors(raw, num_taps=config.num_taps)
    folder = tmp_path_factory.mktemp(request.param)
    save_file(named, folder / "model.safetensors")
    head = load_eagle_head(
        source_of(folder),
        config,
        target.ours,
        parallel=Parallel(),
        device=CPU,
        dtype=torch.float32,
        max_positions=64,
    )
    return Case(request.param, raw, config, named, head, target)


def source_of(folder: Path) -> ModelSource:
    return ModelSource(
        name="the head",
        kind=SourceKind.FOLDER,
        folder=folder,
        config={},
        generation_config={},
        tokenizer=None,
    )


def assert_close(ours: Tensor, theirs: Tensor) -> None:
    assert ours.shape == theirs.shape
    error = (ours - theirs).abs().max() / theirs.abs().max()
    assert error < TOLERANCE, f"relative error {error:.2e}"


def our_features(case: Case) -> Tensor:
    """The target's taps of all tokens but the last, fused."""
    names = tap_names(case.config, case.target.config)
    at = torch.arange(FEATURES)
    taps = case.target.ours(PROMPT[:-1], at, FakeContext(case.target.config), taps=names).taps
    return case.head.fuse([taps[name] for name in names])


def reference_features(case: Case) -> Tensor:
    """The same by transformers' hidden states, of which entry i + 1 is layer i's output."""
    result = case.target.theirs(PROMPT[None, :-1], output_hidden_states=True)
    states = [state[0] for state in result.hidden_states]
    if case.config.version == 1 or case.config.num_taps == 1:
        return states[-1]  # after the final norm
    explicit = case.raw.get("eagle_config", {}).get("eagle_aux_hidden_state_layer_ids")
    deep = heads.TARGET_LAYERS
    layers = explicit or [1, deep // 2 - 1, deep - 4]
    # transformers normalises the last state; undone by running the last layer apart
    taps = [states[i + 1] if i + 1 < deep else last_stream(case) for i in layers]
    if case.raw.get("fc_norm"):
        weights = [case.named[f"fc_norm.{i}.weight"] for i in range(3)]
        eps = case.raw["rms_norm_eps"]
        taps = [heads.reference_norm(eps, w, tap) for w, tap in zip(weights, taps, strict=True)]
    return F.linear(torch.cat(taps, -1), case.named["fc.weight"])


def last_stream(case: Case) -> Tensor:
    """What the last layer returns, before the final norm."""
    caught: list[Tensor] = []
    layer = case.target.theirs.model.layers[-1]
    hook = layer.register_forward_hook(lambda _, __, out: caught.append(out))
    case.target.theirs(PROMPT[None, :-1])
    hook.remove()
    return caught[0][0]


def reference_chain(case: Case, drafts: int) -> tuple[list[Tensor], list[Tensor]]:
    """(features of the last position, logits) of each pass, every pass from scratch."""
    table = case.named.get("embed_tokens.weight", case.target.theirs.model.embed_tokens.weight)
    lm_head = case.named.get("lm_head.weight", case.target.theirs.lm_head.weight)
    tokens, features = PROMPT[1:], reference_features(case)
    out_features, out_logits = [], []
    for _ in range(drafts):
        at = torch.arange(len(tokens))
        stream = heads.reference_pass(case.raw, case.named, table[tokens], features, at)[-1:]
        normed = stream
        if case.config.version == 3:
            normed = heads.reference_norm(
                case.raw["rms_norm_eps"], case.named["norm.weight"], stream
            )
        out_logits.append(F.linear(normed, lm_head))
        out_features.append(normed if case.raw.get("norm_output") else stream)
        tokens = torch.cat((tokens, case.ids(out_logits[-1].argmax(-1))))
        features = torch.cat((features, out_features[-1]))
    return out_features, out_logits


def our_chain(case: Case, drafts: int, chunks: list[int]) -> tuple[list[Tensor], list[Tensor]]:
    """The same with a cache: the known tokens in chunks, then one row per pass."""
    ctx, features = case.context(), our_features(case)
    known, at = PROMPT[1:], torch.arange(FEATURES)
    for ids, positions, part in zip(
        known.split(chunks), at.split(chunks), features.split(chunks), strict=True
    ):
        last = case.head(ids, positions, part, ctx)[-1:]
    out_features, out_logits = [last], [case.head.logits(last)]
    for step in range(1, drafts):
        token = case.ids(out_logits[-1].argmax(-1))
        last = case.head(token, torch.tensor([FEATURES + step - 1]), last, ctx)
        out_features.append(last)
        out_logits.append(case.head.logits(last))
    return out_features, out_logits


def test_fused_features_are_those_of_transformers_hidden_states(case: Case) -> None:
    assert_close(our_features(case), reference_features(case))


def test_taps_that_are_together_as_wide_as_the_head_are_its_feature(target: Target) -> None:
    layers = {"eagle_aux_hidden_state_layer_ids": [1, 5]}
    widths = {"hidden_size": 2 * heads.HIDDEN, "target_hidden_size": heads.HIDDEN}
    head = build_eagle_head(
        parse_eagle_config(heads.EAGLE3 | widths | {"eagle_config": layers}, "EAGLE3"),
        target.ours,
        parallel=Parallel(),
        placement=Placement(CPU, torch.float32, DENSE),
        max_positions=64,
    )
    low, high = torch.randn(2, 3, heads.HIDDEN)
    assert torch.equal(head.fuse((low, high)), torch.cat((low, high), dim=1))


@pytest.mark.parametrize("chunks", [[FEATURES], [1, 4, 6]], ids=["whole", "chunked"])
def test_a_chain_of_drafts_follows_the_published_formulas(case: Case, chunks: list[int]) -> None:
    features, logits = our_chain(case, 5, chunks)
    expected_features, expected_logits = reference_chain(case, 5)
    assert_close(torch.cat(features), torch.cat(expected_features))
    assert_close(torch.cat(logits), torch.cat(expected_logits))


def test_a_pass_mutates_none_of_its_inputs(case: Case) -> None:
    features = our_features(case)
    inputs = (PROMPT[1:].clone(), torch.arange(FEATURES), features.clone())
    before = [tensor.clone() for tensor in inputs]
    out = case.head(*inputs, case.context())
    kept = out.clone()
    case.head.logits(out)
    assert all(map(torch.equal, inputs, before))
    assert torch.equal(out, kept)


def test_what_the_target_shares_is_no_parameter_of_the_head(case: Case) -> None:
    shared = {parameter.data_ptr() for parameter in case.target.ours.parameters()}
    assert not shared & {parameter.data_ptr() for parameter in case.head.parameters()}


def test_every_parameter_is_filled_from_the_checkpoint(case: Case) -> None:
    require_filled_once(case.head, case.head.destinations(), model="head")
