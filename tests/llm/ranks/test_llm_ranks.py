"""Several processes of one model answer as one does: every kind of request in a busy hour, drafted
or not, a model with experts, one of latents."""

import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from llm_cases import (
    GREEDY,
    Checkpoint,
    assert_idle,
    assert_same_or_tie,
    make_checkpoint,
    make_llm,
    random_prompts,
    save_tokenizer,
    shared_prompts,
    text_of,
    tokens_of,
)
from speculative_cases import (
    LLAMA,
    ROWS,
    Truth,
    accepted,
    check_served,
    drafting_llm,
    llama_truth,
    preemptions,
    serve,
    truth_of,
)
from tiny_checkpoints import CASES, make_of

from children import PACELINE
from covers import Cell, cell_name
from paceline.core.errors import ConfigError
from paceline.llm.boot import Knobs
from paceline.llm.embeds import Embeds
from paceline.models.size import expert_shares

KINDS = ("greedy", "every-processor", "logprobs")
KIND_OF = {"NGRAM": "every-processor", "STANDALONE": "logprobs"}  # of any other the first
CELLS: list[Cell] = [
    {"drafter": "NGRAM", "topk": 1, "pool": "tight", "chunked_prefill_size": 7},
    {"drafter": "STANDALONE", "topk": 2, "pool": "roomy", "enforce_eager": True},
    {"drafter": "EAGLE3", "topk": 1, "pool": "roomy", "sanitize": True},
]
OTHERS = [
    ("qwen3_moe-window-every-second-layer", 2),
    ("deepseek_v3-bias-groups", 2),
    pytest.param("olmo2-norms-behind", 2, marks=pytest.mark.slow),
    pytest.param(LLAMA, 4, marks=pytest.mark.slow),  # three processes: test_rank_ends
]


@pytest.fixture(scope="module")
def truth(tmp_path_factory: pytest.TempPathFactory) -> Truth:
    return llama_truth(tmp_path_factory.mktemp("truth"), KINDS)


@pytest.mark.parametrize("cell", CELLS, ids=cell_name)
def test_drafts_on_two_ranks_change_no_text(truth: Truth, cell: Cell) -> None:
    check_drafts(truth, cell, size=2)


EAGLE: Cell = {"drafter": "EAGLE", "topk": 2, "pool": "roomy", "enforce_eager": True}


@pytest.mark.slow  # the short form is the test above
@pytest.mark.parametrize(
    ("cell", "size"),
    [(EAGLE, 2), *((cell, 4) for cell in (*CELLS, EAGLE))],
    ids=lambda value: value if isinstance(value, int) else cell_name(value),
)
def test_every_drafter_on_more_ranks_changes_no_text(truth: Truth, cell: Cell, size: int) -> None:
    check_drafts(truth, cell, size=size)


@pytest.mark.slow  # above each drafter has some of the kinds
@pytest.mark.parametrize("cell", [*CELLS, EAGLE], ids=cell_name)
def test_every_drafter_with_every_kind_on_two_ranks_changes_no_text(
    truth: Truth, cell: Cell
) -> None:
    check_drafts(truth, cell, size=2, kinds=KINDS)


def check_drafts(
    truth: Truth, cell: Cell, *, size: int, kinds: tuple[str, ...] | None = None
) -> None:
    """kinds: of requests; None takes one that no other drafter shows."""
    kinds = kinds or (KIND_OF.get(cell["drafter"], KINDS[0]),)
    ranks = {"tensor_parallel_size": size, "compare_ranks_every": 3}
    with drafting_llm(truth, cell, **ranks) as llm:
        assert llm.prepared.parallel.size == size
        for kind in kinds:
            served = serve(llm, truth.jobs[kind])
            check_served(truth, kind, served)
            assert accepted(served) > 0
            assert (preemptions(served) > 0) == (cell["pool"] == "tight")


@pytest.mark.parametrize(("case", "size"), OTHERS)
def test_a_busy_hour_without_drafts(case: str, size: int, tmp_path: Path) -> None:
    checkpoint = make_checkpoint(case, tmp_path)
    truth = truth_of(checkpoint, {}, ["greedy"])
    options = {"max_num_seqs": ROWS, "chunked_prefill_size": 7, "tensor_parallel_size": size}
    with make_llm(checkpoint, **options) as llm:
        served = serve(llm, truth.jobs["greedy"])
        check_served(truth, "greedy", served)
        job = truth.jobs["greedy"]["shared-prefix"]
        [again] = llm.generate([job.prompt], job.params)
        assert again.metrics.cached_tokens == 64  # whole pages
        assert_same_or_tie(
            again.outputs[0].token_ids,
            truth.answers["greedy"]["shared-prefix"].outputs[0].token_ids,
            checkpoint.gap(job.prompt),
        )


