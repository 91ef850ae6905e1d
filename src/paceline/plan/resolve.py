"""Resolve: turns what was asked into what will run, with the origin of every value.

The same function serves `LLM`, the benchmark and `explain`, so that a plan for a GPU that is not
here shows what the engine would do there.
"""

from collections.abc import Mapping
from dataclasses import fields, replace

import torch

from paceline.attention.ragged.contract import RaggedConfig
from paceline.attention.ragged.registry import choose_ragged
from paceline.core.dtypes import FP8
from paceline.core.gpus import GIB, DeviceFacts
from paceline.core.model.cache_groups import STATE_EVERY, usual_state_every
from paceline.core.model.config import ModelConfig
from paceline.core.modes import End
from paceline.core.options.asked import engine_options
from paceline.core.options.engine_options import OFF, EngineOptions, known
from paceline.plan.contradictions import (
    refuse_asked,
    refuse_cache,
    refuse_caching,
    refuse_expansion,
    refuse_graphs,
    refuse_interval,
    refuse_pages,
    refuse_parts_of_texts,
    refuse_step,
)
from paceline.plan.memory.demand import Demands
from paceline.plan.memory.fit import SHORTEST_LEN, Balance, Fit, balance_of, plan_memory
from paceline.plan.resolution import Resolution
from paceline.plan.speculation import Speculation, shape_of
from paceline.plan.step_size import usual_step

CPU_KV_LIMIT = 4 * GIB
# Longer steps keep the GPU busy while the next operations are launched: a quarter of a full step,
# from the first number to the second.
GPU_GRAPH_TOKENS = (1024, 2048)
# Of models that only make vectors, which are small: tokens x hidden_size^2 of a step that computes
# as long as its launches take; a layer has about 12 hidden_size^2 numbers.  As above of an 8B one.
POOLED_GRAPH_WORK = 2048 * 4096**2
CACHES_NOTHING = "the model caches nothing"
CACHE_FREE = "a step holds the longest text: nothing is written for later ones"
WITHOUT_GRAPHS = "no graphs; steps are padded as with them, so that answers are the same"
CPU_GRAPH_ROWS = 64  # requests; calls are cheap beside so many rows
CPU_DRAFTING = 1  # request; with more, the bundled head costs more than it gains: decision 036


def resolve(asked: Mapping[str, object], demands: Demands) -> tuple[Resolution, Fit]:
    """Decide every open value.

    demands: of the model, the device, and what `plan_speculation` made of the same options.
    Returns the resolution and the memory budget that belongs to it; the budget may be short, see
    `fit.require_fit`.  Raises ConfigError for values that contradict the model or the device.
    """
    config, why, resolution = _decide(asked, demands)
    fit = plan_memory(config, resolution.options, demands)
    if fit.max_model_len < config.max_position:
        why = f"what the KV budget holds; the model's limit is {config.max_position}"
    resolution = resolution.choose("max_model_len", fit.max_model_len, why)
    if fit.kv_bytes:
        resolution = resolution.choose("kv_cache_bytes", fit.kv_bytes, "what the budget leaves")
    return resolution, fit


def shortage(asked: Mapping[str, object], demands: Demands) -> tuple[Balance, int]:
    """(the balance of `asked`, with its max_model_len or the shortest that is served; bytes that it
    lacks, 0 where it fits), without a search for the longest request.  Raises ConfigError as
    `resolve` does."""
    config, _, resolution = _decide(asked, demands)
    options = resolution.options
    length = _shortest(options, config)
    balance = balance_of(replace(options, max_model_len=length), demands)
    return balance, balance.short_by(length)


def _shortest(options: EngineOptions, config: ModelConfig) -> int:
    """Tokens of the request that must fit."""
    return options.max_model_len or min(config.max_position, SHORTEST_LEN)


