"""Faults of attention: of the CPU's kernel and of ATen's."""

from faults.fault import Fault

EXACT = "tests/runtime/test_exactness.py"
STEPS = "tests/runtime/test_steps.py"
ATTENTION = "tests/attention/test_attention.py"
PLAN = "tests/plan/test_plan.py"
FLASH = "tests/attention/test_flash.py"
FLASH_RANKS = "tests/cuda/test_flash_ranks.py"
SCORES = "tests/attention/test_several_scores.py"
DISPATCHER = "cpp/runtime/dispatcher.cpp"
TABLES = "cpp/plan/slice_tables.cpp"
FORWARD = "cpp/attention/cpu_forward.cpp"
BACKWARD = "cpp/attention/cpu_backward.cpp"
KERNEL = "cpp/attention/cpu_kernel.h"
PRODUCTS = "cpp/attention/micro_products.h"
SOFTMAX = "cpp/attention/micro_softmax.h"
ARGUMENTS = "tests/operators/test_arguments.py"
WRAPPERS = "tests/operators/test_wrappers.py"
OF_LSE = "tests/operators/test_gradient_of_lse.py"
TILES_TEST = "tests/attention/test_tiles.py"

FAULTS = [
    # ---- the kernel
    Fault(
        "a local task's queries begin again at row 0 under the full mask",
        "cpp/torch/local_tasks.cpp",
        "t.first_row = before.first_row + before.q_rows();",
        "t.first_row = 0;",
        ("tests/attention/test_local_masks.py",),
    ),
    Fault(
        "tasks of a document may have different keys under the full mask",
        "cpp/torch/local_tasks.cpp",
        "require(before.kv_end == t.kv_end,",
        "require(true,",
        ("tests/attention/test_local_masks.py",),
    ),
    Fault(
        "backward of local attention has no window",
        "cpp/torch/local_attention.cpp",
        "return attention_backward(dout, q, k, v, out, lse, tasks, sinks, options, dlse, w);",
        "LocalOptions wide = options;\n  wide.mask.window = 0;\n"
        "  return attention_backward(dout, q, k, v, out, lse, tasks, sinks, wide, dlse, w);",
        ("tests/attention/test_local_masks.py",),
    ),
    Fault(
        "softmax leaves out keys that the last rows of a vector see",
        SOFTMAX,
        "in_tile((int64_t{seen.upto[lane + kWidth - 1]} + kSums - 1)",
        "in_tile((int64_t{seen.upto[lane]} + kSums - 1)",
        (ATTENTION,),
    ),
    Fault(
        "softmax takes keys for seen by all rows that a window hides from some",
        SOFTMAX,
        "seen.from[lane + kWidth - 1] > tile.begin ? tile.begin : ",
        "",
        (EXACT,),
    ),
    Fault(
        "scores of keys that the last rows of a tile see are not multiplied",
        PRODUCTS,
        "larger_of(p.tile.visible.upto[lane + lanes - 1], p.tile.begin)",
        "larger_of(p.tile.visible.upto[lane], p.tile.begin)",
        (ATTENTION,),
    ),
    Fault(
        "AVX2: the last four rows of a product are left out",
        PRODUCTS,
        "for (; begin < end; begin += 4) tile",
        "for (; begin + 4 < end; begin += 4) tile",
        (ATTENTION,),
    ),
    Fault(
        "exp of a large number is none",
        "cpp/attention/micro_simd.h",
        "    x[u] = smaller(broadcast(kLargest), x[u]);\n",
        "",
        ("tests/attention/test_exponential.py",),
    ),
    Fault(
        "a row sees the key after it",
        KERNEL,
        "!mask.mask.is_full() ? first + 1 : window > 0 ?",
        "!mask.mask.is_full() ? first + 2 : window > 0 ?",
        (ATTENTION,),
    ),
    Fault(
        "keys of one head are packed for all",
        FORWARD,
        "pack_keys(call, group, *views, head, start, begin, end, heads.dim, step.keys);",
        "pack_keys(call, group, *views, 0, start, begin, end, heads.dim, step.keys);",
        (ATTENTION,),
    ),
    Fault(
        "a worker that computes a short document attends all heads to the keys of one",
        FORWARD,
        "attend_unit(call, u, packed_at(u - first), buffers",
        "attend_unit(call, u, packed_at(0), buffers",
        (ATTENTION,),
    ),
    Fault(
        "a worker forgets the item that it has taken ahead",
        "cpp/attention/cpu_kernel.h",
        "take() { return ahead_ != nullptr ? std::exchange(ahead_, nullptr) : take_any(); }",
        "take() { return ahead_ = nullptr, take_any(); }",
        (ATTENTION,),
    ),
    Fault(
        "heads of a short document beyond a worker's share are left out",
        "cpp/attention/cpu_attention.cpp",
        "      begin += heads;",
        "      begin += group.kv_heads;",
        (ATTENTION,),
    ),
    Fault(
        "a key's gradient misses the row of its own",
        KERNEL,
        "!mask.mask.is_full() ? first : window > 0 ?",
        "!mask.mask.is_full() ? first + 1 : window > 0 ?",
        (ATTENTION,),
    ),
    Fault(
        "a block of the arena starts a row late",
        KERNEL,
        "view.at((entry >> 1) + row - block * kKeyBlockRows, kv_head)",
        "view.at((entry >> 1) + row - block * kKeyBlockRows + (entry & 1), kv_head)",
        (STEPS, EXACT),
    ),
    Fault(
        "a window reaches a key too far",
        KERNEL,
        "set_ascending(window > 0 ? first - window + 1 : -kFar, num_keys, from_)",
        "set_ascending(window > 0 ? first - window : -kFar, num_keys, from_)",
        (EXACT,),
    ),
    Fault(
        "keys before a window are not fetched",
        TABLES,
        "const Placement rows = segment.within(arrival.begin, arrival.end);",
        "const Placement rows = segment.within(arrival.begin + (g.kv_begin > 0 ? 1 : 0), arrival.end);",
        (PLAN, EXACT),
    ),
    Fault(
        "a range of heads is read from the first head on",
        "cpp/runtime/arena.cpp",
        "plan::has_kv_heads(kind) ? range.begin : range.begin * heads.group_heads()",
        "plan::has_kv_heads(kind) ? range.begin : 0 * heads.group_heads()",
        (EXACT,),
    ),
    Fault(
        "a row whose log-sum-exp is no number has no gradient",
        "cpp/attention/micro_softmax.h",
        "load(lse + at) != -kInfinity, lane_visibility",
        "load(lse + at) > -kInfinity, lane_visibility",
        ("tests/attention/test_attention_features.py",),
    ),
    Fault(
        "tasks of overlapping head ranges are not cut apart",
        "cpp/plan/task_list.cpp",
        "    if (head <= piece.kv_head_begin || head >= task.kv_head_end) continue;",
        "    if (head <= piece.kv_head_begin || head >= 0) continue;",
        (PLAN,),
    ),
    Fault(
        "all query heads use the first key/value head",
        KERNEL,
        "view.at((entry >> 1) + row - block * kKeyBlockRows, kv_head)",
        "view.at((entry >> 1) + row - block * kKeyBlockRows, 0 * kv_head)",
        (ATTENTION,),
    ),
    Fault(
        "keys that a row may not see are multiplied by zero",
        PRODUCTS,
        "        if (begin < from || begin >= upto) continue;",
        "        if (begin < from && begin >= upto) continue;",
        ("tests/attention/test_nan.py",),
    ),
    Fault(
        "the unseen one of a pair is multiplied by zero",
        PRODUCTS,
        "(second ? 0xffff0000u : 0u)",
        "0xffff0000u",
        ("tests/attention/test_nan.py", TILES_TEST),
    ),
    Fault(
        "the order of sums depends on the rows beside",
        PRODUCTS,
        "constexpr int64_t kScoreChain = 64;\n",
        "#define kScoreChain (tile.lanes == kTileRows ? 16 : 64)\n",
        (ATTENTION, EXACT),
    ),
    Fault(
        "the logarithm is that of a number half as large",
        "cpp/attention/micro_simd.h",
        "return x < kInfinity ? result : x;",
        "return x < kInfinity ? result - 0.6931472f : x;",
        ("tests/attention/test_exponential.py",),
    ),
    Fault(
        "the log-sum-exp lacks the sum",
        SOFTMAX,
        "load(row_base + lane) + logarithm(sum);",
        "load(row_base + lane);",
        (ATTENTION,),
    ),
    Fault(
        "a row keeps its base until its weights overflow",
        "cpp/attention/micro_kernel.h",
        "constexpr float kSlack = 5.f;",
        "constexpr float kSlack = 500.f;",
        (ATTENTION,),
    ),
    Fault(
        "the base of a row depends on the row beside it",
        SOFTMAX,
        "const Floats new_base = found > old_base + kSlack ? found : old_base;",
        "const Floats new_base = found > old_base + (tile.lanes == kTileRows ? kSlack : 0.f) ? found : old_base;",
        (ATTENTION, EXACT),
    ),
    Fault(
        "delta is left out",
        SOFTMAX,
        "p[u] * (load(dprobs + (key + u) * kTileRows) - lanes.delta)",
        "p[u] * load(dprobs + (key + u) * kTileRows)",
        (ATTENTION,),
    ),
    Fault(
        "all groups of a problem have its first scores",
        "cpp/attention/attention.h",
        "return scores[static_cast<size_t>(group.scores)];",
        "return scores[static_cast<size_t>(0 * group.scores)];",
        (SCORES,),
    ),
    Fault(
        "a group may have scores that the problem does not have",
        "cpp/attention/attention.h",
        "require(0 <= scores && scores < num_scores,",
        "require(0 <= scores || scores < num_scores,",
        (SCORES,),
    ),
    Fault(
        "padding rows are not filled",
        DISPATCHER,
        "  fill_padding(step);\n  if (step.max_logits.is_asked()) find_max_logits(step);",
        "  if (step.max_logits.is_asked()) find_max_logits(step);",
        (EXACT, STEPS),
    ),
    Fault(
        "the first step of a row adds to what an earlier row has left",
        FORWARD,
        "const bool is_first = start == first_step[t];",
        "const bool is_first = start == 0;",
        (EXACT,),
    ),
    Fault(
        "every step of a row forgets those before it",
        FORWARD,
        "pairing.is_first});",
        "true});",
        (ATTENTION,),
    ),
    # ---- attention by ATen's operator
    Fault(
        "flash: a window is a row too wide",
        "cpp/torch/flash.cpp",
        "mask.window - 1, mask.is_full() ?",
        "mask.window, mask.is_full() ?",
        (FLASH_RANKS,),
    ),
    Fault(
        "flash: the gradient of queries has the sign of a positive scale",
        "cpp/torch/flash.cpp",
        'scale < 0.f ? aten::unary("aten::neg", dq) : ',
        "scale < 0.f ? dq : ",
        (FLASH,),
    ),
    Fault(
        "flash: a sink leaves the output as it is",
        "cpp/torch/flash.cpp",
        "torch::stable::subtract(lse, sinks)",
        "torch::stable::subtract(lse, lse)",
        (FLASH,),
    ),
    Fault(
        "flash: the last task's gradient replaces the sum",
        "cpp/torch/flash.cpp",
        "aten::add(rows, aten::narrow_rows(partial, done, b.kv_lengths[i]))",
        "aten::narrow_rows(partial, done, b.kv_lengths[i])",
        (FLASH,),
    ),
    Fault(
        "flash: rows that are not aligned are passed as they are",
        "cpp/torch/flash.cpp",
        "  if (fine) return t;",
        "  if (fine || true) return t;",
        (FLASH,),
    ),
    Fault(
        "flash: squares of small gradients are zero",
        "cpp/torch/aten_backend.cpp",
        'aten::unary("aten::abs", rows)',
        "aten::divide(rows, rows)",
        (FLASH_RANKS,),
    ),
    Fault(
        "flash: keys of a block that begins before the group are a row off",
        "cpp/torch/aten_backend.cpp",
        "(entry >> 1) + begin - first",
        "(entry >> 1)",
        (FLASH_RANKS,),
    ),
    # ---- inputs
    Fault(
        "an input without data is computed with",
        "python/distca/ops.py",
        "if not q.is_meta and any(t is not None and t.is_meta for t in others):",
        "if False:",
        (ARGUMENTS,),
    ),
    Fault(
        "local attention ignores autocast",
        "python/distca/ops.py",
        '    check_tensors("attention", q, k, v, sinks)\n    q, k, v = as_autocast(q, k, v)\n',
        '    check_tensors("attention", q, k, v, sinks)\n',
        (WRAPPERS,),
    ),
    Fault(
        "a gradient of lse is dropped",
        "python/distca/ops.py",
        "**ctx.options, **retained, dlse=dlse)",
        "**ctx.options, **retained)",
        (OF_LSE,),
    ),
    Fault(
        "a gradient of lse is dropped in steps in parts",
        "python/distca/steps.py",
        "                dlse=dlse,\n",
        "",
        (OF_LSE,),
    ),
    Fault(
        "a gradient of lse has the other sign",
        "cpp/attention/row_delta.cpp",
        "sum - value_at(rows.dlse, row, head)",
        "sum + value_at(rows.dlse, row, head)",
        (OF_LSE,),
    ),
    Fault(
        "the gradient of sinks leaves out that of lse",
        "python/distca/ops.py",
        "sink_gradient(dout, out, lse, sinks, dlse)",
        "sink_gradient(dout, out, lse, sinks)",
        (OF_LSE,),
    ),
    Fault(
        "the gradient of sinks by ATen leaves out that of lse",
        "cpp/torch/flash_attention.cpp",
        "if (dlse.has_value()) delta",
        "if (false) delta",
        (OF_LSE,),
    ),
    Fault(
        "flash: a gradient of lse is dropped",
        "cpp/torch/flash.cpp",
        "require(!*static_cast<const bool*>(host.data_ptr()), kNoGradientOfLse);",
        "",
        (OF_LSE,),
    ),
    Fault(
        "a gradient of lse of another shape is read",
        "cpp/torch/tensors.h",
        "dlse->size(0) == lse.size(0) && dlse->size(1) == lse.size(1)",
        "true",
        (OF_LSE,),
    ),
    Fault(
        "a scale is checked before it is rounded",
        "cpp/torch/tensors.h",
        'require(std::isfinite(rounded), "scale = "',
        'require(std::isfinite(s), "scale = "',
        (ARGUMENTS,),
    ),
    Fault(
        "a softcap that is too small for float32 is none",
        "cpp/torch/tensors.h",
        " && (rounded > 0.f || softcap == 0.0)",
        "",
        (ARGUMENTS,),
    ),
    Fault(
        "the softcap of a plan that is too small for float32 is none",
        "python/distca/arguments.py",
        "math.isfinite(rounded) and (rounded != 0 or float(value) == 0)",
        "math.isfinite(rounded)",
        ("tests/runtime/test_scores_of_documents.py",),
    ),
]
