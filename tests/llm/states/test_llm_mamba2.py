"""Models with Mamba-2 layers through the whole engine: alone, in turns with attention, and beside
it in every layer.  Every token is what transformers finds best in one pass over the whole text."""

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from draft_checkpoints import save_echo
from llm_cases import (
    GREEDY,
    VOCAB,
    assert_idle,
    assert_same_or_tie,
    make_checkpoint,
    make_llm,
    random_prompts,
    save_tokenizer,
)
from torch import Tensor

from covers import Cell, all_with_a_cover
from paceline.core.errors import ConfigError
from paceline.llm.boot import Knobs
from paceline.llm.llm import LLM

EVERY = 8
CASES = ("mamba2-groups", "granitemoehybrid-experts", "falcon_h1-factors")
SHORT = replace(GREEDY, max_tokens=10)
WEAK = 0.3  # of what blocks add: the newest token says most of what follows


def weaken(model: transformers.PreTrainedModel) -> None:
    """So that a drafter without layers is often right."""
    for name, parameter in model.named_parameters():
        if name.endswith(("out_proj.weight", "o_proj.weight", "down_proj.weight")):
            parameter.mul_(WEAK)


class Served:
    """A checkpoint, and engines on it that keep a state at every EVERY tokens."""

    def __init__(self, case: str, folder: Path) -> None:
        self.checkpoint = make_checkpoint(case, folder, change=weaken)
        self.attends = not case.startswith("mamba2")

    def llm(self, **options: Any) -> LLM:
        page = {"page_size": 4} if self.attends else {}
        return make_llm(self.checkpoint, **page | {"state_checkpoint_every": EVERY} | options)

    def check(self, llm: LLM, prompts: Sequence[Sequence[int]], num_tokens: int = 10) -> list[Any]:
        """Generate, and look at every token; returns the outputs."""
        params = replace(SHORT, max_tokens=num_tokens)
        found = llm.generate([list(prompt) for prompt in prompts], params)
        for prompt, output in zip(prompts, found, strict=True):
            tokens = output.outputs[0].token_ids
            assert len(tokens) == num_tokens
            rows = self.checkpoint.logits([*prompt, *tokens[:-1]])[len(prompt) - 1 :]
            for at, (token, row) in enumerate(zip(tokens, rows, strict=True)):
                best = int(row.argmax())
                gap = (row.max() - row[token]).item(), row.abs().max().item()
                assert_same_or_tie(
                    (*tokens[:at], token), (*tokens[:at], best), lambda *_, gap=gap: gap
                )
        assert_idle(llm)
        return found


@pytest.fixture(scope="module", params=CASES)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Served:
    return Served(request.param, tmp_path_factory.mktemp(request.param))


def last_norm(theirs: transformers.PreTrainedModel) -> Tensor:
    """[hidden] weight of the norm in front of the output head."""
    body = theirs.backbone if hasattr(theirs, "backbone") else theirs.model
    norms = [getattr(body, name, None) for name in ("norm_f", "norm", "final_layernorm")]
    [norm] = [norm for norm in norms if norm is not None]
    return norm.weight


@pytest.fixture(scope="module")
def head(served: Served, tmp_path_factory: pytest.TempPathFactory) -> Path:
    checkpoint = served.checkpoint
    return save_echo(checkpoint, tmp_path_factory.mktemp("head"), last_norm(checkpoint.theirs))


