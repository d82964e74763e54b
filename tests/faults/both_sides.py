"""Faults of windows that reach to both sides of a row, and of models whose rows see those after them."""

from faults.fault import Fault

EXACT = "tests/runtime/test_exactness.py"
LOCAL = "tests/attention/test_local_masks.py"
LOADS = "tests/plan/test_plan_loads.py"
FLASH_RANKS = "tests/cuda/test_flash_ranks.py"
CUDA_HOST = "tests/cuda/test_kernels_on_host.py"
MODELS = "tests/integrations/test_hf_both_sides.py"
KERNEL = "cpp/attention/cpu_kernel.h"
OF_MODELS = "python/distca/integrations/hf_models.py"
OF_LIMITS = "python/distca/integrations/hf_limits.py"
OF_RESULTS = "python/distca/integrations/hf_results.py"

FAULTS = [
    Fault(
        "both sides: a window ends a row too late",
        "cpp/common/mask.h",
        "std::min(length, place + mask.window)",
        "std::min(length, place + mask.window + 1)",
        (LOADS, EXACT),
    ),
    Fault(
        "both sides: a row sees a key too many after it",
        KERNEL,
        "window > 0 ? first + window : kFar, num_keys",
        "window > 0 ? first + window + 1 : kFar, num_keys",
        (LOCAL,),
    ),
    Fault(
        "both sides: the first row that sees a key adds nothing to its gradient",
        KERNEL,
        "first : window > 0 ? first - window + 1 : -kFar, num_rows",
        "first : window > 0 ? first - window + 2 : -kFar, num_rows",
        (LOCAL,),
    ),
    Fault(
        "both sides: ranges of rows that see each other widen a window",
        KERNEL,
        "    if (mask.mask.is_full()) return;\n",
        "",
        ("tests/runtime/test_bidirectional.py",),
    ),
    Fault(
        "both sides: a row counts itself twice",
        "cpp/plan/cost.h",
        "length - q_end, length - q_begin) - rows : before",
        "length - q_end, length - q_begin) : before",
        (LOADS,),
    ),
    Fault(
        "both sides: the costliest row is the last one",
        "cpp/plan/bounds.cpp",
        "std::clamp(document.length / 2, p.begin, p.end - 1)",
        "p.end - 1",
        ("tests/plan/test_scheduler.py",),
    ),
    Fault(
        "both sides: bytes have the bound of rows that cost more the later they are",
        "cpp/plan/bounds.cpp",
        "mask.is_full() ? mask.window < document.length",
        "mask.is_full() ? false",
        ("tests/plan/test_scheduler.py",),
    ),
    Fault(
        "both sides: ATen gets the window of the last row's own key",
        "cpp/torch/aten_backend.cpp",
        "window - 1 + after, window - 1 - after}",
        "window - 1, window - 1}",
        (FLASH_RANKS,),
    ),
    Fault(
        "both sides: calls of ATen that differ after a row are one",
        "cpp/torch/flash.h",
        "  bool operator==(const FlashOptions&) const = default;",
        "  bool operator==(const FlashOptions& o) const { return mask == o.mask; }",
        (FLASH_RANKS,),
    ),
    Fault(
        "both sides: a document may have several tasks",
        "cpp/torch/local_tasks.cpp",
        "a.kv_begin != b.kv_begin || !mask.is_full() || all_keys",
        "true",
        (LOCAL,),
    ),
    Fault(
        "both sides: CUDA: a window ends with the row's own key",
        "cuda/attention/tables.h",
        "if (mask.full) return end_of_window(row, kv_end);",
        "if (mask.full) return mask.window == 0 ? kv_end : row + 1;",
        (CUDA_HOST,),
    ),
    Fault(
        "both sides: CUDA: the first row that sees a key is its own",
        "cuda/attention/tables.h",
        "if (mask.full) return begin_of_window(key);",
        "if (mask.full) return mask.window == 0 ? 0 : key;",
        (CUDA_HOST,),
    ),
    Fault(
        "both sides: a layer takes a plan of another mask",
        "python/distca/integrations/hf.py",
        "        found.has_documents and found.mask != mask,",
        "        False,",
        (MODELS,),
    ),
    Fault(
        "both sides: the window of a mask is that of the configuration",
        "python/distca/integrations/hf_masks.py",
        "return None if size is None else size + far_end",
        "return size",
        (MODELS,),
    ),
    Fault(
        "both sides: any function may be part of a full mask",
        "python/distca/integrations/hf_masks.py",
        "return None if asked.is_known else",
        "return None if True else",
        (MODELS,),
    ),
    Fault(
        "both sides: documents share rows in such a model",
        "python/distca/integrations/hf.py",
        "        is_full and found.has_branches,",
        "        False,",
        (MODELS,),
    ),
    Fault(
        "both sides: a batch is planned as of a causal model",
        "python/distca/integrations/hf_batches.py",
        '"mask": mask_of(model)',
        '"mask": "causal"',
        (MODELS,),
    ),
    Fault(
        "both sides: labels of rows are taken for shifted ones",
        OF_RESULTS,
        "return is_one_of(type(model), _LABELS_OF_ROWS)",
        "return False",
        (MODELS,),
    ),
    Fault(
        "both sides: what looks along rows is found in the layer of the logits",
        OF_MODELS,
        "return text if isinstance(text, PreTrainedModel) else",
        "return text if isinstance(text, torch.nn.Module) else",
        (MODELS,),
    ),
    Fault(
        "both sides: labels of the first rows do not count in halves",
        "python/distca/integrations/hf_ping_pong.py",
        'return call["labels"] if labels_of_rows else call["labels"][:, 1:]',
        'return call["labels"][:, 1:]',
        (MODELS,),
    ),
    Fault(
        "both sides: only what is called a loss by name is a loss",
        OF_RESULTS,
        "loss_function|\\w*loss_fct|",
        "loss_function|",
        (MODELS,),
    ),
    Fault(
        "both sides: what a pooler returns is of all documents",
        "python/distca/integrations/hf_forward.py",
        "        pooled is not None and rank_of_several_documents(layout) is not None,",
        "        False,",
        (MODELS,),
    ),
    Fault(
        "both sides: a class derived from a classifier is none",
        OF_RESULTS,
        "for base in kind.__mro__)",
        "for base in kind.__mro__[:1])",
        (MODELS,),
    ),
    Fault(
        "both sides: graphs have models that are refused outside of them",
        OF_LIMITS,
        '("attn_temperature_tuning", *_ALONG_ROWS)',
        '("attn_temperature_tuning",)',
        (MODELS,),
    ),
    Fault(
        "both sides: segments of a document count as documents",
        OF_RESULTS,
        "pieces = whole_pieces(layout, rank)",
        "pieces = layout.segments(rank)",
        (MODELS,),
    ),
]
