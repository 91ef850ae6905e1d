"""Contradictions: values that cannot hold together, refused before anything is planned by them."""

from dataclasses import fields

from paceline.core.draft_shape import DraftShape
from paceline.core.dtypes import FP8
from paceline.core.errors import ConfigError
from paceline.core.gpus import DeviceFacts
from paceline.core.model.config import ModelConfig
from paceline.core.modes import End
from paceline.core.options.engine_options import (
    REJECTION,
    SAMPLE_AND_MATCH,
    EngineOptions,
    known,
)
from paceline.core.options.spec import spec_of
from paceline.core.parallel import Parallel, of_rank
from paceline.plan.resolution import Resolution
from paceline.speculate.drafter import Algorithm
from paceline.speculate.registry import ALGORITHMS

_OF_A_CACHE = {"kv_cache_bytes", "kv_cache_dtype", "page_size", "enable_prefix_cache"}


def refuse_asked(options: EngineOptions, config: ModelConfig, device: DeviceFacts) -> None:
    """Raise ConfigError where a value that was asked contradicts the model or the device."""
    if options.device is not None and options.device != device.device_type:
        raise ConfigError.about(
            "device",
            expected=f"{device.device_type} ({device.name})",
            got=options.device,
            remedy="leave --device out, or choose another --gpu",
        )
    if options.gpu_memory_utilization is not None and device.device_type == "cpu":
        raise ConfigError.about(
            "gpu_memory_utilization",
            expected="left out on a CPU",
            got=options.gpu_memory_utilization,
            remedy="size the cache with --kv-cache-memory-bytes",
        )
    if options.threads is not None and device.cpus is not None and options.threads > device.cpus:
        raise ConfigError.about(
            "threads",
            expected=f"at most {device.cpus}, the CPUs this process may use",
            got=options.threads,
            remedy="lower --threads, or leave it out to let the engine decide",
        )
    if options.max_model_len is not None and options.max_model_len > config.max_position:
        raise ConfigError.about(
            "max_model_len",
            expected=f"at most {config.max_position}, the model's context limit",
            got=options.max_model_len,
            remedy="lower --max-model-len",
        )
    if options.black_box_bytes is not None and options.black_box_dir is None:
        raise ConfigError.about(
            "black_box_bytes",
            expected="given with --black-box-dir",
            got=f"{options.black_box_bytes} without",
            remedy="name a folder, or leave it out",
        )


def refuse_ranks(options: EngineOptions, config: ModelConfig, num_gpus: int | None) -> None:
    """Raise ConfigError for what several processes of one model cannot serve.  num_gpus: of this
    machine; None: they run on its CPU."""
    size = options.tensor_parallel_size
    if size == 1:
        if options.compare_ranks_every is None:
            return
        raise ConfigError.about(
            "compare_ranks_every",
            expected="given with --tensor-parallel-size",
            got=f"{options.compare_ranks_every} with one process, which agrees with itself",
            remedy="leave it out, or name more processes",
        )
    of_rank(config, Parallel(0, size))
    if num_gpus is not None and size > num_gpus:
        raise ConfigError.about(
            "tensor_parallel_size",
            expected=f"at most {num_gpus}, the GPUs that torch can use here",
            got=size,
            remedy="lower --tensor-parallel-size; `paceline explain --gpu` plans for more GPUs",
        )


def refuse_step(options: EngineOptions, drafts: DraftShape) -> None:
    """Raise ConfigError where numbers of one step contradict each other; `options` has them."""
    rows, tokens = known(options.max_num_seqs), known(options.max_num_batched_tokens)
    chunk = known(options.chunked_prefill_size)
    nodes = drafts.num_draft_tokens
    if tokens < rows * nodes:
        held = f"the {nodes} tokens of a round" if drafts.has_drafts else "one token"
        lower = f"--max-num-seqs to {tokens // nodes}"
        if tokens < nodes:
            lower = "--speculative-num-draft-tokens"
        raise ConfigError.about(
            "max_num_batched_tokens",
            expected=f"at least {rows * nodes}",
            got=tokens,
            remedy=f"a step holds {held} of every running request: raise "
            f"--max-num-batched-tokens to {rows * nodes}, or lower {lower}",
        )
    if chunk > tokens:
        raise ConfigError.about(
            "chunked_prefill_size",
            expected=f"at most {tokens}, the tokens of one step",
            got=chunk,
            remedy="lower --chunked-prefill-size or raise --max-num-batched-tokens",
        )


