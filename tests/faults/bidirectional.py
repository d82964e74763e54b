"""Faults of rows that see those after them: prefixes and images."""

from faults.fault import Fault

EXACT = "tests/runtime/test_bidirectional.py"
LOADS = "tests/plan/test_plan_loads.py"
AHEAD = "tests/plan/test_plan_ahead.py"
DIGEST = "tests/plan/test_plan_digest.py"
CONSISTENT = "tests/plan/test_consistency.py"
LAYOUT = "tests/plan/test_bidirectional_layouts.py"
FLASH_RANKS = "tests/cuda/test_flash_ranks.py"
CUDA_HOST = "tests/cuda/test_kernels_on_host.py"
MODELS = "tests/integrations/test_hf_bidirectional.py"
KERNEL = "cpp/attention/cpu_kernel.h"
MASK = "cpp/common/mask.h"
TABLES = "cuda/attention/tables.h"
OF_MODELS = "python/distca/integrations/hf_bidirectional.py"

FAULTS = [
    Fault(
        "a layer without bidirectional rows gets the plan of layers that have them",
        "python/distca/planner/plan.py",
        "        if self._exact or len(",
        "        if len(",
        ("tests/plan/test_bidirectional_layouts.py",),
    ),
    Fault(
        "bidirectional: the last row of a range sees one key less",
        KERNEL,
        "std::clamp<int64_t>(range.end - key, 0, num_keys)",
        "std::clamp<int64_t>(range.end - 1 - key, 0, num_keys)",
        (EXACT,),
    ),
    Fault(
        "bidirectional: the first key of a range gets no gradient of the rows before it",
        KERNEL,
        "std::clamp<int64_t>(range.begin - row, 0, num_rows)",
        "std::clamp<int64_t>(range.begin + 1 - row, 0, num_rows)",
        (EXACT,),
    ),
    Fault(
        "bidirectional: lanes past the last row see what they saw in the tile before",
        KERNEL,
        "std::fill(upto_ + n, upto_ + kMost, upto_[n - 1]);",
        "",
        (EXACT, "tests/attention/test_tiles.py"),
    ),
    Fault(
        "bidirectional: only the first range of a tile counts",
        KERNEL,
        "b != end && b->begin < first + n; ++b)",
        "b != end && b->begin < first + n; b = end)",
        (EXACT,),
    ),
    Fault(
        "bidirectional: ranges that touch are found by their end",
        MASK,
        "if (low[half].end <= row) {",
        "if (low[half].end < row) {",
        (EXACT, LOADS),
    ),
    Fault(
        "bidirectional: a row outside of a range sees the next one's end",
        MASK,
        "found->begin <= row ? found : nullptr;",
        "found->begin <= row + 1 ? found : nullptr;",
        (EXACT, LOADS),
    ),
    Fault(
        "bidirectional: pairs of a part of a range are counted from its end",
        "cpp/plan/cost.h",
        "sum_below(b->end - from) - sum_below(b->end - upto)",
        "sum_below(upto - from)",
        (LOADS,),
    ),
    Fault(
        "bidirectional: ranges are not in the digest of a layout",
        "cpp/plan/plan.cpp",
        "layout.has_bidirectional() && document < layout.num_documents(); ++document)\n    d.add",
        "false && document < layout.num_documents(); ++document)\n    d.add",
        (DIGEST, "tests/plan/test_origin.py"),
    ),
    Fault(
        "bidirectional: documents of a joined layout have the ranges of the first part's",
        "cpp/plan/layout.cpp",
        "bidirectional.emplace_back(num_documents + document, rows);",
        "bidirectional.emplace_back(document, rows);",
        (LAYOUT,),
    ),
    Fault(
        "bidirectional: groups without ranges are not told from those with",
        "cpp/plan/slice_tables.cpp",
        "row.bidirectional_begin = found == first_bidirectional_.end() ? 0 : found->second;",
        "row.bidirectional_begin = 0;",
        (EXACT, "tests/plan/test_plan.py"),
    ),
    Fault(
        "bidirectional: ranges that overlap are taken",
        "cpp/plan/layout.cpp",
        "document != last_document || rows.begin >= last_end",
        "document != last_document || rows.begin >= 0",
        (LAYOUT,),
    ),
    Fault(
        "bidirectional: plans may have ranges that overlap",
        "cpp/plan/validate.cpp",
        "check_plan(last <= rows.begin && rows.begin < rows.end && rows.end <= kMaxRows,",
        "check_plan(rows.begin < rows.end && rows.end <= kMaxRows,",
        (CONSISTENT,),
    ),
    Fault(
        "bidirectional: the costliest row is the last one under a window, too",
        "cpp/plan/bounds.cpp",
        "if (document.mask.mask.window == 0) continue;",
        "continue;",
        (LAYOUT,),
    ),
    Fault(
        "bidirectional: ATen gets the window of a whole range for a part of it",
        "cpp/torch/aten_backend.cpp",
        "window - 1 + range->end - end}",
        "window - 1}",
        (FLASH_RANKS,),
    ),
    Fault(
        "bidirectional: of several calls of ATen the last one gives the keys' gradients",
        "cpp/torch/aten_backend.cpp",
        "all_dk = is_first ? dk : widened_sum(all_dk, dk);",
        "all_dk = dk;",
        (FLASH_RANKS,),
    ),
    Fault(
        "bidirectional: CUDA: rows of a range end at its last row",
        TABLES,
        "return num_ranges == 0 ? row + 1 : range_of(row).end;",
        "return num_ranges == 0 ? row + 1 : maximum(row + 1, range_of(row).end - 1);",
        (CUDA_HOST,),
    ),
    Fault(
        "bidirectional: CUDA: tiles of earlier rows skip a key of their range",
        TABLES,
        "return num_ranges == 0 ? key : range_of(key).begin;",
        "return key;",
        (CUDA_HOST,),
    ),
    Fault(
        "bidirectional: CUDA: a group has the ranges of the one before",
        "cuda/attention/work_list.cpp",
        "entry.bidirectional_begin = static_cast<int>(list.bidirectional.size());",
        "entry.bidirectional_begin = 0;",
        (CUDA_HOST,),
    ),
    Fault(
        "bidirectional: ranks tell ranges of each other's documents",
        "python/distca/planner/telling.py",
        "of_rank[number] = document",
        "of_rank[number] = number",
        (AHEAD,),
    ),
    Fault(
        "bidirectional: halves lose the ranges",
        "python/distca/planner/halves.py",
        "half = Layout(segments, branches=branches).with_bidirectional(bidirectional)",
        "half = Layout(segments, branches=branches)",
        (LAYOUT,),
    ),
    Fault(
        "bidirectional: chunks keep the rows of the whole document",
        "python/distca/planner/derived.py",
        ".append((begin - start, end - start))",
        ".append((begin, end))",
        (LAYOUT,),
    ),
    Fault(
        "bidirectional: a pickled layout loses the ranges",
        "python/distca/planner/layout.py",
        'if rows := state.get("bidirectional"):',
        'if rows := state.get("none"):',
        (LAYOUT,),
    ),
    Fault(
        "bidirectional: layers without the rows get them, too",
        "python/distca/planner/planning.py",
        "layout if bidirectional is None or window in bidirectional else",
        "layout if True else",
        (MODELS,),
    ),
    Fault(
        "bidirectional: a model's rows are not compared with the layout",
        OF_MODELS,
        "if (document, begin, end) not in planned or",
        "if False or",
        (MODELS,),
    ),
    Fault(
        "bidirectional: a layout's rows are not compared with the model",
        OF_MODELS,
        "if (document, begin, end) not in wanted:",
        "if False:",
        (MODELS,),
    ),
    Fault(
        "bidirectional: rows of one number may lie apart",
        OF_MODELS,
        "lie_apart = len(ranges_of[document, number]) > 1 and runs[number] > 1",
        "lie_apart = False",
        (MODELS,),
    ),
    Fault(
        "bidirectional: a window that does not hide a prefix is taken for one that does",
        OF_MODELS,
        "longest > window and not asked.is_cut",
        "longest > window and False",
        (MODELS,),
    ),
]