def _decide(asked: Mapping[str, object], demands: Demands) -> tuple[ModelConfig, str, Resolution]:
    """(the model at the context taken, why that, everything but its limit and the cache)."""
    config, device, speculation = demands.config, demands.device, demands.speculation
    given = engine_options(asked)
    assert speculation is not None or given.speculative_algorithm in (None, OFF), "not planned"
    explicit = {n for n, v in asked.items() if v is not None and getattr(given, n) is not None}
    origins = {
        option.name: "asked" if option.name in explicit else "default"
        for option in fields(EngineOptions)
    }
    refuse_asked(given, config, device)
    config, why = _unasked_context(config, given)
    start = Resolution(options=given, origins=origins)
    resolution = _choose_drafter(start, speculation)
    resolution = _choose_pages(resolution, config, speculation)
    resolution = _choose_device(resolution, config, device)
    resolution = _choose_shape(resolution, config, device, speculation)
    refuse_step(resolution.options, shape_of(speculation))
    refuse_parts_of_texts(resolution.options, config)
    refuse_cache(resolution.options)
    resolution = _choose_graphs(resolution, config, demands)
    refuse_graphs(resolution.options, config)
    resolution = _choose_expansion(resolution, config, device)
    if device.device_type == "cpu" and not config.reads_whole:  # which caches nothing
        resolution = _choose_cpu_cache(resolution, config, demands)
    return config, why, resolution


def _unasked_context(config: ModelConfig, given: EngineOptions) -> tuple[ModelConfig, str]:
    """The model at the context limit that is taken unless one is asked for, and why that.

    Where longrope has two sets of factors, its trained context: a longer limit takes the long set,
    which changes the answers to short prompts too.  No more than sentence-transformers reads of a
    text.
    """
    most, why = config.max_position, "context limit of the model"
    if given.max_model_len is not None:
        return config, why
    length, short, own = most, config.short_context, config.usual_context
    if short is not None and short < length:
        why = f"the trained context; a longer one, up to {most}, changes every answer"
        length = short
    if own is not None and own < length:
        why = f"max_seq_length of sentence-transformers; the model's limit is {most}"
        length = own
    return replace(config, max_position=length), why


def _choose_drafter(resolution: Resolution, speculation: Speculation | None) -> Resolution:
    if speculation is None:
        why = "unasked, only the bundled model has a drafter"
        return resolution.choose("speculative_algorithm", OFF, why)
    for name, (value, why) in speculation.chosen.items():
        resolution = resolution.choose(name, value, why)
    return resolution


def _choose_device(resolution: Resolution, config: ModelConfig, device: DeviceFacts) -> Resolution:
    resolution = resolution.choose("device", device.device_type, device.name)
    if device.device_type == "cuda" and config.dtype == "float32":
        dtype = "bfloat16" if device.native_bf16 else "float16"
        why = "float32 weights cost a GPU half its speed and memory; ask with --dtype float32"
    elif device.native_bf16 or config.dtype == "float32":
        dtype, why = config.dtype, "as stored in the checkpoint"
    elif device.device_type == "cuda":
        dtype, why = "float16", "this GPU has no bfloat16 instructions"
    else:
        dtype, why = "float32", f"this CPU has no {config.dtype} instructions"
    resolution = resolution.choose("dtype", dtype, why)
    resolution = resolution.choose(
        "kv_cache_dtype", known(resolution.options.dtype), "the format of the activations"
    )
    if device.cores is not None:
        resolution = resolution.choose("threads", device.cores, "physical cores that are free")
    return resolution


def _choose_pages(
    resolution: Resolution, config: ModelConfig, speculation: Speculation | None
) -> Resolution:
    """Tokens of a page, and between the states that are kept.  Where no layer keeps rows of tokens,
    a page is the way from one kept state to the next: the prefix tree has nothing else to find.
    """
    drafts = () if speculation is None else speculation.drafter.groups(1)
    keeps_rows = bool(config.heads or drafts)
    if not keeps_rows and not config.has_states:
        why = CACHES_NOTHING if config.looks_ahead else CACHE_FREE
        refuse_caching(resolution)
        resolution = resolution.choose("page_size", 16, why)
        if resolution.options.enable_prefix_cache:
            resolution = resolution.instead("enable_prefix_cache", False, why)
    refuse_pages(resolution.options, config, keeps_rows=keeps_rows)
    why = "a hit ends at a kept state: behind it, a prompt computes less than that again"
    if config.has_states and not keeps_rows:
        resolution = resolution.choose("state_checkpoint_every", STATE_EVERY, why)
        every = known(resolution.options.state_checkpoint_every)
        return resolution.choose("page_size", every, "from one kept state to the next")
    resolution = resolution.choose("page_size", 16, "short page tables, little waste")
    if not config.has_states:
        return resolution
    usual = usual_state_every(known(resolution.options.page_size))
    resolution = resolution.choose("state_checkpoint_every", usual, why)
    refuse_interval(resolution.options)
    return resolution


