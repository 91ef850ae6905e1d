"""A checkpoint in each format that recipes/quantise.py writes gives the logits that transformers
gives with the numbers which the format's definition, or its own library, says they are."""

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import definitions
import pytest
import tiny_checkpoints
import torch
import transformers
from fake_context import FakeContext
from safetensors.torch import load_file
from test_ranks import TOKENS, logits, require_equal, together
from torch import Tensor

from paceline.core.errors import ConfigError
from paceline.core.parallel import Parallel
from paceline.core.request.sampling_params import SamplingParams
from paceline.kernels.all_reduce import open_exchange
from paceline.llm.llm import LLM
from paceline.models.checkpoint import open_checkpoint
from paceline.models.config import parse_config
from paceline.models.loader import load_model
from paceline.models.locate import locate
from paceline.models.quantized.config import read_quantization
from paceline.models.quantized.stored import Dequantised
from paceline.plan.explain import explain_model, show

RECIPES = Path(__file__).parents[3] / "recipes"
sys.path.insert(0, str(RECIPES))
from quantise import BLOCK, FORMATS, GROUP, quantise  # noqa: E402

TOLERANCE = 1e-4  # of the largest logit; the two differ in the order of float32 sums, and weights
# whose scales are spread make more of it
_COMPRESSED = "compressed-tensors"
DEFINED: dict[str, Callable[[definitions.Parts], Tensor]] = {
    "fp8": definitions.fp8,
    "fp8-block": partial(definitions.fp8, block=BLOCK),
    "awq": partial(definitions.awq, group=GROUP),
    "gptq": partial(definitions.gptq, group=GROUP, bits=4, plus_one=True),
    "gptq-asym": partial(definitions.gptq, group=GROUP, bits=4, plus_one=True),
    "gptq-v2-8bit": partial(definitions.gptq, group=GROUP, bits=8, plus_one=False),
    "mxfp4": definitions.experts_mxfp4,
    "modelopt-fp8": definitions.fp8,
    "modelopt-nvfp4": definitions.nvfp4,
    **{
        name: definitions.compressed(settings)
        for name, (settings, _) in FORMATS.items()
        if settings["quant_method"] == _COMPRESSED
    },
    "nvfp4": definitions.nvfp4,  # the library rounds to bfloat16: see the test of it
}


def test_every_format_has_a_definition_here() -> None:
    assert sorted(DEFINED) == sorted(FORMATS)


@pytest.fixture(scope="module", params=sorted(FORMATS))
def folders(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    """(format, plain folder, quantised folder)."""
    plain = tmp_path_factory.mktemp("plain")
    if request.param == "mxfp4":
        save(plain, "gpt-oss-sinks-alternating-windows", hidden_size=64, intermediate_size=96)
    else:
        sizes = {"hidden_size": 96, "num_attention_heads": 3, "num_key_value_heads": 1}
        save(plain, "llama-gqa2-untied", **sizes, intermediate_size=160)
    quantised = plain / "quantised"
    assert quantise(plain, request.param, quantised)
    return request.param, plain, quantised


def save(folder: Path, case: str, **sizes: int) -> None:
    """Scales of rows and groups spread over 8x, so that one that is swapped or ignored shows."""
    family, settings = tiny_checkpoints.CASES[case]
    config = getattr(transformers, f"{family}Config")(**(settings | sizes))
    torch.manual_seed(1)
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() >= 2 and "layers" in name:
                rows = 0.35 * torch.exp2(3 * torch.rand(*weight.shape[:-1], 1))
                weight.mul_(rows).mul_(torch.exp2(torch.rand(weight.shape[-1])))
    model.save_pretrained(folder)


def by_definition(format_: str, plain: Path, quantised: Path) -> dict[str, Tensor]:
    """The state of a plain checkpoint with the numbers that `quantised` stands for."""
    stored = load_file(quantised / "model.safetensors")
    state = load_file(plain / "model.safetensors")
    for name, tensor in state.items():
        if name in stored and not any(n.startswith(f"{name}_scale") for n in stored):
            continue
        stacked = f"{name}_blocks" in stored
        prefix = f"{name}_" if stacked else name.removesuffix("weight")
        parts = {n.removeprefix(prefix): t for n, t in stored.items() if n.startswith(prefix)}
        state[name] = DEFINED[format_](parts)
        assert state[name].shape == tensor.shape
    return state


def test_numbers_are_those_that_a_format_defines(folders: tuple[str, Path, Path]) -> None:
    state = by_definition(*folders)
    quantization = read_quantization(locate(str(folders[2])).config)
    assert quantization is not None
    with open_checkpoint(folders[2]) as checkpoint:
        ours = Dequantised(checkpoint, quantization, model="tiny")
        assert sorted(ours.names) == sorted(state)
        for name in ours.names:
            assert ours.shape(name) == tuple(state[name].shape)
            torch.testing.assert_close(ours.tensor(name), state[name], rtol=3e-7, atol=0)


def test_logits_are_those_of_the_numbers_a_format_defines(folders: tuple[str, Path, Path]) -> None:
    format_, plain, quantised = folders
    state = by_definition(format_, plain, quantised)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        plain, attn_implementation="eager", experts_implementation="eager"
    )
    told = theirs.load_state_dict(state)
    assert not told.missing_keys
    assert not told.unexpected_keys
    source = locate(str(quantised))
    config = parse_config(source.config, source.generation_config)
    where = {"device": torch.device("cpu"), "dtype": torch.float32}
    ours = load_model(source, config, parallel=Parallel(), **where)
    sequence = theirs.generate(
        torch.randint(4, config.vocab_size, (1, 24)), max_new_tokens=24, do_sample=False
    )[0]
    context = FakeContext(config, ours.attention_sinks())
    logits = ours.logits(ours(sequence, torch.arange(len(sequence)), context).hidden)
    wanted = theirs(sequence[None]).logits[0]
    assert (logits - wanted).abs().max() < TOLERANCE * wanted.abs().max()
    assert torch.equal(logits[23:-1].argmax(-1), sequence[24:])


