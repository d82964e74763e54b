"""Faults of pipelines: tick tables, plans of ticks, and ticks under way."""

from faults.fault import Fault

TABLE = "tests/pipeline/test_tick_table.py"
PLANS = "tests/pipeline/test_pipeline_plans.py"
MEMORY = "tests/pipeline/test_pipeline_memory.py"
AHEAD = "tests/pipeline/test_plans_ahead.py"
MODEL = "tests/pipeline/test_pipelined_model.py"
MISALIGNED = "tests/pipeline/test_misaligned_ticks.py"

FAULTS = [
    Fault(
        "a backward tick comes a tick too late",
        "python/distca/pipeline/tick_table.py",
        "first is None or done_by_last[first] < forward_ticks",
        "first is None or done_by_last[first] < forward_ticks - 1",
        (TABLE,),
    ),
    Fault(
        "interleaved chunks go backward in the order of forward",
        "python/distca/pipeline/tick_table.py",
        'chunk if phase == "forward" else chunks - 1 - chunk',
        "chunk",
        (TABLE,),
    ),
    Fault(
        "the last stage hands its chunks to nobody",
        "python/distca/pipeline/tick_table.py",
        "        if not 0 <= position < self.stages * self.chunks:",
        "        if not 0 <= position < self.stages * self.chunks or neighbour == self.stages - 1:",
        (TABLE,),
    ),
    Fault(
        "a stage may hold one micro-batch more than its limit",
        "python/distca/pipeline/tick_table.py",
        "n - backward[s] < most[s]",
        "n - backward[s] <= most[s]",
        (TABLE,),
    ),
    Fault(
        "a limited table is searched among too few states",
        "python/distca/pipeline/tick_table.py",
        "_KEPT = 256",
        "_KEPT = 2",
        (TABLE,),
    ),
    Fault(
        "the first stage goes backward before the second",
        "python/distca/pipeline/tick_table.py",
        "given = (*backward[1:], microbatches)",
        "given = (microbatches,) * stages",
        (TABLE,),
    ),
    Fault(
        "mirrored ranks may have other speeds",
        "python/distca/pipeline/plans.py",
        "if speeds is not None and any(speeds[rank] != speeds[other] for rank, other in enumerate(servers)):",
        "if speeds is not None and len(speeds) < len(servers):",
        (PLANS,),
    ),
    Fault(
        "a mirrored schedule keeps its servers",
        "python/distca/pipeline/plans.py",
        "                self._mirror[rank] = other",
        "                self._mirror[rank] = rank",
        (PLANS,),
    ),
    Fault(
        "shallow stages have rows in all steps",
        "python/distca/pipeline/plans.py",
        "None if work is None or self.layers[stage] <= step else",
        "None if work is None else",
        (PLANS,),
    ),
    Fault(
        "a rank holds as many rows of every micro-batch",
        "python/distca/pipeline/memory.py",
        "to[tick] += self._rows[work.microbatch]",
        "to[tick] += self._rows[0]",
        (MEMORY,),
    ),
    Fault(
        "what is run again is not counted",
        "python/distca/pipeline/memory.py",
        "redone * again.activations",
        "0 * again.activations",
        (MEMORY,),
    ),
    Fault(
        "1F1B frees a micro-batch before it warms up",
        "python/distca/pipeline/memory.py",
        "taken[warm - 1 :]",
        "taken[warm - 2 :]",
        (MEMORY,),
    ),
    Fault(
        "an iteration ends only when all loaders have ended",
        "python/distca/pipeline/plans_ahead.py",
        "return ENDED in counts",
        "return max(counts) == ENDED",
        (AHEAD,),
    ),
    Fault(
        "other documents of another stage are not seen",
        "python/distca/pipeline/plans_ahead.py",
        "if self._loaded is not None and self._loaded != told[self._place]:",
        "if self._loaded is not None and len(self._loaded) != len(told[self._place]):",
        (AHEAD,),
    ),
    Fault(
        "recomputation takes the plan of the forward tick",
        "python/distca/pipeline/ticks.py",
        "        plans, step = ticks.plans, tick.take_forward()\n        backward = tick.number",
        "        plans, step = ticks.plans, tick.take_forward()\n        backward = 0",
        (MODEL,),
    ),
    Fault(
        "a tick may be left before its end",
        "python/distca/pipeline/ticks.py",
        "        if taken == len(self.steps):\n            return",
        "        if taken <= len(self.steps):\n            return",
        (MISALIGNED,),
    ),
    Fault(
        "the end of recomputation is told as an error",
        "python/distca/errors.py",
        "    except _StopRecomputationError:",
        "    except KeyboardInterrupt:",
        ("tests/operators/test_save_core_attention.py",),
    ),
    Fault(
        "plans with labels may have any rows in backward",
        "cpp/runtime/context.cpp",
        "    return same_document && x.begin == y.begin && x.end == y.end;",
        "    return are_labelled || (same_document && x.begin == y.begin && x.end == y.end);",
        ("tests/pipeline/test_labels.py",),
    ),
    Fault(
        "a label is not in the digest",
        "cpp/plan/slices.cpp",
        "  header.label = label_words(options.label);",
        "  header.label = label_words(options.label.substr(0, 4));",
        ("tests/plan/test_join.py",),
    ),
]
