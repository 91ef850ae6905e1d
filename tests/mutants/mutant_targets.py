"""What is mutated: every derivation of a step's metadata, and what is to notice.

Cells first, the sharpest and cheapest in front; then the tests of the area.
"""

from dataclasses import dataclass

from mutant_child import Killers


@dataclass(frozen=True, slots=True)
class Target:
    """One file."""

    file: str  # below the package
    functions: tuple[str, ...]  # empty: all
    killers: Killers


def _cells(backend: str, *cells: str) -> tuple[str, ...]:
    """Cells of a backend, each given as method/mode/runner/variant."""
    parts = (cell.split("/") for cell in cells)
    return tuple(f"{method}/{backend}/" + "/".join(rest) for method, *rest in parts)


_STEP = (
    "dense/decode/recorded/every-live-size",
    "dense/mixed/recorded/decode-and-chunks",
    "dense/target_verify/recorded/mixed-shapes",
    "dense/target_verify/recorded/chain3",
    "dense/draft_extend_v2/recorded/fixed3-capture2x-scratch",
    "dense/extend/eager/zero-prefix-edges",
    "dense/extend/recorded/ragged-edges",
    "dense/draft_decode/recorded/topk2-step3",
    "dense/draft_extend/recorded/accepted-1-to-4",
)
_SHAPES = (
    "dense/decode/recorded/page1",
    "dense/target_verify/eager/deep",
    "dense/extend/recorded/layers3",
    "dense/extend/recorded/soft-cap",
    "swa/decode/recorded/full-and-windows",
    "swa/extend/recorded/window4-prefix-edges",
    "swa/extend/recorded/full-and-windows",
    "swa/target_verify/recorded/window5-and-full-topk4",
    "swa/target_verify/recorded/window4-topk2",
    "swa/draft_extend_v2/recorded/window12-fixed3",
)
_IN_CHUNKS = (
    *("chunk/decode/recorded/chunk32-edges", "chunk/mixed/recorded/chunk32-edges"),
    *(
        "chunk/target_verify/recorded/chunk32-chain8",
        "chunk/target_verify/recorded/chunk32-deep-sinks",
    ),
    *(
        "chunk/draft_decode/recorded/chunk32-frozen-kv-rows3",
        "chunk/decode/recorded/chunk32-finished",
    ),
    "chunk/extend/eager/chunk64-128-page64",
)
_LATENT = (
    *("mla/decode/recorded/page64-ends", "mla/extend/recorded/page64-ends"),
    *("mla/target_verify/recorded/page64-chain3", "mla/target_verify/recorded/page64-topk4"),
    "mla/draft_decode/recorded/page64-frozen-kv-no-prefix",
)
_EXPANDED = ("mla/extend/eager/expanded-shuffled", "mla/mixed/eager/expanded-behind-decode")
_RAGGED = ("mla/mixed/eager/expanded-by-flashinfer", "mla/mixed/eager/expanded-by-fa4")
_FP8_ROWS = ("mla/decode/eager/fp8-rows", "mla/extend/recorded/fp8-rows")
_TRITON = (
    *("dense/decode/recorded/tiny-page16", "dense/target_verify/eager/tiny-shapes"),
    *("dense/extend/eager/tiny-page1-soft-cap", "dense/decode/eager/tiny-page1-sinks"),
    *("dense/decode/eager/tiny-fp8-mha", "swa/decode/eager/tiny-window6-soft-cap"),
    *("swa/extend/eager/tiny-window6-sinks", "swa/mixed/eager/tiny-window5"),
    "dense/draft_decode/eager/tiny-frozen-kv",
    "swa/target_verify/recorded/tiny-window3-topk2",
)
_STATES = (
    *("gdn/mixed/recorded/decode-and-chunks-shuffled", "gdn/extend/eager/chunks-contiguous"),
    *(
        "gdn/target_verify/recorded/irregular-shuffled",
        "gdn/target_verify/eager/chain4-frozen-shuffled",
    ),
    *("mamba2/decode/recorded/frozen-rows-shuffled", "mamba2/extend/eager/prefill-shuffled"),
    "mamba2/target_verify/recorded/topk2-shuffled",
)
_ENCODERS = (
    *("cross/decode/recorded/lengths", "cross/extend/recorded/lengths"),
    "cross/target_verify/recorded/topk2",
)
_SCALED = (
    *("dense/extend/recorded/fp8-cache", "dense/decode/recorded/fp8-cache"),
    *("dense/target_verify/recorded/topk4-sinks", "swa/decode/recorded/window12-sinks-soft-cap"),
)
_SINKS = ("dense/target_verify/recorded/topk4-sinks", "dense/extend/recorded/sinks")
_TORCH = _cells("torch", *_STEP)
_FLASHINFER = _cells("flashinfer", *_STEP, *_SHAPES, *_SCALED)
_DERIVE_TESTS = ("kernels/test_derive_tree.py", "runner/test_derive.py")
_ROWS_TESTS = ("kernels/test_derive_kernel.py", "kernels/test_derive_pass.py")
_SIZE_TESTS = (
    "runner/test_graphs.py::test_graph_sizes_ascend_to_the_largest",
    "runner/test_graphs.py::test_padding_is_the_smallest_size_that_holds_the_requests",
    "runner/test_ragged_graphs.py::test_token_sizes_grow_by_at_most_half",
    "runner/test_ragged_graphs.py::test_a_ragged_step_is_padded_by_one_row",
)
_GUARD_TESTS = (
    "runner/test_graphs.py::test_the_guard_refuses_more_requests_than_the_graph_holds",
    "runner/test_graphs.py::test_the_guard_refuses_another_stride",
    "runner/test_graphs.py::test_the_guard_refuses_a_length_beyond_the_bound",
    "runner/test_graphs.py::test_a_host_planned_backend_is_planned_before_every_run",
)
_PADDING_TESTS = (
    "runner/test_ragged_graphs.py::test_padding_takes_the_stride_or_what_is_left",
    "runner/test_ragged_graphs.py::test_the_guard_refuses_more_tokens_than_the_graph_holds",
    "runner/test_ragged_graphs.py::test_the_guard_keeps_a_row_for_the_tokens_that_are_left_over",
)
_PASS_TESTS = (
    "speculate/test_pass_lengths.py",
    "speculate/test_self_drafting.py",
    "speculate/test_eagle_state.py",
    "llm/drafts/test_llm_speculative_backends.py::test_drafts_change_no_text_where_the_host_plans",
)
_BUFFER_TESTS = (
    *(*_PADDING_TESTS, *_DERIVE_TESTS, "runner/test_commit.py"),
    *("runner/test_steady_decode.py", "runner/test_step_buffers.py", *_PASS_TESTS),
    *("runner/table/test_block_ends.py", "runner/table/test_overlay.py"),
    *("runner/test_given_drafts.py", "runner/test_ragged_graphs.py", "llm/ends/test_pairs.py"),
)
_KEY_TESTS = (
    *_GUARD_TESTS,
    *_PADDING_TESTS,
    "runner/test_graph_keys.py",
    "runner/test_keys_ahead.py",
)
_ROUND_TESTS = ("kernels/test_linear_states.py",)
_STATE_KERNEL_TESTS = ("kernels/test_state_kernels.py",)
_PROGRAM_TESTS = (
    *("runner/test_program.py", "runner/test_prompt_spans.py", "runner/test_forced_rounds.py"),
    *("speculate/test_round_effects.py", "speculate/test_eagle_state.py"),
    *("speculate/test_acceptance_distribution.py", "runner/test_sanitizer_rounds.py"),
    "llm/drafts/test_llm_speculative_requests.py",
)

