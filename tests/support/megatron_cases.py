"""The runs of Megatron-core with distca that `make megatron` makes."""

from __future__ import annotations

from typing import Any

from support.megatron_model import Case

FULL = {"recompute_granularity": "full"}
UNIFORM = {**FULL, "recompute_method": "uniform"}
BLOCK = {**FULL, "recompute_method": "block"}
SELECTIVE = {"recompute_granularity": "selective"}
SEQUENCE = {"sequence_parallel": True}
WINDOWS = {"window_size": (30, 0), "window_attn_skip_freq": 2}
#: The threshold is one that the small model passes. Megatron 0.16.1 does not clip with tensor parallelism: it cuts the
#: weights of a part as if they were the whole ones.
QK_CLIP = {"qk_clip": True, "qk_clip_threshold": 1.0, "qk_clip_alpha": 0.3}
LOGITS = {"log_max_attention_logit": True}
ALL_TO_ALL = {"moe_token_dispatcher_type": "alltoall"}
EXPERTS = {"num_moe_experts": 4, "moe_router_topk": 2, "moe_aux_loss_coeff": 0.01}
RAGGED = {"variable_seq_lengths": True, **ALL_TO_ALL}
#: What layers do around core attention, all at once.
AROUND: dict[str, Any] = {
    **{"add_bias_linear": True, "add_qkv_bias": True, "gated_linear_unit": True, "rotary_interleaved": True},
    **{"no_rope_freq": 2, "attention_output_gate": True, "fp32_residual_connection": True, "kv_channels": 16},
    **{"apply_residual_connection_post_layernorm": True, "attention_softmax_in_fp32": False},
    **{"softmax_scale": 0.7, "deterministic_mode": True},
}
RECOMPUTED: list[dict[str, Any]] = [
    {**UNIFORM, "recompute_num_layers": 1},
    {**UNIFORM, "recompute_num_layers": 2},
    {**BLOCK, "recompute_num_layers": 1},
    SELECTIVE,
]