def refuse_parts_of_texts(options: EngineOptions, config: ModelConfig) -> None:
    """Raise ConfigError where a model that reads texts whole would be given less; `options` has the
    step's numbers."""
    if not config.reads_whole:
        return
    length = options.max_model_len or config.max_position
    for name in ("max_num_batched_tokens", "chunked_prefill_size"):
        if known(getattr(options, name)) < length:
            flag = "--" + name.replace("_", "-")
            raise ConfigError.about(
                name,
                expected=f"at least {length}, the longest text: its tokens see one another in both "
                "directions, so a step computes all of it",
                got=getattr(options, name),
                remedy=f"leave {flag} out, or lower --max-model-len",
            )


def refuse_graphs(options: EngineOptions, config: ModelConfig) -> None:
    """Raise ConfigError for graphs of more than a step holds, or, where answers are generated, one
    prompt; `options` has the step's numbers."""
    rows, tokens = known(options.max_num_seqs), known(options.max_num_batched_tokens)
    graph_rows, graph_tokens = options.cuda_graph_max_bs, options.cuda_graph_max_tokens
    if graph_rows is not None and graph_rows > rows:
        raise ConfigError.about(
            "cuda_graph_max_bs",
            expected=f"at most {rows}, the requests of one step",
            got=graph_rows,
            remedy="lower --cuda-graph-max-bs or raise --max-num-seqs",
        )
    limit, what, flag = tokens, "tokens of one step", "--max-num-batched-tokens"
    length = options.max_model_len or config.max_position
    if End.GENERATE in config.ends and length < tokens:
        limit, what, flag = length, "tokens of one request", "--max-model-len"
    if graph_tokens is not None and graph_tokens > limit:
        raise ConfigError.about(
            "cuda_graph_max_tokens",
            expected=f"at most {limit}, the {what}",
            got=graph_tokens,
            remedy=f"lower --cuda-graph-max-tokens or raise {flag}",
        )


def refuse_expansion(options: EngineOptions, config: ModelConfig) -> None:
    """Raise ConfigError where latents could never be expanded as asked; `options` has the step's
    numbers."""
    least, named = options.latent_expand_from, options.latent_expand_backend
    if named not in (None, "auto") and (least == 0 or config.expandable is None):
        raise ConfigError.about(
            "latent_expand_backend",
            expected="left out where no latents are expanded",
            got=named,
            remedy="remove --latent-expand-backend",
        )
    if not least:
        return
    tokens, chunk = known(options.max_num_batched_tokens), known(options.chunked_prefill_size)
    expected, remedy = None, "remove --latent-expand-from"
    if config.expandable is None:
        expected = "left out with a model whose layers cache no latents"
    elif options.kv_cache_dtype == FP8:
        expected = "0 with --kv-cache-dtype fp8, whose rows only latent attention reads"
        remedy = "leave --latent-expand-from out, or set it to 0"
    elif least > chunk:
        expected = f"at most {chunk}, the prompt tokens of one request in a step"
        remedy = "lower --latent-expand-from or raise --chunked-prefill-size"
    elif tokens <= known(options.cuda_graph_max_tokens):
        expected = f"0 where every step, of up to {tokens} tokens, may be a graph"
        remedy = "lower --cuda-graph-max-tokens: a graph attends to latents"
    if expected is not None:
        raise ConfigError.about("latent_expand_from", expected=expected, got=least, remedy=remedy)


def refuse_cache(options: EngineOptions) -> None:
    """Raise ConfigError for a cache that is neither of the activations' format nor fp8."""
    if options.kv_cache_dtype not in (options.dtype, FP8):
        raise ConfigError.about(
            "kv_cache_dtype",
            expected=f"{options.dtype}, the format of the activations, or {FP8}",
            got=options.kv_cache_dtype,
            remedy="leave --kv-cache-dtype out, or set --dtype to the same",
        )


def refuse_caching(resolution: Resolution) -> None:
    """Raise ConfigError for what was asked of the cache of a model that keeps nothing."""
    for option in fields(resolution.options):
        name, value = option.name, getattr(resolution.options, option.name)
        if name in _OF_A_CACHE and value and resolution.origins[name] == "asked":
            raise ConfigError.about(
                name,
                expected="left out for a model that caches nothing",
                got=value,
                remedy=f"remove {spec_of(option).flags[0]}",
            )


