"""Faults of what runs in Megatron-core."""

from faults.fault import Fault

TESTS = "tests/integrations/test_megatron.py"
FILE = "python/distca/integrations/megatron.py"
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
        "Megatron's losses are not divided by the number of tokens",
        SCHEDULE,
        "tokens if config.calculate_per_token_loss else None",
        "None",
        (TESTS,),
    ),
    Fault(
        "Megatron's micro-batches change places",
        FILE,
        "self._batches[microbatch]",
        "self._batches[-1 - microbatch]",
        (TESTS,),
    ),
    Fault(
        "nobody serves what Megatron runs again",
        FILE,
        "context=self.context, recompute=self._recompute)",
        "context=self.context)",
        (TESTS,),
    ),
    Fault(
        "selective recomputation of Megatron is taken for none",
        FILE,
        'return "layer" if "core_attn" in config.recompute_modules else None',
        "return None",
        (TESTS,),
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
        "Megatron may drop attention out",
        FILE,
        "if found != value and (found or value):",
        "if found != value and (found and value):",
        (TESTS,),
    ),
    Fault(
        "Megatron's packed sequences are one document",
        FILE,
        "ends = torch.tensor([0, *sizes])",
        "ends = torch.tensor([0, sum(sizes)])",
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