TARGETS = (
    Target(
        "kernels/derive.py",
        ("derive_rows_reference", "_read_table", "_read_pass", "_derive_slots", "derive_rows"),
        Killers(_TORCH, (*_DERIVE_TESTS, *_ROWS_TESTS)),
    ),
    Target("kernels/_triton/derive.py", (), Killers((), _ROWS_TESTS)),
    Target(
        "kernels/derive_tree.py",
        ("derive_tree_reference",),
        Killers(_TORCH, ("kernels/test_derive_tree.py",)),
    ),
    Target(
        "kernels/_triton/derive_tree.py",
        (),
        Killers((), ("kernels/test_derive_tree.py", "kernels/test_derive_pass.py")),
    ),
    Target("kernels/_triton/derive_pass.py", (), Killers((), ("kernels/test_derive_pass.py",))),
    Target(
        "kernels/chain_rows.py",
        ("chain_rows_reference",),
        Killers((), ("kernels/test_chain_rows.py",)),
    ),
    Target("kernels/_triton/chain_rows.py", (), Killers((), ("kernels/test_chain_rows.py",))),
    Target(
        "speculate/draft_passes.py",
        ("DraftPasses.begin", "DraftPasses.host_plan", "DraftPasses._advance"),
        Killers((), _PASS_TESTS),
    ),
    Target("runner/derive.py", (), Killers(_TORCH, _DERIVE_TESTS)),
    Target(
        "runner/buffers.py",
        (
            *("StepBuffers.holds", "StepBuffers.fill", "StepBuffers.pad"),
            *("StepBuffers.view", "StepBuffers.view_of_pass", "StepBuffers._view"),
        ),
        Killers(_TORCH, _BUFFER_TESTS),
    ),
    Target("runner/extents.py", ("PaddedSize", "StepUse.entries"), Killers(_TORCH, _BUFFER_TESTS)),
    Target("runner/recording/graph_sizes.py", (), Killers((), _SIZE_TESTS)),
    Target(
        "runner/recording/graphs.py",
        ("GraphKey",),
        Killers(
            (),
            (
                "runner/test_graphs.py::test_one_size_of_each_program_is_checked_for_host_reads",
                *_KEY_TESTS,
            ),
        ),
    ),
    Target(
        "runner/model_runner.py",
        ("ModelRunner._host_plan", "ModelRunner._program_of"),
        Killers(
            _TORCH + _cells("flashinfer", *_STEP),
            (
                *_KEY_TESTS,
                *("runner/test_ragged_graphs.py", "runner/test_prompt_spans.py"),
                *("runner/test_program.py", "speculate/test_pass_lengths.py"),
            ),
        ),
    ),
    Target(
        "runner/recording/graph_keys.py",
        ("GraphKeys", "empty_step"),
        Killers(_TORCH + _cells("flashinfer", *_STEP), _KEY_TESTS),
    ),
    Target("runner/program.py", (), Killers(_TORCH, _PROGRAM_TESTS)),
    Target("runner/recording/guard.py", ("Guard.check_shape",), Killers(_TORCH, _KEY_TESTS)),
    Target(
        "core/step.py",
        ("StepLayout", "Step", "padded_step", "padded_parents"),
        Killers(
            _TORCH + _cells("flashinfer", *_STEP),
            ("core/test_step.py", *_PADDING_TESTS, *_DERIVE_TESTS),
        ),
    ),
    Target(
        "attention/layouts/csr.py",
        ("csr_lens", "derive_indices", "derive_lists"),
        Killers(_cells("flashinfer", *_STEP, *_SHAPES), ("attention/layouts/test_csr_layout.py",)),
    ),
    Target(
        "attention/layouts/chunks.py",
        (),
        Killers(
            _cells("fa4", *_IN_CHUNKS) + _cells("flashinfer", *_IN_CHUNKS),
            ("attention/layouts/test_chunks.py",),
        ),
    ),
    Target(
        "attention/layouts/page_table.py",
        (),
        Killers(
            _cells("torch", *_STEP, *_SHAPES) + _cells("fa4", *_STEP),
            ("attention/layouts/test_csr_layout.py",),
        ),
    ),
    Target(
        "attention/backends/torch_backend.py",
        ("TorchBackend.plan", "TorchBackend.forward"),
        Killers(_cells("torch", *_STEP, *_SHAPES, *_SCALED), ("attention/test_torch_backend.py",)),
    ),
    Target(
        "attention/paged.py",
        ("paged_call", "weighing_of", "attend_cpu"),
        Killers(
            _cells("torch", *_STEP, *_SHAPES, *_SCALED) + _cells("triton", *_TRITON),
            *(("attention/test_cascade.py", "attention/test_triton_backend.py"),),
        ),
    ),
    Target(
        "kernels/paged_decode_cpu.py",
        ("_decode_slots", "_run_starts"),
        Killers(_cells("torch", *_STEP, *_SHAPES), ("kernels/test_paged_decode_cpu.py",)),
    ),
    Target(
        "attention/backends/triton_backend.py",
        ("TritonBackend.plan", "TritonBackend.forward"),
        Killers(
            _cells("triton", *_TRITON),
            ("attention/test_triton_backend.py",),
        ),
    ),
    Target(
        "kernels/_triton/paged_decode.py",
        ("_splits_of", "_at_slot"),
        Killers(
            (),
            (
                "kernels/test_paged_triton.py::test_splits_by_length_give_the_same",
                "kernels/test_paged_triton.py::test_splits_at_the_ends_of_their_rule_give_the_same",
                "kernels/test_paged_triton.py::test_splits_by_length_go_by_the_keys_that_are_seen",
                "kernels/test_shared_prefix.py::test_decode_of_shared_prefixes_matches_reference",
                "kernels/test_shared_prefix.py::test_what_is_shared_is_read_once",
            ),
        ),
    ),
    Target(
        "attention/backends/flashinfer_backend.py",
        (
            *("FlashInferBackend.host_plan", "FlashInferBackend.plan"),
            *("FlashInferBackend.forward", "Calls.shape", "Calls.lens", "Calls.tables"),
        ),
        Killers(
            _FLASHINFER + _cells("flashinfer", *_IN_CHUNKS),
            ("attention/test_flashinfer_backend.py", "attention/layouts/test_chunks.py"),
        ),
    ),
    Target(
        "attention/backends/flashinfer_mla_backend.py",
        (
            *("FlashInferMLABackend.host_plan", "FlashInferMLABackend.plan"),
            *("FlashInferMLABackend.forward", "LatentRing.plan", "_require_room"),
        ),
        Killers(_cells("flashinfer_mla", *_LATENT), ("attention/test_latent_backends.py",)),
    ),
    Target(
        "attention/layouts/query_rows.py",
        (),
        Killers(
            _cells("flashmla", *_LATENT) + _cells("trtllm_mla", *_LATENT),
            ("attention/test_blackwell_backends.py", "attention/test_latent_backends.py"),
        ),
    ),
    Target(
        "attention/latent_decode.py",
        ("LatentDecodeBackend.plan", "LatentDecodeBackend.forward", "_aligned"),
        Killers(_cells("trtllm_mla", *_LATENT), ("attention/test_blackwell_backends.py",)),
    ),
    Target(
        "attention/backends/trtllm_mha_backend.py",
        ("TrtllmMHABackend.plan", "TrtllmMHABackend.forward", "_decode", "_context", "_pages"),
        Killers(
            _cells(
                "trtllm_mha",
                *(*_STEP, *_SINKS, "dense/decode/recorded/sinks", "dense/decode/recorded/mqa8"),
                *("swa/decode/recorded/full-and-windows", "swa/extend/recorded/full-and-windows"),
                "dense/draft_decode/recorded/frozen-kv-no-prefix",
            ),
            ("attention/test_blackwell_backends.py",),
        ),
    ),
    Target(
        "attention/backends/flashmla_backend.py",
        ("FlashMLABackend.plan", "FlashMLABackend.forward", "_calls"),
        Killers(_cells("flashmla", *_LATENT), ("attention/test_latent_backends.py",)),
    ),
    Target(
        "attention/backends/flashinfer_session.py",
        ("WrapperSession",),
        Killers(_FLASHINFER, ("attention/test_flashinfer_backend.py",)),
    ),
    Target(
        "attention/backends/flashinfer_wrappers.py",
        ("window_left", "WrapperRing.plan", "WrapperRing.run", "distinct_constants", "constants"),
        Killers(_FLASHINFER, ("attention/test_flashinfer_backend.py",)),
    ),
    Target(
        "attention/flash_attention.py",
        (
            *("FlashAttentionBackend.plan", "FlashAttentionBackend.forward"),
            *("prefix_window", "_requests", "_virtual", "FlashAttentionPlan"),
        ),
        Killers(_cells("fa4", *_STEP, *_SHAPES, *_IN_CHUNKS), ("attention/test_fa_backends.py",)),
    ),
    Target(
        "attention/backends/fa4_backend.py",
        ("FlashAttention4Backend.attend",),
        Killers(_cells("fa4", *_STEP, *_SHAPES, *_SINKS), ("attention/test_fa_backends.py",)),
    ),
    Target(
        "attention/backends/fa3_backend.py",
        ("FlashAttention3Backend.attend",),
        Killers(_cells("fa3", *_STEP, *_SHAPES), ("attention/test_fa_backends.py",)),
    ),
    Target(
        "attention/cascade.py",
        (
            *("CascadeBackend.plan", "CascadeBackend.host_plan", "CascadeBackend.forward"),
            *("_with_tree", "_windowed_tree"),
        ),
        Killers(
            _cells("fa4", *_STEP, *_SHAPES, *_SINKS) + _cells("flashinfer", *_STEP, *_SHAPES),
            ("attention/test_cascade.py",),
        ),
    ),
    Target(
        "attention/expanded.py",
        (),
        Killers(_cells("torch", *_EXPANDED, *_RAGGED), ("attention/test_expanded.py",)),
    ),
    Target(
        "core/expansion.py",
        (),
        Killers(_cells("torch", *_EXPANDED), ("core/test_expansion.py",)),
    ),
    Target(
        "kernels/prefix_rows.py",
        ("prefix_rows_reference", "prefix_rows"),
        Killers(_cells("torch", *_EXPANDED), ("kernels/test_prefix_rows.py",)),
    ),
    Target(
        "attention/ragged/contract.py",
        ("keyless_tokens",),
        Killers(_cells("torch", *_RAGGED), ("attention/ragged/test_ragged.py",)),
    ),
    Target(
        "attention/keyless.py",
        (),
        Killers(
            _cells("torch", *_RAGGED) + _cells("flashmla", *_LATENT),
            ("attention/ragged/test_ragged.py", "attention/test_latent_backends.py"),
        ),
    ),
    Target(
        "attention/ragged/flashinfer_ragged.py",
        ("PartWrappers", "FlashInferRagged.plan", "FlashInferRagged.attend"),
        Killers(_cells("torch", *_RAGGED), ("attention/ragged/test_ragged.py",)),
    ),
    Target("kernels/_triton/prefix_rows.py", (), Killers((), ("kernels/test_prefix_rows.py",))),
    Target("kernels/_triton/latent_rows.py", (), Killers((), ("kernels/test_latent_rows.py",))),
    Target(
        "kernels/scaled_latents.py",
        (),
        Killers(_cells("torch", *_FP8_ROWS), ("kernels/test_latent_rows.py",)),
    ),
    Target(
        "attention/linear/rows.py",
        (),
        Killers(_cells("torch", *_STATES), ("attention/test_linear_rows.py", *_ROUND_TESTS)),
    ),
    Target("kernels/conv_rows.py", (), Killers(_cells("torch", *_STATES), _ROUND_TESTS)),
    Target(
        "kernels/commit_states.py",
        ("commit_states_reference",),
        Killers(_cells("torch", *_STATES), _ROUND_TESTS),
    ),
    Target("kernels/_triton/commit_states.py", (), Killers((), _STATE_KERNEL_TESTS)),
    Target(
        "kernels/_triton/state_parts.py",
        ("slots_of", "write_window"),
        Killers((), _STATE_KERNEL_TESTS),
    ),
    Target(
        "kernels/keep_states.py",
        ("keep_states_reference",),
        Killers((), ("kernels/test_keep_states.py",)),
    ),
    Target("kernels/_triton/keep_states.py", (), Killers((), ("kernels/test_keep_states.py",))),
    Target(
        "runner/encoder.py",
        ("derive_encoder", "EncoderRunner.plan"),
        Killers(
            _cells("torch", *_ENCODERS),
            ("runner/states/test_encoder_engine.py", "llm/cross/test_mllama.py"),
        ),
    ),
    Target(
        "kernels/pool_rows.py",
        ("pool_rows_reference",),
        Killers((), ("kernels/test_pool_rows.py",)),
    ),
    Target(
        "cache/states.py",
        (
            *("StateGroup.pages_to_fit", "StateGroup.usable_prefix", "StateGroup.can_admit"),
            *("StateGroup.admit", "StateGroup.slots", "StateGroup.landed", "StateGroup.share"),
            *("StateGroup.release", "StateGroup._take"),
        ),
        Killers((), ("cache/test_states.py",)),
    ),
    Target(
        "attention/hybrid.py",
        (
            *("HybridBackend.plan", "HybridBackend.host_plan", "HybridBackend.forward"),
            *("serves_decode", "may_serve"),
        ),
        Killers(
            _cells(
                "triton+flashinfer",
                *("dense/decode/recorded/one", "dense/target_verify/recorded/topk2"),
                *("dense/extend/eager/tiny", "dense/mixed/eager/page1"),
                *("dense/draft_extend_v2/recorded/fixed3-capture2x-scratch",),
                *("dense/draft_decode/recorded/frozen-kv", "dense/extend/recorded/tiny"),
            ),
            ("attention/test_hybrid.py",),
        ),
    ),
    Target(
        "cache/groups.py",
        (
            *("PagedGroup.first_visible_page", "PagedGroup.usable_prefix", "PagedGroup.advance"),
            *("PagedGroup.pages_to_fit", "PagedGroup._admit_pages", "PagedGroup._num_pages"),
        ),
        Killers((), ("cache/test_groups.py", "cache/test_cache_manager.py")),
    ),
    Target(
        "kernels/commit.py",
        ("commit_reference", "_walk", "_commit_one"),
        Killers((), ("runner/test_commit.py", "kernels/test_commit_walk.py")),
    ),
    Target(
        "kernels/_triton/commit.py",
        (),
        Killers((), ("kernels/test_commit_kernel.py", "kernels/test_commit_walk.py")),
    ),
    Target(
        "runner/commit.py",
        (),
        Killers((), ("runner/test_commit.py", "speculate/test_round_effects.py")),
    ),
    Target(
        "runner/draft_paths.py",
        ("force_drafts", "_forced_depths"),
        Killers((), ("runner/test_forced_rounds.py",)),
    ),
)
