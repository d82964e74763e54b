"""Faults in what callers do around steps, between their parts and with their numbers."""

from faults.fault import Fault

STEPS = "python/distca/steps.py"
CALLERS = "tests/operators/test_awkward_callers.py"
MERGED = "tests/operators/test_merge_states.py"
MODELS = "tests/integrations/test_hf_callers.py"
SPARSE = "tests/pipeline/test_sparse_batches.py"

FAULTS = [
    Fault(
        "flops: hidden keys count",
        "cpp/python/plans.cpp",
        "plan::visible_pairs({g.kv_end, slice.mask_of(g)}, t.q_begin, t.q_end) *",
        "(t.kv_end - t.kv_begin) * (t.q_end - t.q_begin) *",
        ("tests/operators/test_flops.py",),
    ),
    Fault(
        "flops: backward has four products",
        "python/distca/flops.py",
        "return 2 * pairs * (3 * dim + 2 * value_dim)",
        "return 2 * pairs * (2 * dim + 2 * value_dim)",
        ("tests/operators/test_flops.py",),
    ),
    Fault(
        "flops: rows before a task's own count",
        "python/distca/flops.py",
        "visible_pairs(keys, window) - visible_pairs(keys - rows, window)",
        "visible_pairs(keys, window)",
        ("tests/operators/test_flops.py",),
    ),
    Fault(
        "a scale that is a tensor is read again in backward",
        "python/distca/inputs.py",
        "        return float(value)\n    except OverflowError:",
        "        return value\n    except OverflowError:",
        (CALLERS,),
    ),
    Fault(
        "a scale that needs a gradient is taken for a number",
        "python/distca/inputs.py",
        "if value.requires_grad:",
        "if False:",
        (CALLERS,),
    ),
    Fault(
        "attend without gradients cuts the graph of its step",
        STEPS,
        "if self._token.requires_grad and not torch.is_grad_enabled():",
        "if False:",
        (CALLERS,),
    ),
    Fault(
        "a checkpoint leaves a step without gradients under way",
        STEPS,
        "torch.empty(0, requires_grad=True).sin()",
        "pass",
        (CALLERS,),
    ),
    Fault(
        "a backward pass inside another abandons that one's steps",
        STEPS,
        "if context is not None and torch._C._current_graph_task_id() == -1:",
        "if context is not None:",
        (CALLERS,),
    ),
    Fault(
        "a plan that was made in inference mode is of that mode",
        "python/distca/planner/plan.py",
        "with torch.inference_mode(False):",
        "with torch.no_grad():",
        (CALLERS,),
    ),
    Fault(
        "tasks are on the default device",
        "python/distca/ops.py",
        'torch.tensor(rows, dtype=torch.int64, device="cpu")',
        "torch.tensor(rows, dtype=torch.int64)",
        (CALLERS,),
    ),
    Fault(
        "merged rows that see nothing are NaN",
        "python/distca/merging.py",
        "stacked.masked_fill(nothing, 0.0)",
        "stacked",
        (MERGED,),
    ),
    Fault(
        "a compiled model overlooks the current plan",
        "python/distca/integrations/hf_forward.py",
        "_IN_GRAPHS in self.__dict__ and may_be_open()",
        "False",
        (MODELS,),
    ),
    Fault(
        "a graph of any number of rows makes a message of them",
        "python/distca/integrations/hf.py",
        "    if key.shape[2] != num_rows:\n        refuse(\n            True,",
        "    if True:\n        refuse(\n            key.shape[2] != num_rows,",
        (MODELS,),
    ),
    Fault(
        "local attention takes every layer for causal",
        "python/distca/integrations/hf.py",
        "if mask is None and _is_causal(module, options):",
        "if mask is None:",
        (MODELS,),
    ),
    Fault(
        "a classifier pools rows of several documents",
        "python/distca/integrations/hf_results.py",
        "if cut or len(pieces) != 1 or pieces[0][0] == PADDING:",
        "if False:",
        (MODELS,),
    ),
    Fault(
        "a pipeline's step without documents leaves scores to the calls",
        "python/distca/pipeline/step_planner.py",
        "otherwise=first",
        "otherwise=Scores()",
        (SPARSE,),
    ),
    Fault(
        "the process that ranks are forked from is taken apart at its end",
        "python/distca/apps/common/preloading.py",
        "atexit.register(exit_now, 0)",
        "",
        ("tests/apps/test_start_ranks.py",),
    ),
]
