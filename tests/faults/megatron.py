"""Faults of what runs in Megatron-core."""

from faults.fault import Fault

TESTS = "tests/integrations/test_megatron.py"
CONFIG_TESTS = "tests/integrations/test_megatron_config.py"
FILE = "python/distca/integrations/megatron.py"
BATCHES = "python/distca/integrations/megatron_batches.py"
CONFIG = "python/distca/integrations/megatron_config.py"
SCHEDULE = "python/distca/integrations/megatron_schedule.py"

FAULTS = [
    Fault(
        "Megatron's idle stages do not serve",
        SCHEDULE,
        "                    tick.serve()",
        "                    pass",
        (TESTS,),
    ),
    Fault(
        "a shallow stage of Megatron does not pad",
        SCHEDULE,
        "padded = self.ticks.pad(output)",
        "padded = output",
        (TESTS,),
    ),
    Fault(
        "no_sync of Megatron does not end with the last micro-batch",
        SCHEDULE,
        "if work.microbatch == table.microbatches - 1:",
        "if work.microbatch == table.microbatches:",
        (TESTS,),
    ),
    Fault(
        "one function of Megatron against early reduction stands for all chunks",
        SCHEDULE,
        "if num_chunks > 1 and config.no_sync_func is not None",
        "if num_chunks < 1 and config.no_sync_func is not None",
        (TESTS,),
    ),
    Fault(
        "Megatron's losses are not divided by the number of tokens",
        SCHEDULE,
        "tokens if config.calculate_per_token_loss else None",
        "None",
        (TESTS,),
    ),
    Fault(
        "Megatron's micro-batches change places",
        BATCHES,
        "self._batches[microbatch]",
        "self._batches[-1 - microbatch]",
        (TESTS,),
    ),
    Fault(
        "nobody serves what Megatron runs again",
        BATCHES,
        "None if forward_only else recomputed(config, layers)",
        "None",
        (TESTS,),
    ),
    Fault(
        "Megatron's idle stages serve with another scale",
        BATCHES,
        '"scale": config.softmax_scale,',
        '"scale": None,',
        (TESTS,),
    ),
    Fault(
        "Megatron's batches take windows that its configuration does not have",
        BATCHES,
        'for name in ("windows", "scores", "halves"):',
        'for name in ("scores", "halves"):',
        (CONFIG_TESTS,),
    ),
    Fault(
        "Megatron's packed sequences are one document",
        BATCHES,
        "[0, sum(sizes)] if self._by_row else [0, *sizes]",
        "[0, sum(sizes)]",
        (TESTS,),
    ),
    Fault(
        "Megatron's RoPE counts from the first row that a rank has of a document",
        BATCHES,
        "register_forward_hook(self._of_rows)",
        "register_forward_hook(lambda *_: None)",
        (TESTS,),
    ),
    Fault(
        "every process of a tensor group of Megatron tells lengths for itself",
        BATCHES,
        "if dist.get_rank(names.tensor_group()) == 0 else None",
        "if dist.get_rank(names.tensor_group()) == 1 else None",
        (TESTS,),
    ),
    Fault(
        "selective recomputation of Megatron is taken for none",
        CONFIG,
        "groups = [1] * depth",
        "return None",
        (CONFIG_TESTS,),
    ),
    Fault(
        "block recomputation of Megatron is taken for that of all layers",
        CONFIG,
        "groups = [int(layer < size) for layer in range(depth)]",
        "groups = [1] * depth",
        (TESTS,),
    ),
    Fault(
        "a window of Megatron has a key too few",
        CONFIG,
        "return None if before == -1 else int(before) + 1",
        "return None if before == -1 else int(before)",
        (TESTS,),
    ),
    Fault(
        "a window of Megatron may reach behind a row",
        CONFIG,
        "if behind != 0 or before < -1:",
        "if before < -1:",
        (CONFIG_TESTS,),
    ),
    Fault(
        "a stage of Megatron may be without layers",
        CONFIG,
        "or 0 in of_stage for of_stage in layers",
        "for of_stage in layers",
        (CONFIG_TESTS,),
    ),
    Fault(
        "Megatron may drop attention out",
        CONFIG,
        "if found != allowed and (found or allowed):",
        "if found != allowed and (found and allowed):",
        (CONFIG_TESTS,),
    ),
    Fault(
        "a field of Megatron's configuration is not looked at",
        CONFIG,
        '"softmax_type": "vanilla",',
        "",
        (CONFIG_TESTS,),
    ),
    Fault(
        "Megatron's rows may be others than those of the plans",
        SCHEDULE,
        "if found != {rows} and not config.variable_seq_lengths:",
        "if not found:",
        (TESTS,),
    ),
    Fault(
        "Megatron's mask is dropped without a word",
        FILE,
        "if attention_mask is not None or attention_bias is not None:",
        "if attention_bias is not None:",
        (TESTS,),
    ),
    Fault(
        "a plan in Megatron may have any window and mask",
        FILE,
        "if isinstance(plan, Plan) and not plan.same_window(self.window):",
        "if isinstance(plan, Plan) and plan.num_rows < 0:",
        (TESTS,),
    ),
    Fault(
        "a name that Megatron lacks is told as Python does",
        "python/distca/integrations/megatron_names.py",
        "except (ImportError, AttributeError) as error:",
        "except ZeroDivisionError as error:",
        (TESTS,),
    ),
    Fault(
        "a Megatron that was not tried is taken",
        "python/distca/integrations/megatron_names.py",
        "if not _FIRST <= version[:2] < _END:",
        "if not _FIRST <= version[:2]:",
        (TESTS,),
    ),
    Fault(
        "Megatron may shard weights over ranks that have other data",
        CONFIG,
        '("gtp_weight_remat_size", "expert_gtp_weight_remat_size")',
        '("expert_gtp_weight_remat_size",)',
        ("tests/integrations/test_megatron_config.py",),
    ),
]