#: Of four processes. Gradients are reduced in backward from the second step on.
FOUR = [
    Case(tensor=2, stock=True),
    *(Case(tensor=2, stock=True, changes=changes) for changes in RECOMPUTED),
    # `megatron_model` does not cut gated weights as Megatron does.
    Case(tensor=2, stock=True, changes={**WINDOWS, **AROUND, "gated_linear_unit": False}),
    Case(tensor=2, stock=True, steps=3, changes={**LOGITS, **RECOMPUTED[0]}),
    Case(data=4, stock=True, share=1, steps=3, changes=QK_CLIP),
    Case(tensor=2, steps=8),
    Case(pipeline=2, steps=3, changes={**QK_CLIP, **WINDOWS, "num_layers_in_first_pipeline_stage": 1}),
    Case(pipeline=2, layers=8, chunks=2, steps=3, changes={**QK_CLIP, **SELECTIVE}),
    Case(pipeline=2, steps=2, changes=LOGITS),
    Case(tensor=2, changes=SEQUENCE),
    Case(tensor=2, changes={**RECOMPUTED[1], "distribute_saved_activations": True}),
    Case(tensor=4, data=1),
    Case(tensor=4, data=1, kv_heads=1),
    Case(pipeline=2, steps=8),
    *(Case(pipeline=2, changes=changes) for changes in RECOMPUTED),
    Case(pipeline=2, layers=8, chunks=2, steps=8),
    *(Case(pipeline=2, layers=8, chunks=2, changes=changes) for changes in RECOMPUTED),
    Case(pipeline=2, changes={"num_layers_in_first_pipeline_stage": 1}),
    Case(pipeline=2, changes={"num_layers_in_last_pipeline_stage": 1, "deallocate_pipeline_outputs": True}),
    Case(pipeline=2, changes={"num_layers_in_first_pipeline_stage": 2, **RECOMPUTED[1]}, layers=6),
    *(
        Case(
            pipeline=2,
            changes={"num_layers_in_first_pipeline_stage": 3, **BLOCK, "recompute_num_layers": size},
            layers=8,
        )
        for size in (2, 4)
    ),
    Case(pipeline=2, layers=3, changes={"account_for_embedding_in_pipeline_split": True}),
    Case(pipeline=2, layers=3, changes={"account_for_loss_in_pipeline_split": True}),
    Case(pipeline=2, changes=AROUND),
    Case(pipeline=2, changes=WINDOWS),
    Case(pipeline=2, layers=8, chunks=2, changes={**WINDOWS, "window_attn_skip_freq": 3}),
    Case(
        pipeline=2,
        changes={
            **WINDOWS,
            **{"window_attn_skip_freq": [1, 0, 0, 1], "num_layers_in_first_pipeline_stage": 3},
            **RECOMPUTED[2],
        },
    ),
    Case(pipeline=2, tied=True, steps=2),
    Case(pipeline=2, chunks=2, tied=True, steps=2),
    Case(pipeline=2, changes={"batch_p2p_comm": False, "overlap_p2p_comm": True}),
    Case(pipeline=2, per_token=True),
    # Documents that go on on the next data rank.
    Case(tensor=2, per_token=True, joined=True, changes=SEQUENCE),
    Case(data=4, per_token=True, joined=True, share=1, changes={"rotary_interleaved": True}),
    Case(pipeline=2, chunks=2, per_token=True, joined=True, changes=SELECTIVE, steps=2),
    Case(pipeline=2, per_token=True, joined=True, halved=True, changes=RECOMPUTED[0]),
    Case(tensor=2, per_token=True, joined=True, halved=True, changes=SEQUENCE),
    Case(pipeline=2, overlap=True, steps=3),
    Case(pipeline=2, overlap=True, steps=3, align=True),
    Case(pipeline=2, chunks=2, overlap=True, steps=3, align=True),
    Case(pipeline=2, shards=True),
    Case(tensor=2, overlap=True, steps=3, shards=True, gathers=True),
    Case(pipeline=2, overlap=True, steps=3, shards=True, gathers=True),
    Case(pipeline=2, chunks=2, overlap=True, steps=3, shards=True, gathers=True),
    Case(pipeline=2, chunks=2, overlap=True, steps=3, shards=True, gathers=True, align=True),
    Case(pipeline=2, ragged=True, changes=RAGGED),
    Case(pipeline=2, changes={**EXPERTS, **ALL_TO_ALL}),
    Case(pipeline=2, changes={**EXPERTS, "moe_token_dispatcher_type": "allgather", "expert_model_parallel_size": 2}),
    Case(
        pipeline=2,
        steps=2,
        chunks=2,
        changes={
            **EXPERTS,
            **ALL_TO_ALL,
            **{"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True},
            **{"moe_router_load_balancing_type": "none", "moe_aux_loss_coeff": 0.0},
            **{**SELECTIVE, "recompute_modules": ["core_attn", "moe"]},
        },
    ),
    # Checkpoints are read at another split than that at which they were written.
    Case(tensor=2, pipeline=2, data=1, share=2, steps=4, writes="whole states"),
    Case(pipeline=2, steps=4, reads="whole states"),
    Case(tensor=2, steps=4, reads="whole states"),
    Case(pipeline=2, chunks=2, steps=4, reads="whole states", changes=SELECTIVE),
    Case(pipeline=2, chunks=2, overlap=True, shards=True, steps=4, writes="shards of states"),
    Case(tensor=2, shards=True, steps=4, reads="shards of states", changes=SEQUENCE),
    Case(tensor=4, data=1, share=2, shards=True, steps=4, reads="shards of states"),
    Case(pipeline=2, shards=True, steps=4, reads="shards of states", changes={"num_layers_in_first_pipeline_stage": 1}),
]
#: Of four processes, in ping-pong.
HALVED = [
    Case(tensor=2, halved=True),
    Case(pipeline=2, halved=True, steps=3, changes={**QK_CLIP, **RECOMPUTED[0]}),
    Case(tensor=2, halved=True, overlap=True, steps=3, shards=True, gathers=True),
    *(Case(tensor=2, halved=True, changes=SEQUENCE | changes) for changes in RECOMPUTED),
    Case(tensor=4, data=1, share=2, halved=True, changes=SEQUENCE),
    Case(pipeline=2, halved=True, steps=8),
    *(Case(pipeline=2, halved=True, changes=changes) for changes in RECOMPUTED),
    *(Case(pipeline=2, halved=True, layers=8, chunks=2, changes=changes) for changes in ({}, *RECOMPUTED)),
    Case(pipeline=2, halved=True, layers=3, changes={"account_for_loss_in_pipeline_split": True}),
    Case(
        pipeline=2,
        halved=True,
        layers=8,
        changes={"num_layers_in_first_pipeline_stage": 3, **BLOCK, "recompute_num_layers": 2},
    ),
    Case(pipeline=2, halved=True, changes={**AROUND, **WINDOWS, "deallocate_pipeline_outputs": True}),
    Case(pipeline=2, halved=True, changes={**SELECTIVE, "recompute_modules": ["core_attn", "mlp"]}),
    Case(pipeline=2, halved=True, chunks=2, tied=True, per_token=True, overlap=True, align=True, steps=3),
    Case(pipeline=2, halved=True, ragged=True, changes=RAGGED),
]
#: Of eight processes.
EIGHT = [
    Case(2, 2, 2, steps=8),
    *(Case(2, 2, 2, changes=SEQUENCE | changes) for changes in RECOMPUTED),
    Case(2, 2, 2, chunks=2, changes=SEQUENCE, overlap=True, steps=3, shards=True, gathers=True),
    Case(2, 2, 2, changes={**SEQUENCE, "num_layers_in_first_pipeline_stage": 1, **RECOMPUTED[0]}, shards=True),
    Case(2, 4, 1, per_token=True),
    Case(2, 2, 2, steps=3, changes={**LOGITS, **SEQUENCE}),
    Case(1, 4, 2, layers=8, chunks=2, steps=3, changes=QK_CLIP),
    Case(2, 4, 1, ragged=True, changes=RAGGED),
    Case(1, 4, 2, layers=8, chunks=2, changes=SELECTIVE),
    Case(2, 2, 2, halved=True, changes=SEQUENCE, steps=3),
    Case(
        2, 2, 2, halved=True, chunks=2, changes={**SEQUENCE, **RECOMPUTED[0]}, overlap=True, shards=True, gathers=True
    ),
]
#: Of four processes, beside Megatron in as many: what a layer of experts does depends on the micro-batches before.
PEERS = [
    Case(
        pipeline=2,
        steps=3,
        changes={
            **EXPERTS,
            **ALL_TO_ALL,
            **{"moe_layer_freq": [0, 1, 1, 0], "moe_shared_expert_intermediate_size": 32, "moe_z_loss_coeff": 1e-3},
            "moe_router_load_balancing_type": "global_aux_loss",
        },
    ),
]
