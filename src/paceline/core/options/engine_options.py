"""EngineOptions: every knob of the engine, once.

The command line, the benchmark and `LLM(...)` all take their names, defaults, help and aliases from
these fields.  `None` means "decide for me"; `plan.resolve` removes it.  No torch.
"""

from dataclasses import dataclass, fields
from functools import partial
from typing import TypeVar

from paceline.core.draft_shape import MOST_BRANCHES, MOST_DRAFT_TOKENS, MOST_STEPS
from paceline.core.dtypes import DTYPE_WORDS, DTYPES, FP8, KV_ELEMENT_BYTES
from paceline.core.modes import Pooling
from paceline.core.options.spec import check, option
from paceline.core.parallel import MOST_RANKS
from paceline.core.request.sampling_params import SEED_LIMIT

LOAD_FORMATS = ("auto", "dummy")
DRAFT_ALGORITHMS = ("EAGLE", "EAGLE3", "MTP", "NGRAM", "STANDALONE")
OFF = "off"
MAX_QUEUED = 1024  # completions that may wait, beside the max_num_seqs that run
SAMPLE_AND_MATCH, REJECTION = "sample_and_match", "rejection"
T = TypeVar("T")

_of_model = partial(option, group="Model")
_of_memory = partial(option, group="Memory")
_of_steps = partial(option, group="Requests and steps")
_of_kernels = partial(option, group="Attention and graphs")
_of_drafts = partial(option, group="Speculation")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """What a caller may ask of the engine.  Checked when built; raises ConfigError."""

    model: str = _of_model(
        "bundled",
        str,
        "Hub id, local folder, 'bundled', or a shape shipped in the package.",
        "--model",
        "--model-path",
    )
    revision: str | None = _of_model(None, str, "Branch, tag or commit of a hub id.", "--revision")
    device: str | None = _of_model(
        None,
        str,
        "Where the model runs.",
        "--device",
        choices=("cpu", "cuda"),
        aliases=(("gpu", "cuda"),),
    )
    dtype: str | None = _of_model(
        None,
        str,
        "Number format of weights and activations.",
        "--dtype",
        choices=DTYPES,
        aliases=DTYPE_WORDS,
    )
    kv_cache_dtype: str | None = _of_memory(
        None,
        str,
        "Number format of the KV cache: the model's, or 8 bits with scales.",
        "--kv-cache-dtype",
        choices=tuple(KV_ELEMENT_BYTES),
        aliases=(("fp8", FP8), *DTYPE_WORDS),
    )
    load_format: str = _of_model(
        "auto",
        str,
        "'dummy' fills the weights with seeded random numbers instead of reading them.",
        "--load-format",
        choices=LOAD_FORMATS,
    )
    quantization: str | None = _of_model(
        None,
        str,
        "How the checkpoint must store its weights (fp8, awq, gptq, ...; none: as plain numbers).",
        "--quantization",
    )
    pooling: str | None = _of_model(
        None,
        str,
        "Also make vectors of texts (embeddings), of the hidden state of the last token, of the "
        "first, or of all.",
        "--pooling",
        choices=tuple(each.value for each in Pooling),
        left_out="as the model's files say, if they do",
    )
    max_model_len: int | None = _of_memory(
        None,
        int,
        "Context limit: prompt and output of one request.",
        "--max-model-len",
        "--context-length",
        unit="tokens",
        low=2,
    )
    page_size: int | None = _of_memory(
        None,
        int,
        "Tokens of one page of the KV cache.",
        "--page-size",
        "--block-size",
        unit="tokens",
        low=1,
    )
    gpu_memory_utilization: float | None = _of_memory(
        None,
        float,
        "Share of the GPU's memory the engine may use.",
        "--gpu-memory-utilization",
        "--mem-fraction-static",
        low=0.01,
        high=1.0,
    )
    kv_cache_bytes: int | None = _of_memory(
        None, int, "Size of the KV cache.", "--kv-cache-memory-bytes", unit="bytes", low=1
    )
    max_num_seqs: int | None = _of_steps(
        None,
        int,
        "Requests running at the same time.",
        "--max-num-seqs",
        "--max-running-requests",
        unit="requests",
        low=1,
    )
    max_num_batched_tokens: int | None = _of_steps(
        None, int, "Tokens computed in one step.", "--max-num-batched-tokens", unit="tokens", low=1
    )
    chunked_prefill_size: int | None = _of_steps(
        None,
        int,
        "Prompt tokens of one request computed in one step.",
        "--chunked-prefill-size",
        unit="tokens",
        low=1,
    )
    max_prompt_embeds: int = _of_memory(
        0,
        int,
        "Rows that prompts bring as prompt_embeds, held at once; 0: such prompts are refused.",
        "--max-prompt-embeds",
        unit="tokens",
        low=0,
    )
    prompt_blocks: bool = _of_memory(
        False,
        bool,
        "Prompts may bring prompt_blocks, whose tokens see one another in both directions.",
        "--prompt-blocks",
    )
    enable_prefix_cache: bool = _of_memory(
        True,
        bool,
        "Share the KV of equal prompt prefixes.",
        "--enable-prefix-caching",
        off_flags=("--no-enable-prefix-caching", "--disable-radix-cache"),
    )
    state_checkpoint_every: int | None = _of_memory(
        None,
        int,
        "Tokens between the states of recurrent layers that are kept for equal prompt prefixes, in "
        "whole pages.",
        "--state-checkpoint-every",
        unit="tokens",
        low=1,
    )
    attention_backend: str | None = _of_kernels(
        None,
        str,
        "Attention backend by name, prefill+decode, cascade(name), or pkg.mod:Class.",
        "--attention-backend",
    )
    linear_attention_backend: str | None = _of_kernels(
        None,
        str,
        "Backend of layers that keep a state of each request, by name or pkg.mod:Class.",
        "--linear-attention-backend",
        "--linear-attn-backend",
    )
    logits_processors: tuple[str, ...] = _of_steps(
        (),
        tuple,
        "Logits processor as pkg.mod:Class; may be given several times.",
        "--logits-processor",
        "--logits-processors",
    )
    share_prefix_reads: bool = _of_kernels(
        True,
        bool,
        "Read a prefix that many requests share once for several of them, where the attention "
        "backend can; an answer's rounding then depends on who else shares it, too.",
        "--share-prefix-reads",
        off_flags=("--no-share-prefix-reads", "--disable-cascade-attn"),
    )
    enforce_eager: bool = _of_kernels(
        False, bool, "Never use graphs.", "--enforce-eager", "--disable-cuda-graph"
    )
    cuda_graph_max_bs: int | None = _of_kernels(
        None,
        int,
        "Largest decode batch that runs as a graph.",
        "--cuda-graph-max-bs",
        unit="requests",
        low=1,
    )
    cuda_graph_max_tokens: int | None = _of_kernels(
        None,
        int,
        "Largest prefill or mixed step that runs as a graph; 0: none.",
        "--cuda-graph-max-tokens",
        unit="tokens",
        low=0,
    )
    latent_expand_from: int | None = _of_kernels(
        None,
        int,
        "Prompt tokens of one request in one step from which latent attention expands keys and "
        "values of every head, in steps that are no graphs; 0: none, and the attention backend has "
        "all steps.",
        "--latent-expand-from",
        unit="tokens",
        low=0,
        left_out="where that takes fewer operations, with a model of latents on a GPU",
    )
    latent_expand_backend: str | None = _of_kernels(
        None,
        str,
        "Who attends to expanded keys and values: own (our kernel), flashinfer, fa4, fa3, auto, or "
        "pkg.mod:Class.",
        "--latent-expand-backend",
        left_out="the fastest that was measured, or the library of --attention-backend",
    )
    speculative_algorithm: str | None = _of_drafts(
        None,
        str,
        "Who drafts tokens for the model to verify several at a time; the text stays the same.  "
        "EAGLE and EAGLE3: a head on the model's hidden states; MTP: the layer that the model has "
        "for it; STANDALONE: a small model of the same vocabulary; NGRAM: a search in the "
        "request's own text, without a draft model; auto: what the draft model is, and the "
        "bundled model's own head.",
        "--speculative-algorithm",
        choices=(*DRAFT_ALGORITHMS, OFF),
    )
    speculative_draft_model_path: str | None = _of_drafts(
        None,
        str,
        "The draft head or model of EAGLE, EAGLE3 and STANDALONE: hub id, local folder, 'bundled', "
        "or a shape shipped in the package.",
        "--speculative-draft-model-path",
        "--speculative-draft-model",
        left_out="the bundled head, with the bundled model",
    )
    speculative_num_steps: int | None = _of_drafts(
        None,
        int,
        "Depth of the drafts: a round emits at most one token more.",
        "--speculative-num-steps",
        unit="tokens",
        low=1,
        high=MOST_STEPS,
    )
    speculative_eagle_topk: int | None = _of_drafts(
        None,
        int,
        "Drafts tried behind each draft: 1 is a chain, more a tree.",
        "--speculative-eagle-topk",
        low=1,
        high=MOST_BRANCHES,
    )
    speculative_num_draft_tokens: int | None = _of_drafts(
        None,
        int,
        "Tokens the model verifies per request and round, the newest token included.",
        "--speculative-num-draft-tokens",
        unit="tokens",
        low=2,
        high=MOST_DRAFT_TOKENS,
    )
    speculative_max_batch: int | None = _of_drafts(
        None,
        int,
        "Requests that draft at the same time: while more decode, all take plain steps.  1: who "
        "met company drafts no more, and larger batches do not pay for the drafter.",
        "--speculative-max-batch",
        "--speculative-disable-by-batch-size",
        unit="requests",
        low=1,
    )
    speculative_acceptance: str = _of_drafts(
        SAMPLE_AND_MATCH,
        str,
        "Which drafts of a chain count.  sample_and_match: those that plain decoding would have "
        "sampled, so a seed gives the same text; rejection: by chance, with the same distribution "
        "but not the same text.",
        "--speculative-acceptance",
        choices=(SAMPLE_AND_MATCH, REJECTION),
    )
    speculative_ngram_min: int | None = _of_drafts(
        None,
        int,
        "Shortest end of the text that NGRAM looks for.",
        "--speculative-ngram-min",
        "--speculative-ngram-min-match-window-size",
        unit="tokens",
        low=1,
    )
    speculative_ngram_max: int | None = _of_drafts(
        None,
        int,
        "Longest end of the text that NGRAM looks for.",
        "--speculative-ngram-max",
        "--speculative-ngram-max-match-window-size",
        unit="tokens",
        low=1,
    )
    force_accept_len: float | None = _of_drafts(
        None,
        float,
        "Forced tokens per round on average, whatever the model says: the text is WRONG.  To "
        "compare hardware only.",
        "--force-accept-len",
        unit="tokens",
        low=1,
        left_out="not forced",
    )
    sanitize: bool = _of_kernels(
        False,
        bool,
        "Run every step again over poison where it may not read, and check the books of the cache "
        "when nothing runs; stop where that shows.  For debugging: tens of times slower.",
        "--sanitize",
    )
    black_box_dir: str | None = _of_kernels(
        None,
        str,
        "Folder that gets the last steps of an engine that fails, as a file that debug replay runs "
        "again.  It has the token ids of prompts and answers, extra_args, and the texts of "
        "exceptions: keep it as you keep those.",
        "--black-box-dir",
        left_out="none is written",
    )
    black_box_bytes: int | None = _of_kernels(
        None,
        int,
        "Memory for what the steps brought that a black box keeps: token ids, embeddings, masks.  "
        "Where that is more, it keeps fewer than 256 steps.  Encoders' inputs of running requests "
        "come on top.",
        "--black-box-bytes",
        unit="bytes",
        low=1,
        left_out="256 MiB, with --black-box-dir",
    )
    seed: int = _of_model(
        0,
        int,
        "Seed of requests that bring none, and of dummy weights.",
        "--seed",
        "--random-seed",
        low=-SEED_LIMIT,
        high=SEED_LIMIT - 1,
    )
    overlap: bool = _of_steps(
        True,
        bool,
        "Schedule the next step while the device computes this one.",
        "--overlap",
        off_flags=("--no-overlap", "--disable-overlap-schedule"),
    )
    threads: int | None = _of_model(
        None,
        int,
        "CPU threads of tensor operations, in each process of the model.",
        "--threads",
        unit="threads",
        low=1,
    )
    tensor_parallel_size: int = _of_model(
        1,
        int,
        "Processes that share one model, each with a part of every layer, on GPUs one GPU each.",
        "--tensor-parallel-size",
        "--tp-size",
        "--tp",
        "-tp",
        unit="processes",
        low=1,
        high=MOST_RANKS,
    )
    compare_ranks_every: int | None = _of_model(
        None,
        int,
        "Steps from one in which all processes of a model tell their tokens to the next; stop "
        "where these differ.  For debugging: a step that is compared is waited for.",
        "--compare-ranks-every",
        unit="steps",
        low=1,
        left_out="never",
    )

    def __post_init__(self) -> None:
        for field in fields(self):
            check(field, getattr(self, field.name))


def known(value: T | None) -> T:
    """The value of an option that `plan.resolve` has decided."""
    assert value is not None, "resolve() decides every open value"
    return value