def refuse_pages(options: EngineOptions, config: ModelConfig, *, keeps_rows: bool) -> None:
    """Raise ConfigError where a size that was asked has nothing to say of the model's cache.

    keeps_rows: whether some layer, of the model or its drafter, keeps rows of tokens.
    """
    every, named = options.state_checkpoint_every, options.linear_attention_backend
    lacks = None
    if not config.has_states:
        lacks = "a model whose layers keep no states"
        if named not in (None, "auto"):
            raise ConfigError.about(
                "linear_attention_backend",
                expected=f"left out with {lacks}",
                got=repr(named),
                remedy="remove --linear-attention-backend",
            )
    elif not options.enable_prefix_cache:
        lacks = "--no-enable-prefix-caching: no states are kept for others"
    if every is not None and lacks is not None:
        raise ConfigError.about(
            "state_checkpoint_every",
            expected=f"left out with {lacks}",
            got=every,
            remedy="remove --state-checkpoint-every",
        )
    if keeps_rows or not config.has_states:
        return
    if options.page_size is not None:
        raise ConfigError.about(
            "page_size",
            expected="left out with a model whose layers keep states alone",
            got=options.page_size,
            remedy="say where its states are kept, with --state-checkpoint-every",
        )
    if options.kv_cache_dtype == FP8:
        raise ConfigError.about(
            "kv_cache_dtype",
            expected="left out with a model whose layers keep states alone, in formats they name",
            got=FP8,
            remedy="remove --kv-cache-dtype; fewer states take less: --max-num-seqs",
        )


def refuse_interval(options: EngineOptions) -> None:
    """Raise ConfigError for states that would be kept within a page; `options` has its size."""
    every, page = options.state_checkpoint_every, known(options.page_size)
    if every is not None and every % page:
        above = every + -every % page
        raise ConfigError.about(
            "state_checkpoint_every",
            expected=f"a multiple of the page size, {page} tokens",
            got=every,
            remedy=f"set --state-checkpoint-every to {above}, or change --page-size: states are "
            "found again at the ends of pages",
        )


def refuse_acceptance(options: EngineOptions, algorithm: Algorithm, shape: DraftShape) -> None:
    """Raise ConfigError for a rule of acceptance that these drafts cannot have."""
    if options.speculative_acceptance == REJECTION:
        lacks = None
        if not algorithm.has_model:
            lacks = f"{algorithm.name}, whose drafts have no probabilities"
        elif not shape.is_chain:
            lacks = f"a tree of topk {shape.topk}: it is defined for chains"
        elif options.force_accept_len is not None:
            lacks = "--force-accept-len, which forces what is accepted"
        if lacks is not None:
            raise ConfigError.about(
                "speculative_acceptance",
                expected=f"{SAMPLE_AND_MATCH} with {lacks}",
                got=REJECTION,
                remedy=f"leave --speculative-acceptance out, which is {SAMPLE_AND_MATCH}",
            )
    most = 1 + min(shape.num_steps, shape.num_draft_tokens - 1)
    forced = options.force_accept_len
    if forced is not None and forced > most:
        raise ConfigError.about(
            "force_accept_len",
            expected=f"from 1 to {most}: a path of {most - 1} drafts and the token behind it",
            got=f"{forced:g}",
            remedy="lower --force-accept-len or raise --speculative-num-steps",
        )


def refuse_strays(options: EngineOptions, algorithm: Algorithm) -> None:
    """Raise ConfigError for a setting that another algorithm alone has."""
    for other in ALGORITHMS.values():
        if other.name == algorithm.name:
            continue
        for name in other.own_options:
            value = getattr(options, name)
            if value is not None:
                raise ConfigError.about(
                    name,
                    expected=f"left out with {algorithm.name}, which {other.others}",
                    got=value,
                    remedy=f"remove --{name.replace('_', '-')}, or name {other.name}",
                )


def refuse_axes(drafter: ModelConfig | None, target: ModelConfig) -> None:
    """Raise ConfigError for a drafter that cannot turn by the target's positions."""
    if drafter is not None and drafter.rope_axes != target.rope_axes:
        raise ConfigError.about(
            "speculative_draft_model_path",
            expected=f"a draft model whose rope has as many axes as the target's, "
            f"{target.rope_axes}",
            got=drafter.rope_axes,
            remedy="take one that was trained for this model, or draft without a model",
        )


def refuse_topk(shape: DraftShape, vocab_size: int) -> None:
    """Raise ConfigError for more branches than the drafter has tokens; vocab_size 0: no model."""
    if vocab_size and shape.topk > vocab_size:
        raise ConfigError.about(
            "speculative_eagle_topk",
            expected=f"at most {vocab_size}, the draft model's vocabulary",
            got=shape.topk,
            remedy="lower --speculative-eagle-topk",
        )