def test_drafts_beside_whole_experts_in_codes_change_no_text(tmp_path: Path) -> None:
    """fp8 that each rank makes of its own experts' numbers: 6 columns of 12 would cut a chunk, and
    projections, which a cut would leave plain, have whole ones."""
    family, settings = CASES["qwen3_moe-window-every-second-layer"]
    sizes = {"head_dim": 64, "intermediate_size": 256}
    theirs = make_of("whole experts", family, settings | sizes)
    theirs.save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    checkpoint = Checkpoint(tmp_path, theirs)
    prompts, short = random_prompts((30, 9, 17), seed=2), replace(GREEDY, max_tokens=24)
    options: dict[str, Any] = {"quantization": "fp8", "max_num_seqs": 4}
    with make_llm(checkpoint, enforce_eager=True, **options) as llm:
        answers, alone = tokens_of(llm.generate(prompts, short)), llm.prepared.fit.weights_bytes
    options |= {"tensor_parallel_size": 2, "compare_ranks_every": 3}
    with make_llm(checkpoint, speculative_algorithm="NGRAM", **options) as llm:
        fit, memory = llm.prepared.fit, llm.report()["memory"]["measured"]
        assert memory["weights"] == fit.weights_bytes < alone
        plan = llm.prepared
        [share] = expert_shares(plan.config, plan.parallel, plan.packings)
        assert share.startswith("20 of 40 experts, whole: a part of their 12 columns")
        found = llm.generate(prompts, short)
        assert tokens_of(found) == answers
        assert accepted(dict(enumerate(found))) > 0


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return make_checkpoint(LLAMA, tmp_path_factory.mktemp("llama"))


def test_ranks_have_their_share_and_pages_that_all_have(checkpoint: Checkpoint) -> None:
    prompts = shared_prompts()
    with make_llm(checkpoint) as llm:
        alone = llm.prepared.fit
        answers = tokens_of(llm.generate(prompts, GREEDY))
    knobs = Knobs(num_pages=(40,))  # fewer than the other rank has planned
    with make_llm(checkpoint, knobs=knobs, tensor_parallel_size=2, threads=None) as llm:
        fit, memory = llm.prepared.fit, llm.report()["memory"]["measured"]
        [group] = fit.groups
        assert group.page_bytes * 2 == alone.groups[0].page_bytes
        assert alone.weights_bytes / 2 < fit.weights_bytes < alone.weights_bytes
        assert memory["weights"] == fit.weights_bytes
        assert memory["KV"] == 40 * group.page_bytes
        assert fit.total_bytes == alone.total_bytes // 2
        [pool] = llm.engine.scheduler.cache.stats().groups
        assert pool.total < 40 < group.num_pages
        found = tokens_of(llm.generate(prompts, GREEDY))
        for prompt, one, other in zip(prompts, answers, found, strict=True):
            assert_same_or_tie(one, other, checkpoint.gap(prompt))
        with pytest.raises(ConfigError, match="tensor_parallel_size must be 1 for a teacher"):
            llm.teacher()


@pytest.mark.parametrize(
    ("overlap", "backend"),
    [
        (True, "torch"),
        pytest.param(False, "example_backend:DenseBackend", marks=pytest.mark.slow),
    ],
)
def test_requests_that_leave_and_come_again(
    checkpoint: Checkpoint, overlap: bool, backend: str
) -> None:
    prompts = random_prompts((40, 12, 9), seed=3)
    with make_llm(checkpoint) as llm:
        answers = tokens_of(llm.generate(prompts, GREEDY))
    options = {"overlap": overlap, "attention_backend": backend, "max_num_seqs": 2}
    with make_llm(checkpoint, tensor_parallel_size=2, **options) as llm:
        for _ in range(2):
            stream = llm.generate(prompts, GREEDY, stream=True)
            for _, _ in zip(range(5), stream, strict=False):
                pass
            stream.close()
            assert_idle(llm)
        found = tokens_of(llm.generate(prompts, GREEDY))
        for prompt, one, other in zip(prompts, answers, found, strict=True):
            assert_same_or_tie(one, other, checkpoint.gap(prompt))


def test_what_requests_bring_reaches_every_rank(checkpoint: Checkpoint) -> None:
    """Rows in place of embeddings, blocks, and arguments of a processor."""
    table = checkpoint.theirs.get_input_embeddings().weight.detach()
    prompts = random_prompts((20, 26, 23), seed=5)
    brought: list[Any] = [
        {
            "prompt_token_ids": [0] * 9 + prompts[0][9:],
            "prompt_embeds": Embeds(0, table[prompts[0][:9]].flip(0)),
        },
        {"prompt_token_ids": prompts[1], "prompt_blocks": [(3, 10), (18, 26)]},
        prompts[2],
    ]
    short = replace(GREEDY, max_tokens=12)
    decay = replace(short, ignore_eos=False, extra_args={"length_decay": [2, 1.5]})
    params = [short, short, decay]
    options: dict[str, Any] = {
        "max_prompt_embeds": 32,
        "prompt_blocks": True,
        "logits_processors": ["example_processor:LengthDecay"],
        "chunked_prefill_size": 16,
        "page_size": 4,
    }
    with make_llm(checkpoint, **options) as llm:
        answers = tokens_of(llm.generate(brought, params))
        plain = tokens_of(llm.generate(prompts, short))
    assert all(one != other for one, other in zip(answers, plain, strict=True)), "each matters"
    with make_llm(checkpoint, sanitize=True, tensor_parallel_size=2, **options) as llm:
        for _ in range(2):  # the second time behind prefix hits
            assert tokens_of(llm.generate(brought, params)) == answers


def test_the_command_line_gives_the_text_of_one_process(checkpoint: Checkpoint) -> None:
    [prompt] = random_prompts((30,), seed=5)
    with make_llm(checkpoint) as llm:
        [expected] = llm.generate([prompt], GREEDY)
    command = [*PACELINE, "generate", str(checkpoint.folder), "--tp", "2", "--device", "cpu"]
    command += ["--prompt", text_of(prompt), "--max-tokens", "46", "--ignore-eos"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == expected.outputs[0].text + "\n"
    assert "Traceback" not in done.stderr