def _choose_shape(
    resolution: Resolution,
    config: ModelConfig,
    device: DeviceFacts,
    speculation: Speculation | None,
) -> Resolution:
    if device.device_type == "cuda":
        resolution = resolution.choose("gpu_memory_utilization", 0.9, "leaves a tenth to others")
    resolution = _choose_step(resolution, config, device, speculation)
    tokens = resolution.options.max_num_batched_tokens
    return resolution.choose("chunked_prefill_size", tokens, "the whole step")


def _choose_graphs(
    resolution: Resolution,
    config: ModelConfig,
    demands: Demands,
) -> Resolution:
    """The largest decode batch that runs as a graph: all, where its graphs leave room for KV.

    Without graphs steps are padded to the same sizes, so that answers are the same.
    """
    device = demands.device
    resolution = _choose_graph_tokens(resolution, config, device)
    options = resolution.options
    rows, why = known(options.max_num_seqs), "every decode batch runs as a graph"
    if device.device_type == "cpu" and rows > CPU_GRAPH_ROWS:
        rows, why = CPU_GRAPH_ROWS, "larger batches gain nothing from a graph on a CPU"
    length = options.max_model_len or config.max_position
    limit = device.free_bytes // 4

    def graph_bytes(rows: int) -> int:
        return demands.graphs(replace(options, cuda_graph_max_bs=rows), length)

    is_open = options.cuda_graph_max_bs is None
    while is_open and rows > 1 and graph_bytes(rows) > limit:
        rows, why = (rows + 1) // 2, "its graphs take at most a quarter of free memory"
    why = WITHOUT_GRAPHS if options.enforce_eager else why
    return resolution.choose("cuda_graph_max_bs", rows, why)