@pytest.fixture(scope="module")
def drafter(served: Served, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama with embedding, last norm and head of the model, and layers that add nothing."""
    folder, theirs = tmp_path_factory.mktemp("drafter"), served.checkpoint.theirs
    hidden = theirs.config.hidden_size
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=hidden,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=128,
        eos_token_id=[2, 3],
    )
    llama = transformers.LlamaForCausalLM(config).eval().requires_grad_(False)
    llama.model.embed_tokens.weight.copy_(theirs.get_input_embeddings().weight)
    llama.model.norm.weight.copy_(last_norm(theirs))
    llama.lm_head.weight.copy_(theirs.lm_head.weight)
    for layer in llama.model.layers:
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
    llama.save_pretrained(folder)
    save_tokenizer(folder)
    return folder


def ragged(num: int) -> list[list[int]]:
    """Prompts of 1 to 39 tokens, every second one behind some of a common text."""
    rng = random.Random(3)
    (family,) = random_prompts([30])
    own = random_prompts([rng.randrange(1, 10) for _ in range(num)], seed=1)
    return [[*family[: rng.randrange(30) * (i % 2)], *prompt] for i, prompt in enumerate(own)]


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"enforce_eager": True, "chunked_prefill_size": 7}, id="eager, odd chunks"),
        pytest.param({"sanitize": True, "max_num_seqs": 5}, id="graphs, sanitized"),
        pytest.param({"overlap": False, "chunked_prefill_size": 3}, id="the twin loop"),
    ],
)
def test_sixteen_ragged_requests_say_what_transformers_says(
    served: Served, options: dict[str, Any]
) -> None:
    with served.llm(**options) as llm:
        found = served.check(llm, ragged(16))
        graphs = llm.engine._runner._graphs
    assert any(output.metrics.cached_tokens for output in found)
    assert (graphs is None) == options.get("enforce_eager", False)
    assert graphs is None or graphs.graphs


def test_a_hit_ends_at_a_kept_state_and_beside_one(served: Served) -> None:
    """Behind it are one, two and more tokens: fewer than the convolution sees, and as many."""
    (first,) = random_prompts([33])
    with served.llm(chunked_prefill_size=6, max_num_seqs=32) as llm:  # with room for all states
        served.check(llm, [first])
        for length in (7, 8, 9, 15, 16, 17, 18, 26, 32):
            (found,) = served.check(llm, [[*first[:length], 5]])
            assert found.metrics.cached_tokens == length // EVERY * EVERY
            (again,) = served.check(llm, [first[:length]])
            assert again.metrics.cached_tokens == (length - 1) // EVERY * EVERY


def test_who_lacks_room_is_preempted_or_waits(served: Served) -> None:
    """Pages run out as requests grow; of states each has its one."""
    prompts = [prompt * 2 for prompt in random_prompts((14, 17, 20, 9, 3, 12))]
    pages = (36, 12) if served.attends else (4,)
    knobs = Knobs(num_pages=pages, reserve_ahead=0, admission_margin=0)
    with served.llm(knobs=knobs, max_num_seqs=4) as llm:
        found = served.check(llm, prompts, 24)
    preempted = sum(output.metrics.preemptions for output in found)
    assert (preempted > 0) == served.attends


DRAFTED = {"case": CASES, "drafter": ("NGRAM", "STANDALONE", "EAGLE"), "topk": (1, 2)}
DRAFTED |= {"enforce_eager": (False, True)}


@pytest.mark.parametrize(
    ("served", "cell"),
    [
        pytest.param(
            *(cell["case"] for cell in each.values), *each.values, id=each.id, marks=each.marks
        )
        for each in all_with_a_cover(DRAFTED)
    ],
    indirect=["served"],
)
def test_drafts_change_no_text(served: Served, drafter: Path, head: Path, cell: Cell) -> None:
    name = cell["drafter"]
    options = {"speculative_algorithm": name, "speculative_eagle_topk": cell["topk"]}
    options |= {"speculative_num_steps": 3, "enforce_eager": cell["enforce_eager"]}
    if name == "NGRAM":
        options |= {"speculative_ngram_min": 1}
    else:
        path = drafter if name == "STANDALONE" else head
        options |= {"speculative_draft_model_path": str(path), "page_size": 4}
    prompts = [prompt * 2 for prompt in random_prompts((5, 9, 20, 2))]
    with served.llm(chunked_prefill_size=7, **options) as llm:
        found = served.check(llm, prompts, 20)
        told = [*found[0].prompt_token_ids, *found[0].outputs[0].token_ids]
        served.check(llm, [[*told, 9]])  # behind states that rounds kept, or passed
    assert sum(output.metrics.rounds for output in found) > 0
    accepted = sum(sum(output.metrics.accepted_by_position) for output in found)
    drafted = sum(output.metrics.drafted_tokens for output in found)
    assert accepted > 0 or name == "NGRAM"
    assert accepted < drafted  # some end behind the root, or within


def test_bfloat16_states_and_windows_are_kept_as_they_are_declared(served: Served) -> None:
    """The window in the activations' format, the heads' matrices in float32."""
    with served.llm(dtype="bfloat16") as llm:
        llm.generate([[5, 6, 7] * 9], SHORT)
        [mixer] = llm.engine._runner.parts.mixers
        assert {name: part.dtype for name, part in mixer.pool.parts.items()} == {
            "conv": torch.bfloat16,
            "state": torch.float32,
        }


def test_a_step_limit_holds_in_every_step(tmp_path: Path) -> None:
    """transformers' decode leaves it out; its pass over a whole text does not."""
    import tiny_checkpoints

    family, settings = tiny_checkpoints.CASES["mamba2-groups"]
    with pytest.MonkeyPatch.context() as patch:
        limited = settings | {"time_step_limit": (0.3, 0.6)}
        patch.setitem(tiny_checkpoints.CASES, "mamba2-groups", (family, limited))
        served = Served("mamba2-groups", tmp_path)
    with served.llm(chunked_prefill_size=7) as llm:
        served.check(llm, random_prompts((23, 9)), 20)


def test_what_cannot_be_kept_is_refused(served: Served) -> None:
    if served.attends:
        with pytest.raises(ConfigError, match="state_checkpoint_every"):
            served.llm(state_checkpoint_every=6, page_size=4)
    with pytest.raises(ConfigError, match="layers of mamba2 are not split among ranks"):
        served.llm(tensor_parallel_size=2, device="cpu")
