"""What Megatron's configuration and layer specs ask for: each field is exact in a test, not distca's, or refused."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import re
from types import SimpleNamespace as Spec
from typing import Any

import pytest

import distca

if (
    importlib.util.find_spec("megatron") is None
):  # Megatron itself is imported where it runs, because that takes seconds
    pytest.skip("megatron-core is not installed", allow_module_level=True)

REFUSED: dict[str, Any] = {
    "attention_dropout": 0.1,
    "context_parallel_size": 2,
    "hybrid_context_parallel": True,
    "gtp_weight_remat_size": 2,
    "expert_gtp_weight_remat_size": 2,
    "multi_latent_attention": True,
    "experimental_attention_variant": "gated_delta_net",
    "linear_attention_freq": 4,
    "is_hybrid_model": True,
    "softmax_type": "learnable",
    "apply_query_key_layer_scaling": True,
    "batch_invariant_mode": True,
    "use_kitchen_attention": True,
    "fp8": "hybrid",
    "fp8_dot_product_attention": True,
    "fp8_multi_head_attention": True,
    "fp4": "e2m1",
    "enable_autocast": True,
    "cuda_graph_impl": "local",
    "flash_decode": True,
    "cpu_offloading": True,
    "fine_grained_activation_offloading": True,
    "heterogeneous_block_specs": True,
    "mtp_num_layers": 1,
    "pipeline_model_parallel_layout": "Et|tL",
    "num_microbatches_with_partial_activation_checkpoints": 1,
    "overlap_moe_expert_parallel_comm": True,
    "delay_wgrad_compute": True,
    "defer_embedding_wgrad_compute": True,
    "use_ring_exchange_p2p": True,
    "moe_paged_stash": True,
}

#: Fields of all versions without a case of their own in `every_megatron.py`, by the reason why they need none.
OTHERS = {
    "set from another field": "moe_router_padding_for_fp8 enable_cuda_graph external_cuda_graph mtp_standalone",
    "nothing without a field that is refused": """
        max_seqlen_per_dp_cp_rank hierarchical_context_parallel_sizes cp_comm_type autocast_dtype
        ep_overlap_early_attn_memory_release wgrad_deferral_limit mtp_loss_scaling_factor dsa_indexer_n_heads
        dsa_indexer_head_dim dsa_indexer_topk dsa_indexer_loss_coeff
        dsa_indexer_use_sparse_loss linear_conv_kernel_dim linear_key_head_dim linear_value_head_dim
        linear_num_key_heads linear_num_value_heads fp8_recipe fp8_param fp8_quantizer_factory fp8_margin fp8_interval
        fp8_amax_history_len fp8_amax_compute_algo fp8_wgrad tp_only_amax_red first_last_layers_bf16
        num_layers_at_start_in_bf16 num_layers_at_end_in_bf16 kitchen_attention_backend fp4_recipe fp4_param
        fp4_quantizer_factory cuda_graph_use_single_mempool cuda_graph_retain_backward_graph cuda_graph_warmup_steps
        cuda_graph_scope cpu_offloading_num_layers _cpu_offloading_context cpu_offloading_activations
        cpu_offloading_weights cpu_offloading_double_buffering offload_modules min_offloaded_tensor_size
        mamba_state_dim mamba_head_dim mamba_num_groups mamba_num_heads use_mamba_mem_eff_path
        hetereogenous_dist_checkpoint activation_func_fp8_input_store disable_parameter_transpose_cache
        tensor_parallel_num_weight_shards expert_tensor_parallel_num_weight_shards moe_paged_stash_page_size
        moe_paged_stash_buffer_size_factor_cpu moe_paged_stash_buffer_size_factor_cuda cuda_graph_modules
        cpu_offloading_retain_pinned_cpu_buffers fine_grained_offloading_max_inflight_offloads
        delay_offload_until_cuda_graph delta_offload_bytes_across_pp_ranks activation_offload_fraction
        high_priority_a2a_comm_stream fp8_output_proj mtp_use_repeated_layer mtp_detach_heads mtp_grad_scale_func
        mtp_hybrid_override_pattern mamba_training_ssm_states_dtype dsa_indexer_topk_freq dsa_indexer_skip_topk_offset
        dsa_kernel_backend dsa_indexer_rope_interleaved dsa_indexer_rotate_activation dsa_indexer_scoring_relu
        dsa_indexer_k_norm_epsilon dsa_indexer_k_norm_fp32 experimental_attention_variant_loss_scale_func""",
    "sets softmax_scale, how weights begin, and factors outside of core attention": """
        use_mup mup_width_mult mup_base_hidden_size mup_embedding_mult mup_output_mult mup_base_head_dim
        mup_attn_scale_power""",
    "how weights begin": """
        perform_initialization init_method output_layer_init_method init_method_std embedding_init_method
        embedding_init_method_std init_model_with_meta_device""",
    "the kernel of attention, in whose place distca's comes": """
        attention_backend masked_softmax_fusion flash_attention_version""",
    "inside of layers, outside of core attention": """
        hidden_dropout layernorm_epsilon layernorm_zero_centered_gamma activation_func glu_linear_offset
        activation_func_clamp_value qk_layernorm qk_l2_norm bias_activation_fusion persist_layer_norm
        memory_efficient_layer_norm bias_dropout_fusion apply_rope_fusion use_fused_weighted_squared_relu
        fused_single_qkv_rope use_te_activation_func mrope_section clone_scatter_output_in_embedding
        disable_bf16_reduced_precision_matmul gradient_accumulation_fusion cross_entropy_loss_fusion
        cross_entropy_fusion_impl use_kitchen quant_recipe transformer_impl tp_comm_overlap tp_comm_bulk_wgrad
        tp_comm_bulk_dgrad tp_comm_overlap_ag tp_comm_overlap_rs tp_comm_overlap_rs_dgrad tp_comm_split_ag
        tp_comm_atomic_ag tp_comm_split_rs tp_comm_atomic_rs tp_comm_overlap_disable_qkv tp_comm_overlap_disable_fc1
        tp_comm_bootstrap_backend symmetric_ar_type use_te_rng_tracker fused_residual_rmsnorm
        use_transformer_engine_op_fuser mlp_chunks_for_training use_grouped_gemm_for_dense_mlp""",
    "inside of layers of experts": """
        moe_shared_expert_gate moe_shared_expert_overlap moe_ffn_hidden_size moe_enable_routing_replay
        moe_router_topk_limited_devices moe_router_padding_for_quantization moe_router_num_groups
        moe_router_group_topk moe_router_pre_softmax moe_router_topk_scaling_factor moe_router_dtype
        moe_router_bias_update_rate moe_router_force_load_balancing moe_grouped_gemm moe_use_legacy_grouped_gemm
        moe_input_jitter_eps moe_token_dropping moe_enable_deepep moe_flex_dispatcher_backend moe_per_layer_logging
        moe_expert_capacity_factor moe_pad_expert_input_to_capacity moe_token_drop_policy moe_layer_recompute
        moe_permute_fusion moe_router_fusion moe_apply_probs_on_input moe_latent_size moe_deepep_num_sms
        moe_hybridep_num_sms moe_extended_tp expert_tensor_parallel_size
        moe_hybridep_num_blocks_permute moe_hybridep_num_blocks_unpermute moe_hybridep_num_sms_preprocessing
        moe_hybridep_pad_uneven_dispatch_inputs moe_permute_fusion_into_hybridep moe_flex_dispatcher_num_sms
        moe_ncclep_static_shape moe_ncclep_zero_copy moe_router_force_biased moe_router_quantile_balancing_ema
        moe_grad_scale_func moe_expert_rank_capacity_factor moe_mlp_glu_interleave_size
        moe_shared_expert_glu_interleave_size moe_single_grouped_weight moe_single_grouped_bias
        use_grouped_gemm_for_shared_expert overlap_dispatch_backward_with_experts_wgrad""",
    "the dtype of the heads, or a mistake that is told": "fp16 bf16 params_dtype",
    "when things happen, not what": """
        batch_p2p_sync pipeline_model_parallel_comm_backend overlap_p2p_comm_warmup_flush
        microbatch_group_size_per_vp_stage barrier_with_L1_time async_tensor_model_parallel_allreduce""",
    "logs and tests": "config_logger_dir test_mode",
    "inference, which has no plans": """
        inference_rng_tracker inference_sampling_seed use_inference_optimized_layers inference_fuse_tp_communication
        mlp_chunks_for_prefill inference_cuda_graph_scope inference_disable_triton_nvls_kernels
        inference_grouped_gemm_backend inference_moe_disable_fused_quant_kernels inference_moe_token_dispatcher_type
        nccl_all_reduce_for_prefill moe_pad_experts_for_cuda_graph_inference""",
    "set by the runs of all cases": """
        timers finalize_model_grads_func grad_scale_func no_sync_func grad_sync_func param_sync_func""",
}


def _config(**changes: Any) -> Any:
    """A configuration of Megatron, with fields as they are after its own checks."""
    from megatron.core.transformer import TransformerConfig

    config = TransformerConfig(num_layers=2, hidden_size=32, num_attention_heads=4, attention_dropout=0.0)
    for name, value in changes.items():
        setattr(config, name, value)
    return config


def _batches(config: Any, **options: Any) -> Any:
    """A PlannedBatches that is refused before it tells anybody anything."""
    from distca.integrations import megatron

    with distca.init(max_tokens=8, heads=distca.Heads(q=4, kv=4, dim=8), name="refused") as context:
        return megatron.PlannedBatches([], config, context=context, num_microbatches=1, **options)


def test_every_field_is_exact_in_a_case_or_not_of_distca_or_refused() -> None:
    """A field that a new version brings is in none of these."""
    from megatron.core.transformer import TransformerConfig

    from support.megatron_cases import EIGHT, FOUR, PEERS
    from support.megatron_model import fields_of

    fields = {field.name for field in dataclasses.fields(TransformerConfig)}
    cases = FOUR + EIGHT + PEERS
    tried = {name for case in cases for name, value in fields_of(case).items() if value or name in case.changes}
    others = [name for names in OTHERS.values() for name in names.split()]
    assert len(others) == len(set(others))
    assert sorted(tried & set(others)) == []
    assert sorted(fields - tried - set(others)) == sorted(fields & set(REFUSED) - tried)


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_go_together_with_distca_is_refused_by_name(name: str) -> None:
    from distca.integrations.megatron import DistcaCoreAttention

    config = _config(**{name: REFUSED[name]})
    message = f"Megatron's {name} = {re.escape(repr(REFUSED[name]))} does not go together with distca; .* is allowed$"
    with pytest.raises(distca.InvalidArgumentError, match=message):
        DistcaCoreAttention(config, 1)
    with pytest.raises(distca.InvalidArgumentError, match=message):
        _batches(config)


IN_PING_PONG: dict[str, Any] = {
    "hidden_dropout": 0.1,
    "num_moe_experts": 4,
    "distribute_saved_activations": True,
    "tp_comm_overlap": True,
}


@pytest.mark.parametrize("name", IN_PING_PONG)
def test_what_cannot_go_together_with_ping_pong_is_refused_by_name(name: str) -> None:
    config = _config(**{"hidden_dropout": 0.0, name: IN_PING_PONG[name]})
    message = f"Megatron's {name} = {re.escape(repr(IN_PING_PONG[name]))} does not go together with ping-pong; .* is al"
    with pytest.raises(distca.InvalidArgumentError, match=message):
        _batches(config, ping_pong=True)


def test_norms_that_are_recomputed_are_refused_in_ping_pong() -> None:
    """Megatron keeps what it recomputes in the layer, where the other half would find it."""
    recomputed = {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "layernorm"]}
    with pytest.raises(distca.InvalidArgumentError, match="recompute_modules = .* leave out 'layernorm'"):
        _batches(_config(hidden_dropout=0.0, **recomputed), ping_pong=True)


@pytest.mark.parametrize("window", [(128, 1), (128, -1), (-2, 0)], ids=str)
def test_a_window_that_is_not_causal_is_refused(window: tuple[int, int]) -> None:
    from distca.integrations.megatron import DistcaCoreAttention

    config = _config(window_size=window)
    message = re.escape(f"Megatron's window_size = {window} does not go together with distca; (n, 0) is allowed, and")
    with pytest.raises(distca.InvalidArgumentError, match=message):
        DistcaCoreAttention(config, 1)
    with pytest.raises(distca.InvalidArgumentError, match=message):
        _batches(config)


def test_a_configuration_of_cuda_graphs_in_the_old_way_is_refused() -> None:
    from megatron.core.transformer import TransformerConfig

    from distca.integrations.megatron import DistcaCoreAttention

    with pytest.warns(UserWarning, match="enable_cuda_graph is deprecated"):
        config = TransformerConfig(
            num_layers=2, hidden_size=32, num_attention_heads=4, attention_dropout=0.0, enable_cuda_graph=True
        )
    with pytest.raises(distca.InvalidArgumentError, match="Megatron's cuda_graph_impl = 'local' does not go together"):
        DistcaCoreAttention(config, 1)


@pytest.mark.parametrize("name", ["windows", "scores", "halves"])
def test_what_the_configuration_says_is_no_option_of_the_batches(name: str) -> None:
    with pytest.raises(distca.InvalidArgumentError, match=f"PlannedBatches: {name}= cannot be given; Megatron's"):
        _batches(_config(), **{name: None})


@pytest.mark.parametrize(
    "lengths",
    [[5, 3, 4, 2], [12], [3, 4, 7]],
    ids=["several documents", "one document", "documents of halves as long as the longest"],
)
@pytest.mark.parametrize("kind", ["table", "mrope"])
def test_rows_of_halves_are_rotated_as_those_of_the_micro_batch(kind: str, lengths: list[int]) -> None:
    """A table has the positions of the longest document, mRoPE an angle for each row."""
    import torch
    from megatron.core.models.common.embeddings.rope_utils import _apply_rotary_pos_emb_thd

    from distca.integrations.megatron import DistcaPackedSeqParams
    from distca.integrations.megatron_ping_pong import rotaries_of_halves
    from distca.pipeline import PipelinePlans

    def scores(rows: torch.Tensor, rotary: torch.Tensor, layout: distca.Layout) -> torch.Tensor:
        """Of all rows with each other. Those of a document are the same wherever its positions begin."""
        ends, one = packed.of_rows(layout, 0, None).cu_seqlens_q, Spec(size=lambda: 1, rank=lambda: 0)
        rotated = _apply_rotary_pos_emb_thd(rows, ends, rotary, cp_group=one)[:, 0]
        return rotated @ rotated.T

    layout, heads = distca.Layout.from_documents([lengths]), distca.Heads(q=1, kv=1, dim=8)
    q = torch.randn(sum(lengths), 1, 8, dtype=torch.float64)
    positions = torch.arange(max(lengths)) if kind == "table" else torch.randint(99, (sum(lengths),))
    rotary = (positions[:, None] * torch.tensor([1.0, 0.7, 0.1, 0.01] * 2, dtype=torch.float64))[:, None, None]
    documents = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    with distca.init(max_tokens=32, heads=heads, name="halves") as context:
        plans = PipelinePlans(
            [layout],
            heads,
            stages=[[0]],
            layers=1,
            halves=functools.partial(distca.halves, idle_rows=1),
            context=context,
        )
        packed = DistcaPackedSeqParams("thd", context=context)
        whole = scores(q, rotary, layout)
        for half, of_half in zip(plans.halves[0], rotaries_of_halves(rotary, plans, 0), strict=True):
            rows = half.rows(0)
            found = scores(half.take(q, 0), of_half, half.layout)[: len(rows), : len(rows)]
            same = documents[rows][:, None] == documents[rows]
            torch.testing.assert_close(found[same], whole[rows][:, rows][same])


@pytest.mark.parametrize("depths", [(1, 2), (0, 0)], ids=str)
def test_chunks_of_different_depth_or_without_layers_are_refused(
    depths: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    from distca.integrations import megatron

    monkeypatch.setattr(megatron.names, "get_num_layers_to_build", lambda _, chunk, __: depths[chunk])
    with pytest.raises(
        distca.InvalidArgumentError, match=re.escape(f"the chunks of the stages [{list(depths)}] layer")
    ):
        _batches(_config(virtual_pipeline_model_parallel_size=2))


def test_a_shallow_stage_that_ends_inside_of_a_group_is_refused() -> None:
    from distca.integrations.megatron_config import recomputed

    config = _config(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=2)
    assert recomputed(config, [5, 4]) == [2, 2, 1]
    with pytest.raises(distca.InvalidArgumentError, match="recompute_num_layers: .* stage 1 with its 3 layers ends"):
        recomputed(config, [4, 3])


def test_recomputation_is_that_of_the_configuration() -> None:
    from distca.integrations.megatron_config import recomputed

    block = {"recompute_granularity": "full", "recompute_method": "block"}
    selective = {"recompute_granularity": "selective"}
    assert recomputed(_config(**block, recompute_num_layers=2), [4, 3]) == [1, 1, 0, 0]
    assert recomputed(_config(**block, recompute_num_layers=9), [2]) == [1, 1]
    assert recomputed(_config(**selective, recompute_modules=["core_attn", "mlp"]), [3]) == [1, 1, 1]
    assert recomputed(_config(**selective, recompute_modules=["mlp"]), [3]) is None
    assert recomputed(_config(), [3]) is None


@pytest.mark.parametrize(
    ("options", "windows"),
    [
        ({}, [None] * 4),
        ({"window_size": (30, 0)}, [31] * 4),
        ({"window_size": (30, 0), "window_attn_skip_freq": 2}, [31, None, 31, None]),
        ({"window_size": (0, 0), "window_attn_skip_freq": [0, 1, 1, 0]}, [None, 1, 1, None]),
        ({"window_size": (-1, 0)}, [None] * 4),
    ],
    ids=str,
)
def test_windows_are_those_of_the_configuration(options: dict[str, Any], windows: list[int | None]) -> None:
    """Megatron counts the keys before a row, distca its own too."""
    from distca.integrations.megatron_config import window_of_layer

    assert [window_of_layer(_config(**options), number) for number in range(1, 5)] == windows


@pytest.mark.parametrize(
    "options",
    [{"attention_type": "cross"}, {"attention_dropout": 0.1}, {"num_splits": 1}, {"attn_mask_type": "no_mask"}],
    ids=str,
)
def test_other_kinds_of_attention_are_refused(options: dict[str, Any]) -> None:
    from distca.integrations.megatron import DistcaCoreAttention, names

    if "attn_mask_type" in options:
        options = {"attn_mask_type": names.AttnMaskType[options["attn_mask_type"]]}
    with pytest.raises(distca.InvalidArgumentError, match="allowed"):
        DistcaCoreAttention(_config(), 1, **options)


def _layer(attention: Any, **others: Any) -> Spec:
    return Spec(submodules=Spec(self_attention=Spec(submodules=attention), **others))


def test_every_self_attention_of_a_block_gets_distca() -> None:
    """Megatron's specs, that of Transformer Engine too, have the slot in this place."""
    from distca.integrations.megatron import DistcaCoreAttention, use_distca

    layers = [_layer(Spec(core_attention=object, linear_qkv=int)) for _ in range(2)]
    assert use_distca(block := Spec(layer_specs=layers)) is block
    assert [layer.submodules.self_attention.submodules.core_attention for layer in layers] == [DistcaCoreAttention] * 2
    assert layers[0].submodules.self_attention.submodules.linear_qkv is int


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (_layer(Spec()), "no self_attention.submodules.core_attention"),
        (Spec(), "no self_attention.submodules.core_attention"),
        (_layer(Spec(core_attention=object), cross_attention=Spec(submodules=Spec())), "cross attention"),
    ],
    ids=["no slot", "no layer", "cross attention"],
)
def test_a_layer_without_the_slot_is_refused(layer: Spec, message: str) -> None:
    from distca.integrations.megatron import use_distca

    with pytest.raises(distca.InvalidArgumentError, match=message):
        use_distca(layer)