def _choose_graph_tokens(
    resolution: Resolution, config: ModelConfig, device: DeviceFacts
) -> Resolution:
    """The largest ragged step that runs as a graph: where launching takes longer than computing."""
    options = resolution.options
    if device.device_type == "cpu":
        return resolution.choose("cuda_graph_max_tokens", 0, "padding costs a CPU time")
    length = options.max_model_len or config.max_position
    whole, (least, most) = known(options.max_num_batched_tokens), GPU_GRAPH_TOKENS
    tokens = min(max(least, min(whole // 4, most)), whole, length)
    if End.GENERATE not in config.ends:
        tokens = min(max(tokens, POOLED_GRAPH_WORK // config.hidden_size**2), whole)
    why = WITHOUT_GRAPHS if options.enforce_eager else "longer steps outlast their launches"
    return resolution.choose("cuda_graph_max_tokens", tokens, why)


def _choose_expansion(
    resolution: Resolution, config: ModelConfig, device: DeviceFacts
) -> Resolution:
    """From how many tokens on latents are expanded to keys and values, and who attends to these."""
    refuse_expansion(resolution.options, config)
    if config.expandable is None:
        return resolution
    options, least = resolution.options, config.expandable.expand_from
    if device.device_type == "cpu":
        least, why = 0, "a CPU attends to latents in blocks, and to expanded keys in none"
    elif options.kv_cache_dtype == FP8:
        least, why = 0, "only latent attention reads rows in float8"
    elif known(options.max_num_batched_tokens) <= known(options.cuda_graph_max_tokens):
        least, why = 0, "every step may be a graph, and attends to latents"
    elif not 0 < least <= known(options.chunked_prefill_size):
        least, why = 0, "expanded keys and values would take more operations"
    else:
        why = (
            f"fewer operations (0: none); steps of up to {options.cuda_graph_max_tokens} tokens "
            "are graphs"
        )
    resolution = resolution.choose("latent_expand_from", least, why)
    if not resolution.options.latent_expand_from:
        refuse_expansion(resolution.options, config)
        return resolution
    head_dim, v_head_dim = config.expanded_dims
    found = choose_ragged(
        RaggedConfig(
            device_type=device.device_type,
            cuda_arch=device.cuda_arch,
            dtype=getattr(torch, known(options.dtype)),
            num_heads=config.heads[0].num_heads,
            head_dim=head_dim,
            v_head_dim=v_head_dim,
        ),
        options.latent_expand_backend,
        attention=options.attention_backend,
        gpu=device.name,
    )
    name = options.latent_expand_backend
    if name == "auto":
        return resolution.instead("latent_expand_backend", found.name, found.why)
    return resolution.choose("latent_expand_backend", found.name, found.why)


def _choose_step(
    resolution: Resolution,
    config: ModelConfig,
    device: DeviceFacts,
    speculation: Speculation | None,
) -> Resolution:
    """Requests and tokens of a step: the usual, or what the other number asks for.

    With drafts every request brings several rows: as many rows in all as without keeps logits,
    samplers and graphs as large, and products where more rows still cost little.
    """
    resolution = _choose_drafting(resolution, device, speculation)
    options, (usual, why) = resolution.options, usual_step(device, config)
    nodes = shape_of(speculation).num_draft_tokens
    each = "one token" if nodes == 1 else f"{nodes} tokens"
    rows, why_rows = usual.requests, why
    if speculation is not None and options.speculative_max_batch is None:
        rows, why_rows = max(1, rows // nodes), f"{each} of each, in all the rows {why}"
    if options.max_num_batched_tokens is not None:
        most = max(1, options.max_num_batched_tokens // nodes)
        if most < rows:
            rows, why_rows = most, f"a step of --max-num-batched-tokens holds {each} of each"
    resolution = resolution.choose("max_num_seqs", rows, why_rows)
    tokens, why_tokens = usual.tokens, why
    if known(resolution.options.max_num_seqs) * nodes > tokens:
        tokens = known(resolution.options.max_num_seqs) * nodes
        why_tokens = f"{each} of each of --max-num-seqs"
    if options.chunked_prefill_size is not None and options.chunked_prefill_size > tokens:
        tokens, why_tokens = options.chunked_prefill_size, "one chunk of --chunked-prefill-size"
    length = options.max_model_len or config.max_position
    if config.reads_whole and length > tokens:
        tokens, why_tokens = length, "a step holds every text whole"
    return resolution.choose("max_num_batched_tokens", tokens, why_tokens)


def _choose_drafting(
    resolution: Resolution, device: DeviceFacts, speculation: Speculation | None
) -> Resolution:
    """How many requests draft at a time where nobody asked for drafts; None: all."""
    asked = ("speculative_algorithm", "speculative_draft_model_path")
    is_asked = any(resolution.origins[name] == "asked" for name in asked)
    if speculation is None or is_asked or device.device_type != "cpu":
        return resolution
    why = "with more, the bundled model is faster without drafts on a CPU"
    return resolution.choose("speculative_max_batch", CPU_DRAFTING, why)


def _choose_cpu_cache(
    resolution: Resolution,
    config: ModelConfig,
    demands: Demands,
) -> Resolution:
    options, device = resolution.options, demands.device
    longest = options.max_model_len or config.max_position
    balance = balance_of(options, demands)
    full = balance.least(longest, known(options.max_num_seqs))
    limits = {
        full: "every running request at full length",
        CPU_KV_LIMIT: "the most taken unasked on a CPU",
        device.free_bytes // 4: "a quarter of free memory",
    }
    # Where not even the shortest fits nothing is left, and no longer one need be looked for.
    if not balance.short_by(longest) or not balance.short_by(_shortest(options, config)):
        fit = plan_memory(config, options, demands)
        limits.setdefault(fit.kv_bytes, "what weights and buffers leave")
    size = min(limits)
    return resolution.choose("kv_cache_bytes", size, limits[size])
