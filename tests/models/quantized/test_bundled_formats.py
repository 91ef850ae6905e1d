"""The bundled model in every format that recipes/quantise.py writes generates what transformers
generates with the numbers which the format's definition says they are."""

from pathlib import Path

import pytest
import torch
import transformers
from test_quantized_checkpoints import FORMATS, by_definition, quantise

from paceline.core.request.sampling_params import SamplingParams
from paceline.llm.llm import LLM

BUNDLED = Path(__file__).parents[3] / "src" / "paceline" / "models" / "bundled"
PROMPT, NUM_TOKENS = [5, 6, 7], 8
OF_LAYERS = sorted(set(FORMATS) - {"mxfp4"})  # which is one of experts


@pytest.fixture(scope="module")
def theirs() -> transformers.PreTrainedModel:
    """Its numbers are replaced by each test."""
    return transformers.AutoModelForCausalLM.from_pretrained(BUNDLED, dtype=torch.float32)


@pytest.mark.parametrize("format_", OF_LAYERS)
def test_it_generates_what_its_numbers_do(
    format_: str, theirs: transformers.PreTrainedModel, tmp_path: Path
) -> None:
    folder = tmp_path / "quantised"
    assert quantise(BUNDLED, format_, folder) == 7 * 12  # linear layers of a decoder's
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    with LLM(str(folder), dtype="float32", threads=1, max_num_seqs=1) as llm:
        [output] = llm.generate([{"prompt_token_ids": PROMPT}], params)
    told = theirs.load_state_dict(by_definition(format_, BUNDLED, folder), strict=False)
    assert (told.missing_keys, told.unexpected_keys) == (["lm_head.weight"], [])  # it is tied
    how = {"max_new_tokens": NUM_TOKENS, "do_sample": False, "eos_token_id": None}
    wanted = theirs.generate(torch.tensor([PROMPT]), **how)[0, len(PROMPT) :]
    assert list(output.outputs[0].token_ids) == wanted.tolist()
