"""Faults of the integration of torchtitan."""

from faults.fault import Fault

ADAPTER = "python/distca/integrations/torchtitan.py"
CONFIG = "python/distca/integrations/torchtitan_config.py"
TRAINER = "python/distca/integrations/torchtitan_trainer.py"
EXCHANGE = "python/distca/planner/exchange.py"
MODELS = "tests/integrations/test_torchtitan.py"
TRAINER_OF_HF = "tests/integrations/test_trainer.py"
EXACT = f"{MODELS}::test_two_ranks_have_loss_and_gradients_of_torchtitans_own_attention"
PLANNED = f"{MODELS}::test_a_model_plans_its_batches_from_the_positions_of_all_ranks"
JOB = "tests/integrations/test_torchtitan_trainer.py"

FAULTS = [
    Fault(
        "torchtitan: a layer's window is a row too small",
        CONFIG,
        "return None if before < 0 else before + 1",
        "return None if before < 0 else before",
        (f"{MODELS}::test_models_differ_in_windows_sinks_and_value_heads",),
    ),
    Fault(
        "torchtitan: values of latent attention have the dimension of keys",
        CONFIG,
        'getattr(attention, "v_head_dim", dim)',
        "dim",
        (f"{MODELS}::test_models_differ_in_windows_sinks_and_value_heads",),
    ),
    Fault(
        "torchtitan: layers of multi-token prediction are overlooked",
        CONFIG,
        'for kind in ("layers", "mtp_layers"):',
        'for kind in ("layers",):',
        (EXACT,),
    ),
    Fault(
        "torchtitan: an out_transform that is not known is left out",
        ADAPTER,
        "if out_transform is None or sinks is not None else",
        "if True else",
        (f"{MODELS}::test_an_out_transform_of_any_kind_has_exact_gradients",),
    ),
    Fault(
        "torchtitan: a layer takes a plan of another window",
        ADAPTER,
        "if not found.same_window(self.window):",
        "if False:",
        (f"{MODELS}::test_what_a_plan_cannot_express_is_refused_by_name",),
    ),
    Fault(
        "torchtitan: what a layer returns has the plan's dtype",
        ADAPTER,
        "out.unflatten(0, q_BLNH.shape[:2]).to(q_BLNH.dtype)",
        "out.unflatten(0, q_BLNH.shape[:2])",
        (f"{MODELS}::test_a_layers_output_has_the_dtype_and_shape_of_its_queries",),
    ),
    Fault(
        "torchtitan: a copy of a batch's plan is another one",
        ADAPTER,
        "return self  # there is one context",
        "return BatchPlan(self.plan, self.context)  # there is one context",
        (f"{MODELS}::test_the_plan_of_a_batch_survives_pytrees_copies_and_the_splitting_of_keywords",),
    ),
    Fault(
        "torchtitan: a stage goes backward by the plan of its forward tick",
        ADAPTER,
        "attention_masks=BatchPlan(plan, self.context)",
        "attention_masks=BatchPlan(plan.upcoming(), self.context)",
        (f"{MODELS}::test_stages_of_a_model_in_the_schedule_of_ticks_are_exact",),
    ),
    Fault(
        "torchtitan: selective checkpointing runs core attention again",
        ADAPTER,
        "return super().get_save_ops() | {ops.core_attention.default, ops.core_attention_all.default}",
        "return super().get_save_ops() | {ops.core_attention_all.default}",
        (f"{MODELS}::test_selective_checkpointing_saves_core_attention",),
    ),
    Fault(
        "each rank of a trainer plans as if all had its own documents",
        EXCHANGE,
        "of_ranks = exchange.words(mine, exchange.counts(len(mine)))",
        "of_ranks = [mine] * exchange.num_ranks",
        (TRAINER_OF_HF,),
    ),
    Fault(
        "torchtitan: the options of a job are replaced",
        TRAINER,
        "config.distca if has_options else DistcaConfig()",
        "DistcaConfig()",
        (JOB,),
    ),
    Fault(
        "a rank refuses its batch before it has told the others",
        EXCHANGE,
        "        failed = None if refused else error",
        "        raise",
        (f"{TRAINER_OF_HF}::test_all_ranks_refuse_a_batch_that_one_rank_has_packed_wrongly",),
    ),
    Fault(
        "torchtitan: a row that begins inside of a document is planned",
        ADAPTER,
        "not bool(starts[:, 0].all())",
        "len(starts) == 0",
        (PLANNED,),
    ),
    Fault(
        "torchtitan: the trainer's heads are not divided among tensor ranks",
        TRAINER,
        "tensor_parallel=tensor_parallel,",
        "",
        (JOB,),
    ),
    Fault(
        "torchtitan: the trainer leaves its context open",
        TRAINER,
        "self.distca.close()",
        "pass",
        (JOB,),
    ),
]