# One of each way that names come: parts of a weight, a scale beside it, stacks.
@pytest.mark.parametrize("folders", ["awq", "fp8-block", "mxfp4"], indirect=True)
def test_an_engine_generates_with_it_and_says_how_it_is_stored(
    folders: tuple[str, Path, Path],
) -> None:
    format_, _, quantised = folders
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    with LLM(str(quantised), dtype="float32", threads=1, max_num_seqs=2) as llm:
        outputs = llm.generate([{"prompt_token_ids": [5, 6, 7]}], params)
        said = {event["reason"]: event["detail"] for event in llm.report()["events"]}
    tokens = [list(output.outputs[0].token_ids) for output in outputs]
    method = FORMATS[format_][0]["quant_method"]
    assert said["weights_dequantised"].startswith(f"{method}; codes become plain numbers")
    plan = explain_model({"model": str(quantised)}, gpu="h200")
    stays = {
        "awq": "weights: awq; 14 stay int4, a scale for 32 columns",
        "fp8": "2 stay fp8, a scale for 128 columns",
    }
    assert stays.get(method, f"weights: {method}; codes become plain numbers") in show(plan)
    assert plan.to_json()["quantization"] == method
    assert explain_model({"model": str(quantised), "quantization": method}, gpu="h200")
    for model, asked, stored in ((quantised, "none", method), (folders[1], "gptq", "none")):
        with pytest.raises(ConfigError, match=f"quantization must be '{stored}', as .* '{asked}'"):
            explain_model({"model": str(model), "quantization": asked}, gpu="h200")
    dense = transformers.AutoModelForCausalLM.from_pretrained(folders[1])
    dense.load_state_dict(by_definition(*folders))
    how = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None}
    wanted = dense.generate(torch.tensor([[5, 6, 7]]), **how)
    assert tokens == [wanted[0, 3:].tolist()]


@pytest.mark.parametrize("format_", ["awq", "fp8-block", "mxfp4"])
def test_ranks_read_their_parts_of_it(format_: str, tmp_path: Path) -> None:
    plain, quantised = tmp_path / "plain", tmp_path / "quantised"
    if format_ == "mxfp4":
        save(plain, "gpt-oss-sinks-alternating-windows", hidden_size=64, intermediate_size=96)
    else:
        save(plain, "llama-gqa2-untied", hidden_size=128, intermediate_size=160)
    quantise(plain, format_, quantised)
    source = locate(str(quantised))
    config = parse_config(source.config, source.generation_config)
    where = {"device": torch.device("cpu"), "dtype": torch.float32}
    alone = load_model(source, config, parallel=Parallel(), **where)
    capacity = TOKENS * max(config.hidden_size, config.vocab_size)
    ranks = [
        load_model(source, config, parallel=Parallel(rank, 2), exchange=way, **where)
        for rank, way in enumerate(open_exchange(2, capacity, **where))
    ]
    require_equal(together(ranks, config), logits(alone, config))


def test_nvfp4_is_what_its_library_says_in_bfloat16() -> None:
    settings, encode = FORMATS["nvfp4"]
    torch.manual_seed(0)
    parts = encode(torch.randn(48, 96) * torch.exp2(3 * torch.rand(48, 1)))
    ours, theirs = definitions.nvfp4(parts), definitions.compressed(settings)(parts)
    torch.testing.assert_close(ours, theirs, rtol=2**-8, atol=0)


def test_the_plain_weights_are_not_the_quantised_ones(folders: tuple[str, Path, Path]) -> None:
    format_, plain, _ = folders
    before, after = load_file(plain / "model.safetensors"), by_definition(*folders)
    changed = [n for n in before if not torch.equal(before[n].float(), after[n].float())]
    errors = [
        float((after[n].float() - before[n].float()).norm() / before[n].norm()) for n in changed
    ]
    assert changed
    assert max(errors) < (0.05 if "8" in format_ else 0.2)
